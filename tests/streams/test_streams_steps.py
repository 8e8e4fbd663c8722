"""Steps from the times at which streams emit."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from emulated_engine import INSTANCE, MS, T0, Stream, TrueStep, parts_of, run_engine, timing
from hypothesis import example, given
from hypothesis import strategies as st

from latencyprism.schemas.records import RequestTiming, StepBatch
from latencyprism.streams.config import StreamsConfig
from latencyprism.streams.observation import Steps
from latencyprism.streams.steps import GivenSteps, StepRecovery, step_starts
from latencyprism.streams.tracking import RequestTracker

WINDOW_NS = 250 * MS


def recover(parts: Sequence[RequestTiming], *, window_ns: int = WINDOW_NS) -> Steps:
    """All steps of the exchanges, recovered window by window."""
    tracker, recovery = RequestTracker(StreamsConfig()), StepRecovery()
    for part in parts:
        tracker.add(part)
    last_ns = max(part.observed_at_ns for part in parts) + 3 * window_ns
    found = []
    for end_ns in range(T0 + window_ns, last_ns, window_ns):
        traffic = tracker.close(end_ns)
        found.append(
            recovery.recover(traffic.chunks, traffic.chunk_gaps_ms, traffic.occupancy, end_ns)
        )
    return Steps(
        **{
            field.name: np.concatenate([getattr(steps, field.name) for steps in found])
            for field in fields(Steps)
        }
    )


def assert_steps(found: Steps, true: Sequence[TrueStep]) -> None:
    """The recovered steps are the true ones, less the first, whose begin nobody saw."""
    true = true[1:]
    assert found.end_ns.tolist() == [step.end_ns for step in true]
    assert found.duration_ms == pytest.approx([step.duration_ms for step in true], abs=0.002)
    assert found.decode_sequences.tolist() == [step.decode for step in true]
    assert found.joined.tolist() == [step.joined for step in true]
    assert found.left.tolist() == [step.left for step in true]


def all_parts(streams: Sequence[Stream]) -> list[RequestTiming]:
    return [part for stream in streams for part in parts_of(stream)]


def test_steps_of_overlapping_streams() -> None:
    streams = [
        Stream(name="a", arrival=1, tokens=80, prompt_tokens=50),
        Stream(name="b", arrival=43, tokens=60, prompt_tokens=200),
        Stream(name="c", arrival=205, tokens=100, prompt_tokens=20),
        Stream(name="d", arrival=206, tokens=3, prompt_tokens=300),
    ]
    true = run_engine(streams)
    found = recover(all_parts(streams))
    assert_steps(found, true)
    assert found.prefill_tokens[found.joined > 0].tolist() == [200, 320]


def test_an_idle_engine_is_woken_by_the_next_request() -> None:
    streams = [
        Stream(name="a", arrival=0, tokens=5),
        Stream(name="b", arrival=700, tokens=5),
    ]
    true = run_engine(streams)
    assert_steps(recover(all_parts(streams)), true)


def test_a_stall_of_a_busy_engine_is_one_long_step() -> None:
    times = [T0 + k * 10 * MS for k in range(1, 20)] + [T0 + 990 * MS, T0 + 1_000 * MS]
    parts = [
        timing(chunk_base_ns=at, chunks_before=k, part=k, observed_at_ns=at)
        for k, at in enumerate(times)
    ]
    found = recover(parts)
    assert found.duration_ms.max() == pytest.approx(800)
    assert found.end_ns[found.duration_ms.argmax()] == T0 + 990 * MS


def test_context_grows_with_every_token() -> None:
    stream = Stream(name="a", arrival=0, tokens=20, prompt_tokens=100)
    run_engine([stream])
    found = recover(
        [
            timing(
                state="complete",
                observed_at_ns=stream.end_ns,
                end_ns=stream.end_ns,
                chunk_base_ns=stream.emitted[0],
                chunk_deltas_us=(10_000,) * 19,
                prompt_tokens=100,
            )
        ]
    )
    assert found.context_tokens.tolist() == [100 + k for k in range(1, 20)]


def test_a_step_that_straddles_a_window_is_one_step() -> None:
    streams = [Stream(name=f"s{i}", arrival=0, tokens=40, prompt_tokens=10) for i in range(6)]
    true = run_engine(streams, step_ms=12.4, spread_ms=0.7)
    assert_steps(recover(all_parts(streams), window_ns=25 * MS), true)


def test_held_up_bytes_that_come_together_are_one_step() -> None:
    steady = [T0 + k * 10 * MS for k in range(1, 30)]
    burst = [T0 + 600 * MS + k * 10_000 for k in range(20)]
    after = [T0 + 610 * MS, T0 + 620 * MS]
    times = steady + burst + after
    parts = [
        timing(chunk_base_ns=at, chunks_before=k, part=k, observed_at_ns=at)
        for k, at in enumerate(times)
    ]
    found = recover(parts)
    assert found.end_ns.tolist() == [*steady[1:], burst[0], *after]
    assert found.decode_sequences.tolist() == [1] * len(found.end_ns)


def test_a_stream_whose_tokens_were_merged_still_counts_in_every_step() -> None:
    """A server that lags sends two tokens of a stream in one event."""
    streams = [Stream(name="a", arrival=0, tokens=40), Stream(name="b", arrival=0, tokens=40)]
    true = run_engine(streams)
    del streams[1].emitted[20]
    found = recover(all_parts(streams))
    assert found.decode_sequences.tolist() == [step.decode for step in true[1:]]


def test_waiting_requests_are_counted_at_each_step() -> None:
    streams = [Stream(name="a", arrival=0, tokens=30)]
    run_engine(streams)
    late = timing("w", arrival_ns=T0 + 105 * MS, observed_at_ns=T0 + 105 * MS)
    found = recover([*all_parts(streams), late])
    assert found.waiting.tolist() == [int(at > T0 + 105 * MS) for at in found.end_ns]


def test_events_that_come_late_make_no_step() -> None:
    tracker, recovery = RequestTracker(StreamsConfig()), StepRecovery()
    times = [T0 + k * 10 * MS for k in range(1, 60)]
    for k, at in enumerate(times):
        if k != 5:
            tracker.add(timing(part=k, chunks_before=k, chunk_base_ns=at, observed_at_ns=at))
    for end_ns in (T0 + WINDOW_NS, T0 + 2 * WINDOW_NS, T0 + 3 * WINDOW_NS):
        traffic = tracker.close(end_ns)
        steps = recovery.recover(traffic.chunks, traffic.chunk_gaps_ms, traffic.occupancy, end_ns)
        assert (steps.duration_ms > 9).all()
        if end_ns == T0 + WINDOW_NS:
            tracker.add(
                timing(part=5, chunks_before=5, chunk_base_ns=times[5], observed_at_ns=times[5])
            )


@given(
    arrivals=st.lists(st.integers(0, 600), min_size=1, max_size=8),
    tokens=st.lists(st.integers(2, 40), min_size=8, max_size=8),
    step_ms=st.integers(5, 40),
)
@example(arrivals=[170, 170], tokens=[2] * 8, step_ms=39)
def test_any_load_gives_its_steps(arrivals: list[int], tokens: list[int], step_ms: int) -> None:
    streams = [
        Stream(name=f"s{i}", arrival=at, tokens=count, prompt_tokens=10)
        for i, (at, count) in enumerate(zip(arrivals, tokens, strict=False))
    ]
    true = run_engine(streams, step_ms=step_ms, spread_ms=0.02 * step_ms)
    found = recover(all_parts(streams))
    assert found.end_ns.tolist() == [step.end_ns for step in true[1:]]
    assert found.joined.tolist() == [step.joined for step in true[1:]]
    assert (found.decode_sequences + found.joined).tolist() == [
        step.decode + step.joined for step in true[1:]
    ]


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 4)), min_size=1, max_size=60),
    st.integers(1, 50),
)
def test_no_stream_emits_twice_in_a_step(events: list[tuple[int, int]], pause: int) -> None:
    events.sort()
    at_ns = np.array([at for at, _ in events])
    serial = np.array([stream for _, stream in events])
    starts = step_starts(at_ns, serial, pause, 0)
    assert starts[0]
    for step in np.split(np.arange(len(events)), np.flatnonzero(starts)[1:]):
        emitted = [(events[i][1], events[i][0]) for i in step]
        assert len({stream for stream, _ in emitted}) == len(set(emitted))
        assert (np.diff(at_ns[step]) <= pause).all()


def batch(start_ns: Sequence[int], **changes: tuple[int, ...]) -> StepBatch:
    count = len(start_ns)
    values: dict[str, Any] = {
        "duration_us": (8_000,) * count,
        "decode_sequences": (3,) * count,
        "joined": (1,) * count,
        "left": (0,) * count,
        "prefill_tokens": (-1,) * count,
        "context_tokens": (500,) * count,
    } | changes
    return StepBatch(
        instance=INSTANCE,
        source="kernel",
        observed_at_ns=start_ns[-1] + 8 * MS,
        start_ns=tuple(start_ns),
        **values,
    )


def test_given_steps_wait_for_the_window_they_end_in() -> None:
    given_steps = GivenSteps(bound=10)
    occupancy = RequestTracker(StreamsConfig()).close(T0).occupancy
    told = batch([T0, T0 + 8 * MS, T0 + 16 * MS])
    assert given_steps.add(told)
    assert not given_steps.add(told)
    first = given_steps.take(T0 + 20 * MS, occupancy)
    assert first.end_ns.tolist() == [T0 + 8 * MS, T0 + 16 * MS]
    assert first.duration_ms.tolist() == [8.0, 8.0]
    assert np.isnan(first.prefill_tokens).all()
    assert first.context_tokens.tolist() == [500, 500]
    assert given_steps.take(T0 + 30 * MS, occupancy).end_ns.tolist() == [T0 + 24 * MS]
    assert given_steps.oldest_ns() is None


def test_given_steps_are_bounded() -> None:
    given_steps = GivenSteps(bound=2)
    given_steps.add(batch([T0, T0 + 8 * MS, T0 + 16 * MS]))
    assert (len(given_steps), given_steps.dropped) == (2, 1)
