"""What an HTTP request asks of the engine, told from the first words of its SQL. Pure."""

import re
from dataclasses import dataclass
from typing import Literal

HEAD_BYTES = 65_536
"""How far into a request the head of an INSERT is looked for."""

_FLAGS = re.IGNORECASE | re.DOTALL
_NAME = rb"(?:`(?:[^`\\]|\\.)+`|\"(?:[^\"\\]|\\.)+\"|\w+)"
_SPACE = rb"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
_FIRST_WORD = re.compile(_SPACE + rb"\(*(\w+)", re.DOTALL)
_INSERT = re.compile(
    _SPACE
    + rb"(?P<target>INSERT\s+INTO\s+(?:TABLE\s+)?"
    + _NAME
    + rb"(?:\."
    + _NAME
    + rb")?(?:\s*\((?:[^()`\"]|`(?:[^`\\]|\\.)+`|\"(?:[^\"\\]|\\.)+\")*\))?)"
    + rb"(?P<settings>\s+SETTINGS\s+[\w\s=,.'-]+?)?"
    + rb"\s+FORMAT\s+(?P<format>\w+)[ \t]*(?:;[ \t]*)?(?:\r?\n)?",
    _FLAGS,
)
_FORMAT = re.compile(rb"\bFORMAT\s+(\w+)\s*;?\s*$", re.IGNORECASE)
_KAFKA = re.compile(rb"\bENGINE\s*=?\s*Kafka\b", re.IGNORECASE)
_TEMPORARY = re.compile(_SPACE + rb"CREATE\s+(?:OR\s+REPLACE\s+)?TEMPORARY\b", _FLAGS)
_READS = frozenset({b"SELECT", b"WITH", b"SHOW", b"DESCRIBE", b"DESC", b"EXISTS", b"EXPLAIN"})

Kind = Literal["read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormattedInsert:
    """``INSERT INTO ... FORMAT ...`` with its rows behind it, in that format."""

    target: str
    """``INSERT INTO table (columns)``."""
    settings: str
    """``SETTINGS a = 1``, or empty."""
    format: str
    data: bytes


def first_word(sql: bytes) -> bytes:
    """The first keyword in capitals, comments and parentheses skipped; empty if there is none."""
    match = _FIRST_WORD.match(sql, 0, HEAD_BYTES)
    return match[1].upper() if match else b""


def kind(sql: bytes) -> Kind:
    """Whether the statement only reads."""
    return "read" if first_word(sql) in _READS else "write"


def formatted_insert(sql: bytes) -> FormattedInsert | None:
    """The parts of an INSERT that carries rows in a format; None for any other statement."""
    match = _INSERT.match(sql, 0, HEAD_BYTES)
    if match is None:
        return None
    return FormattedInsert(
        target=match["target"].decode(),
        settings=(match["settings"] or b"").decode().strip(),
        format=match["format"].decode(),
        data=sql[match.end() :],
    )


def output_format(sql: bytes, default: str) -> str:
    """Format of the answer: the statement's own, else the default."""
    match = _FORMAT.search(sql[-200:])
    return match[1].decode() if match else default


def selection(sql: bytes) -> bytes | None:
    """A query without its FORMAT, to be asked about inside another; None for other statements."""
    if first_word(sql) not in (b"SELECT", b"WITH"):
        return None
    return _FORMAT.sub(b"", sql)


def refusal(sql: bytes) -> str | None:
    """Why this store does not run the statement; None when it does."""
    word = first_word(sql)
    if word in (b"SET", b"USE") or _TEMPORARY.match(sql):
        return (
            "this store keeps no sessions, so SET, USE and temporary tables would have no effect: "
            "send settings and the database with each query"
        )
    if word in (b"CREATE", b"ATTACH", b"REPLACE") and _KAFKA.search(sql):
        return (
            "a table with the Kafka engine would make the folder unreadable for chDB: "
            "`latencyprism sink` brings Kafka's topics into tables"
        )
    return None


def quoted_name(name: str) -> str:
    """An identifier as ClickHouse's SQL takes any."""
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"


def quoted_text(text: str) -> str:
    """A string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
