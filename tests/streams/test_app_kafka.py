"""The application on a real Kafka: whole, poisoned, killed, shared."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from kafka_io import KafkaIO
from worker_process import WorkerProcess

from latencyprism.local.broker import UnavailableError
from latencyprism.local.kafka import EmbeddedKafka
from latencyprism.recordings.cut import cut
from latencyprism.recordings.format import Recording, RecordingWriter
from latencyprism.recordings.replay import replay, replay_in_process
from latencyprism.schemas.codec import Codec, DecodeError, Pack
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import Ack, BatchProfile, HostSample
from latencyprism.schemas.topics import (
    ALERTS,
    CONTROL_ACKS,
    DEADLETTER,
    LATENCY_BATCHES,
    MODELS,
    TELEMETRY,
    TELEMETRY_ENGINE,
    TELEMETRY_HOST,
    Topic,
)
from latencyprism.streams.app import LARGE_BYTES
from latencyprism.topics_admin import ensure_topics

pytestmark = pytest.mark.kafka

SHORT = Path(__file__).parents[1] / "data" / "vllm-short"
S = 1_000_000_000
WINDOW_NS = 250_000_000


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def beginning(folder: Path, seconds: int) -> Recording:
    source = Recording(SHORT)
    start_ns = source.meta.start_ns
    cut(source, folder, start_ns=start_ns, end_ns=start_ns + seconds * S)
    return Recording(folder)


def multiplied(source: Recording, folder: Path, instances: list[str]) -> Recording:
    """The recording as if each instance had done the same."""
    with RecordingWriter(folder, engine=source.meta.engine, source="test") as writer:
        for topic, record in source.merged():
            for instance in instances:
                writer.write(topic, replace(record, instance=instance))
    return Recording(folder)


def profiles(kafka_io: KafkaIO) -> list[tuple[str, BatchProfile]]:
    """(agent, profile) of all that is on latency.batches now, poison left out."""
    packs = []
    for message in kafka_io.read_until(LATENCY_BATCHES, lambda _: False, timeout_s=2):
        with suppress(DecodeError):
            packs.append(kafka_io.codec.decode(LATENCY_BATCHES, message.value() or b""))
    return [(pack.agent, profile) for pack in packs for profile in pack.samples]


def assert_each_window_once(found: list[BatchProfile], recording: Recording) -> None:
    first = recording.meta.start_ns // WINDOW_NS
    last = recording.meta.end_ns // WINDOW_NS
    by_instance: dict[str, list[int]] = {}
    for profile in found:
        number = profile.window_start_ns // WINDOW_NS
        by_instance.setdefault(profile.instance, []).append(number)
    for instance, numbers in by_instance.items():
        assert [n for n, k in Counter(numbers).items() if k > 1] == [], f"double: {instance}"
        missing = set(range(first, last + 1)) - set(numbers)
        assert missing == set(), f"lost: {instance}"
    ids = [profile.batch_id for profile in found]
    assert len(ids) == len(set(ids))
    expected = {name for names in recording.meta.streams.values() for name in names}
    assert set(by_instance) == expected


def without_figures(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != "figures"}


def test_a_replay_through_kafka_gives_what_the_pure_chain_gives(
    kafka: KafkaConfig, kafka_io: KafkaIO, tmp_path: Path
) -> None:
    with WorkerProcess(kafka, tmp_path / "w") as worker:
        worker.wait()
        report = replay(Recording(SHORT), kafka)
        assert worker.stop() == 0, worker.log
    assert without_figures(report) == without_figures(replay_in_process(Recording(SHORT)))
    assert [alert["verdict"] for alert in report["alerts"]] == ["fault"]
    assert kafka_io.read(ALERTS, 1)[0].state == "firing"
    (snapshot,) = kafka_io.read(MODELS, 1)
    assert snapshot.version.startswith("mixture-")
    assert "Traceback" not in worker.log


def poison(kafka_io: KafkaIO, topic: Topic) -> list[tuple[str, bytes]]:
    """Messages of a topic that are none: random bytes, another record, a message cut short."""
    other = TELEMETRY_ENGINE if topic is not TELEMETRY_ENGINE else LATENCY_BATCHES
    empty: Pack[Any] = Pack(agent="a", boot_ns=1, sequence=0, watermark_ns=1, samples=())
    good = (
        kafka_io.codec.encode(topic, empty)
        if topic.packed
        else kafka_io.codec.encode(
            topic,
            Ack(
                ack_id="a",
                command_id="c",
                target="t:1",
                epoch=1,
                router="r",
                effect="applied",
                dry_run=False,
                at_ns=1,
            ),
        )
    )
    return [
        ("t:1", bytes(range(7, 99))),
        ("t:1", kafka_io.codec.encode(other, empty)),
        ("t:1", good[:-2]),
    ]


def test_poison_on_every_topic_costs_one_dead_letter_each_and_nothing_stops(
    kafka: KafkaConfig, kafka_io: KafkaIO, tmp_path: Path
) -> None:
    topics = (*TELEMETRY, LATENCY_BATCHES, CONTROL_ACKS)
    recording = beginning(tmp_path / "r", 6)
    with WorkerProcess(kafka, tmp_path / "w") as worker:
        worker.wait()
        kafka_io.read_until(CONTROL_ACKS, lambda _: False, timeout_s=1)
        for topic in topics:
            kafka_io.send_bytes(topic, poison(kafka_io, topic))
        misplaced: Pack[Any] = Pack(
            agent="a",
            boot_ns=1,
            sequence=0,
            watermark_ns=1,
            samples=tuple(recording.records(TELEMETRY_ENGINE)) * 40,
        )
        assert len(kafka_io.codec.encode(TELEMETRY_ENGINE, misplaced)) > LARGE_BYTES
        kafka_io.send(TELEMETRY_ENGINE, misplaced, key="another:1")
        named: Pack[Any] = replace(misplaced, samples=misplaced.samples[:1])
        value = kafka_io.codec.encode(TELEMETRY_ENGINE, named)
        kafka_io.send_bytes(TELEMETRY_ENGINE, [("x" * 900_000, value)])
        letters = kafka_io.read(DEADLETTER, 3 * len(topics) + 2)
        replay(recording, kafka)
        assert worker.stop() == 0, worker.log
    reasons = Counter((letter.topic, letter.reason) for letter in letters)
    for topic in topics:
        name = kafka.topic(topic)
        assert reasons[name, "bad_magic"] == 1
        assert reasons[name, "wrong_record"] == 1
        assert reasons[name, "malformed"] == 1
    assert reasons[kafka.topic(TELEMETRY_ENGINE), "invalid_value"] == 2
    assert {letter.component for letter in letters} == {"streams"}
    sent = {value for topic in topics for _, value in poison(kafka_io, topic)}
    assert sent <= {letter.payload for letter in letters}
    assert_each_window_once([profile for _, profile in profiles(kafka_io)], recording)


def fits(kafka_io: KafkaIO, snapshots: Sequence[Any]) -> int:
    """Fits that the newest of these snapshots had seen."""
    if not snapshots:
        return 0
    newest = kafka_io.codec.decode(MODELS, snapshots[-1].value() or b"")
    return int(newest.version.removeprefix("mixture-"))


def test_a_killed_worker_is_followed_by_one_that_goes_on(
    kafka: KafkaConfig, kafka_io: KafkaIO, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    recording = beginning(tmp_path / "r", 25)
    with WorkerProcess(kafka, tmp_path / "w1", save_every_s=0.2) as first:
        running = pool.submit(replay, recording, kafka, speed=3.0)
        first.wait()
        kafka_io.read(LATENCY_BATCHES, 50, timeout_s=60)
        saved = kafka_io.read_until(MODELS, lambda got: fits(kafka_io, got) > 0, timeout_s=60)
        assert not running.done()
        first.kill()
    with WorkerProcess(kafka, tmp_path / "w2") as second:
        report = running.result(150)
        assert second.stop() == 0, second.log
    found = sorted(profiles(kafka_io), key=lambda pair: pair[1].window_start_ns)
    assert_each_window_once([profile for _, profile in found], recording)
    assert sum(report["batches"].values()) == len(found)
    by_agent: dict[str, list[BatchProfile]] = {}
    for agent, profile in found:
        by_agent.setdefault(agent, []).append(profile)
    _killed, heir = by_agent.values()
    assert {profile.service for profile in heir} == {"small"}
    assert int(heir[0].model_version.removeprefix("mixture-")) >= fits(kafka_io, saved) > 0
    assert not heir[0].reason.startswith("learning")


@pytest.mark.slow
def test_two_workers_share_the_partitions_and_one_can_leave(
    kafka: KafkaConfig, kafka_io: KafkaIO, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    instances = [f"10.0.0.{n}:8000" for n in range(4)]
    recording = multiplied(beginning(tmp_path / "b", 16), tmp_path / "r", instances)
    with (
        WorkerProcess(kafka, tmp_path / "w1") as first,
        WorkerProcess(kafka, tmp_path / "w2") as second,
    ):
        first.wait()
        second.wait()
        running = pool.submit(replay, recording, kafka, speed=2.0)
        kafka_io.read(LATENCY_BATCHES, 60, timeout_s=60)
        assert len({agent for agent, _ in profiles(kafka_io)}) == 2, "both publish"
        assert not running.done()
        assert second.stop() == 0, second.log
        running.result(150)
        assert first.stop() == 0, first.log
    assert_each_window_once([profile for _, profile in profiles(kafka_io)], recording)


@pytest.mark.slow
def test_a_broker_that_is_away_for_a_while_costs_no_window(tmp_path: Path) -> None:
    try:
        broker = EmbeddedKafka(directory=tmp_path / "kafka").start()
    except UnavailableError as e:
        pytest.skip(str(e))
    try:
        kafka = KafkaConfig(bootstrap=broker.bootstrap, prefix="away", partitions=2)
        ensure_topics(kafka, timeout_s=30)
        stop = threading.Event()
        live = threading.Thread(target=report_host, args=(kafka, stop))
        with WorkerProcess(kafka, tmp_path / "w", event=False) as worker:
            worker.wait()
            live.start()
            kafka_io = KafkaIO(kafka)
            kafka_io.read(LATENCY_BATCHES, 8)
            broker.stop()
            time.sleep(8)
            broker.start()
            back_ns = time.time_ns()
            found = kafka_io.read_until(
                LATENCY_BATCHES, lambda got: newest_window_ns(kafka_io, got) > back_ns, timeout_s=60
            )
            stop.set()
            live.join()
            assert worker.stop() == 0, worker.log
        packs = [kafka_io.codec.decode(LATENCY_BATCHES, m.value() or b"") for m in found]
        starts = sorted(p.window_start_ns for pack in packs for p in pack.samples)
        assert starts == list(range(starts[0], starts[-1] + 1, WINDOW_NS))
        assert newest_window_ns(kafka_io, found) > back_ns
    finally:
        broker.stop()


def newest_window_ns(kafka_io: KafkaIO, messages: Sequence[Any]) -> int:
    packs = [kafka_io.codec.decode(LATENCY_BATCHES, m.value() or b"") for m in messages[-3:]]
    return max((p.window_end_ns for pack in packs for p in pack.samples), default=0)


def report_host(kafka: KafkaConfig, stop: threading.Event) -> None:
    """What a host collector sends, ten times a second, until told to stop."""
    quiet = logging.getLogger("librdkafka.test")
    quiet.setLevel(logging.CRITICAL)
    producer = Producer(kafka.librdkafka(partitioner="murmur2_random", linger_ms=5), logger=quiet)
    codec = Codec()
    boot_ns = time.time_ns()
    for sequence in count():
        now_ns = time.time_ns()
        sample = HostSample(
            instance="a:1",
            source="host",
            observed_at_ns=now_ns,
            host="h",
            interval_ns=100_000_000,
        )
        pack = Pack(
            agent="a", boot_ns=boot_ns, sequence=sequence, watermark_ns=now_ns, samples=(sample,)
        )
        producer.produce(
            kafka.topic(TELEMETRY_HOST), codec.encode(TELEMETRY_HOST, pack), key=b"a:1"
        )
        producer.poll(0)
        if stop.wait(0.1):
            break
    assert producer.flush(30) == 0
