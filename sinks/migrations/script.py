"""SQL files: their statements, and which of these remove data. Pure."""

import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""
      '(?:[^'\\]|\\.|'')*'          # text
    | `(?:[^`\\]|\\.)*`             # quoted name
    | --[^\n]*                      # comment to the end of the line
    | /\*.*?\*/                     # comment
    | ;
    """,
    re.VERBOSE | re.DOTALL,
)
_DANGER = re.compile(
    r"^\s*(?:DROP|TRUNCATE|DELETE|DETACH|RENAME)\b"
    r"|^\s*ALTER\s+TABLE\b.*\b(?:DELETE|UPDATE|DROP|CLEAR|DETACH|MODIFY\s+TTL|REPLACE\s+PARTITION)\b"
    r"|^\s*CREATE\s+OR\s+REPLACE\s+TABLE\b"
    r"|^\s*REPLACE\s+TABLE\b",
    re.IGNORECASE | re.DOTALL,
)


def statements(sql: str) -> list[str]:
    """The statements of a file, without the comments between and around them."""
    return [text for text in map(str.strip, _split(sql)) if text]


def removes_data(statement: str) -> bool:
    """Whether a statement can lose rows or a whole table."""
    bare = _TOKEN.sub(lambda token: "" if token[0][0] in "-/'" else token[0], statement)
    return _DANGER.search(bare) is not None


def _split(sql: str) -> Iterator[str]:
    start, parts = 0, []
    for token in _TOKEN.finditer(sql):
        if token[0] == ";":
            parts.append(sql[start : token.start()])
            yield "".join(parts)
            start, parts = token.end(), []
        elif token[0].startswith(("--", "/*")):
            parts.append(sql[start : token.start()])
            start = token.end()
    parts.append(sql[start:])
    yield "".join(parts)
