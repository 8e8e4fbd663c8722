"""Reading records off topics as they come, for views, replays and the demo."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from latencyprism.schemas.codec import Codec, DecodeError, Pack
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.topics import Topic

logger = logging.getLogger(__name__)


class Listener:
    """Reads every partition of some topics without a consumer group of its own.

    ``from_start`` begins at the oldest message, otherwise only what comes from now on is read.
    """

    def __init__(
        self, kafka: KafkaConfig, topics: Sequence[Topic], codec: Codec, *, from_start: bool = False
    ) -> None:
        self._codec = codec
        self._topics = {kafka.topic(topic): topic for topic in topics}
        self._consumer = Consumer(
            kafka.librdkafka(group_id=f"listener-{uuid4()}", enable_auto_commit=False)
        )
        self._consumer.assign(
            [
                TopicPartition(name, partition, offset)
                for name in self._topics
                for partition, (first, end) in self._watermarks(name).items()
                for offset in (first if from_start else end,)
            ]
        )

    def poll(self, timeout_s: float, limit: int = 500) -> Iterator[tuple[Topic, Any]]:
        """Records that have come, packs unpacked; waits at most ``timeout_s`` for the first.

        Messages that cannot be decoded are logged and passed over: their topics' readers send
        them to the dead letters.
        """
        for message in self._consumer.consume(limit, timeout_s):
            if error := message.error():
                if error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 public constant
                    logger.warning("listening: %s", error)
                continue
            topic = self._topics[message.topic() or ""]
            try:
                value = self._codec.decode(topic, message.value() or b"")
            except DecodeError as e:
                logger.warning("passed over %s offset %s: %s", message.topic(), message.offset(), e)
                continue
            for record in value.samples if isinstance(value, Pack) else (value,):
                yield topic, record

    def close(self) -> None:
        """Leave the cluster."""
        self._consumer.close()

    def _watermarks(self, name: str) -> dict[int, tuple[int, int]]:
        metadata = self._consumer.list_topics(name, timeout=10).topics[name]
        if metadata.error:
            raise KafkaException(metadata.error)
        return {
            partition: self._consumer.get_watermark_offsets(
                TopicPartition(name, partition), timeout=10
            )
            for partition in metadata.partitions
        }
