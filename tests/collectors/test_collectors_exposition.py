import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from latencyprism.collectors.engine import exposition
from latencyprism.collectors.engine.exposition import ExpositionError, Parser, Series

DATA = Path(__file__).parent / "data"
PAGES = sorted(DATA.glob("*.prom"))

Values = dict[tuple[str, frozenset[tuple[str, str]]], float | str]


def ours(parser: Parser, page: bytes) -> Values:
    parsed = parser.parse(page)
    return {
        (series.name, frozenset(series.labels)): comparable(value)
        for series, value in zip(parsed.table.series, parsed.values, strict=False)
        if value is not None
    }


def theirs(page: bytes) -> Values:
    """What prometheus_client reads, with its renaming of counters undone."""
    text = page.decode()
    values: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name
            if family.type == "counter" and f"# TYPE {family.name} counter" in text:
                name = family.name
            values[name, frozenset(sample.labels.items())] = comparable(float(sample.value))
    return values


def comparable(value: float) -> float | str:
    return "NaN" if math.isnan(value) else value


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_real_pages_read_as_the_reference_reads_them(path: Path) -> None:
    page = path.read_bytes()
    parser = Parser()

    first, second = ours(parser, page), ours(parser, page)

    assert len(first) > 10
    assert first == theirs(page)
    assert second == first


def test_series_of_a_later_page_keep_their_numbers() -> None:
    parser = Parser()
    before = parser.parse((DATA / "vllm-0.32-1.prom").read_bytes())
    after = parser.parse(b"new_metric 1\n" + (DATA / "vllm-0.32-2.prom").read_bytes())

    assert after.table is before.table
    number = after.table.numbers[Series("new_metric", ())]
    assert after.values[number] == 1
    assert number == len(before.values)
    assert all(value is not None for value in after.values)


def test_a_series_that_is_gone_has_no_value() -> None:
    parser = Parser()
    parser.parse(b"a 1\nb 2\n")

    assert parser.parse(b"b 3\n").values == [None, 3.0]


LABEL_VALUES = st.text(max_size=12)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)


@given(
    gauges=st.dictionaries(LABEL_VALUES, FLOATS, max_size=5),
    observed=st.lists(st.floats(0, 100), max_size=5),
    counted=st.dictionaries(LABEL_VALUES, st.floats(0, 1e12), max_size=3),
)
def test_what_the_reference_writes_reads_the_same(
    gauges: dict[str, float], observed: list[float], counted: dict[str, float]
) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("app:gauge", 'help with \\ " and\nmore', ["one", "two"], registry=registry)
    for label, value in gauges.items():
        gauge.labels(label, label[::-1]).set(value)
    histogram = Histogram("app:seconds", "help", ["engine"], registry=registry)
    for value in observed:
        histogram.labels("0").observe(value)
    counter = Counter("app:events", "help", ["reason"], registry=registry)
    for label, value in counted.items():
        counter.labels(label).inc(value)
    page = generate_latest(registry)
    parser = Parser()

    expected = theirs(page)

    assert ours(parser, page) == expected
    assert ours(parser, page) == expected


NAMES = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,8}", fullmatch=True)
KEYS = st.from_regex(r"[a-zA-Z][a-zA-Z0-9_]{0,5}", fullmatch=True)
SPACES = st.sampled_from(["", " ", "  ", "\t"])
GAPS = st.sampled_from([" ", "  ", "\t", " \t "])
NUMBERS = st.one_of(
    FLOATS.map(repr), st.integers(-(10**6), 10**6).map(str), st.sampled_from(["+Inf", "NaN", "1e3"])
)

LABELS = st.dictionaries(KEYS, st.text(alphabet='ab\\"{}, =\n#é', max_size=8), max_size=3)
CHOICES = st.booleans()
TIMESTAMPS = st.integers(0, 2**41)


def escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@st.composite
def lines(draw: Callable[[st.SearchStrategy[Any]], Any]) -> str:
    """A valid sample line, spaced and escaped in any way the format allows."""
    parts = [draw(NAMES), draw(SPACES)]
    labels = draw(LABELS)
    if labels or draw(CHOICES):
        pairs = [
            f'{draw(SPACES)}{key}{draw(SPACES)}={draw(SPACES)}"{escaped(value)}"{draw(SPACES)}'
            for key, value in labels.items()
        ]
        trailing = "," if pairs and draw(CHOICES) else ""
        parts.append("{" + ",".join(pairs) + trailing + "}")
    parts += [draw(GAPS), draw(NUMBERS)]
    if draw(CHOICES):
        parts += [" ", str(draw(TIMESTAMPS))]
    return "".join(parts)


@given(st.lists(lines(), max_size=6), st.sampled_from(["\n", "\r\n"]))
@example(["a 1", "a 1 1700000000000", "a  2"], "\n")
@example(['a{x="} 1 2"} 3', 'a{x="} 1 2"} 3 4', 'a{x="} 1 2"}\t5'], "\n")
def test_any_spacing_reads_as_the_reference_reads_it_first_and_again(
    page_lines: list[str], end: str
) -> None:
    page = "".join(line + end for line in page_lines).encode()
    parser = Parser()
    expected = theirs(page)

    assert ours(parser, page) == expected
    assert ours(parser, page) == expected


def test_quoted_names_are_read() -> None:
    page = b'{"http.server/duration",route="/v1"} 2\nok{"a.b"="c"} 3\n'
    parser = Parser()
    expected = {
        ("http.server/duration", frozenset({("route", "/v1")})): 2.0,
        ("ok", frozenset({("a.b", "c")})): 3.0,
    }

    assert ours(parser, page) == expected == theirs(page)


@pytest.mark.parametrize(
    "line",
    [
        b"name",
        b"name ",
        b"name value",
        b"name 1 2 3",
        b"name 1_000",
        b'name{a="1} 2',
        b'name{a="1"',
        b'name{a="1",a="2"} 3',
        b"name{a=1} 3",
        b"name{a} 3",
        b'name{a="1"b="2"} 3',
        b"{} 3",
        b"1name 3",
        b"name \xff",
        b'name{a="\xff"} 1',
        b"<html>",
    ],
)
def test_malformed_line_is_refused_with_its_number(line: bytes) -> None:
    parser = Parser()
    for _ in range(2):
        with pytest.raises(ExpositionError, match=r"^line 2: "):
            parser.parse(b"fine 1\n" + line + b"\nfine_too 2\n")
    assert ours(parser, b"fine 3\n") == {("fine", frozenset()): 3.0}


def test_bad_value_of_a_known_series_is_refused_too() -> None:
    parser = Parser()
    parser.parse(b"fine 1\n")
    with pytest.raises(ExpositionError, match="line 1"):
        parser.parse(b"fine x\n")


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(page: bytes) -> None:
    with suppress(ExpositionError):
        assert Parser().parse(page).values is not None


def test_series_without_bound_are_refused_but_changing_ones_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exposition, "MAX_SERIES", 10)
    parser = Parser()
    with pytest.raises(ExpositionError, match="more than 10 series"):
        parser.parse(b"".join(b"m%d 1\n" % i for i in range(11)))

    assert len(ours(parser, b"".join(b"m%d 1\n" % i for i in range(10)))) == 10
    for start in range(0, 100, 5):
        page = b"".join(b"x%d 1\n" % i for i in range(start, start + 5))
        assert len(ours(parser, page)) == 5
        assert len(parser._table.series) <= 10
