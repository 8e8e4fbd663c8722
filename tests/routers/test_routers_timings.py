"""Timings that the gateway reports: parts, content events, usage, and nothing of the text."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from latencyprism.routers.timings import MAX_EVENT_BYTES, Exchange, GatewayTimings
from latencyprism.schemas.codec import Codec, Pack
from latencyprism.schemas.records import RequestTiming
from latencyprism.schemas.topics import TELEMETRY_REQUESTS, Topic

MS = 1_000_000
SECRET = "the prompt nobody may see"


@dataclass
class Bench:
    """Collects what is emitted, on a clock that is set by hand."""

    now_ns: int = 1_800_000_000 * 10**9
    samples: list[RequestTiming] = field(default_factory=list)
    watermarks: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.timings = GatewayTimings(
            self, ("a:1", "b:1"), gateway="g", clock_ns=lambda: self.now_ns
        )

    def sample(self, topic: Topic, sample: Any) -> None:
        assert topic is TELEMETRY_REQUESTS
        pack = Pack(agent="g", boot_ns=0, sequence=0, watermark_ns=0, samples=(sample,))
        Codec().encode(topic, pack)
        self.samples.append(sample)

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:
        assert topic is TELEMETRY_REQUESTS
        self.watermarks.append((instance, watermark_ns))

    def begin(self, **body: object) -> Exchange:
        return self.timings.begin(
            instance="a:1",
            endpoint="/v1/completions",
            body=json.dumps({"model": "small", "prompt": SECRET, **body}).encode(),
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        )

    def wait(self, ms: float) -> None:
        self.now_ns += round(ms * MS)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(word: str) -> bytes:
    return event({"choices": [{"index": 0, "text": word}]})


USAGE = event(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
)


def test_stream_is_reported_in_parts_while_it_is_open(bench: Bench) -> None:
    begun_ns = bench.now_ns
    exchange = bench.begin()
    bench.wait(10)
    exchange.answered(200, streaming=True)
    bench.wait(50)
    exchange.data(text("one"))
    bench.wait(20)
    exchange.data(text("two"))
    bench.timings.tick()
    bench.timings.tick()
    bench.wait(100)
    exchange.data(text("three") + USAGE + b"data: [DONE]\n\n")
    exchange.ended(complete=True)
    first, last = bench.samples
    assert (first.part, first.state, last.part, last.state) == (0, "open", 1, "complete")
    assert first.request_id == last.request_id
    assert first.arrival_ns == begun_ns
    assert first.first_byte_ns == begun_ns + 10 * MS
    assert first.first_token_ns == first.chunk_base_ns == begun_ns + 60 * MS
    assert first.chunk_deltas_us == (20_000,)
    assert first.end_ns is None
    assert (last.chunks_before, last.chunk_base_ns) == (2, begun_ns + 180 * MS)
    assert (last.prompt_tokens, last.cached_tokens, last.completion_tokens) == (5, 2, 3)
    assert last.end_ns == begun_ns + 180 * MS
    assert (last.model, last.source, last.streaming) == ("small", "gateway", True)
    assert last.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert SECRET not in repr(bench.samples)


def test_watermark_moves_for_every_instance_and_no_sample_is_earlier(bench: Bench) -> None:
    exchange = bench.begin()
    bench.wait(100)
    bench.timings.tick()
    assert bench.watermarks == [("a:1", bench.now_ns), ("b:1", bench.now_ns)]
    bench.wait(1)
    exchange.ended(complete=False)
    assert bench.samples[-1].state == "aborted"
    assert bench.samples[-1].observed_at_ns >= bench.watermarks[-1][1]


def test_waiting_request_is_reported_once_and_then_silent(bench: Bench) -> None:
    bench.begin()
    for _ in range(3):
        bench.wait(100)
        bench.timings.tick()
    assert [(s.part, s.status, s.first_token_ns) for s in bench.samples] == [(0, None, None)]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_are_found_however_the_bytes_are_cut(bench: Bench, size: int) -> None:
    exchange = bench.begin()
    exchange.answered(200, streaming=True)
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    word = event({"choices": [{"delta": {"content": "x"}}]}).replace(b"\n\n", b"\r\n\r\n")
    answer = b": comment\n\n" + role + word * 3 + USAGE + b"data: [DONE]\n\n"
    for start in range(0, len(answer), size):
        exchange.data(answer[start : start + size])
    exchange.ended(complete=True)
    (sample,) = bench.samples
    assert len(sample.chunk_deltas_us) + 1 == 3
    assert sample.completion_tokens == 3
    assert sample.response_bytes == len(answer)


def test_whole_answer_tells_its_usage_and_has_no_first_token(bench: Bench) -> None:
    exchange = bench.begin()
    exchange.answered(200, streaming=False)
    exchange.data(b'{"choices": [{"text": "x"}], "usage": {"prompt_')
    exchange.data(b'tokens": 9, "completion_tokens": 1}}')
    exchange.ended(complete=True)
    (sample,) = bench.samples
    assert (sample.prompt_tokens, sample.completion_tokens) == (9, 1)
    assert (sample.first_token_ns, sample.chunk_base_ns, sample.streaming) == (None, None, False)


@pytest.mark.parametrize(
    "answer",
    [
        b"data: {broken\n\n",
        b"data: [1]\n\n",
        event({"choices": 5, "usage": 7}),
        event({"choices": [5], "usage": {"prompt_tokens": "x", "prompt_tokens_details": 3}}),
    ],
)
def test_strange_answer_costs_nothing_but_its_figures(bench: Bench, answer: bytes) -> None:
    exchange = bench.begin()
    exchange.answered(200, streaming=True)
    exchange.data(answer)
    exchange.data(text("fine"))
    exchange.ended(complete=True)
    (sample,) = bench.samples
    assert (sample.prompt_tokens, sample.first_token_ns) == (None, bench.now_ns)


def test_event_without_end_does_not_fill_the_memory(bench: Bench) -> None:
    exchange = bench.begin()
    exchange.answered(200, streaming=True)
    for _ in range(3):
        exchange.data(b"x" * MAX_EVENT_BYTES)
    assert len(exchange._buffer) <= MAX_EVENT_BYTES
    exchange.ended(complete=True)
    assert bench.samples[-1].response_bytes == 3 * MAX_EVENT_BYTES
