"""Routers' answers, read by every worker: whose command was answered, only its worker knows."""

import logging
import time
from typing import Final

from confluent_kafka import OFFSET_END, Consumer, TopicPartition

from latencyprism.schemas.codec import DecodeError, codec_for
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import Ack, DeadLetter
from latencyprism.schemas.topics import CONTROL_ACKS
from latencyprism.streams.letters import dead_letter

logger = logging.getLogger(__name__)

POLL_S: Final = 0.2
LOG_EVERY_S: Final = 10.0


class AckReader:
    """Reads what comes on control.acks from now on, without a consumer group. Blocking."""

    def __init__(self, kafka: KafkaConfig) -> None:
        self._codec = codec_for(kafka)
        self._consumer = Consumer(
            kafka.librdkafka(group_id=kafka.group("acks"), enable_auto_commit=False)
        )
        self._consumer.assign([TopicPartition(kafka.topic(CONTROL_ACKS), 0, OFFSET_END)])
        self._complained = -LOG_EVERY_S

    def poll(self) -> list[Ack | DeadLetter]:
        """What has come, at most 100 messages; waits ``POLL_S`` for it. Never raises."""
        found: list[Ack | DeadLetter] = []
        for message in self._consumer.consume(100, POLL_S):
            if message.error():
                self._complain(str(message.error()))
                continue
            value = message.value() or b""
            try:
                found.append(self._codec.decode(CONTROL_ACKS, value))
            except DecodeError as e:
                found.append(
                    dead_letter(
                        e,
                        topic=message.topic() or "",
                        partition=message.partition() or 0,
                        offset=message.offset() or 0,
                        key=message.key(),
                        payload=value,
                    )
                )
        return found

    def close(self) -> None:
        """Leave the cluster."""
        self._consumer.close()

    def _complain(self, trouble: str) -> None:
        if time.monotonic() - self._complained > LOG_EVERY_S:
            self._complained = time.monotonic()
            logger.warning("control.acks cannot be read: %s", trouble)
