import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from mock_kafka import MESSAGE_TOO_LARGE, MockCluster, mock_cluster

from latencyprism.collectors.config import PublishConfig
from latencyprism.collectors.publisher import KafkaPublisher, MemoryPublisher
from latencyprism.schemas.codec import Codec, Pack
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import EngineSample, HostSample
from latencyprism.schemas.topics import TELEMETRY_ENGINE, TELEMETRY_HOST

INSTANCE = "127.0.0.1:8000"


def host_sample(at_ns: int, instance: str = INSTANCE) -> HostSample:
    return HostSample(
        instance=instance, source="host", observed_at_ns=at_ns, host="h", interval_ns=100
    )


def wait_for(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.02)


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    with mock_cluster() as running:
        running.create_topic("prism.telemetry.host", 6)
        running.create_topic("prism.telemetry.engine", 6)
        yield running


def kafka_publisher(bootstrap: str, registry: Any = None, **settings: Any) -> KafkaPublisher:
    return KafkaPublisher(
        agent="agent",
        boot_ns=1,
        config=PublishConfig(linger_ms=10, **settings),
        kafka=KafkaConfig(bootstrap=bootstrap),
        registry=registry,
    )


def read_all(bootstrap: str, topic: str, partitions: int = 6) -> list[tuple[bytes, int, bytes]]:
    """Key, partition and value of everything on a topic, in the order of the log."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "test"})
    ends = {}
    for partition in range(partitions):
        _, ends[partition] = consumer.get_watermark_offsets(TopicPartition(topic, partition))
    consumer.assign([TopicPartition(topic, p, 0) for p in ends])
    messages: list[Any] = []
    deadline = time.monotonic() + 15
    while len(messages) < sum(ends.values()) and time.monotonic() < deadline:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            messages.append((message.key(), message.partition(), message.value()))
    consumer.close()
    assert len(messages) == sum(ends.values())
    return messages


def packs_on(bootstrap: str) -> list[Pack[HostSample]]:
    codec = Codec()
    return [
        codec.decode(TELEMETRY_HOST, value)
        for _, _, value in read_all(bootstrap, "prism.telemetry.host")
    ]


def test_memory_publisher_packs_on_flush() -> None:
    publisher = MemoryPublisher(agent="a", boot_ns=3)
    publisher.start()
    publisher.sample(TELEMETRY_HOST, host_sample(10))
    publisher.watermark(TELEMETRY_HOST, INSTANCE, 11)

    (packed,) = publisher.flush()

    assert packed.pack == Pack(
        agent="a", boot_ns=3, sequence=0, watermark_ns=11, samples=(host_sample(10),)
    )
    assert publisher.stats().samples == 1
    publisher.sample(TELEMETRY_HOST, host_sample(12))
    publisher.close(0)
    assert [p.pack.sequence for p in publisher.packs] == [0, 1]


def test_a_record_of_another_topic_is_refused_and_counted() -> None:
    publisher = MemoryPublisher()
    publisher.sample(TELEMETRY_ENGINE, host_sample(1))
    publisher.sample(TELEMETRY_ENGINE, None)

    assert publisher.flush() == []
    assert publisher.stats().dropped == {("telemetry.engine", "wrong record"): 2}


def test_offering_from_many_threads_loses_nothing() -> None:
    publisher = MemoryPublisher()

    def offer(instance: str) -> None:
        for at_ns in range(500):
            publisher.sample(TELEMETRY_HOST, host_sample(at_ns, instance))

    threads = [threading.Thread(target=offer, args=(f"h:{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    publisher.flush()

    for i in range(4):
        samples = [s for p in publisher.packs if p.key == f"h:{i}" for s in p.pack.samples]
        assert [s.observed_at_ns for s in samples] == list(range(500))


def test_publishes_packs_in_order_with_the_partition_of_the_java_hash(cluster: MockCluster) -> None:
    publisher = kafka_publisher(cluster.bootstrap)
    publisher.start()
    for at_ns in range(5):
        publisher.sample(TELEMETRY_HOST, host_sample(at_ns))
        publisher.watermark(TELEMETRY_HOST, INSTANCE, at_ns)
        time.sleep(0.02)
    publisher.close(5)

    messages = read_all(cluster.bootstrap, "prism.telemetry.host")
    packs = packs_on(cluster.bootstrap)

    assert [s.observed_at_ns for p in packs for s in p.samples] == list(range(5))
    assert [p.sequence for p in packs] == list(range(len(packs)))
    assert packs[-1].watermark_ns == 4
    assert {(key, partition) for key, partition, _ in messages} == {(INSTANCE.encode(), murmur(6))}
    stats = publisher.stats()
    assert (stats.packs, stats.dropped, stats.in_flight) == (len(packs), {}, 0)
    assert stats.bytes == sum(len(value) for _, _, value in messages)


def murmur(partitions: int) -> int:
    """Partition of INSTANCE by the hash of the Java client (Apache Kafka's Utils.murmur2)."""
    data, mask, m = INSTANCE.encode(), 0xFFFFFFFF, 0x5BD1E995
    h = 0x9747B28C ^ len(data)
    whole = len(data) // 4 * 4
    for start in range(0, whole, 4):
        k = int.from_bytes(data[start : start + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    if tail := data[whole:]:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return ((h ^ h >> 15) & 0x7FFFFFFF) % partitions


def test_many_samples_go_out_before_the_linger_ends(cluster: MockCluster) -> None:
    publisher = KafkaPublisher(
        agent="agent",
        boot_ns=1,
        config=PublishConfig(linger_ms=1000, pack_samples=10),
        kafka=KafkaConfig(bootstrap=cluster.bootstrap),
    )
    publisher.start()
    began = time.monotonic()
    for at_ns in range(10):
        publisher.sample(TELEMETRY_HOST, host_sample(at_ns))
    wait_for(lambda: publisher.stats().waiting == 0)
    took = time.monotonic() - began
    publisher.close(5)

    assert took < 0.8
    assert [len(p.samples) for p in packs_on(cluster.bootstrap)] == [10]


def test_broker_away_at_start_loses_nothing_within_the_bounds(cluster: MockCluster) -> None:
    cluster.down()
    publisher = kafka_publisher(cluster.bootstrap)
    publisher.start()
    publisher.sample(TELEMETRY_HOST, host_sample(1))
    wait_for(lambda: publisher.stats().broker_away)
    publisher.sample(TELEMETRY_HOST, host_sample(2))
    cluster.up()
    wait_for(lambda: publisher.stats().packs > 0)
    publisher.close(5)

    assert [s.observed_at_ns for p in packs_on(cluster.bootstrap) for s in p.samples] == [1, 2]
    stats = publisher.stats()
    assert stats.dropped == {}
    assert not stats.broker_away


def test_broker_away_mid_run_drops_the_oldest_and_counts_them(cluster: MockCluster) -> None:
    publisher = kafka_publisher(cluster.bootstrap, backlog_mb=0.02)
    publisher.start()
    publisher.sample(TELEMETRY_HOST, host_sample(0))
    wait_for(lambda: publisher.stats().packs == 1)
    cluster.down()
    offered = 1
    deadline = time.monotonic() + 20
    while not publisher.stats().dropped and time.monotonic() < deadline:
        for _ in range(20):
            publisher.sample(TELEMETRY_HOST, host_sample(offered))
            offered += 1
        time.sleep(0.012)
    cluster.up()
    wait_for(lambda: publisher.stats().backlog_bytes == 0 and publisher.stats().in_flight == 0)
    publisher.close(5)

    stats = publisher.stats()
    lost = stats.dropped["telemetry.host", "queue full"]
    arrived = {s.observed_at_ns for p in packs_on(cluster.bootstrap) for s in p.samples}
    assert set(stats.dropped) == {("telemetry.host", "queue full")}
    assert len(arrived) == offered - lost
    assert offered - 1 in arrived


def test_refused_message_is_counted_by_kind_and_the_rest_goes_on(cluster: MockCluster) -> None:
    publisher = kafka_publisher(cluster.bootstrap)
    cluster.refuse_produce(MESSAGE_TOO_LARGE)
    publisher.start()
    publisher.sample(TELEMETRY_HOST, host_sample(1))
    wait_for(lambda: bool(publisher.stats().errors))
    publisher.sample(TELEMETRY_HOST, host_sample(2))
    publisher.close(5)

    stats = publisher.stats()
    assert stats.errors == {"MSG_SIZE_TOO_LARGE": 1}
    assert stats.dropped == {("telemetry.host", "MSG_SIZE_TOO_LARGE"): 1}
    packs = packs_on(cluster.bootstrap)
    assert [s.observed_at_ns for p in packs for s in p.samples] == [2]
    assert [p.sequence for p in packs] == [1]


def test_sample_that_does_not_fit_its_schema_costs_only_itself(
    cluster: MockCluster, caplog: pytest.LogCaptureFixture
) -> None:
    broken = host_sample("yesterday")  # type: ignore[arg-type]
    publisher = kafka_publisher(cluster.bootstrap)
    publisher.sample(TELEMETRY_HOST, host_sample(1))
    publisher.sample(TELEMETRY_HOST, broken)
    publisher.sample(TELEMETRY_HOST, host_sample(3))
    with caplog.at_level(logging.ERROR):
        publisher.start()
        publisher.close(5)

    assert [s.observed_at_ns for p in packs_on(cluster.bootstrap) for s in p.samples] == [1, 3]
    assert publisher.stats().dropped == {("telemetry.host", "invalid"): 1}
    assert "telemetry.host" in caplog.text


def test_close_is_bounded_while_the_broker_is_away() -> None:
    publisher = kafka_publisher("127.0.0.1:1")
    publisher.start()
    publisher.sample(TELEMETRY_HOST, host_sample(1))
    wait_for(lambda: publisher.stats().waiting == 0)
    began = time.monotonic()
    publisher.close(0.3)

    assert time.monotonic() - began < 1
    stats = publisher.stats()
    assert stats.in_flight == 0
    assert sum(stats.dropped.values()) == 1


class Registry:
    """A schema registry that is away at first."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.registered: dict[str, str] = {}

    def register(self, subject: str, schema: dict[str, Any]) -> int:
        if self.failures:
            self.failures -= 1
            raise OSError("connection refused")
        self.registered[subject] = schema["name"]
        return 42

    def schema(self, schema_id: int) -> dict[str, Any] | None:
        raise AssertionError(f"a publisher has no schema to look up, asked for {schema_id}")


def test_samples_wait_for_the_schema_registry(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latencyprism.collectors.publisher.REGISTRY_RETRY_S", 0.05)
    registry = Registry(failures=2)
    publisher = kafka_publisher(cluster.bootstrap, registry=registry)
    publisher.start()
    publisher.sample(TELEMETRY_HOST, host_sample(1))
    wait_for(lambda: publisher.stats().packs == 1)
    publisher.close(5)

    ((_, _, value),) = read_all(cluster.bootstrap, "prism.telemetry.host")
    assert value[:5] == b"\x00\x00\x00\x00\x2a"
    assert publisher.stats().errors == {"schema registry": 2}
    assert registry.registered == {"prism.telemetry.host-value": "HostSamplePack"}


def test_wrong_client_configuration_is_told_at_the_start() -> None:
    publisher = KafkaPublisher(
        agent="agent",
        boot_ns=1,
        config=PublishConfig(),
        kafka=KafkaConfig(bootstrap="h:1", security_protocol="SSL", ssl_ca="/nowhere.pem"),
    )
    with pytest.raises(ValueError, match=r"Kafka client configuration: .*ssl\.ca\.location"):
        publisher.start()


def test_real_broker_takes_the_packs(kafka: KafkaConfig) -> None:
    publisher = KafkaPublisher(agent="agent", boot_ns=1, config=PublishConfig(), kafka=kafka)
    sample = EngineSample(
        instance=INSTANCE,
        source="engine",
        observed_at_ns=5,
        freshness="fresh",
        scrape_ms=1.0,
        restarted=False,
    )
    publisher.start()
    publisher.sample(TELEMETRY_ENGINE, sample)
    publisher.watermark(TELEMETRY_ENGINE, INSTANCE, 6)
    publisher.close(20)

    topic = kafka.topic(TELEMETRY_ENGINE)
    ((key, partition, value),) = read_all(kafka.bootstrap, topic, kafka.partitions)
    pack = Codec().decode(TELEMETRY_ENGINE, value)
    assert (key, partition) == (INSTANCE.encode(), murmur(kafka.partitions))
    assert pack == Pack(agent="agent", boot_ns=1, sequence=0, watermark_ns=6, samples=(sample,))
