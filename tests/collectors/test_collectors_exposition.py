import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from latencyprism.collectors.engine.aliases import WANTED
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
def texts(draw: Callable[[st.SearchStrategy[Any]], Any]) -> str:
    """A series, spaced and escaped in any way the format allows."""
    parts = [draw(NAMES), draw(SPACES)]
    labels = draw(LABELS)
    if labels or draw(CHOICES):
        pairs = [
            f'{draw(SPACES)}{key}{draw(SPACES)}={draw(SPACES)}"{escaped(value)}"{draw(SPACES)}'
            for key, value in labels.items()
        ]
        trailing = "," if pairs and draw(CHOICES) else ""
        parts.append("{" + ",".join(pairs) + trailing + "}")
    return "".join(parts)


@st.composite
def lines(draw: Callable[[st.SearchStrategy[Any]], Any]) -> str:
    """A valid sample line."""
    timestamp = f" {draw(TIMESTAMPS)}" if draw(CHOICES) else ""
    return f"{draw(texts())}{draw(GAPS)}{draw(NUMBERS)}{timestamp}"


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


def test_exemplars_and_the_end_mark_of_openmetrics_are_passed_over() -> None:
    page = (
        b"# TYPE ttft histogram\n"
        b'ttft_bucket{le="0.1"} 3 # {trace_id="a # b"} 0.05 1.7e9\n'
        b'ttft_bucket{le="+Inf"} 4 1700000000.5 # {trace_id="c"} 0.5\n'
        b"plain 5 # {} 1\n"
        b"# EOF\n"
    )
    parser = Parser()
    expected = {
        ("ttft_bucket", frozenset({("le", "0.1")})): 3.0,
        ("ttft_bucket", frozenset({("le", "+Inf")})): 4.0,
        ("plain", frozenset()): 5.0,
    }

    assert ours(parser, page) == expected == theirs(page)
    assert ours(parser, page) == expected


Line = tuple[str, str, str, str]
"""Series, gap, value and timestamp with a space before it, or nothing."""
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["value", "swap", "drop", "double", "new", "gap", "time"]),
        st.integers(0, 10**6),
    ),
    max_size=4,
)


def edited(page: list[Line], edits: list[tuple[str, int]]) -> list[Line]:
    """Lines as the next page could have them: a value changed, lines moved, gone, new ..."""
    page = list(page)
    for kind, n in edits:
        if kind == "new" or not page:
            page.insert(n % (len(page) + 1), (f'fresh{n % 3}{{x="{n % 5}"}}', " ", str(n), ""))
            continue
        at = n % len(page)
        text, gap, value, timestamp = page[at]
        match kind:
            case "value":
                page[at] = (text, gap, str(n), timestamp)
            case "gap":
                page[at] = (text, " \t"[n % 2], value, timestamp)
            case "time":
                page[at] = (text, gap, value, f" {n}" if n % 2 else "")
            case "swap":
                page[0], page[at] = page[at], page[0]
            case "drop":
                del page[at]
            case "double":
                page.insert(at, page[at])
    return page


@given(
    st.lists(st.tuples(texts(), GAPS, NUMBERS, st.just("")), max_size=6),
    st.lists(EDITS, min_size=1, max_size=4),
)
@example([("a", " ", "1", ""), ("b", " ", "2", "")], [[("swap", 1)], [("value", 1)]])
@example([('E {x="1"}', "", "4", ""), ("E", " ", "4", "")], [[]])
@example([("a", "\t", "1", ""), ("b", "\t", "2", "")], [[("swap", 1)], [("value", 1)]])
@example([("a", " ", "1", "")], [[("double", 0)], [("value", 0)], [("value", 1)]])
def test_each_page_that_follows_reads_as_the_reference_reads_it(
    page: list[Line], pages: list[list[tuple[str, int]]]
) -> None:
    some = {"fresh0", "fresh1", "a"}
    parser, choosy = Parser(), Parser(some)
    for edits in [[], *pages]:
        page = edited(page, edits)
        text = "".join("".join(line) + "\n" for line in page).encode()
        expected = theirs(text)
        assert ours(parser, text) == expected
        assert ours(choosy, text) == {k: v for k, v in expected.items() if k[0] in some}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_wanted_series_of_real_pages_are_those_of_the_reference(path: Path) -> None:
    page = path.read_bytes()
    parser = Parser(WANTED)
    expected = {key: value for key, value in theirs(page).items() if key[0] in WANTED}

    assert ours(parser, page) == expected
    assert ours(parser, page) == expected


def test_a_real_page_is_followed_line_by_line_to_the_next() -> None:
    parser = Parser()
    for number in (1, 2, 1):
        page = (DATA / f"vllm-0.32-live-{number}.prom").read_bytes()
        assert ours(parser, page) == theirs(page)


def test_a_line_that_is_not_wanted_is_checked_all_the_same() -> None:
    parser = Parser({"fine"})
    for line in (b"hello world", b"<html>", b'{"error": "no such page"}'):
        with pytest.raises(ExpositionError, match=r"^line 2: "):
            parser.parse(b"fine 1\n" + line + b"\n")


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


def test_changing_series_are_forgotten() -> None:
    parser = Parser(max_series=10)

    for start in range(0, 100, 5):
        page = b"".join(b"x%d 1\n" % i for i in range(start, start + 5))
        assert len(ours(parser, page)) == 5
        assert len(parser._table.series) <= 10
        assert len(parser._table.texts) <= 20
    assert parser.crowded == 0


def test_of_too_many_series_those_of_the_largest_name_are_given_up() -> None:
    parser = Parser(max_series=10)
    many = b"".join(b'many{i="%d"} 1\n' % i for i in range(50))
    page = b"".join(b"m%d 1\n" % i for i in range(8)) + many

    for _ in range(3):
        assert ours(parser, page) == {(f"m{i}", frozenset()): 1.0 for i in range(8)}
    assert parser.crowded == 1
    assert len(parser._table.series) == 8


def test_names_are_given_up_until_the_rest_fits() -> None:
    parser = Parser(max_series=3)
    page = b"".join(b"m%d 1\n" % i for i in range(8))

    for _ in range(2):
        assert len(ours(parser, page)) == 3
    assert parser.crowded == 5


def test_too_many_series_that_have_no_plain_name_are_refused() -> None:
    page = b"".join(b'{"m.%d"} 1\n' % i for i in range(8))

    with pytest.raises(ExpositionError, match="more than 3 series"):
        Parser(max_series=3).parse(page)


@pytest.mark.parametrize(
    "line",
    [
        b"a{" + b" " * 100_000 + b"x",
        b"a{" + b'b="' + b"\\" * 100_000,
        b"a{" + b"b" * 100_000 + b" " * 100_000,
        b"a{" + b"}" * 100_000 + b" x",
        b" " * 100_000 + b"x",
        b"a{" + b'b="1",' * 20_000,
    ],
)
def test_a_long_malformed_line_takes_time_by_its_length_only(line: bytes) -> None:
    for parser in (Parser(), Parser({"b"})):
        began = time.thread_time()
        with pytest.raises(ExpositionError):
            parser.parse(line)
        assert time.thread_time() - began < 1
