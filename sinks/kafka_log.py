"""Kafka behind the sink's ports."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from latencyprism.schemas.codec import Codec
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import DeadLetter
from latencyprism.schemas.topics import DEADLETTER
from latencyprism.sinks.ports import LogAwayError, Message, Place
from latencyprism.sinks.tables import BY_TOPIC, TABLES

logger = logging.getLogger(__name__)

GROUP = "sinks"
MESSAGES_AT_ONCE = 500
PREFETCH_KB = 4_096
"""Most bytes librdkafka holds of one partition before they are asked for."""
SESSION_MS = 10_000
"""How soon a killed sink's partitions go to another."""
LETTERS_TIMEOUT_S = 30.0


class KafkaLog:
    """A member of the sinks' group on every topic that has a table. Not thread-safe."""

    def __init__(self, kafka: KafkaConfig) -> None:
        self._names = {kafka.topic(table.topic): table.topic for table in TABLES}
        self._kafka = kafka
        self._paused = False
        self._lost: list[Place] = []
        self._consumer: Any = Consumer(
            kafka.librdkafka(
                group_id=kafka.group(GROUP),
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                session_timeout_ms=SESSION_MS,
                queued_max_messages_kbytes=PREFETCH_KB,
                topic_metadata_refresh_interval_ms=30_000,
            ),
            logger=logger,
        )
        self._consumer.subscribe(
            list(self._names), on_assign=self._on_assign, on_revoke=self._on_revoke
        )

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """The next messages; what goes wrong with the cluster for a while is logged."""
        messages = []
        for message in self._consumer.consume(MESSAGES_AT_ONCE, timeout_s):
            if error := message.error():
                self._report(error)
                continue
            messages.append(
                Message(
                    topic=self._names[message.topic()],
                    partition=message.partition(),
                    offset=message.offset(),
                    key=message.key(),
                    value=message.value() or b"",
                )
            )
        return messages

    def lost(self) -> Sequence[Place]:
        """Partitions that went to another member since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def pause(self) -> None:
        """Fetch nothing, from partitions of a later assignment neither."""
        if not self._paused:
            self._paused = True
            self._consumer.pause(self._consumer.assignment())

    def resume(self) -> None:
        """Fetch again."""
        if self._paused:
            self._paused = False
            self._consumer.resume(self._consumer.assignment())

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Commit and wait; a failure is logged, since what it covers is only delivered again."""
        partitions = [
            TopicPartition(self._kafka.topic(BY_TOPIC[name].topic), partition, offset)
            for (name, partition), offset in offsets.items()
        ]
        try:
            self._consumer.commit(offsets=partitions, asynchronous=False)
        except KafkaException as e:
            logger.warning("offsets not committed, their rows will be written again: %s", e)

    @property
    def assigned(self) -> int:
        """Number of partitions that are ours now."""
        return len(self._consumer.assignment())

    def close(self) -> None:
        """Leave the group, so that others take over at once."""
        self._consumer.close()

    def _on_assign(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        logger.info("assigned %d partitions", len(partitions))
        consumer.assign(partitions)
        if self._paused:
            consumer.pause(partitions)

    def _on_revoke(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        logger.info("revoked %d partitions", len(partitions))
        self._lost += [(self._names[p.topic].name, p.partition) for p in partitions]
        consumer.unassign()

    def _report(self, error: KafkaError) -> None:
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            logger.warning(
                "a topic is missing, make it with `latencyprism topics --create`: %s", error
            )
        else:
            logger.warning("Kafka: %s", error)


class KafkaLetterBox:
    """Sends letters to the dead-letter topic and waits until the brokers have them."""

    def __init__(self, kafka: KafkaConfig, codec: Codec) -> None:
        self._topic = kafka.topic(DEADLETTER)
        self._codec = codec
        self._producer: Any = Producer(
            kafka.librdkafka(
                acks="all",
                enable_idempotence=True,
                compression_type="lz4",
                message_max_bytes=2_000_000,
                delivery_timeout_ms=int(LETTERS_TIMEOUT_S * 1000),
            ),
            logger=logger,
        )

    def send(self, letters: Sequence[DeadLetter]) -> None:
        """Return when all are on the topic; blocks for at most 30 s."""
        failed: list[str] = []

        def delivered(error: KafkaError | None, _message: object) -> None:
            if error is not None:
                failed.append(str(error))

        for letter in letters:
            self._produce(letter, delivered)
        left = self._producer.flush(LETTERS_TIMEOUT_S)
        if left or failed:
            reason = (
                failed[0] if failed else f"{left} not acknowledged in {LETTERS_TIMEOUT_S:.0f} s"
            )
            raise LogAwayError(f"dead letters were not taken by {self._topic}: {reason}")

    def _produce(self, letter: DeadLetter, delivered: Any) -> None:
        value = self._codec.encode(DEADLETTER, letter)
        key = letter.topic.encode()
        while True:
            try:
                self._producer.produce(self._topic, value=value, key=key, on_delivery=delivered)
            except BufferError:  # the local queue is full: let it drain
                self._producer.poll(0.1)
            except KafkaException as e:
                raise LogAwayError(f"{self._topic}: {e}") from e
            else:
                return
