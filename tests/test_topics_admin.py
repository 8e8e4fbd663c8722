"""Topics made and described on a real Kafka, and trouble told in words."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic
from kafka_io import KafkaIO

from latencyprism.local.kafka import EmbeddedKafka
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.topics import ALERTS, DAY_MS, MODELS, TELEMETRY_HOST, TOPICS
from latencyprism.topics_admin import (
    TopicsError,
    describe_topics,
    differences,
    ensure_topics,
    topic_config,
)

ALL = {topic.name for topic in TOPICS}


def test_durable_clusters_ask_for_two_replicas_in_sync() -> None:
    assert topic_config(ALERTS, replication=3)["min.insync.replicas"] == "2"
    assert topic_config(ALERTS, replication=1)["min.insync.replicas"] == "1"


def test_a_topic_as_it_should_be_differs_in_nothing() -> None:
    kafka = KafkaConfig(partitions=6)
    config = topic_config(TELEMETRY_HOST, replication=1)
    assert differences(TELEMETRY_HOST, kafka, partitions=6, config=config) == []


def test_differences_say_what_and_what_to_do() -> None:
    kafka = KafkaConfig(partitions=6)
    config = topic_config(TELEMETRY_HOST, replication=1) | {"retention.ms": "1000"}
    partitions, retention = differences(TELEMETRY_HOST, kafka, partitions=4, config=config)
    assert "prism.telemetry.host has 4 partitions where 6 are wanted" in partitions
    assert "set kafka.partitions=4" in partitions
    assert f"has retention.ms=1000 where {DAY_MS} is wanted" in retention
    assert f"--add-config retention.ms={DAY_MS}" in retention
    (alerts,) = differences(ALERTS, kafka, partitions=2, config=topic_config(ALERTS, replication=1))
    assert "delete it while nothing runs" in alerts


def test_topics_are_made_once_with_their_contract(kafka: KafkaConfig) -> None:
    fresh = replace(kafka, prefix=f"{kafka.prefix}-fresh", partitions=3)
    first = ensure_topics(fresh, timeout_s=20)
    assert set(first.created) == {f"{fresh.prefix}.{name}" for name in ALL}
    assert (first.existing, first.findings) == ((), ())
    second = ensure_topics(fresh, timeout_s=20)
    assert (second.created, set(second.existing)) == ((), set(first.created))
    assert second.findings == ()

    name = fresh.topic(MODELS)
    admin = AdminClient(fresh.librdkafka())
    assert len(admin.list_topics(name, timeout=10).topics[name].partitions) == 3
    resource = ConfigResource(ConfigResource.Type.TOPIC, name)
    config = admin.describe_configs([resource])[resource].result(10)
    assert config["cleanup.policy"].value == "compact"
    assert config["retention.ms"].value == "-1"


@pytest.mark.kafka
def test_topics_of_an_earlier_run_are_found_again(tmp_path: Path) -> None:
    with EmbeddedKafka(directory=tmp_path) as broker:
        kafka = KafkaConfig(bootstrap=broker.bootstrap)
        assert set(ensure_topics(kafka, timeout_s=30).created) == {kafka.topic(t) for t in TOPICS}
        # Many partitions: the broker answers well before it has taken them all up again.
        admin = AdminClient(kafka.librdkafka() | {"log_level": 0})
        admin.create_topics([NewTopic("many", 100, 1)])["many"].result(30)
        broker.stop()
        broker.start()
        assert ensure_topics(kafka, timeout_s=30).created == ()


def test_a_topic_that_differs_is_found_and_left_alone(kafka: KafkaConfig) -> None:
    report = ensure_topics(replace(kafka, partitions=5), timeout_s=20)
    assert report.created == ()
    assert len(report.findings) == len([topic for topic in TOPICS if topic.partitions is None])
    assert ensure_topics(kafka, timeout_s=20).findings == ()


def test_two_processes_may_make_topics_at_once(kafka: KafkaConfig) -> None:
    fresh = replace(kafka, prefix=f"{kafka.prefix}-race")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: ensure_topics(fresh, timeout_s=30), range(2))
    assert len(first.created) + len(second.created) == len(ALL)
    assert first.findings == second.findings == ()


def test_messages_and_lag_are_counted(kafka: KafkaConfig, kafka_io: KafkaIO) -> None:
    kafka_io.send_bytes(ALERTS, [("chat", b"x")] * 5)
    consumer = Consumer(kafka.librdkafka(group_id=kafka.group("sinks")))
    consumer.commit(offsets=[TopicPartition(kafka.topic(ALERTS), 0, 2)], asynchronous=False)
    consumer.close()
    states = {state.name: state for state in describe_topics(kafka, timeout_s=20)}
    assert set(states) == {kafka.topic(topic) for topic in TOPICS}
    alerts = states[kafka.topic(ALERTS)]
    assert (alerts.record, alerts.key, alerts.partitions) == ("Alert", "service", 1)
    assert (alerts.messages, alerts.lag) == (5, {kafka.group("sinks"): 3})
    assert states[kafka.topic(MODELS)].lag == {}


def test_topics_that_are_not_there_are_described_as_such(kafka: KafkaConfig) -> None:
    states = describe_topics(replace(kafka, prefix="absent"), timeout_s=20)
    assert {(state.partitions, state.messages) for state in states} == {(0, 0)}


def test_an_impossible_replication_is_refused_in_words(kafka: KafkaConfig) -> None:
    greedy = replace(kafka, prefix=f"{kafka.prefix}-greedy", replication=3)
    with pytest.raises(TopicsError, match=r"refused making topic .*kafka\.replication"):
        ensure_topics(greedy, timeout_s=20)


def test_a_broker_that_is_away_is_told_within_the_time() -> None:
    begin = time.monotonic()
    with pytest.raises(TopicsError, match=r"127\.0\.0\.1:1 within 1 s: .*refused.*PLAINTEXT"):
        ensure_topics(KafkaConfig(bootstrap="127.0.0.1:1"), timeout_s=1)
    assert time.monotonic() - begin < 3


def test_the_wrong_security_protocol_is_told(kafka: KafkaConfig) -> None:
    with pytest.raises(TopicsError, match=r"ssl:.*SSL.*takes SSL there"):
        ensure_topics(replace(kafka, security_protocol="SSL"), timeout_s=2)


def test_no_address_is_told_at_once() -> None:
    with pytest.raises(TopicsError, match="bootstrap is empty"):
        ensure_topics(KafkaConfig(), timeout_s=1)


def test_settings_that_the_client_refuses_are_told() -> None:
    broken = KafkaConfig(bootstrap="127.0.0.1:1", security_protocol="SSL", ssl_ca="/no/such.pem")
    with pytest.raises(TopicsError, match=r"refuses the settings: .*ssl\.ca\.location failed"):
        ensure_topics(broken, timeout_s=1)
