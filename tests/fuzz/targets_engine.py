"""What an engine answers: pages, compressed ones, JSON."""

from contextlib import suppress

from latencyprism.collectors.engine.aliases import WANTED
from latencyprism.collectors.engine.client import (
    ScrapeError,
    checked_page,
    decoded,
    parsed_json,
)
from latencyprism.collectors.engine.exposition import ExpositionError, Page, Parser
from latencyprism.collectors.engine.sample import Tracker

MOST = 20
KNOWN = (
    b"vllm:num_requests_running 1\n"
    b'vllm:time_to_first_token_seconds_bucket{le="1"} 2\n'
    b"vllm:time_to_first_token_seconds_count 2\nvllm:time_to_first_token_seconds_sum 1\n"
    b"vllm:generation_tokens_total "
)


def _read(parser: Parser, page: bytes) -> Page | None:
    with suppress(ExpositionError):
        read = parser.parse(page)
        assert len(read.values) == len(read.table.series) <= MOST
        return read
    return None


def target_exposition(data: bytes) -> None:
    """A page, and then the same one read by following it."""
    parser = Parser(max_series=MOST)
    first = _read(parser, data)
    second = _read(parser, data)
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert repr(first.values) == repr(second.values)


def target_engine_page(data: bytes) -> None:
    """Pages of a known engine among which there is any other."""
    parser, tracker = Parser(WANTED, max_series=MOST), Tracker("h:1")
    for second, body in enumerate((KNOWN + b"5\n", KNOWN + data, data, KNOWN + b"9\n")):
        page = _read(parser, body)
        if page is not None:
            tracker.page(page, observed_at_ns=1, monotonic_ns=second * 10**9, scrape_ms=1.0)


def target_answer(data: bytes) -> None:
    """A body: compressed, as a page, as JSON."""
    for encoding in ("gzip", "deflate", data[:20].decode(errors="replace")):
        with suppress(ScrapeError):
            decoded(data, encoding)
    for content_type in ("text/plain", "application/openmetrics-text"):
        with suppress(ScrapeError):
            checked_page(content_type, data)
    with suppress(ScrapeError):
        parsed_json(data)
