"""Reads the Prometheus text format fast, by remembering the series of the pages before.

An engine shows the same series on every page, and telling their labels apart is most of the work
of a parser. Here the text before a value is looked up as bytes; only text never seen before is
taken apart. Values equal those of ``prometheus_client.parser``; types and help are not kept.
"""

import re
from dataclasses import dataclass, field
from typing import cast

MAX_SERIES = 50_000
"""Series remembered, and series allowed on a page; an engine shows a few hundred."""


class ExpositionError(ValueError):
    """A page that is not in the text format; the message says where."""


@dataclass(frozen=True, slots=True)
class Series:
    """A metric's name and its labels in the order of the page."""

    name: str
    labels: tuple[tuple[str, str], ...]

    def label(self, name: str) -> str | None:
        """Value of a label, None if the series has none of that name."""
        return next((value for key, value in self.labels if key == name), None)


@dataclass(slots=True)
class Table:
    """Series by number; grows only, so that a number stays valid."""

    series: list[Series] = field(default_factory=list)
    numbers: dict[Series, int] = field(default_factory=dict)
    texts: dict[bytes, int] = field(default_factory=dict)
    """Numbers by the text before the value, one space excluded, as pages have it."""

    def number(self, series: Series) -> int:
        """Number of a series, a new one if it was never seen."""
        number = self.numbers.setdefault(series, len(self.series))
        if number == len(self.series):
            self.series.append(series)
        return number


@dataclass(frozen=True, slots=True)
class Page:
    """Values of one page; ``values[n]`` belongs to ``table.series[n]``, None if not on the page.

    Later pages add to the same table, so it may have more series than the page has values.
    """

    table: Table
    values: list[float | None]


class Parser:
    """Parses the pages of one engine, remembering at most ``MAX_SERIES`` series between them."""

    def __init__(self) -> None:
        self._table = Table()

    def parse(self, page: bytes) -> Page:
        """Values of a page; of a series that stands on it twice, the last one.

        Raises :class:`ExpositionError`, after which the next page can be parsed all the same.
        """
        if len(self._table.series) >= MAX_SERIES or len(self._table.texts) >= 2 * MAX_SERIES:
            self._table = Table()
        table = self._table
        values: list[float | None] = [None] * len(table.series)
        known = table.texts.get
        lines = page.split(b"\n")
        line = b""
        try:
            for line in lines:
                if line[:1] == b"#":
                    continue
                text, _, value = line.rpartition(b" ")
                number = known(text)
                if number is None:
                    self._unknown(line.strip(), values)
                else:
                    values[number] = float(value)
        except ValueError as error:
            where = lines.index(line) + 1
            raise ExpositionError(f"line {where}: {error}: {line[:120]!r}") from error
        return Page(table, values)

    def _unknown(self, line: bytes, values: list[float | None]) -> None:
        if not line or line[:1] == b"#":
            return
        series, (value, *timestamp) = parse_line(line.decode())
        number = self._table.number(series)
        if number >= MAX_SERIES:
            raise ValueError(f"more than {MAX_SERIES} series")
        if number == len(values):
            values.append(None)
        values[number] = parse_value(value)
        text, space, last = line.rpartition(b" ")
        # With a timestamp, or a tab before the value, this text would not be all of the series.
        if space and not timestamp and last == value.encode():
            self._table.texts[text] = number


def parse_line(line: str) -> tuple[Series, list[str]]:
    """Series of a line without surrounding space, and its value and, if any, timestamp as text.

    Raises ValueError for anything else.
    """
    start = cast("re.Match[str]", _METRIC.match(line))  # it matches the empty text too
    name, brace = start.groups()
    position = start.end()
    labels: dict[str, str] = {}
    while brace:
        if end := _LABELS_END.match(line, position):
            position = end.end()
            break
        label = _LABEL.match(line, position)
        if label is None:
            raise ValueError("malformed labels")
        position = label.end()
        quoted, key, value = label.groups()
        if value is None and quoted is not None and not name:
            name = _unescape(quoted)
            continue
        key = key if quoted is None else _unescape(quoted)
        if value is None or key in labels:
            raise ValueError(f"label {key!r} has no value or stands twice")
        labels[key] = _unescape(value)
    numbers = line[position:].split()
    if not name or not 1 <= len(numbers) <= 2 or not (brace or line[position].isspace()):
        raise ValueError("neither a value nor a value and a timestamp after the series")
    for number in numbers:
        parse_value(number)
    return Series(name, tuple(labels.items())), numbers


def parse_value(text: str) -> float:
    """Number as the format has it: decimal, NaN, +Inf, -Inf. Raises ValueError."""
    if "_" in text:
        raise ValueError(f"not a number: {text!r}")
    return float(text)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text)


_METRIC = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?(?:\s*(\{))?")
_QUOTED = r'"((?:[^"\\]|\\.)*)"'
_LABEL = re.compile(
    rf"\s*(?:{_QUOTED}|([a-zA-Z_][a-zA-Z0-9_]*))\s*(?:=\s*{_QUOTED}\s*)?(?:,|(?=\}}))"
)
_LABELS_END = re.compile(r"\s*,?\s*\}")
_ESCAPE = re.compile(r'\\([\\n"])')
