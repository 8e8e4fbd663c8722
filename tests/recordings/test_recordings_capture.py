"""Capturing: records of several agents are put in order of time, within bounds."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kafka_io import KafkaIO

from latencyprism.recordings import capture
from latencyprism.recordings.capture import HOLD_NS, Sorter, record
from latencyprism.recordings.cut import cut
from latencyprism.recordings.feed import feed
from latencyprism.recordings.format import Recording
from latencyprism.recordings.replay import replay_in_process
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import EngineSample
from latencyprism.schemas.topics import TELEMETRY_ENGINE, TELEMETRY_HOST

S = 1_000_000_000
SHORT = Path(__file__).parents[1] / "data" / "vllm-short"


def sample(at_ns: int) -> EngineSample:
    return EngineSample(
        instance="10.0.0.1:8000",
        source="engine",
        observed_at_ns=at_ns,
        freshness="fresh",
        scrape_ms=1.0,
        restarted=False,
    )


def sort(times: list[int]) -> list[int]:
    sorter = Sorter()
    out = [r for at in times for r in sorter.add(TELEMETRY_ENGINE, sample(at))]
    return [record.observed_at_ns for _, record in [*out, *sorter.rest()]]


def test_records_late_by_less_than_the_hold_are_put_in_order() -> None:
    chance = random.Random(3)
    late = [(at * S // 10, chance.uniform(0, 0.99 * HOLD_NS)) for at in range(500)]
    arriving = [at for at, lateness in sorted(late, key=lambda pair: pair[0] + pair[1])]
    assert arriving != sorted(arriving)
    assert sort(arriving) == sorted(arriving)


def test_a_record_is_let_go_once_nothing_earlier_can_come() -> None:
    sorter = Sorter()
    assert list(sorter.add(TELEMETRY_ENGINE, sample(0))) == []
    assert list(sorter.add(TELEMETRY_ENGINE, sample(HOLD_NS))) == []
    released = list(sorter.add(TELEMETRY_ENGINE, sample(HOLD_NS + 1)))
    assert [record.observed_at_ns for _, record in released] == [0]


def test_no_more_is_held_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "HELD_MAX", 10)
    sorter = Sorter()
    released = [r for at in range(100) for r in sorter.add(TELEMETRY_ENGINE, sample(at))]
    assert len(released) == 90


@pytest.mark.kafka
def test_a_running_system_is_recorded_and_can_be_replayed(
    kafka: KafkaConfig, kafka_io: KafkaIO, tmp_path: Path
) -> None:
    source = Recording(SHORT)
    start_ns = source.meta.start_ns
    cut(source, tmp_path / "cut", start_ns=start_ns, end_ns=start_ns + 5 * S)
    original = Recording(tmp_path / "cut")
    with ThreadPoolExecutor(1) as pool:
        recording = pool.submit(record, kafka, tmp_path / "out", duration_s=6.0)
        time.sleep(1.5)  # until the recorder listens: only what comes then is recorded
        for tick in feed(original):
            for parcel in tick:
                kafka_io.send(parcel.topic, parcel.pack, key=parcel.instance)
        counts = recording.result(30)
    captured = Recording(tmp_path / "out")
    assert list(captured.merged()) == list(original.merged())
    assert counts["telemetry.host"] == len(list(original.records(TELEMETRY_HOST)))
    assert captured.meta.engine == "vllm"
    report, expected = replay_in_process(captured), replay_in_process(original)
    assert report["batches"] == expected["batches"]
