"""What tests put on topics and read back, beside the code under test."""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, Producer, TopicPartition

from latencyprism.schemas.codec import Codec, Pack
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.topics import Topic


@dataclass(slots=True)
class KafkaIO:
    """Writes to and reads from the topics of one test, blocking, as an outsider."""

    kafka: KafkaConfig
    codec: Codec = field(default_factory=Codec)
    _producer: Producer | None = None

    def send(self, topic: Topic, message: Any, *, key: str) -> None:
        """Write one record or pack, and wait until the broker has it."""
        self.send_bytes(topic, [(key, self.codec.encode(topic, message))])

    def send_bytes(self, topic: Topic, messages: Iterable[tuple[str, bytes]]) -> None:
        """Write pairs of key and value as they are, and wait until the broker has them."""
        if self._producer is None:
            self._producer = Producer(self.kafka.librdkafka(linger_ms=2))
        failures: list[str] = []

        def delivered(error: object, _message: Message) -> None:
            if error is not None:
                failures.append(str(error))

        for key, value in messages:
            self._producer.produce(
                self.kafka.topic(topic), value, key=key.encode(), on_delivery=delivered
            )
            self._producer.poll(0)
        left = self._producer.flush(30)
        assert not failures, failures[:3]
        assert left == 0, f"{left} messages were not delivered"

    def read_messages(
        self, topic: Topic | str, count: int, *, timeout_s: float = 20.0
    ) -> list[Message]:
        """The topic from its beginning, until there are ``count`` messages. Fails if fewer come."""
        messages = self.read_until(topic, lambda got: len(got) >= count, timeout_s=timeout_s)
        assert len(messages) >= count, f"{len(messages)} of {count} messages on {topic}"
        return messages

    def read_until(
        self,
        topic: Topic | str,
        enough: Callable[[Sequence[Message]], bool],
        *,
        timeout_s: float = 20.0,
    ) -> list[Message]:
        """The topic from its beginning, until it is enough or the time is over."""
        name = topic if isinstance(topic, str) else self.kafka.topic(topic)
        consumer = Consumer(
            self.kafka.librdkafka(
                group_id=f"{self.kafka.prefix}-reader-{uuid.uuid4().hex[:8]}",
                enable_auto_commit=False,
            )
        )
        try:
            found = consumer.list_topics(name, timeout=timeout_s).topics[name].partitions
            consumer.assign([TopicPartition(name, number, OFFSET_BEGINNING) for number in found])
            messages: list[Message] = []
            deadline = time.monotonic() + timeout_s
            while not enough(messages) and time.monotonic() < deadline:
                for message in consumer.consume(500, timeout=0.1):
                    assert message.error() is None, message.error()
                    messages.append(message)
            return messages
        finally:
            consumer.close()

    def read(self, topic: Topic, count: int, *, timeout_s: float = 20.0) -> list[Any]:
        """The first records of the topic, in the order of each partition; packs are opened.

        Fails unless there are ``count``.
        """
        records: list[Any] = []

        def enough(messages: Sequence[Message]) -> bool:
            records[:] = [
                record
                for message in messages
                for record in _records(self.codec.decode(topic, message.value() or b""))
            ]
            return len(records) >= count

        self.read_until(topic, enough, timeout_s=timeout_s)
        assert len(records) >= count, f"{len(records)} of {count} records on {topic.name}"
        return records


def _records(message: Any) -> Sequence[Any]:
    return message.samples if isinstance(message, Pack) else (message,)
