"""Makes the topics of :mod:`latencyprism.schemas.topics` on a cluster, and tells how they stand."""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any, TypeVar

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec

from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.topics import TOPICS, Topic

T = TypeVar("T")

DURABLE_REPLICATION = 3
COMPACTED_SEGMENT_BYTES = 16 * 2**20
POLL_S = 0.05
NOT_YET = (
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    # A broker that has just started tells of an epoch of its leadership before it takes it up.
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
)


class TopicsError(OSError):
    """A cluster that cannot be reached or refuses; the text says which, why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsReport:
    """What :func:`ensure_topics` did and found."""

    created: tuple[str, ...]
    existing: tuple[str, ...]
    findings: tuple[str, ...]
    """Where an existing topic differs from its contract, a sentence each; nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicState:
    """One declared topic as it stands on the cluster."""

    name: str
    record: str
    key: str
    partitions: int
    """0 when the topic is not there."""
    messages: int
    """Offsets between the oldest and the newest; compaction and transactions leave gaps in them."""
    lag: Mapping[str, int] = field(default_factory=dict)
    """Messages yet to be read by each of our consumer groups that reads the topic."""


def topic_config(topic: Topic, *, replication: int) -> dict[str, str]:
    """Configuration of the topic on a cluster with that replication factor."""
    config = {
        "cleanup.policy": "compact" if topic.compacted else "delete",
        "retention.ms": str(topic.retention_ms),
        "compression.type": "producer",
        "min.insync.replicas": "2" if replication >= DURABLE_REPLICATION else "1",
    }
    if topic.compacted:
        # The cleaner works on closed segments, so a quiet topic needs small ones.
        config["segment.bytes"] = str(COMPACTED_SEGMENT_BYTES)
        config["min.cleanable.dirty.ratio"] = "0.2"
    return config


def ensure_topics(kafka: KafkaConfig, *, timeout_s: float) -> TopicsReport:
    """Make the topics that are missing and compare the others with their contract.

    On return every topic can be written and read. Blocks up to ``timeout_s``; idempotent, and
    safe while another process does the same. Raises :class:`TopicsError` when no broker answers
    or it refuses.
    """
    cluster = _Cluster(kafka, timeout_s)
    there = cluster.partitions()
    created = cluster.create([topic for topic in TOPICS if kafka.topic(topic) not in there])
    existing = [topic for topic in TOPICS if kafka.topic(topic) not in created]
    there = cluster.await_usable([kafka.topic(topic) for topic in TOPICS])
    configs = cluster.configs([kafka.topic(topic) for topic in existing])
    return TopicsReport(
        created=tuple(created),
        existing=tuple(kafka.topic(topic) for topic in existing),
        findings=tuple(
            finding
            for topic in existing
            for finding in differences(
                topic,
                kafka,
                partitions=there.get(kafka.topic(topic), 0),
                config=configs[kafka.topic(topic)],
            )
        ),
    )


def differences(
    topic: Topic, kafka: KafkaConfig, *, partitions: int, config: Mapping[str, str]
) -> list[str]:
    """Where a topic on the cluster differs from its contract, in words with what to do."""
    name, wanted = kafka.topic(topic), topic.partitions or kafka.partitions
    found = []
    if partitions != wanted:
        remedy = (
            f"set kafka.partitions={partitions} for every part"
            if topic.partitions is None
            else "delete it while nothing runs and create it again"
        )
        found.append(
            f"{name} has {partitions} partitions where {wanted} are wanted: a worker sees all "
            f"about one {topic.key} only where the topics keyed by it agree; {remedy}"
        )
    for key, value in topic_config(topic, replication=kafka.replication).items():
        actual = config.get(key)
        if actual != value:
            found.append(
                f"{name} has {key}={actual} where {value} is wanted; if that is not meant: "
                f"kafka-configs --alter --topic {name} --add-config {key}={value}"
            )
    return found


def describe_topics(kafka: KafkaConfig, *, timeout_s: float) -> list[TopicState]:
    """How every declared topic stands. Blocks up to ``timeout_s``; raises :class:`TopicsError`."""
    cluster = _Cluster(kafka, timeout_s)
    there = cluster.partitions()
    names = [kafka.topic(topic) for topic in TOPICS]
    partitions = [
        TopicPartition(name, number) for name in names for number in range(there.get(name, 0))
    ]
    begins = cluster.offsets(partitions, OffsetSpec.earliest())
    ends = cluster.offsets(partitions, OffsetSpec.latest())
    committed = {group: cluster.committed(group) for group in cluster.groups(kafka.group(""))}
    return [
        TopicState(
            name=kafka.topic(topic),
            record=topic.record.__name__,
            key=topic.key,
            partitions=there.get(kafka.topic(topic), 0),
            messages=sum(ends[at] - begins[at] for at in begins if at[0] == kafka.topic(topic)),
            lag=_lag(kafka.topic(topic), begins, ends, committed),
        )
        for topic in TOPICS
    ]


_Offsets = dict[tuple[str, int], int]


def _lag(
    name: str, begins: _Offsets, ends: _Offsets, committed: Mapping[str, _Offsets]
) -> dict[str, int]:
    """A partition where the group has committed nothing yet counts from its oldest message."""
    return {
        group: sum(
            max(0, end - max(offsets.get(at, 0), begins[at]))
            for at, end in ends.items()
            if at[0] == name
        )
        for group, offsets in sorted(committed.items())
        if any(topic == name for topic, _ in offsets)
    }


class _Cluster:
    """The admin requests of this module under one deadline, their failures in words."""

    def __init__(self, kafka: KafkaConfig, timeout_s: float) -> None:
        if not kafka.bootstrap:
            raise TopicsError("kafka.bootstrap is empty: set it to the brokers, as host:port,...")
        self._kafka = kafka
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._trouble = ""
        config: dict[str, Any] = kafka.librdkafka()
        # Requests end at the deadline by themselves; librdkafka's own limit must not be shorter.
        config["socket.timeout.ms"] = max(1_000, int(timeout_s * 1e3))
        config["log_level"] = 0
        config["error_cb"] = self._on_error
        try:
            self._admin = AdminClient(config)
        except KafkaException as e:
            raise TopicsError(f"Kafka's client refuses the settings: {_words(e)}") from e

    def partitions(self) -> dict[str, int]:
        """Number of partitions of every topic."""
        try:
            metadata = self._admin.list_topics(timeout=self._left_s())
        except KafkaException as e:
            raise self._away(_words(e)) from e
        return {name: len(topic.partitions) for name, topic in metadata.topics.items()}

    def await_usable(self, names: Iterable[str]) -> dict[str, int]:
        """Wait until the topics can be written and read; numbers of partitions.

        A broker knows of a topic, new or from an earlier run, a little before it leads its
        partitions.
        """
        while True:
            there = self.partitions()
            absent = [name for name in names if not there.get(name)]
            try:
                if not absent:
                    self.offsets(
                        [TopicPartition(name, n) for name in names for n in range(there[name])],
                        OffsetSpec.latest(),
                    )
                    return there
            except _RefusedError as e:
                if e.code not in NOT_YET:
                    raise
            if time.monotonic() > self._deadline:
                raise self._away(f"topics made but not usable, {absent or names}")
            time.sleep(POLL_S)

    def create(self, topics: Iterable[Topic]) -> list[str]:
        """Names of those that were made; one that another process made meanwhile is left out."""
        kafka = self._kafka
        new = [
            NewTopic(
                kafka.topic(topic),
                num_partitions=topic.partitions or kafka.partitions,
                replication_factor=kafka.replication,
                config=topic_config(topic, replication=kafka.replication),
            )
            for topic in topics
        ]
        created = []
        requests = self._admin.create_topics(new) if new else {}
        for name, request in requests.items():
            try:
                self._result(request, f"making topic {name}")
            except _RefusedError as e:
                if e.code != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
            else:
                created.append(name)
        return created

    def configs(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Configuration in force of each topic."""
        resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
        requests = self._admin.describe_configs(resources) if resources else {}
        return {
            resource.name: {
                key: entry.value
                for key, entry in self._result(
                    request, f"reading the configuration of {resource.name}"
                ).items()
            }
            for resource, request in requests.items()
        }

    def offsets(self, partitions: list[TopicPartition], which: OffsetSpec) -> _Offsets:
        """The oldest or newest offset of each partition."""
        requests = self._admin.list_offsets(dict.fromkeys(partitions, which)) if partitions else {}
        return {
            (at.topic, at.partition): self._result(request, f"reading offsets of {at.topic}").offset
            for at, request in requests.items()
        }

    def groups(self, prefix: str) -> list[str]:
        """Consumer groups whose name starts with the prefix."""
        listing = self._result(self._admin.list_consumer_groups(), "listing consumer groups")
        if listing.errors:
            raise self._away(_words(listing.errors[0]))
        return [group.group_id for group in listing.valid if group.group_id.startswith(prefix)]

    def committed(self, group: str) -> _Offsets:
        """Offsets that the group has committed."""
        requests = self._admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
        result = self._result(requests[group], f"reading the offsets of group {group}")
        return {
            (at.topic, at.partition): at.offset
            for at in result.topic_partitions
            if at.offset >= 0  # negative: nothing committed
        }

    def _result(self, request: "Future[T]", doing: str) -> T:
        try:
            return request.result(self._left_s())
        except FutureTimeout as e:
            raise self._away(f"{doing} took too long") from e
        except KafkaException as e:
            error = e.args[0]
            if error.code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT):  # noqa: SLF001 librdkafka's own
                raise self._away(f"{doing}: {error.str()}") from e
            raise _RefusedError(
                f"Kafka at {self._kafka.bootstrap} refused {doing}: {error.str()}{_hint(error)}",
                error.code(),
            ) from e

    def _left_s(self) -> float:
        return max(0.01, self._deadline - time.monotonic())

    def _away(self, detail: str) -> TopicsError:
        self._admin.poll(0)  # delivers what librdkafka has noticed to _on_error
        return TopicsError(
            f"no answer from Kafka at {self._kafka.bootstrap} "
            f"within {self._timeout_s:g} s: {self._trouble or detail}. Check kafka.bootstrap, that "
            f"the broker runs, and that it takes {self._kafka.security_protocol} there"
        )

    def _on_error(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001 says less than the one before it
            self._trouble = error.str()


class _RefusedError(TopicsError):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def _words(error: KafkaException) -> str:
    return str(error.args[0].str())


def _hint(error: KafkaError) -> str:
    hints = {
        KafkaError.INVALID_REPLICATION_FACTOR: "; set kafka.replication to at most the brokers",
        KafkaError.TOPIC_AUTHORIZATION_FAILED: "; this user needs Create and Describe on it",
        KafkaError.CLUSTER_AUTHORIZATION_FAILED: "; this user needs Create on the cluster",
        KafkaError.GROUP_AUTHORIZATION_FAILED: "; this user needs Describe on the group",
    }
    return hints.get(error.code(), "")
