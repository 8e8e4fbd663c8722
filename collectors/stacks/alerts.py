"""Where the stacks source hears of alerts."""

import logging
import socket
from collections.abc import Iterator
from typing import Protocol

from confluent_kafka import Consumer, KafkaError

from latencyprism.schemas.codec import Codec, DecodeError, SchemaRegistry
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import Alert
from latencyprism.schemas.topics import ALERTS

logger = logging.getLogger(__name__)


class Alerts(Protocol):
    """Alerts as they come."""

    def poll(self, timeout_s: float) -> Iterator[Alert]:
        """Those that have come, after at most ``timeout_s`` without any."""

    def close(self) -> None:
        """Hear no more."""


class KafkaAlerts:
    """Reads the alerts topic from its end, in a consumer group of this host's own."""

    def __init__(self, kafka: KafkaConfig, registry: SchemaRegistry | None = None) -> None:
        self._codec = Codec(registry, prefix=kafka.prefix)
        self._consumer = Consumer(
            {"log_level": 2}
            | kafka.librdkafka(
                group_id=kafka.group(f"stacks.{socket.gethostname()}"),
                enable_auto_commit=False,
                auto_offset_reset="latest",
            )
        )
        self._consumer.subscribe([kafka.topic(ALERTS)])

    def poll(self, timeout_s: float) -> Iterator[Alert]:
        """See :meth:`Alerts.poll`; a message that cannot be decoded is passed over."""
        message = self._consumer.poll(timeout_s)
        if message is None:
            return
        if (error := message.error()) is not None:
            if error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - public constant
                logger.info("Hearing of alerts: %s", error)
            return
        try:
            yield self._codec.decode(ALERTS, message.value() or b"")
        except DecodeError as error:
            logger.warning("Passed over an alert at offset %s: %s", message.offset(), error)

    def close(self) -> None:
        """See :meth:`Alerts.close`."""
        self._consumer.close()
