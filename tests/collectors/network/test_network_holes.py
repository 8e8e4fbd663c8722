"""Lost packets: an exchange goes on behind a hole where it can be told what follows."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_wire import (
    DONE,
    MS,
    START_NS,
    STREAM_END,
    STREAM_HEAD,
    Wire,
    answer,
    chunk,
    delta,
    make_tap,
    play,
    request,
    usage,
)

from latencyprism.collectors.network.tap import Tap
from latencyprism.schemas.records import RequestTiming

BODY = {"model": "m", "messages": []}
EVENTS = 10
SEGMENTS = [
    STREAM_HEAD,
    *(chunk(delta(content=f"word {n}")) for n in range(EVENTS)),
    chunk(usage(11, EVENTS, 4)),
    chunk(DONE) + STREAM_END,
]


def heard(segments: Sequence[bytes], lost: Sequence[int]) -> tuple[Tap, list[RequestTiming]]:
    """What is told of an answer in these segments of which some never come."""
    wire, tap = Wire(), make_tap()
    packets = [*wire.syn(), wire.client(request(BODY))]
    packets += [p for n, p in enumerate(map(wire.server, segments)) if n not in lost]
    parts = play(tap, packets)
    for late_ms in (400, 800, 1200):
        parts += tap.flush(START_NS + late_ms * MS)
    return tap, parts


def chunks(parts: Sequence[RequestTiming]) -> int:
    return sum(len(p.chunk_deltas_us) + (p.chunk_base_ns is not None) for p in parts)


@pytest.mark.parametrize("lost", [[1], [4], [5, 6, 7], [3, 8], [10]])
def test_events_behind_a_hole_are_timed(lost: list[int]) -> None:
    tap, parts = heard(SEGMENTS, lost)

    assert parts[-1].state == "complete"
    assert chunks(parts) == EVENTS - len(lost)
    assert parts[-1].completion_tokens == EVENTS
    assert "chunk_deltas_us" in parts[-1].estimated
    assert ("first_token_ns" in parts[-1].estimated) == (lost == [1])
    assert not {"state", "end_ns"} & set(parts[-1].estimated)
    assert tap.counts["resynced exchanges"] == 1


def test_a_hole_inside_a_large_chunk_has_a_known_end() -> None:
    events = b"".join(delta(content=f"word {n}") for n in range(60))
    body = chunk(events)
    pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]

    tap, parts = heard([STREAM_HEAD, *pieces, STREAM_END], [2])

    torn = len(pieces[1]) // len(delta(content="word 10"))
    assert parts[-1].state == "complete"
    assert 60 - torn - 3 <= chunks(parts) < 60
    assert parts[-1].response_bytes == len(events)
    assert tap.counts["resynced exchanges"] == 1


def test_a_hole_inside_an_answer_with_a_length_has_a_known_end() -> None:
    whole = answer(b'{"pad":"' + b"x" * 900 + b'","usage":{"prompt_tokens":5}}')

    _, (*_, part) = heard([whole[:200], whole[200:500], whole[500:]], [1])

    assert (part.state, part.prompt_tokens, part.estimated) == ("complete", 5, ())


def test_a_hole_inside_a_request_hides_what_it_asked_for() -> None:
    wire, tap = Wire(), make_tap()
    ask = request({"pad": "x" * 900, "model": "m", "max_tokens": 5})
    packets = [*wire.syn(), wire.client(ask[:200])]
    wire.client(ask[200:700])  # lost
    packets += [wire.client(ask[700:]), *map(wire.server, SEGMENTS)]

    parts = play(tap, packets)
    parts += tap.flush(START_NS + 400 * MS)

    assert parts[-1].state == "complete"
    assert (parts[0].max_tokens, chunks(parts)) == (None, EVENTS)


def test_the_next_answer_ends_the_one_whose_end_was_lost() -> None:
    wire, tap = Wire(), make_tap()
    packets = [*wire.syn(), wire.client(request(BODY) + request(BODY))]
    packets += map(wire.server, SEGMENTS[:4])
    for segment in SEGMENTS[4:]:
        wire.server(segment)  # lost
    packets += map(wire.server, SEGMENTS)

    parts = play(tap, packets)
    parts += tap.flush(START_NS + 400 * MS)

    ended = [part for part in parts if part.state != "open"]
    assert sorted(part.state for part in ended) == ["aborted", "complete"]
    (lost,) = (part for part in ended if part.state == "aborted")
    assert {"state", "end_ns"} <= set(lost.estimated)


def test_a_connection_that_ends_in_a_hole_is_not_called_aborted_for_sure() -> None:
    wire, tap = Wire(), make_tap()
    packets = [*wire.syn(), wire.client(request(BODY)), *map(wire.server, SEGMENTS[:4])]
    for segment in SEGMENTS[4:]:
        wire.server(segment)  # lost
    packets.append(wire.fin("server"))

    play(tap, packets)
    (part,) = tap.flush(START_NS + 400 * MS)

    assert part.state == "aborted"
    assert {"state", "end_ns"} <= set(part.estimated)
    assert len(tap) == 0


def test_what_is_no_stream_cannot_be_found_again() -> None:
    head = STREAM_HEAD.replace(b"text/event-stream", b"application/json")
    segments = [head, chunk(b'{"a":1,'), chunk(b'"b":2,'), chunk(b'"c":3}') + STREAM_END]

    tap, (*_, part) = heard(segments, [2])

    assert (part.state, part.estimated) == ("aborted", ("state", "end_ns"))
    assert tap.counts["resynced exchanges"] == 0


def test_the_search_for_a_chunk_is_bounded() -> None:
    segments = [STREAM_HEAD, chunk(b"x" * 10), *[b"y" * 10_000] * 8, STREAM_END]

    tap, (*_, part) = heard(segments, [1])

    assert part.state == "aborted"
    assert tap.counts["resynced exchanges"] == 0


@given(
    st.lists(st.integers(1, 2000), max_size=12),
    st.frozensets(st.integers(0, 14), max_size=4),
)
def test_any_hole_costs_no_more_than_its_exchange(cuts: list[int], lost: frozenset[int]) -> None:
    data = b"".join(SEGMENTS)
    edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    segments = [data[a:b] for a, b in pairwise(edges)]

    tap, parts = heard(segments, sorted(lost))

    assert len(tap) <= 1
    assert chunks(parts) <= EVENTS
    if parts and not lost & set(range(len(segments))):
        assert (parts[-1].state, chunks(parts), parts[-1].estimated) == ("complete", EVENTS, ())
    if any(part.state == "complete" for part in parts) and chunks(parts) < EVENTS:
        assert "chunk_deltas_us" in parts[-1].estimated
