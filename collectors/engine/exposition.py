"""Reads the Prometheus text format fast, by following the page before.

An engine shows the same lines on every page, in the same order, and few of them change in a
second. So a page is first laid beside the one before, and only the values of lines that changed
are read; where the lines themselves changed, the text before each value is looked up among the
texts known, and only text never seen is taken apart. Values equal those of
``prometheus_client.parser``; types, help, timestamps and exemplars are not kept.
"""

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import compress
from operator import ne
from typing import cast

MAX_SERIES = 10_000
"""Series kept of a page, unless said otherwise; an engine shows a few hundred."""

Values = list[float | None]


class ExpositionError(ValueError):
    """A page that is not in the text format; the message says where."""


class _CrowdedError(Exception):
    """More series than are kept."""


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

    Later pages add to the same table, so it may have more series than the page has values. A page
    with another table than the one before begins anew: the numbers mean other series.
    """

    table: Table
    values: Values


class Parser:
    """Parses the pages of one engine.

    Only series whose name is ``wanted`` are kept, all of them if that is None; the lines of others
    are checked for their shape only, and take no memory beyond the page's. When a page has more
    than ``max_series`` series, those of the name that has the most are given up for good, so that
    what remains is whole; when all pages together have, the table begins anew.
    """

    def __init__(self, wanted: Collection[str] | None = None, max_series: int = MAX_SERIES) -> None:
        self._crowded: set[bytes] = set()
        self._wanted = None if wanted is None else {name.encode() for name in wanted}
        self._max_series = max_series
        self._table = Table()
        self._lines: list[bytes] = []
        """The page before, empty when the next one must be read in full."""
        self._numbers: list[int | None] = []
        """Of each of its lines the number of the series, None where there is none wanted."""
        self._values: Values = []

    @property
    def crowded(self) -> int:
        """Number of names given up because they had too many series."""
        return len(self._crowded)

    def parse(self, page: bytes) -> Page:
        """Values of a page; of a series that stands on it twice, the last one.

        Raises :class:`ExpositionError`, after which the next page can be parsed all the same.
        """
        lines = page.split(b"\n")
        values = self._follow(lines)
        if values is None:
            values = self._read(lines)
        self._values = values
        return Page(self._table, values)

    def _follow(self, lines: list[bytes]) -> Values | None:
        """Values of a page that has the same series on the same lines as the one before."""
        if len(lines) != len(self._lines):
            return None
        values = self._values.copy()
        known = self._table.texts.get
        try:
            for i in compress(range(len(lines)), map(ne, self._lines, lines)):
                text, _, value = lines[i].rpartition(b" ")
                number = known(text)
                if number != self._numbers[i] or _UNDERSCORE in value:
                    return None
                if number is not None:
                    values[number] = float(value)
                elif not text.strip() or text != self._lines[i].rpartition(b" ")[0]:
                    return None
        except ValueError:
            return None  # met again, and told with its line, when the page is read in full
        self._lines = lines
        return values

    def _read(self, lines: list[bytes]) -> Values:
        """Values of any page."""
        self._lines = []
        if len(self._table.texts) > 2 * self._max_series:
            self._table = Table()
        try:
            values, regular = self._read_lines(lines)
        except _CrowdedError:
            self._make_room(lines)
            try:
                values, regular = self._read_lines(lines)
            except _CrowdedError as error:
                raise ExpositionError(f"more than {self._max_series} series") from error
        if regular:
            known = self._table.texts.get
            self._lines = lines
            self._numbers = [known(line.rpartition(b" ")[0]) for line in lines]
        return values

    def _read_lines(self, lines: list[bytes]) -> tuple[Values, bool]:
        """Values, and whether the next page can be followed from this one."""
        values: Values = [None] * len(self._table.series)
        known = self._table.texts.get
        samples, regular = 0, True
        line = b""
        try:
            for line in lines:
                if line[:1] == b"#":
                    continue
                text, _, value = line.rpartition(b" ")
                number = known(text)
                if number is not None:
                    try:
                        values[number] = parse_value(value)
                    except ValueError:
                        number = None  # what follows is more than a value: other labels, say
                if number is None:
                    number, value, follows = self._learn(line)
                    regular = regular and follows
                    if number is None:
                        continue
                    if number == len(values):
                        values.append(None)
                    values[number] = parse_value(value)
                samples += 1
        except ValueError as error:
            where = lines.index(line) + 1
            raise ExpositionError(f"line {where}: {error}: {line[:120]!r}") from error
        return values, regular and samples == len(values) - values.count(None)

    def _learn(self, line: bytes) -> tuple[int | None, bytes, bool]:
        """Number of the line's series, None if it has none or it is not wanted; its value; and
        whether the text up to the last space tells the series, so that pages can be followed.

        Raises ValueError for a line that is none.
        """
        text, _, last = line.rpartition(b" ")
        if self._plainly_unwanted(text, last):
            return None, b"", True
        stripped = line.strip()
        if not stripped or stripped[:1] == b"#":
            return None, b"", True
        series, (value, *timestamp) = parse_line(stripped.decode())
        if self._unwanted(series.name.encode()):
            return None, b"", False
        number = self._table.number(series)
        if number >= self._max_series:
            raise _CrowdedError
        # With a timestamp, or a tab before the value, this text would not be all of the series.
        follows = bool(text) and not timestamp and last.rstrip() == value.encode()
        if follows:
            self._table.texts[text] = number
        return number, value.encode(), follows

    def _plainly_unwanted(self, text: bytes, value: bytes) -> bool:
        name = _NAME.match(text)
        if name is None or not self._unwanted(name[0]):
            return False
        rest = text[name.end() :]
        if rest and (rest[0] != _BRACE or rest[-1:] != b"}"):
            return False
        try:
            parse_value(value)
        except ValueError:
            return False
        return True

    def _unwanted(self, name: bytes) -> bool:
        return name in self._crowded or (self._wanted is not None and name not in self._wanted)

    def _make_room(self, lines: list[bytes]) -> None:
        """Begin the table anew, without the largest names of a page that alone is too large."""
        self._table = Table()
        matches = map(_NAME.match, lines)
        names = (match[0] for match in matches if match is not None)
        counts = Counter(name for name in names if not self._unwanted(name))
        excess = counts.total() - self._max_series
        for name, count in counts.most_common():
            if excess <= 0:
                break
            self._crowded.add(name)
            excess -= count


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
    sample, _, _ = line[position:].partition(" # ")  # an exemplar follows
    numbers = sample.split()
    if not name or not 1 <= len(numbers) <= 2 or not (brace or line[position].isspace()):
        raise ValueError("neither a value nor a value and a timestamp after the series")
    for number in numbers:
        parse_value(number.encode())
    return Series(name, tuple(labels.items())), numbers


def parse_value(text: bytes) -> float:
    """Number as the format has it: decimal, NaN, +Inf, -Inf. Raises ValueError."""
    if _UNDERSCORE in text:
        raise ValueError(f"not a number: {text!r}")
    return float(text)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text)


_NAME = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*")
_BRACE, _UNDERSCORE = b"{_"
_METRIC = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?(?:\s*(\{))?")
_QUOTED = r'"((?:[^"\\]|\\.)*)"'
_LABEL = re.compile(
    rf"\s*(?:{_QUOTED}|([a-zA-Z_][a-zA-Z0-9_]*))\s*(?:=\s*{_QUOTED}\s*)?(?:,|(?=\}}))"
)
_LABELS_END = re.compile(r"\s*(?:,\s*)?\}")
_ESCAPE = re.compile(r'\\([\\n"])')
