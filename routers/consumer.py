"""Reads commands from Kafka, has them put into effect and answers: the Kafka edge of a router."""

import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from latencyprism.routers.config import RouterConfig
from latencyprism.routers.controller import Controller
from latencyprism.routers.haproxy import HAProxyAdapter
from latencyprism.routers.lease import Instant, LeaseBook
from latencyprism.schemas.codec import Codec, DecodeError, SchemaRegistry, registry_for
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import Ack, DeadLetter
from latencyprism.schemas.topics import CONTROL_ACKS, CONTROL_COMMANDS, DEADLETTER, Topic

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""How often leases are looked at; a lease ends at most this late."""
CATCH_UP_S = 5.0
"""Longest time from the start until targets are brought to the state in force: up to then the
live leases of an earlier run are being read."""
RETRY_S = 2.0
"""Between attempts to find the commands' topic on a broker that is away."""
FLUSH_S = 5.0
MAX_PAYLOAD_BYTES = 900_000
"""Of a dead letter."""


class ControlConsumer:
    """Reads ``control.commands`` and feeds a :class:`Controller`; answers on ``control.acks``.

    Every router reads all commands (no consumer group), beginning one longest lease back, so
    that a restarted router obeys the leases that are still running. While the broker is away
    leases go on running out.
    """

    def __init__(
        self,
        controller: Controller,
        config: RouterConfig,
        kafka: KafkaConfig,
        *,
        registry: SchemaRegistry | None = None,
        clock: Callable[[], Instant] = Instant.now,
    ) -> None:
        self._controller = controller
        self._config = config
        self._kafka = kafka
        self._codec = Codec(registry, prefix=kafka.prefix)
        self._clock = clock
        self._caught_up: set[int] = set()
        self._partitions: frozenset[int] = frozenset()
        self._broker_away = False
        self.caught_up = threading.Event()
        """Set once the commands of before the start have been read, or the wait was given up."""
        self.counts: Counter[str] = Counter()
        """Messages read, dead letters, acks sent and lost, since the start."""

    def run(self, stop: threading.Event) -> None:
        """Obey until ``stop`` is set, then bring every target back to normal. Blocks.

        Returns within about 8 s of ``stop`` when the broker is away, at once when it is not.
        """
        consumer = Consumer(
            self._kafka.librdkafka(
                group_id=self._kafka.group(f"router.{self._config.router}"),
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                enable_partition_eof=True,
                fetch_wait_max_ms=100,
            )
            | {"error_cb": self._on_error}
        )
        producer = Producer(
            self._kafka.librdkafka(
                enable_idempotence=True,
                linger_ms=0,
                message_timeout_ms=30_000,
                queue_buffering_max_messages=10_000,
            )
            | {"error_cb": self._on_error}
        )
        try:
            self._obey(consumer, producer, stop)
        finally:
            self._controller.release()
            consumer.close()
            lost = producer.flush(FLUSH_S)
            if lost:
                logger.warning("%d acks could not be sent before the end", lost)

    def _obey(self, consumer: Consumer, producer: Producer, stop: threading.Event) -> None:
        give_up_s = time.monotonic() + CATCH_UP_S
        look_s = tick_s = verify_s = 0.0
        while not stop.is_set():
            now_s = time.monotonic()
            if not self._partitions and now_s >= look_s:
                self._begin(consumer)
                look_s = time.monotonic() + RETRY_S
            message = consumer.poll(TICK_S)
            if message is not None:
                self._take(message, producer)
            producer.poll(0)
            if not self.caught_up.is_set() and now_s >= give_up_s:
                logger.warning(
                    "commands of before the start could not all be read within %.0f s", CATCH_UP_S
                )
                self.caught_up.set()
            if not self.caught_up.is_set():
                continue
            if now_s >= tick_s:
                for ack in self._controller.tick(self._clock()):
                    self._answer(producer, ack)
                tick_s = now_s + TICK_S
            if now_s >= verify_s:
                self._controller.verify()
                verify_s = now_s + self._config.verify_s

    def _begin(self, consumer: Consumer) -> None:
        """Take all partitions from one longest lease back; tried again later when it fails."""
        topic = self._kafka.topic(CONTROL_COMMANDS)
        try:
            starts = self._starts(consumer, topic)
            consumer.assign(starts)
        except KafkaException as error:
            logger.warning("cannot read %s yet, trying again: %s", topic, error.args[0])
            return
        self._partitions = frozenset(start.partition for start in starts)
        logger.info("obeying %s as %s", topic, self._config.router)

    def _starts(self, consumer: Consumer, topic: str) -> list[TopicPartition]:
        found = consumer.list_topics(topic, timeout=RETRY_S).topics[topic]
        if found.error is not None:
            raise KafkaException(found.error)
        ends = {}
        for partition in found.partitions:
            bounds = consumer.get_watermark_offsets(
                TopicPartition(topic, partition), timeout=RETRY_S
            )
            if bounds is None:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001 public
            ends[partition] = bounds[1]
        since_ms = self._clock().wall_ns // 1_000_000 - self._config.rules.lease_max_ms
        found_starts = consumer.offsets_for_times(
            [TopicPartition(topic, partition, since_ms) for partition in ends], timeout=RETRY_S
        )
        # No command that young: begin at the end seen before asking, so that one that came
        # meanwhile is not passed over.
        return [
            TopicPartition(topic, s.partition, s.offset if s.offset >= 0 else ends[s.partition])
            for s in found_starts
        ]

    def _take(self, message: Message, producer: Producer) -> None:
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 its public constant
                self._caught_up.add(message.partition() or 0)
                if self._caught_up >= self._partitions:
                    self.caught_up.set()
            else:
                logger.warning("cannot read commands: %s", error)
            return
        self.counts["read"] += 1
        self._broker_away = False
        try:
            command = self._codec.decode(CONTROL_COMMANDS, message.value() or b"")
            ack = self._controller.handle(command, self._clock())
        except DecodeError as refusal:
            self._bury(producer, message, refusal.reason, str(refusal))
        except Exception as defect:  # a command that trips our own code must not end the obeying
            logger.exception("command at offset %s could not be handled", message.offset())
            self._bury(producer, message, "failed", f"{type(defect).__name__}: {defect}")
        else:
            if ack is not None:
                self._answer(producer, ack)

    def _answer(self, producer: Producer, ack: Ack) -> None:
        self._send(producer, CONTROL_ACKS, ack.target.encode(), ack)

    def _bury(self, producer: Producer, message: Message, reason: str, detail: str) -> None:
        self.counts["dead_letters"] += 1
        topic = message.topic() or ""
        logger.warning("dead letter from %s: %s, %s", topic, reason, detail)
        letter = DeadLetter(
            topic=topic,
            partition=_number(message.partition()),
            offset=_number(message.offset()),
            at_ns=self._clock().wall_ns,
            component="routers",
            reason=reason,
            detail=detail,
            key=_bytes(message.key()),
            payload=(_bytes(message.value()) or b"")[:MAX_PAYLOAD_BYTES],
        )
        self._send(producer, DEADLETTER, topic.encode(), letter)

    def _send(self, producer: Producer, topic: Topic, key: bytes, record: Ack | DeadLetter) -> None:
        try:
            producer.produce(
                self._kafka.topic(topic),
                self._codec.encode(topic, record),
                key,
                on_delivery=self._on_delivery,
            )
        except (BufferError, KafkaException, OSError) as error:
            # Full queue or registry away: an answer lost must not stop the obeying.
            self.counts["lost"] += 1
            logger.warning("a record for %s was lost: %s", topic.name, error)

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.counts["sent"] += 1
        else:
            self.counts["lost"] += 1
            logger.warning("a record for %s was lost: %s", message.topic(), error)

    def _on_error(self, error: KafkaError) -> None:
        if not self._broker_away:
            self._broker_away = True
            logger.warning("Kafka: %s; leases go on running out meanwhile", error)


def run_router(
    config: RouterConfig, kafka: KafkaConfig, *, ready: Callable[[], object] = lambda: None
) -> None:
    """Drive a running HAProxy by the commands until SIGTERM or SIGINT, then restore it. Blocks.

    ``ready`` is called once the leases in force are in effect. Raises ValueError when there is
    nothing to drive.
    """
    if not config.targets:
        raise ValueError(
            "the router has no targets: give router.targets as {instance: server of the backend}"
        )
    adapter = HAProxyAdapter(config.haproxy, config.targets)
    book = LeaseBook(config.targets, config.rules)
    controller = Controller(book, adapter, router=config.router)
    consumer = ControlConsumer(controller, config, kafka, registry=registry_for(kafka))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(
        target=lambda: consumer.caught_up.wait() and ready(), name="announce", daemon=True
    ).start()
    consumer.run(stop)


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _number(value: int | None) -> int:
    return -1 if value is None else value
