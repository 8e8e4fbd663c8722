"""Packs of one instance in, judged windows out."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from emulated_engine import (
    INSTANCE,
    MS,
    T0,
    KeepingJudge,
    Stream,
    deltas_us,
    pack,
    packs_of,
    parts_of,
    run_engine,
    timing,
)
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.schemas.codec import Pack
from latencyprism.schemas.records import (
    BatchProfile,
    EngineSample,
    HostSample,
    ModelSnapshot,
    RequestTiming,
    StepBatch,
    XpuSample,
)
from latencyprism.schemas.topics import (
    TELEMETRY_ENGINE,
    TELEMETRY_HOST,
    TELEMETRY_REQUESTS,
    TELEMETRY_STEPS,
    TELEMETRY_XPU,
    Topic,
)
from latencyprism.streams.config import StreamsConfig
from latencyprism.streams.observation import Observation
from latencyprism.streams.pipeline import InstancePipeline, batch_id


def pipeline(**changes: Any) -> InstancePipeline:
    settings: dict[str, Any] = {"settle_ms": 0, "grace_ms": 0} | changes
    return InstancePipeline(INSTANCE, config=StreamsConfig(**settings), judge=KeepingJudge())


def seen(made: InstancePipeline) -> list[Observation]:
    assert isinstance(made.judge, KeepingJudge)
    return made.judge.seen


def run(
    made: InstancePipeline,
    packs: Iterable[Pack[RequestTiming]],
    *,
    topic: Topic = TELEMETRY_REQUESTS,
) -> list[BatchProfile]:
    """Give the packs as they would come, and look after each."""
    profiles = []
    for one in packs:
        made.add(topic, one, one.watermark_ns)
        profiles += made.advance(one.watermark_ns)
    return profiles


def some_streams() -> list[Stream]:
    streams = [
        Stream(name="a", arrival=12, tokens=70, prompt_tokens=80),
        Stream(name="b", arrival=130, tokens=30, prompt_tokens=200),
        Stream(name="c", arrival=131, tokens=60, prompt_tokens=20),
        Stream(name="d", arrival=900, tokens=8, prompt_tokens=400),
    ]
    run_engine(streams)
    return streams


def packs_of_all(streams: Sequence[Stream], until_ms: int = 1_600) -> list[Pack[RequestTiming]]:
    return packs_of([part for s in streams for part in parts_of(s)], until_ms=until_ms)


def test_profiles_of_a_short_run() -> None:
    streams = some_streams()
    made = pipeline(services={INSTANCE: "chat"})
    profiles = run(made, packs_of_all(streams))
    assert [p.window_start_ns for p in profiles] == [T0 + k * 250 * MS for k in range(6)]
    assert sum(p.chunks for p in profiles) == 70 + 30 + 60 + 8
    assert sum(p.requests_started for p in profiles) == 4
    assert sum(p.requests_finished for p in profiles) == 4
    assert [p.requests_open for p in profiles] == [3, 2, 1, 1, 0, 0]
    assert {p.model for p in profiles} == {"small"}
    assert {p.service for p in profiles} == {"chat"}
    assert {p.verdict for p in profiles} == {"normal"}
    assert {p.model_version for p in profiles} == {"keeping-1"}
    assert profiles[0].features == {"batch": 3.0}
    assert profiles[0].batch_id == batch_id(INSTANCE, "small", T0)
    assert len({p.batch_id for p in profiles}) == len(profiles)
    assert all(p.closed_at_ns >= p.window_end_ns for p in profiles)
    ended = [p for p in profiles if p.requests_finished]
    assert all(p.e2e_ms is not None and p.e2e_ms > 0 for p in ended)
    assert not any(made.counters().values())


def test_a_window_without_work_is_told_too() -> None:
    profiles = run(pipeline(), packs_of([], until_ms=1_000))
    assert len(profiles) == 4
    assert {(p.chunks, p.requests_open, p.steps, p.ttft_ms, p.service) for p in profiles} == {
        (0, 0, 0, None, "default")
    }


@given(st.data())
def test_order_and_repetition_within_the_grace_change_no_profile(data: st.DataObject) -> None:
    """Packs of the same 200 ms in any order, in which parts are repeated in any pack."""
    packs = packs_of_all(some_streams(), until_ms=1_600)
    expected = run(pipeline(grace_ms=200), packs)
    made = pipeline(grace_ms=200)
    profiles = []
    for pair in zip(packs[::2], packs[1::2], strict=True):
        shuffled = data.draw(st.permutations([*pair, data.draw(st.sampled_from(pair))]))
        earlier = [part for one in packs[: pair[0].sequence] for part in one.samples]
        for one in shuffled:
            again = data.draw(st.lists(st.sampled_from(earlier), max_size=3)) if earlier else []
            parts = data.draw(st.permutations([*one.samples, *again]))
            made.add(TELEMETRY_REQUESTS, replace(one, samples=tuple(parts)), one.watermark_ns)
        profiles += made.advance(pair[-1].watermark_ns)
    assert [replace(p, closed_at_ns=0) for p in profiles] == [
        replace(p, closed_at_ns=0) for p in expected
    ]


def test_late_samples_are_counted_in_the_next_window() -> None:
    made = pipeline()
    late = timing("late", observed_at_ns=T0 + 30 * MS, chunk_base_ns=T0 + 30 * MS)
    profiles = run(
        made,
        [
            pack(sequence=0, watermark_ns=T0 + 10 * MS),
            pack(sequence=1, watermark_ns=T0 + 260 * MS),
            pack(sequence=2, watermark_ns=T0 + 510 * MS, samples=[late]),
        ],
    )
    assert [(p.late_samples, p.chunks) for p in profiles] == [(0, 0), (1, 1)]
    assert made.counters()["late_samples"] == 1


def test_samples_of_another_time_or_instance_are_refused() -> None:
    made = pipeline()
    run(made, [pack(sequence=k, watermark_ns=T0 + k * 20_000 * MS) for k in range(2)])
    strange = [
        timing("too old", observed_at_ns=T0 - 3_600_000 * MS),
        timing("too new", observed_at_ns=T0 + 3_600_000 * MS),
        replace(timing("elsewhere", observed_at_ns=T0 + 20_000 * MS), instance="10.0.0.1:1"),
    ]
    run(made, [pack(sequence=2, watermark_ns=T0 + 20_100 * MS, samples=strange)])
    assert made.counters()["refused_samples"] == 3


def test_packs_of_a_second_agent_are_not_counted_twice() -> None:
    streams = some_streams()
    made = pipeline()
    profiles = []
    for one in packs_of_all(streams):
        for agent in ("first", "second"):
            made.add(TELEMETRY_REQUESTS, replace(one, agent=agent), one.watermark_ns)
        profiles += made.advance(one.watermark_ns)
    assert sum(p.requests_started for p in profiles) == 4
    assert made.counters()["rival_packs"] == 16


@pytest.mark.parametrize("again", [{"boot_ns": T0 + 1}, {"agent": "other"}])
def test_open_requests_of_a_collector_that_ended_do_not_stall(again: dict[str, Any]) -> None:
    made = pipeline()
    times = [T0 + ms * MS for ms in range(10, 200, 10)]
    part = timing(
        arrival_ns=T0,
        observed_at_ns=times[-1],
        first_token_ns=times[0],
        chunk_base_ns=times[0],
        chunk_deltas_us=deltas_us(times),
    )
    made.add(TELEMETRY_REQUESTS, pack(samples=[part], watermark_ns=T0 + 500 * MS), T0)
    made.advance(T0 + 500 * MS)
    after = T0 + 4_000 * MS
    made.add(TELEMETRY_REQUESTS, pack(watermark_ns=after, **again), after)
    made.advance(after)
    assert seen(made)[0].chunks == len(times)
    assert seen(made)[0].open_requests.decoding == 1
    assert seen(made)[-1].open_requests.decoding == 0
    assert sum(observation.requests_failed for observation in seen(made)) == 0
    assert made.counters()["orphaned_requests"] == 1


def test_a_clock_set_back_begins_anew_and_keeps_what_was_learned() -> None:
    made = pipeline()
    run(made, packs_of_all(some_streams()))
    learned = made.snapshot().state
    hour = 3_600_000 * MS
    back = [
        replace(one, sequence=100 + one.sequence, watermark_ns=one.watermark_ns - hour, samples=())
        for one in packs_of([], until_ms=1_000)
    ]
    profiles = []
    for one in back:
        now_ns = one.watermark_ns + hour + 2_000 * MS
        made.add(TELEMETRY_REQUESTS, one, now_ns)
        profiles += made.advance(now_ns)
    assert [p.window_start_ns for p in profiles] == [T0 - hour + k * 250 * MS for k in range(4)]
    assert {p.requests_open for p in profiles} == {0}
    assert made.counters()["resets"] == 1
    assert made.snapshot().state == learned


def engine_sample(at_ms: int, **changes: Any) -> EngineSample:
    fields: dict[str, Any] = {
        "instance": INSTANCE,
        "source": "engine",
        "observed_at_ns": T0 + at_ms * MS,
        "model": "scraped",
        "freshness": "fresh",
        "scrape_ms": 4.0,
        "restarted": False,
    }
    return EngineSample(**(fields | changes))


def test_samples_fall_into_the_window_of_their_time() -> None:
    made = pipeline()
    scrapes = [engine_sample(100), engine_sample(300, freshness="failed"), engine_sample(300)]
    host = HostSample(
        instance=INSTANCE, source="host", observed_at_ns=T0 + 260 * MS, host="h", interval_ns=1
    )
    xpu = [
        XpuSample(
            instance=INSTANCE,
            source="xpu",
            observed_at_ns=T0 + 10 * MS,
            host="h",
            vendor="v",
            device=device,
        )
        for device in ("1", "0", "0")
    ]
    now_ns = T0 + 600 * MS
    for topic, samples in (
        (TELEMETRY_ENGINE, scrapes),
        (TELEMETRY_HOST, [host]),
        (TELEMETRY_XPU, xpu),
    ):
        made.add(topic, _pack(samples, now_ns), now_ns)
    made.advance(now_ns)
    first, second = seen(made)
    assert first.engine == (scrapes[0],)
    assert first.last_engine == scrapes[0]
    assert [sample.device for sample in first.xpu] == ["0", "1"]
    assert first.host == ()
    assert second.engine == (scrapes[1],)
    assert second.last_engine == scrapes[0]
    assert second.host == (host,)
    assert first.model == "scraped"


def _pack(samples: Sequence[Any], watermark_ns: int) -> Pack[Any]:
    return Pack(agent="tap", boot_ns=1, sequence=0, watermark_ns=watermark_ns, samples=samples)


def test_steps_of_the_engine_itself_replace_recovered_ones() -> None:
    made = pipeline()
    told = StepBatch(
        instance=INSTANCE,
        source="kernel",
        observed_at_ns=T0 + 48 * MS,
        start_ns=(T0 + 30 * MS, T0 + 39 * MS),
        duration_us=(9_000, 9_000),
        decode_sequences=(7, 7),
        joined=(0, 0),
        left=(0, 0),
        prefill_tokens=(0, 0),
        context_tokens=(-1, 90),
    )
    streams = some_streams()
    made.add(TELEMETRY_STEPS, _pack([told], T0 + 1_600 * MS), T0)
    run(made, packs_of_all(streams))
    assert seen(made)[0].steps.decode_sequences.tolist() == [7, 7]
    assert len(seen(made)[1].steps.end_ns) > 5


def test_a_limit_leaves_the_rest_for_the_next_call() -> None:
    made = pipeline()
    now_ns = T0 + 2_000 * MS
    made.add(TELEMETRY_REQUESTS, pack(sequence=0, watermark_ns=T0), T0)
    made.add(TELEMETRY_REQUESTS, pack(sequence=1, watermark_ns=now_ns), now_ns)
    assert [len(made.advance(now_ns, limit=3)) for _ in range(4)] == [3, 3, 2, 0]


def test_too_much_waiting_lets_the_slowest_source_go() -> None:
    made = pipeline(buffered_chunks=100)
    made.add(TELEMETRY_ENGINE, _pack([], T0), T0)
    many = timing(
        observed_at_ns=T0 + 90 * MS,
        chunk_base_ns=T0 + 10 * MS,
        chunk_deltas_us=(1_000,) * 79,
    )
    made.add(TELEMETRY_REQUESTS, pack(watermark_ns=T0 + 300 * MS, samples=[many]), T0)
    assert [p.chunks for p in made.advance(T0 + 300 * MS)] == [80]


def test_what_was_learned_moves_with_a_snapshot() -> None:
    one, other = pipeline(), pipeline()
    run(one, packs_of_all(some_streams()))
    assert isinstance(one.judge, KeepingJudge)
    assert isinstance(other.judge, KeepingJudge)
    one.judge.learned = b"much"
    snapshot = one.snapshot()
    assert (snapshot.instance, snapshot.model, snapshot.taken_ns) == (
        INSTANCE,
        "small",
        T0 + 1_500 * MS,
    )
    assert other.restore(snapshot)
    assert other.judge.learned == b"much"
    assert other.snapshot().state == snapshot.state


@pytest.mark.parametrize(
    "changes",
    [
        {"instance": "10.0.0.1:1"},
        {"format": 99},
        {"state": b""},
        {"state": b"\x00\x00\x00\x05{}   rest"},
        {"state": b"\x00\x00\x00\x40" + b"not json"},
    ],
)
def test_a_snapshot_that_cannot_be_read_starts_cold(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    made = pipeline()
    before = made.snapshot()
    assert not made.restore(replace(before, **changes))
    assert made.snapshot() == before
    assert "learning begins anew" in caplog.text


def test_a_judge_that_refuses_its_state_starts_cold() -> None:
    made, other = pipeline(), pipeline()
    run(made, packs_of_all(some_streams()))
    assert isinstance(made.judge, KeepingJudge)
    made.judge.learned = b"damaged"
    before: ModelSnapshot = other.snapshot()
    assert not other.restore(made.snapshot())
    assert other.snapshot() == before


def test_an_instance_that_is_gone_can_be_dropped() -> None:
    made = pipeline(forget_after_s=5)
    made.add(TELEMETRY_REQUESTS, pack(watermark_ns=T0), T0)
    assert not made.forgettable(T0 + 5_000 * MS)
    assert made.forgettable(T0 + 5_001 * MS)


anything = st.one_of(st.none(), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 900))


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "part": st.integers(-3, 9),
                "state": st.sampled_from(["open", "complete", "aborted"]),
                "observed_at_ns": st.integers(0, 900).map(lambda ms: T0 + ms * MS),
                "arrival_ns": st.integers(-(1 << 63), (1 << 63) - 1)
                | st.integers(0, 900).map(lambda ms: T0 + ms * MS),
                "request_end_ns": anything,
                "first_byte_ns": anything,
                "first_token_ns": anything,
                "end_ns": anything,
                "chunk_base_ns": anything,
                "chunk_deltas_us": st.lists(st.integers(-(1 << 31), 1 << 31), max_size=3).map(
                    tuple
                ),
                "chunks_before": st.integers(-5, 50),
                "prompt_tokens": anything,
                "cached_tokens": anything,
                "request_bytes": anything,
                "status": st.one_of(st.none(), st.integers(-1, 999)),
            }
        ),
        max_size=12,
    )
)
def test_no_part_makes_it_fail(parts: list[dict[str, Any]]) -> None:
    made = pipeline(buffered_chunks=64, open_requests=4)
    samples = [timing(f"r{k % 5}", **fields) for k, fields in enumerate(parts)]
    profiles = run(
        made,
        [
            pack(sequence=0, watermark_ns=T0),
            pack(sequence=1, watermark_ns=T0 + 500 * MS, samples=samples[::2]),
            pack(sequence=2, watermark_ns=T0 + 1_000 * MS, samples=samples[1::2]),
        ],
    )
    assert len(profiles) == 4
    assert all(p.e2e_ms is None or p.e2e_ms >= 0 for p in profiles)


def test_what_gateways_and_engines_say_of_the_same_requests_changes_no_window() -> None:
    parts = [part for stream in some_streams() for part in parts_of(stream)]
    until_ms = 2_000
    alone = run(pipeline(), packs_of(parts, until_ms=until_ms))
    others = [
        replace(part, request_id=f"{source} {part.request_id}", part=0, source=source)
        for part in parts
        for source in ("gateway", "otlp")
        if part.state == "complete"
    ]
    made = pipeline()
    together = run(made, packs_of(parts + others, until_ms=until_ms))

    assert sum(profile.requests_finished for profile in alone) > 0
    assert together == alone
    assert made.counters()["secondary_parts"] == len(others)
