"""Exchanges assembled from parts and cut into windows."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from emulated_engine import MS, T0, Stream, deltas_us, parts_of, run_engine, timing
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.schemas.records import RequestTiming
from latencyprism.streams.config import StreamsConfig
from latencyprism.streams.tracking import RequestTracker, Traffic

WINDOW_NS = 250 * MS
END_NS = T0 + WINDOW_NS


def tracker(**bounds: Any) -> RequestTracker:
    return RequestTracker(StreamsConfig(**bounds))


def tracked(*parts: RequestTiming, **bounds: Any) -> RequestTracker:
    made = tracker(**bounds)
    for part in parts:
        made.add(part)
    return made


def stream_parts(times_ms: Sequence[float], name: str = "r") -> list[RequestTiming]:
    """One part an event."""
    return [
        timing(
            name,
            part,
            observed_at_ns=T0 + round(at * MS),
            chunks_before=part,
            chunk_base_ns=T0 + round(at * MS),
        )
        for part, at in enumerate(times_ms)
    ]


def closed(made: RequestTracker, windows: int) -> list[Traffic]:
    return [made.close(T0 + (k + 1) * WINDOW_NS) for k in range(windows)]


def told(traffic: Traffic) -> dict[str, object]:
    """A window's traffic as plain values, to compare."""
    first, chunks, still = traffic.first_tokens, traffic.chunks, traffic.open_requests
    return {
        "started": traffic.started,
        "ended": [exchange.request_id for exchange in traffic.ended],
        "chunks": chunks.at_ns.tolist(),
        "serial": chunks.serial.tolist(),
        "ordinal": chunks.ordinal.tolist(),
        "final": chunks.final.tolist(),
        "gaps": traffic.chunk_gaps_ms.tolist(),
        "ttft": first.ttft_ms.tolist(),
        "tokens": np.nan_to_num(first.prompt_tokens, nan=-1).tolist(),
        "ahead": first.ahead.tolist(),
        "decoding": first.decoding.tolist(),
        "open": (still.decoding, still.waiting),
        "silence": sorted(still.silence_ms.tolist()),
        "waiting": sorted(still.waiting_ms.tolist()),
    }


def test_parts_become_one_exchange() -> None:
    parts = [
        timing(part=0, arrival_ns=T0, request_bytes=400),
        timing(
            part=1,
            observed_at_ns=T0 + 60 * MS,
            streaming=True,
            status=200,
            first_byte_ns=T0 + 5 * MS,
            request_end_ns=T0 + 2 * MS,
            chunk_base_ns=T0 + 40 * MS,
            chunk_deltas_us=(10_000, 10_000),
        ),
        timing(
            part=2,
            state="complete",
            observed_at_ns=T0 + 81 * MS,
            chunks_before=3,
            chunk_base_ns=T0 + 80 * MS,
            end_ns=T0 + 81 * MS,
            prompt_tokens=64,
            cached_tokens=16,
        ),
    ]
    traffic = tracked(*parts).close(END_NS)
    (exchange,) = traffic.ended
    assert (traffic.started, len(traffic.chunks)) == (1, 4)
    assert exchange.first_token_ns == T0 + 40 * MS
    assert exchange.last_chunk_ns == T0 + 80 * MS
    assert traffic.chunk_gaps_ms.tolist() == [10, 10, 20]
    assert traffic.chunks.final.tolist() == [False, False, False, True]
    first = traffic.first_tokens
    assert first.ttft_ms.tolist() == [40]
    assert first.headers_ms.tolist() == [5]
    assert first.upload_ms.tolist() == [2]
    assert first.prompt_tokens.tolist() == [64]
    assert first.cached_tokens.tolist() == [16]
    assert first.request_bytes.tolist() == [400]


def test_a_part_counts_once() -> None:
    made = tracker()
    part = stream_parts([10])[0]
    assert made.add(part)
    assert not made.add(part)
    assert len(made.close(END_NS).chunks) == 1
    assert made.counters.duplicate_parts == 1


def test_a_part_of_an_ended_exchange_counts_once_too() -> None:
    stream = Stream(name="a", arrival=0, tokens=20)
    run_engine([stream])
    parts = parts_of(stream)
    made = tracked(*parts)
    first, second = closed(made, 2)
    assert len(first.ended) + len(second.ended) == 1
    assert not any(made.add(part) for part in parts)
    third = made.close(T0 + 3 * WINDOW_NS)
    assert (third.started, len(third.ended), len(third.chunks)) == (0, 0, 0)


def test_late_events_count_in_the_next_window() -> None:
    *parts, late = stream_parts([10, 20, 40, 30])
    made = tracked(*parts)
    first = made.close(END_NS)
    made.add(late)
    second = made.close(END_NS + WINDOW_NS)
    assert (len(first.chunks), len(second.chunks)) == (3, 1)
    assert second.started == 0
    assert second.chunk_gaps_ms.tolist() == []


def test_late_events_of_an_ended_exchange_count_too() -> None:
    stream = Stream(name="a", arrival=0, tokens=12)
    run_engine([stream])
    first, *rest = parts_of(stream)
    made = tracked(*rest)
    before = made.close(END_NS)
    made.add(first)
    after = made.close(END_NS + WINDOW_NS)
    assert len(before.chunks) + len(after.chunks) == 12
    assert len(after.chunks) > 0
    assert made.buffered_chunks == 0


@given(st.data())
def test_order_and_repetition_of_parts_do_not_matter(data: st.DataObject) -> None:
    streams = [
        Stream(
            name=f"s{i}",
            arrival=data.draw(st.integers(0, 400)),
            tokens=data.draw(st.integers(1, 30)),
            prompt_tokens=data.draw(st.integers(1, 500)),
        )
        for i in range(data.draw(st.integers(1, 5)))
    ]
    run_engine(streams)
    parts = [part for stream in streams for part in parts_of(stream)]
    shuffled = data.draw(st.permutations(parts + data.draw(st.lists(st.sampled_from(parts)))))
    ordered, disordered = tracked(*parts), tracked(*shuffled)
    expected = [told(traffic) for traffic in closed(ordered, 8)]
    assert [told(traffic) for traffic in closed(disordered, 8)] == expected


@given(
    st.lists(st.lists(st.integers(0, 1_200), min_size=1, max_size=20), min_size=1, max_size=4),
    st.integers(10, 400),
)
def test_every_event_counts_in_exactly_one_window(streams: list[list[int]], window_ms: int) -> None:
    parts = [
        part
        for number, times in enumerate(streams)
        for part in stream_parts(sorted(times), name=f"s{number}")
    ]
    random.Random(window_ms).shuffle(parts)
    made = tracker()
    counted = 0
    half = len(parts) // 2
    for k in range(1_300 // window_ms + 2):
        for part in parts[:half] if k == 0 else parts[half:] if k == 1 else ():
            made.add(part)
        counted += len(made.close(T0 + (k + 1) * window_ms * MS).chunks)
    assert counted == sum(len(times) for times in streams)
    assert made.buffered_chunks == 0


def test_a_worker_that_starts_in_the_middle_of_a_stream_makes_no_first_token() -> None:
    part = timing(
        part=9,
        observed_at_ns=T0 + 20 * MS,
        arrival_ns=T0 - 900 * MS,
        first_token_ns=T0 - 800 * MS,
        chunks_before=80,
        chunk_base_ns=T0 + 10 * MS,
        chunk_deltas_us=(10_000,),
    )
    traffic = tracked(part).close(END_NS)
    assert traffic.chunks.ordinal.tolist() == [80, 81]


def test_what_a_request_met_on_arrival() -> None:
    parts = [
        timing("decodes", chunk_base_ns=T0 + 5 * MS, observed_at_ns=T0 + 5 * MS),
        timing("waits", arrival_ns=T0 + 10 * MS, prompt_tokens=300),
        timing(
            "asks",
            arrival_ns=T0 + 20 * MS,
            chunk_base_ns=T0 + 90 * MS,
            observed_at_ns=T0 + 90 * MS,
        ),
    ]
    first = tracked(*parts).close(END_NS).first_tokens
    assert first.decoding.tolist() == [0, 1]
    assert first.ahead.tolist() == [0, 1]
    assert first.ahead_tokens.tolist() == [0, 300]


def test_open_requests_tell_how_long_nothing_came() -> None:
    parts = [
        timing("silent", chunk_base_ns=T0 + 50 * MS, observed_at_ns=T0 + 50 * MS),
        timing("waits", arrival_ns=T0 + 30 * MS, observed_at_ns=T0 + 30 * MS, prompt_tokens=9),
    ]
    still = tracked(*parts).close(END_NS).open_requests
    assert (still.decoding, still.waiting) == (1, 1)
    assert still.silence_ms.tolist() == [200]
    assert still.waiting_ms.tolist() == [220]
    assert still.waiting_tokens.tolist() == [9]


def test_prompt_tokens_are_estimated_from_bytes_once_both_were_seen() -> None:
    made = tracker()
    for k in range(30):
        at = T0 + k * MS
        made.add(
            timing(
                f"known{k}",
                state="complete",
                arrival_ns=at,
                observed_at_ns=at,
                end_ns=at,
                request_bytes=50 + 40 * k,
                prompt_tokens=10 * k,
            )
        )
    made.close(END_NS)
    at = END_NS + 10 * MS
    made.add(
        timing("new", arrival_ns=END_NS, observed_at_ns=at, chunk_base_ns=at, request_bytes=450)
    )
    first = made.close(END_NS + WINDOW_NS).first_tokens
    assert first.prompt_tokens == pytest.approx([100], rel=0.01)
    assert first.tokens_estimated.tolist() == [True]


def test_prompt_tokens_are_unknown_while_nothing_was_learned() -> None:
    part = timing(request_bytes=450, chunk_base_ns=T0 + MS, observed_at_ns=T0 + MS)
    assert np.isnan(tracked(part).close(END_NS).first_tokens.prompt_tokens).all()


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({"state": "complete", "status": 200}, False),
        ({"state": "complete", "status": 404}, False),
        ({"state": "complete", "status": 503}, True),
        ({"state": "aborted", "status": 200}, True),
        ({"state": "aborted", "estimated": ("state", "end_ns")}, False),
        ({"state": "aborted", "status": 500, "estimated": ("state", "end_ns")}, True),
    ],
)
def test_what_counts_as_failed(changes: dict[str, Any], failed: bool) -> None:
    (exchange,) = tracked(timing(end_ns=T0 + MS, **changes)).close(END_NS).ended
    assert exchange.failed is failed


def test_the_request_longest_without_news_makes_room() -> None:
    made = tracked(timing("a"), timing("b"), timing("a", 1), timing("c"), open_requests=2)
    assert len(made) == 2
    assert made.counters.evicted_requests == 1
    assert made.close(END_NS).started == 2
    assert made.add(timing("b")), "b was evicted, so it is new again"


def test_events_beyond_the_bound_are_dropped_and_counted() -> None:
    made = tracked(
        timing(chunk_base_ns=T0, chunk_deltas_us=(1_000,) * 9),
        timing(part=1, chunks_before=10, chunk_base_ns=T0 + 20 * MS, chunk_deltas_us=(1_000,) * 4),
        buffered_chunks=12,
    )
    assert made.counters.dropped_chunks == 5
    assert len(made.close(END_NS).chunks) == 10
    assert made.buffered_chunks == 0


def test_a_request_without_news_is_given_up() -> None:
    made = tracked(timing(chunk_base_ns=T0 + MS, observed_at_ns=T0 + MS), request_timeout_s=1)
    assert made.close(T0 + 750 * MS).open_requests.decoding == 1
    made.close(T0 + 1_250 * MS)
    assert (len(made), made.counters.abandoned_requests) == (0, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"part": -1},
        {"part": 1 << 40},
        {"arrival_ns": -5},
        {"end_ns": (1 << 63) - 1},
        {"chunks_before": -1},
        {"chunk_base_ns": T0, "chunk_deltas_us": (10, -20)},
        {"chunk_base_ns": T0, "chunk_deltas_us": (1 << 62,)},
    ],
)
def test_a_part_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    made = tracker()
    assert not made.add(timing(**changes))
    assert (len(made), made.counters.refused_parts) == (0, 1)


def test_ended_exchanges_are_dropped_when_nothing_of_them_may_come() -> None:
    made = tracked(
        timing(state="complete", end_ns=T0 + MS, chunk_base_ns=T0 + MS), clock_bound_ms=500
    )
    part = timing(part=1, chunks_before=1, chunk_base_ns=T0 + MS, observed_at_ns=T0 + MS)
    closed(made, 1)
    made.add(part)
    assert len(made) == 0, "it belongs to the exchange that ended"
    made.close(T0 + 600 * MS)
    made.add(part)
    assert len(made) == 1, "nothing is known of it any more"


def test_times_before_the_arrival_are_taken_as_the_arrival() -> None:
    """A clock was set back between the request and its answer."""
    part = timing(
        state="complete",
        arrival_ns=T0 + 50 * MS,
        observed_at_ns=T0 + 60 * MS,
        chunk_base_ns=T0 + 10 * MS,
        chunk_deltas_us=deltas_us([T0, T0 + MS]),
        end_ns=T0 + 20 * MS,
    )
    traffic = tracked(part).close(END_NS)
    assert traffic.first_tokens.ttft_ms.tolist() == [0]
    assert (traffic.chunks.at_ns >= T0 + 50 * MS).all()
    assert traffic.ended[0].end_ns == T0 + 50 * MS


def test_forgetting_keeps_what_was_learned() -> None:
    made = tracked(timing(chunk_base_ns=T0 + MS))
    for x in range(20):
        made.tokens_of_bytes.learn(x, 2 * x)
    made.forget()
    assert (len(made), made.buffered_chunks, made.next_event_ns()) == (0, 0, None)
    assert made.tokens_of_bytes.ready


def test_the_oldest_event_that_waits() -> None:
    made = tracked(timing(arrival_ns=T0 + 5 * MS, chunk_base_ns=T0 + 300 * MS))
    assert made.next_event_ns() == T0 + 5 * MS
    made.close(END_NS)
    assert made.next_event_ns() == T0 + 300 * MS


def test_a_model_that_the_server_refused_is_not_its_model() -> None:
    end_ns = T0 + 50 * MS
    served: dict[str, Any] = {"model": "small", "status": 200, "first_token_ns": T0 + 9 * MS}
    made = tracked(
        timing("a", **served),
        timing("b", model="nobody", status=404, state="complete", end_ns=end_ns, arrival_ns=T0 + 1),
        timing("c", model="unheard", arrival_ns=T0 + 2),
    )
    closed(made, 1)
    assert made.model == "small"
    made.add(timing("c", 1, model="unheard", status=200, state="complete", end_ns=T0 + 300 * MS))
    closed(made, 2)
    assert made.model == "unheard"


def gateway_part(
    name: str, arrival_ms: float, end_ms: float, source: str = "gateway"
) -> RequestTiming:
    end_ns = T0 + round(end_ms * MS)
    return timing(
        name,
        source=source,
        state="complete",
        arrival_ns=T0 + round(arrival_ms * MS),
        observed_at_ns=end_ns,
        end_ns=end_ns,
    )


def test_an_exchange_that_network_and_gateway_tell_of_counts_once() -> None:
    made = tracked(*stream_parts([20, 60]), gateway_part("g", -1, 61))
    made.add(timing("r", 2, state="complete", observed_at_ns=T0 + 60 * MS, end_ns=T0 + 60 * MS))

    traffic = made.close(END_NS)
    assert (traffic.started, [e.request_id for e in traffic.ended]) == (1, ["r"])
    assert made.counters.secondary_parts == 1


@pytest.mark.parametrize(("silent_s", "counted"), [(59, 0), (61, 1)])
def test_a_gateway_counts_once_the_network_source_is_silent(silent_s: int, counted: int) -> None:
    made = tracked(*stream_parts([0]))
    made.close(END_NS)

    assert made.add(gateway_part("g", silent_s * 1000, silent_s * 1000 + 5)) == bool(counted)


def test_a_gateway_alone_counts() -> None:
    assert tracked(gateway_part("g", 0, 10)).close(END_NS).started == 1


def test_spans_never_count() -> None:
    made = tracked(gateway_part("s", 0, 10, source="otlp"))

    assert (made.close(END_NS).started, made.counters.secondary_parts) == (0, 1)


def test_what_cannot_be_does_not_silence_a_worse_source() -> None:
    made = tracked(timing("x", observed_at_ns=1 << 62), gateway_part("g", 0, 10))

    assert made.close(END_NS).started == 1


def test_forgetting_forgets_who_told() -> None:
    made = tracked(*stream_parts([0]))
    made.forget()

    assert made.add(gateway_part("g", 0, 10))
