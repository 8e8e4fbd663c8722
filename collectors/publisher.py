"""From the sources' threads to Kafka without ever holding a source up."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from confluent_kafka import KafkaError, KafkaException, Producer

from latencyprism.collectors.config import PublishConfig
from latencyprism.collectors.packing import Backlog, Message, Packed, Packer
from latencyprism.collectors.source import Emit
from latencyprism.schemas.codec import Codec, Pack, SchemaRegistry
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.topics import BY_NAME, Topic

logger = logging.getLogger(__name__)

IN_FLIGHT = 200
"""Messages handed to the client library and not yet acknowledged; the rest waits in the backlog,
where the oldest can give way."""
MESSAGE_BYTES = 900_000
"""Longest message; Kafka refuses more than 10^6 bytes unless told otherwise."""
REGISTRY_RETRY_S = 1.0

Drops = Counter[tuple[str, str]]

_NOTHING: Pack[Any] = Pack(agent="", boot_ns=0, sequence=0, watermark_ns=0, samples=())


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherStats:
    """What became of the samples so far."""

    samples: int = 0
    """Samples offered."""
    packs: int = 0
    """Messages acknowledged by the broker."""
    bytes: int = 0
    """Bytes of the acknowledged messages."""
    dropped: dict[tuple[str, str], int] = field(default_factory=dict)
    """Samples lost, by topic and reason."""
    errors: dict[str, int] = field(default_factory=dict)
    """Messages the broker or the client library refused, by error name."""
    waiting: int = 0
    """Samples not yet packed."""
    backlog_bytes: int = 0
    """Bytes packed and not yet handed to the client library."""
    in_flight: int = 0
    """Messages handed to the client library and not yet acknowledged."""
    broker_away: bool = False
    """Whether no broker could be reached when last heard of."""


class Publisher(Emit, Protocol):
    """An :class:`Emit` with a life of its own."""

    def start(self) -> None:
        """Begin to publish; does not wait for the broker. Raises ValueError when the client library
        refuses the configuration.
        """

    def close(self, timeout_s: float) -> None:
        """Publish what is held for at most ``timeout_s``, count the rest as dropped, and end."""

    def stats(self) -> PublisherStats:
        """Counts so far; cheap, from any thread."""


class BufferedPublisher:
    """The part of a publisher that sources talk to; thread-safe, never blocks, never raises."""

    def __init__(self, *, agent: str, boot_ns: int, config: PublishConfig) -> None:
        self._packer = Packer(
            agent=agent,
            boot_ns=boot_ns,
            bound=config.queue_samples,
            pack_samples=config.pack_samples,
        )
        self._pack_samples = config.pack_samples
        self._lock = threading.Lock()
        self._full = threading.Event()
        self._samples = 0
        self._refused: Drops = Counter()

    def sample(self, topic: Topic, sample: Any) -> None:
        """See :meth:`Emit.sample`."""
        key = getattr(sample, topic.key, None)
        with self._lock:
            self._samples += 1
            if type(sample) is not topic.record or not isinstance(key, str):
                self._refused[topic.name, "wrong record"] += 1
                return
            self._packer.offer(topic, key, sample)
            if len(self._packer) >= self._pack_samples:
                self._full.set()

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:
        """See :meth:`Emit.watermark`."""
        with self._lock:
            self._packer.watermark(topic, instance, watermark_ns)

    def _drain(self) -> list[Packed]:
        with self._lock:
            self._full.clear()
            return self._packer.drain()


class MemoryPublisher(BufferedPublisher):
    """Keeps the packs in ``packs`` instead of publishing them; packs on :meth:`flush` only."""

    def __init__(
        self, *, agent: str = "memory", boot_ns: int = 0, config: PublishConfig | None = None
    ) -> None:
        super().__init__(agent=agent, boot_ns=boot_ns, config=config or PublishConfig())
        self.packs: list[Packed] = []

    def start(self) -> None:
        """Nothing to begin."""

    def flush(self) -> list[Packed]:
        """Pack what waits; returns the new packs."""
        packs = self._drain()
        self.packs += packs
        return packs

    def close(self, timeout_s: float) -> None:  # noqa: ARG002 - nothing here can take long
        """Pack what waits."""
        self.flush()

    def stats(self) -> PublisherStats:
        """See :meth:`Publisher.stats`."""
        with self._lock:
            return PublisherStats(
                samples=self._samples,
                packs=len(self.packs),
                dropped=dict(self._packer.drops + self._refused),
                waiting=len(self._packer),
            )


class KafkaPublisher(BufferedPublisher):
    """Packs every ``linger_ms`` and produces to Kafka from a thread of its own.

    While the broker is away, messages wait in a bounded backlog, the oldest of which gives way.
    The order of a key's messages is kept; a message may arrive twice when an acknowledgement was
    lost.
    """

    def __init__(
        self,
        *,
        agent: str,
        boot_ns: int,
        config: PublishConfig,
        kafka: KafkaConfig,
        registry: SchemaRegistry | None = None,
    ) -> None:
        super().__init__(agent=agent, boot_ns=boot_ns, config=config)
        self._agent = agent
        self._config = config
        self._kafka = kafka
        self._has_registry = registry is not None
        self._codec = Codec(registry, prefix=kafka.prefix)
        self._ready: set[str] = set()
        self._registry_retry = 0.0
        self._linger_s = config.linger_ms / 1000
        self._backlog = Backlog(int(config.backlog_mb * 1e6))
        self._packs = 0
        self._bytes = 0
        self._broker_away = False
        self._errors: Counter[str] = Counter()
        self._lost: Drops = Counter()
        self._in_flight = 0
        self._stop = threading.Event()
        self._deadline = 0.0
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        """See :meth:`Publisher.start`; the client library starts its threads here."""
        self._producer = self._connected()
        self._thread.start()

    def _connected(self) -> Producer:
        try:
            return Producer(
                # Its own log repeats with every attempt to connect; the callback tells errors once.
                {"error_cb": self._client_error, "log_level": 2}
                | self._kafka.librdkafka(
                    client_id=f"latencyprism-{self._agent}",
                    acks="all",
                    # Order without idempotence, which not every broker knows; packs are few.
                    max_in_flight_requests_per_connection=1,
                    # The hash of the Java client, so that all producers agree on the partition.
                    partitioner="murmur2_random",
                    compression_type="lz4",
                    message_timeout_ms=int(self._config.delivery_timeout_s * 1000),
                    queue_buffering_max_messages=2 * IN_FLIGHT,
                    queue_buffering_max_kbytes=2 * IN_FLIGHT * MESSAGE_BYTES // 1024,
                    reconnect_backoff_max_ms=2000,
                    socket_keepalive_enable=True,
                ),
                logger=logging.getLogger(f"{__name__}.librdkafka"),
            )
        except KafkaException as error:
            raise ValueError(f"Kafka client configuration: {error.args[0].str()}") from error

    def close(self, timeout_s: float) -> None:
        """See :meth:`Publisher.close`."""
        self._deadline = time.monotonic() + timeout_s
        self._stop.set()
        self._full.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s + 1)

    def stats(self) -> PublisherStats:
        """See :meth:`Publisher.stats`."""
        with self._lock:
            dropped = self._packer.drops + self._refused + self._backlog.drops + self._lost
            return PublisherStats(
                samples=self._samples,
                packs=self._packs,
                bytes=self._bytes,
                dropped=dict(dropped),
                errors=dict(self._errors),
                waiting=len(self._packer),
                backlog_bytes=self._backlog.bytes,
                in_flight=self._in_flight,
                broker_away=self._broker_away,
            )

    def _run(self) -> None:
        while not self._stop.is_set():
            self._full.wait(self._linger_s)
            self._guard(self._turn)
        self._guard(self._finish)

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:  # one turn's fault must not end the thread
            logger.exception("Publishing failed; going on")
            self._errors["internal"] += 1

    def _turn(self) -> None:
        if self._codec_ready():
            for packed in self._drain():
                self._encode(packed)
        else:
            self._full.clear()
            self._stop.wait(self._linger_s)
        self._send()
        self._producer.poll(0)

    def _finish(self) -> None:
        self._turn()
        while self._backlog and time.monotonic() < self._deadline:
            self._producer.poll(0.02)
            self._send()
        self._producer.flush(max(0.0, self._deadline - time.monotonic()))
        self._producer.purge()
        self._producer.poll(0)
        while self._backlog:
            self._lose(self._backlog.pop(), "closed")

    def _codec_ready(self) -> bool:
        """Whether the schemas of all waiting topics are known to the registry, if there is one."""
        if not self._has_registry:
            return True
        with self._lock:
            topics = self._packer.topics() - self._ready
        if not topics:
            return True
        if time.monotonic() < self._registry_retry:
            return False
        try:
            for name in topics:
                self._codec.encode(BY_NAME[name], _NOTHING)
        except OSError as error:
            self._registry_retry = time.monotonic() + REGISTRY_RETRY_S
            self._errors["schema registry"] += 1
            logger.warning("Holding samples, the schema registry does not answer: %s", error)
            return False
        self._ready |= topics
        return True

    def _encode(self, packed: Packed) -> None:
        topic, key, pack = packed.topic, packed.key, packed.pack
        try:
            data = self._codec.encode(topic, pack)
        except ValueError:
            pack = replace(pack, samples=[s for s in pack.samples if self._fits(topic, s)])
            data = self._codec.encode(topic, pack)
        if len(data) <= MESSAGE_BYTES:
            self._backlog.push(Message(topic, key, data, len(pack.samples)))
        else:
            logger.error("Dropped a message of %d bytes, more than Kafka takes", len(data))
            self._lost[topic.name, "too large"] += len(pack.samples)

    def _fits(self, topic: Topic, sample: Any) -> bool:
        try:
            self._codec.encode(topic, replace(_NOTHING, samples=(sample,)))
        except ValueError as error:
            logger.error("Dropped a sample: %s", error)  # noqa: TRY400 - the source is at fault
            self._lost[topic.name, "invalid"] += 1
            return False
        return True

    def _send(self) -> None:
        while self._backlog and self._in_flight < IN_FLIGHT:
            message = self._backlog.pop()
            try:
                self._producer.produce(
                    self._kafka.topic(message.topic),
                    key=message.key.encode(),
                    value=message.data,
                    on_delivery=partial(self._delivered, message),
                )
            except BufferError:
                self._backlog.put_back(message)
                return
            except KafkaException as error:
                self._refuse(message, error.args[0])
            else:
                self._in_flight += 1

    def _delivered(self, message: Message, error: KafkaError | None, _: object) -> None:
        self._in_flight -= 1
        if error is not None:
            self._refuse(message, error)
            return
        if self._broker_away:
            logger.info("The Kafka broker is back")
            self._broker_away = False
        self._packs += 1
        self._bytes += len(message.data)

    def _refuse(self, message: Message, error: KafkaError) -> None:
        if error.name() not in self._errors:
            logger.warning(
                "A message to %s was not delivered, further ones are counted: %s",
                self._kafka.topic(message.topic),
                error.str(),
            )
        self._errors[error.name()] += 1
        self._lose(message, error.name())

    def _lose(self, message: Message, reason: str) -> None:
        if message.samples:
            self._lost[message.topic.name, reason] += message.samples

    def _client_error(self, error: KafkaError) -> None:
        self._errors[error.name()] += 1
        if error.code() == KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001 - the library's name for it
            if not self._broker_away:
                logger.warning("No Kafka broker of %s answers", self._kafka.bootstrap)
            self._broker_away = True
        elif self._errors[error.name()] == 1:
            logger.warning("Kafka: %s; further ones are counted", error.str())
