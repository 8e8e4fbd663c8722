"""What it takes to read an engine's metrics page, in CPU time of this process."""

import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

from latencyprism.bench.figures import Figure, median
from latencyprism.collectors.engine.aliases import WANTED
from latencyprism.collectors.engine.exposition import Parser
from latencyprism.collectors.engine.sample import Tracker

RUNS = 15
PAIRS = 20
DATA = Path(__file__).resolve().parent.parent / "tests/collectors/data"
SERIES = 60_000


def measure_engine() -> dict[str, Figure]:
    """Milliseconds a page; FileNotFoundError outside a checkout.

    ``parse`` is of two pages of vLLM in turn, recorded a second apart, between which a request
    finished, which moves more than half of the lines; ``parse_every_value`` of a page on which all
    values change, and ``read`` of that page with the sample made of it; ``parse_new_lines`` of one
    that has other lines than the one before; ``parse_60000_series`` of one with so many series of
    others, a third of which change.
    """
    first, second = ((DATA / f"vllm-0.32-{number}.prom").read_bytes() for number in (1, 2))
    whole = (DATA / "vllm-0.32-full.prom").read_bytes()
    other = [b'other{i="%d"} %d\n' % (i, i) for i in range(SERIES)]
    moved = [line if i % 3 else line[:-1] + b"5\n" for i, line in enumerate(other)]
    return {
        "engine.parse_ms": _parse_ms(first, second),
        "engine.parse_every_value_ms": _parse_ms(whole, _moved(whole, 1)),
        "engine.parse_new_lines_ms": _parse_ms(whole, b"\n" + whole),
        "engine.parse_60000_series_ms": _parse_ms(
            whole + b"".join(other), whole + b"".join(moved), pairs=1
        ),
        "engine.read_ms": _read_ms(whole),
    }


def _moved(page: bytes, by: int) -> bytes:
    lines = page.split(b"\n")
    for i, line in enumerate(lines):
        text, space, value = line.rpartition(b" ")
        if space and not line.startswith(b"#"):
            lines[i] = text + space + repr(float(value) + by).encode()
    return b"\n".join(lines)


def _parse_ms(one: bytes, other: bytes, pairs: int = PAIRS) -> Figure:
    parser = Parser(WANTED)

    def parse() -> None:
        parser.parse(one)
        parser.parse(other)

    return _pages_ms(parse, pairs)


def _read_ms(page: bytes) -> Figure:
    pages = cycle([_moved(page, by) for by in range(2 * PAIRS)])
    parser, tracker = Parser(WANTED), Tracker("h:1")

    def read() -> None:
        for page in (next(pages), next(pages)):
            tracker.page(parser.parse(page), observed_at_ns=0, monotonic_ns=0, scrape_ms=0.0)

    return _pages_ms(read, PAIRS)


def _pages_ms(read_two: Callable[[], None], pairs: int) -> Figure:
    read_two()
    runs = []
    for _ in range(RUNS):
        began = time.process_time()
        for _ in range(pairs):
            read_two()
        runs.append((time.process_time() - began) / (2 * pairs) * 1000)
    return median(runs, "ms")
