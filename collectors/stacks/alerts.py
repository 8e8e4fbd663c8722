"""Where the stacks source hears of alerts."""

import logging
import socket
from collections.abc import Iterator
from typing import Protocol

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from latencyprism.schemas.codec import Codec, DecodeError, SchemaRegistry
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import Alert
from latencyprism.schemas.topics import ALERTS

logger = logging.getLogger(__name__)

ASK_S = 0.2
"""How long the broker may take to say where the topic ends; it is asked again otherwise."""


class Alerts(Protocol):
    """Alerts as they come."""

    def poll(self, timeout_s: float) -> Iterator[Alert]:
        """Those that have come, after at most ``timeout_s`` without any.

        One counts as dealt with once the next is asked for: another reader of the same place
        begins with the one that was left at.
        """

    def close(self) -> None:
        """Hear no more."""


class KafkaAlerts:
    """Reads all partitions of the alerts topic by itself, from their ends, as a member of no group.

    ``offsets`` (partition → next offset) is where it goes on instead, and is kept up to date:
    given to the next reader, nothing is missed in between. Partitions that are added to the topic
    are heard once the source is started again.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        registry: SchemaRegistry | None = None,
        *,
        offsets: dict[int, int] | None = None,
    ) -> None:
        self._codec = Codec(registry, prefix=kafka.prefix)
        self._topic = kafka.topic(ALERTS)
        self._offsets = {} if offsets is None else offsets
        self._assigned = False
        self._consumer = Consumer(
            {"log_level": 2}
            | kafka.librdkafka(
                # The library wants a name; no offset is committed to it and nobody joins it.
                group_id=kafka.group(f"stacks.{socket.gethostname()}"),
                enable_auto_commit=False,
                auto_offset_reset="latest",
            )
        )

    def poll(self, timeout_s: float) -> Iterator[Alert]:
        """See :meth:`Alerts.poll`; a message that cannot be decoded is passed over.

        Takes up to 0.4 s more while the broker does not say where the topic ends.
        """
        if not self._assigned:
            self._assign()
        message = self._consumer.poll(timeout_s)
        if message is None:
            return
        if (error := message.error()) is not None:
            if error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - public constant
                logger.info("Hearing of alerts: %s", error)
            return
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        try:
            yield self._codec.decode(ALERTS, message.value() or b"")
        except DecodeError as error:
            logger.warning("Passed over an alert at offset %s: %s", offset, error)
        self._offsets[partition] = offset + 1

    def close(self) -> None:
        """See :meth:`Alerts.close`."""
        self._consumer.close()

    def _assign(self) -> None:
        """Begin to read, unless the broker does not answer in time."""
        try:
            found = self._consumer.list_topics(self._topic, ASK_S).topics[self._topic].partitions
            unknown = [
                TopicPartition(self._topic, number, OFFSET_END)
                for number in found
                if number not in self._offsets
            ]
            # Told in numbers, so that another reader can go on from here before anything came.
            ends = self._consumer.offsets_for_times(unknown, ASK_S) if unknown else []
        except KafkaException as error:
            logger.debug("Where the alerts end is not known yet: %s", error)
            return
        if not found or any(end.error is not None or end.offset < 0 for end in ends):
            return
        self._offsets.update({end.partition: end.offset for end in ends})
        self._consumer.assign(
            [TopicPartition(self._topic, number, self._offsets[number]) for number in found]
        )
        self._assigned = True
