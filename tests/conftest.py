"""Fixtures shared by the parts: a real Kafka for the session, fresh topics for each test."""

import shutil
import uuid
from collections.abc import Iterator

import hypothesis
import pytest
from confluent_kafka.admin import AdminClient
from kafka_io import KafkaIO

from latencyprism.local.broker import UnavailableError
from latencyprism.local.jars import find_java, jars_dir
from latencyprism.local.kafka import EmbeddedKafka
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.topics import TOPICS
from latencyprism.topics_admin import ensure_topics

# A shared machine stalls for longer than hypothesis allows an example; pytest's timeout stands.
hypothesis.settings.register_profile("shared-machine", deadline=None)
hypothesis.settings.load_profile("shared-machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that uses the broker, so that none is forgotten."""
    for item in items:
        if "kafka_broker" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.kafka)


@pytest.fixture(scope="session")
def kafka_broker() -> Iterator[EmbeddedKafka]:
    """A real Apache Kafka; skips only where Java or Maven is not installed."""
    try:
        find_java()
    except UnavailableError as e:
        pytest.skip(str(e))
    if shutil.which("mvn") is None and not jars_dir().is_dir():
        pytest.skip("Apache Kafka's jars are not here and there is no mvn to fetch them")
    with EmbeddedKafka() as broker:
        yield broker


@pytest.fixture
def kafka(kafka_broker: EmbeddedKafka) -> Iterator[KafkaConfig]:
    """The broker under a prefix of this test's own, its topics made (2 partitions each)."""
    config = KafkaConfig(
        bootstrap=kafka_broker.bootstrap, prefix=f"t{uuid.uuid4().hex[:10]}", partitions=2
    )
    ensure_topics(config, timeout_s=30)
    yield config
    admin = AdminClient(config.librdkafka())
    for deletion in admin.delete_topics([config.topic(topic) for topic in TOPICS]).values():
        deletion.result(30)


@pytest.fixture
def kafka_io(kafka: KafkaConfig) -> KafkaIO:
    """Writes to and reads from the test's topics."""
    return KafkaIO(kafka)
