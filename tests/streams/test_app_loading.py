"""What a worker finds when it takes over partitions, on a real Kafka."""

from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from kafka_io import KafkaIO

from latencyprism.schemas.codec import Pack
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import BatchProfile, ModelSnapshot
from latencyprism.schemas.topics import LATENCY_BATCHES, MODELS
from latencyprism.streams import loading
from latencyprism.streams.loading import inherit

pytestmark = pytest.mark.kafka

GROUP = "g"
PROFILE = BatchProfile(
    batch_id="b",
    instance="a:1",
    service="s",
    window_start_ns=0,
    window_end_ns=250,
    closed_at_ns=300,
    requests_started=0,
    requests_finished=0,
    requests_failed=0,
    requests_open=0,
    chunks=0,
    steps=0,
    late_samples=0,
    verdict="normal",
    reason="as expected",
    model_version="m",
)


def pack(*ends_ns: int, instance: str = "a:1") -> Pack[Any]:
    samples = tuple(replace(PROFILE, instance=instance, window_end_ns=end) for end in ends_ns)
    return Pack(agent="w", boot_ns=1, sequence=0, watermark_ns=0, samples=samples)


def snapshot(instance: str, version: str) -> ModelSnapshot:
    return ModelSnapshot(instance=instance, version=version, taken_ns=1, format=1, state=b"x")


def place(kafka: KafkaConfig, kafka_io: KafkaIO) -> TopicPartition:
    """Where the profiles of service s are."""
    (message,) = kafka_io.read_messages(LATENCY_BATCHES, 1)[:1]
    return TopicPartition(kafka.topic(LATENCY_BATCHES), message.partition() or 0)


def test_an_empty_cluster_leaves_nothing(kafka: KafkaConfig) -> None:
    left = inherit(kafka, group=GROUP, partitions=[0, 1])
    assert (left.snapshots, left.published, left.history) == ((), {}, ())


def test_the_newest_snapshot_of_each_instance_is_found(
    kafka: KafkaConfig, kafka_io: KafkaIO
) -> None:
    for version in ("1", "2", "3"):
        for instance in ("a:1", "b:1", "c:1", "d:1"):
            kafka_io.send(MODELS, snapshot(instance, version), key=instance)
    by_partition = [inherit(kafka, group=GROUP, partitions=[p]).snapshots for p in (0, 1)]
    assert all(by_partition), "the keys are spread"
    both = sorted((s.instance, s.version) for one in by_partition for s in one)
    assert both == [(instance, "3") for instance in ("a:1", "b:1", "c:1", "d:1")]


def test_what_is_published_is_found_and_what_was_decided_is_told_apart(
    kafka: KafkaConfig, kafka_io: KafkaIO
) -> None:
    kafka_io.send(LATENCY_BATCHES, pack(250, 500), key="s")
    kafka_io.send(LATENCY_BATCHES, pack(250, instance="b:1"), key="s")
    kafka_io.send(LATENCY_BATCHES, pack(750), key="s")
    where = place(kafka, kafka_io)
    member = Consumer(kafka.librdkafka(group_id=GROUP, enable_auto_commit=False))
    member.commit(offsets=[TopicPartition(where.topic, where.partition, 2)], asynchronous=False)
    member.close()
    left = inherit(kafka, group=GROUP, partitions=[where.partition])
    assert left.published == {"a:1": 750, "b:1": 250}
    assert [(p, f.instance, f.window_end_ns) for p, f in left.history] == [
        (where.partition, "a:1", 250),
        (where.partition, "a:1", 500),
        (where.partition, "b:1", 250),
    ]
    other = inherit(kafka, group=GROUP, partitions=[1 - where.partition])
    assert other.history == ()
    assert other.published == left.published, "windows of any partition may be published"


def test_what_cannot_be_decoded_is_passed_over(
    kafka: KafkaConfig, kafka_io: KafkaIO, caplog: pytest.LogCaptureFixture
) -> None:
    kafka_io.send_bytes(MODELS, [("a:1", b"junk")])
    kafka_io.send(MODELS, snapshot("a:1", "1"), key="a:1")
    left = inherit(kafka, group=GROUP, partitions=[0, 1])
    assert [s.version for s in left.snapshots] == ["1"]
    assert "passed over" in caplog.text


def test_only_the_tail_is_read_again(
    kafka: KafkaConfig, kafka_io: KafkaIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "TAIL_MESSAGES", 2)
    kafka_io.send(LATENCY_BATCHES, pack(250, instance="old:1"), key="s")
    for end_ns in (250, 500):
        kafka_io.send(LATENCY_BATCHES, pack(end_ns), key="s")
    assert inherit(kafka, group=GROUP, partitions=[0, 1]).published == {"a:1": 500}
