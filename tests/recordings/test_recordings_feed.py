"""The feed: every record once, in time order, with watermarks that hold, warm parts before."""

from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latencyprism.recordings.feed import (
    FLUSH_NS,
    MOMENTS,
    TICK_NS,
    WARM_GAP_NS,
    Parcel,
    feed,
    plan,
    shift,
)
from latencyprism.recordings.format import Recording, RecordingWriter
from latencyprism.schemas.records import EngineSample, HostSample, RequestTiming, StepBatch
from latencyprism.schemas.topics import (
    TELEMETRY,
    TELEMETRY_ENGINE,
    TELEMETRY_HOST,
    TELEMETRY_REQUESTS,
    Topic,
)

START_NS = 1_796_000_000_000_000_000
A, B = "10.0.0.1:8000", "10.0.0.2:8000"
LENGTHS = {
    "interval_ns",
    "cpu_ns",
    "runqueue_ns",
    "throttled_ns",
    "clock_step_ns",
}
"""Fields of telemetry records that are lengths of time, and no moments."""


def engine(at_ns: int, instance: str = A) -> EngineSample:
    return EngineSample(
        instance=instance,
        source="engine",
        observed_at_ns=at_ns,
        freshness="fresh",
        scrape_ms=1.0,
        restarted=False,
    )


def host(at_ns: int, instance: str = A) -> HostSample:
    return HostSample(
        instance=instance, source="host", observed_at_ns=at_ns, host="h", interval_ns=1
    )


def record(folder: Path, samples: list[tuple[Topic, Any]]) -> Recording:
    with RecordingWriter(folder, engine="vllm", source="test") as writer:
        for topic, sample in sorted(samples, key=lambda pair: pair[1].observed_at_ns):
            writer.write(topic, sample)
    return Recording(folder)


def seconds(folder: Path, start_ns: int, count: int) -> Recording:
    return record(
        folder,
        [(TELEMETRY_ENGINE, engine(start_ns + i * 1_000_000_000)) for i in range(count)]
        + [(TELEMETRY_HOST, host(start_ns + i * 1_000_000_000 + 5)) for i in range(count)],
    )


def samples(parcels: list[tuple[Parcel, ...]]) -> list[Any]:
    return [sample for tick in parcels for parcel in tick for sample in parcel.pack.samples]


moments = st.lists(
    st.tuples(
        st.integers(0, 3_000_000_000), st.sampled_from([A, B]), st.sampled_from([engine, host])
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(moments)
def test_every_record_comes_once_and_watermarks_hold(
    tmp_path_factory: pytest.TempPathFactory, told: list[tuple[int, str, Any]]
) -> None:
    topics = {engine: TELEMETRY_ENGINE, host: TELEMETRY_HOST}
    written = [(topics[make], make(START_NS + at, instance)) for at, instance, make in told]
    parcels = list(feed(record(tmp_path_factory.mktemp("feed"), written)))
    assert Counter(samples(parcels)) == Counter(sample for _, sample in written)
    for tick in parcels:
        assert len({parcel.pack.watermark_ns for parcel in tick}) == 1
        for parcel in tick:
            assert all(s.instance == parcel.instance for s in parcel.pack.samples)
    streams: dict[tuple[str, str], list[Parcel]] = {}
    for parcel in (parcel for tick in parcels for parcel in tick):
        streams.setdefault((parcel.topic.name, parcel.instance), []).append(parcel)
    for sent in streams.values():
        assert [p.pack.sequence for p in sent] == list(range(len(sent)))
        assert {p.pack.boot_ns for p in sent} == {sent[0].pack.boot_ns}
        for before, after in pairwise(sent):
            assert after.pack.watermark_ns - before.pack.watermark_ns == TICK_NS
            for sample in after.pack.samples:
                assert before.pack.watermark_ns <= sample.observed_at_ns < after.pack.watermark_ns


def test_the_first_tick_makes_all_known_and_the_last_flushes(tmp_path: Path) -> None:
    recording = seconds(tmp_path / "r", START_NS, 3)
    parcels = list(feed(recording))
    assert {(p.topic, p.instance) for p in parcels[0]} == {
        (TELEMETRY_ENGINE, A),
        (TELEMETRY_HOST, A),
    }
    assert samples(parcels[:1]) == []
    assert parcels[0][0].pack.watermark_ns == recording.meta.start_ns
    assert parcels[-1][0].pack.watermark_ns >= recording.meta.end_ns + FLUSH_NS


def test_two_feeds_of_a_recording_are_equal(tmp_path: Path) -> None:
    recording = seconds(tmp_path / "r", START_NS, 5)
    assert list(feed(recording)) == list(feed(recording))


def test_warm_recordings_come_first_in_order_and_the_target_keeps_its_times(
    tmp_path: Path,
) -> None:
    target = seconds(tmp_path / "target", START_NS, 3)
    later = seconds(tmp_path / "later", START_NS + 10**13, 4)
    earlier = seconds(tmp_path / "earlier", START_NS - 10**15, 5)
    parcels = list(feed(target, warm=[earlier, later]))
    spans = [(start, end) for _, start, end in plan(target, [earlier, later])]
    assert spans[-1] == (target.meta.start_ns, target.meta.end_ns)
    assert [start - end for (_, end), (start, _) in pairwise(spans)] == [WARM_GAP_NS] * 2
    counted = [
        sum(start <= s.observed_at_ns <= end for s in samples(parcels)) for start, end in spans
    ]
    assert counted == [2 * 5, 2 * 4, 2 * 3]
    assert samples(parcels)[-6:] == [sample for _, sample in target.merged()]
    marks = [tick[0].pack.watermark_ns for tick in parcels]
    assert marks == sorted(marks)


def test_moments_are_shifted_and_lengths_are_not() -> None:
    steps = StepBatch(
        instance=A, source="log", observed_at_ns=30, start_ns=(10, 20), duration_us=(5, 5)
    )
    assert shift(steps, 100) == replace(steps, observed_at_ns=130, start_ns=(110, 120))
    timing = RequestTiming(
        request_id="r",
        part=0,
        state="open",
        instance=A,
        source="network",
        observed_at_ns=7,
        endpoint="/",
        arrival_ns=5,
        chunks_before=0,
        chunk_base_ns=6,
        chunk_deltas_us=(1,),
    )
    moved = shift(timing, 100)
    assert (moved.observed_at_ns, moved.arrival_ns, moved.chunk_base_ns) == (107, 105, 106)
    assert moved.first_token_ns is None
    assert moved.chunk_deltas_us == (1,)
    assert moved.request_id != timing.request_id
    assert shift(host(50), 100) == host(150)


def test_every_time_of_every_record_is_known_as_a_moment_or_a_length() -> None:
    assert set(MOMENTS) == {topic.record for topic in TELEMETRY}
    for record_type, named in MOMENTS.items():
        times = {field.name for field in fields(record_type) if field.name.endswith("_ns")}
        assert times - LENGTHS == set(named)


def test_requests_open_at_the_end_of_a_warm_recording_break_off_there(tmp_path: Path) -> None:
    def part(number: int, state: Any, at_ns: int) -> RequestTiming:
        return RequestTiming(
            request_id="r",
            part=number,
            state=state,
            instance=A,
            source="network",
            observed_at_ns=at_ns,
            endpoint="/",
            arrival_ns=START_NS,
            chunks_before=2 * number,
            chunk_base_ns=at_ns - 1000,
            chunk_deltas_us=(1,),
        )

    told = [(TELEMETRY_REQUESTS, part(i, "open", START_NS + i * TICK_NS)) for i in range(3)]
    recording = record(tmp_path / "open", told)
    assert [s.state for s in samples(list(feed(recording)))] == ["open"] * 3
    fed = samples(list(feed(seconds(tmp_path / "target", START_NS, 1), warm=[recording])))
    broken = [s for s in fed if isinstance(s, RequestTiming)]
    assert [s.state for s in broken] == ["open"] * 3 + ["aborted"]
    assert (broken[-1].part, broken[-1].chunks_before) == (3, 6)
    assert broken[-1].end_ns == broken[-1].observed_at_ns == broken[-2].observed_at_ns
    assert broken[-1].chunk_base_ns is None
