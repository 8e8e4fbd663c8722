"""The Faust application: edges around the pure parts, a few lines each."""

import asyncio
import logging
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import faust
from aiokafka.errors import KafkaError, MessageSizeTooLargeError
from confluent_kafka import KafkaException
from faust.types import EventT, StreamT

from latencyprism.schemas.codec import DecodeError, Pack, codec_for
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import Ack, Alert, BatchProfile, Command
from latencyprism.schemas.topics import (
    ALERTS,
    CONTROL_COMMANDS,
    DEADLETTER,
    LATENCY_BATCHES,
    MODELS,
    TELEMETRY,
    Topic,
)
from latencyprism.streams.acks import InOrder, Receipt
from latencyprism.streams.answers import AckReader
from latencyprism.streams.config import StreamsConfig
from latencyprism.streams.letters import dead_letter, key_of
from latencyprism.streams.loading import inherit
from latencyprism.streams.shard import InstanceShard, Refit, ServiceShard
from latencyprism.streams.worker import GROUP, SAVE_EVERY_S

logger = logging.getLogger(__name__)

PUBLISH_S: Final = 0.05
TICK_S: Final = 1.0
TURN_S: Final = 0.005
"""Longest that windows are closed without letting the event loop do something else."""
SAVE_TURN_S: Final = 0.05
"""Longest that snapshots are taken and sent in one turn."""
REVOKE_SAVE_S: Final = 5.0
"""Longest that a rebalance waits for snapshots; what is not saved by then is learned again."""
PACK_PROFILES: Final = 128
MESSAGE_BYTES: Final = 4 << 20
LARGE_BYTES: Final = 32 << 10
"""A message from this size on takes some ten milliseconds to decode."""
RETRY_S: Final = 1.0

Stream = StreamT[Any]
Event = EventT[bytes]


def build_app(
    config: StreamsConfig,
    kafka: KafkaConfig,
    *,
    datadir: Path,
    save_every_s: float = SAVE_EVERY_S,
    ready: Callable[[], object] = lambda: None,
) -> faust.App:
    """An application that reads telemetry and writes profiles, alerts, commands and models.

    The topics must exist, and so must the parent of ``datadir``. ``ready`` is called whenever a
    rebalance is over and the worker reads. Raises OSError when TLS files cannot be read.
    """
    app = faust.App(
        kafka.group(GROUP),
        broker=[f"kafka://{address}" for address in kafka.bootstrap.split(",")],
        broker_credentials=credentials(kafka),
        datadir=datadir,
        processing_guarantee="at_least_once",
        broker_session_timeout=6.0,
        broker_heartbeat_interval=1.0,
        broker_rebalance_timeout=15.0,
        broker_commit_interval=1.0,
        consumer_auto_offset_reset="earliest",
        producer_max_request_size=MESSAGE_BYTES,
        producer_linger=0,
        stream_buffer_maxsize=1_024,
        stream_wait_empty=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        web_enabled=False,
        worker_redirect_stdouts=False,
    )
    edges = Edges(app, config, kafka, save_every_s=save_every_s, ready=ready)
    for topic in TELEMETRY:
        app.agent(edges.channel(topic), name=f"read.{topic.name}")(partial(edges.read, topic))
    app.agent(edges.channel(LATENCY_BATCHES), name="decide")(edges.decide)
    app.task(edges.keep_publishing)
    app.task(edges.keep_ticking)
    app.task(edges.follow_acks)
    app.on_partitions_revoked.connect(edges.on_revoked)
    app.on_partitions_assigned.connect(edges.on_assigned)
    app.on_before_shutdown.connect(edges.on_shutdown)
    return app


def credentials(kafka: KafkaConfig) -> Any:
    """What Faust needs to log in; None for a cluster that asks nothing."""
    context = kafka.ssl_context()
    if kafka.security_protocol.startswith("SASL"):
        return faust.SASLCredentials(
            mechanism=kafka.sasl_mechanism,
            username=kafka.sasl_username,
            password=kafka.sasl_password,
            ssl_context=context,
        )
    return faust.SSLCredentials(context) if context else None


class Edges:
    """What happens at the application's topics, timers and rebalances."""

    def __init__(
        self,
        app: faust.App,
        config: StreamsConfig,
        kafka: KafkaConfig,
        *,
        save_every_s: float,
        ready: Callable[[], object],
    ) -> None:
        self._app = app
        self._config = config
        self._kafka = kafka
        self._save_every_s = save_every_s
        self._ready = ready
        self._codec = codec_for(kafka)
        self._channels: dict[str, Any] = {}
        self._instances: InstanceShard[Receipt[Event]] = InstanceShard(config)
        self._services = ServiceShard(config)
        self._order: InOrder[Event] = InOrder()
        self._mine: frozenset[int] = frozenset()
        """Partitions assigned to this worker, the same of every topic."""
        self._settled = asyncio.Event()
        """Set while no rebalance is under way and all that was left for this worker is read."""
        self._publishing = asyncio.Lock()
        self._fitter = ThreadPoolExecutor(1, thread_name_prefix="refit")
        self._tasks: set[asyncio.Task[None]] = set()
        self._taking_over: asyncio.Task[None] | None = None
        self._agent = f"{socket.gethostname()}-{os.getpid()}"
        self._boot_ns = time.time_ns()
        self._sequences: Counter[str] = Counter()

    def channel(self, topic: Topic) -> Any:
        """The topic on the cluster, bytes as they are."""
        if topic.name not in self._channels:
            self._channels[topic.name] = self._app.topic(
                self._kafka.topic(topic),
                key_type=bytes,
                value_type=bytes,
                key_serializer="raw",
                value_serializer="raw",
            )
        return self._channels[topic.name]

    # ------------------------------------------------------------------------ what comes in

    async def read(self, topic: Topic, stream: Stream) -> None:
        """Give the packs of a telemetry topic to their instances."""
        async for receipt, instance, pack in self._packs(topic, stream):
            self._instances.add(
                topic,
                instance,
                pack,
                time.time_ns(),
                partition=receipt.partition[1],
                token=receipt,
            )
            if self._instances.waiting >= PACK_PROFILES:
                await self.publish()

    async def decide(self, stream: Stream) -> None:
        """Give profiles to their services, and publish what follows."""
        take = self._follow if self._config.clock == "event" else self._add
        async for receipt, _, pack in self._packs(LATENCY_BATCHES, stream):
            partition = receipt.partition[1]
            outs = [out for profile in pack.samples for out in take(profile, partition)]
            await self._publish_decisions(outs)
            self._done(receipt)

    async def follow_acks(self) -> None:
        """Give every router's answers to the services: each worker reads them all."""
        reader = AckReader(self._kafka)
        try:
            while not self._app.should_stop:
                for found in await asyncio.to_thread(reader.poll):
                    if isinstance(found, Ack):
                        self._services.acknowledge(found)
                    elif 0 in self._mine:  # one worker's word is enough
                        await self._send(DEADLETTER, found.topic, found)
        finally:
            reader.close()

    def _add(self, profile: BatchProfile, partition: int) -> list[Alert | Command]:
        return self._services.add(profile, time.time_ns(), partition=partition)

    def _follow(self, profile: BatchProfile, partition: int) -> list[Alert | Command]:
        return self._services.follow(profile, partition=partition)

    async def _packs(
        self, topic: Topic, stream: Stream
    ) -> AsyncIterator[tuple[Receipt[Event], str, Pack[Any]]]:
        """(receipt, key, pack) of each message; what is none becomes a dead letter."""
        async for event in cast("faust.Stream[bytes]", stream).noack().events():
            await self._settled.wait()
            message = event.message
            if message.partition not in self._mine:
                continue
            receipt = self._order.take(message.topic, message.partition, event)
            try:
                pack = await self._decode(topic, event.value or b"")
                key = key_of(topic, message.key, pack)
            except DecodeError as e:
                letter = dead_letter(
                    e,
                    topic=message.topic,
                    partition=message.partition,
                    offset=message.offset,
                    key=message.key,
                    payload=event.value,
                )
                await self._send(DEADLETTER, letter.topic, letter)
                self._done(receipt)
            else:
                yield receipt, key, pack

    async def _decode(self, topic: Topic, value: bytes) -> Pack[Any]:
        """The pack; a large one in another thread, so that the event loop goes on meanwhile."""
        if len(value) < LARGE_BYTES:
            pack: Pack[Any] = self._codec.decode(topic, value)
            return pack
        return await asyncio.to_thread(self._codec.decode, topic, value)

    # ------------------------------------------------------------------------ what goes out

    async def publish(self) -> None:
        """Close the windows that are due and publish them."""
        async with self._publishing:
            if self._settled.is_set():
                await self._advance()
            closed = self._instances.drain()
            await self._publish_profiles(closed.profiles)
            for receipt in self._instances.published(closed, time.time_ns()):
                self._done(receipt)
            for refit in self._instances.refits():
                self._spawn(self._refit(refit))

    async def keep_publishing(self) -> None:
        """:meth:`publish` for as long as the application runs."""
        while not self._app.should_stop:
            await self.publish()
            await self._app.sleep(PUBLISH_S)

    async def keep_ticking(self) -> None:
        """Every second renew leases, resolve alerts, and publish the snapshots that are due.

        In a replay the profiles' own clock renews and resolves.
        """
        while not self._app.should_stop:
            await self._app.sleep(TICK_S)
            if not self._settled.is_set():
                continue
            if self._config.clock == "wall":
                await self._publish_decisions(self._services.tick(time.time_ns()))
            await self._save(every_s=self._save_every_s, within_s=SAVE_TURN_S)

    async def _advance(self) -> None:
        turn = time.monotonic() + TURN_S
        for instance in self._instances:
            self._instances.advance(instance, time.time_ns())
            if time.monotonic() > turn:
                await asyncio.sleep(0)
                turn = time.monotonic() + TURN_S

    async def _publish_profiles(self, profiles: Sequence[BatchProfile]) -> None:
        by_service: defaultdict[str, list[BatchProfile]] = defaultdict(list)
        for profile in profiles:
            by_service[profile.service].append(profile)
        messages = []
        for service, told in by_service.items():
            for start in range(0, len(told), PACK_PROFILES):
                pack: Pack[BatchProfile] = Pack(
                    agent=self._agent,
                    boot_ns=self._boot_ns,
                    sequence=self._sequences[service],
                    watermark_ns=0,  # no promise: each instance closes at its own pace
                    samples=told[start : start + PACK_PROFILES],
                )
                self._sequences[service] += 1
                messages.append((LATENCY_BATCHES, service, pack))
        await self._send_all(messages)

    async def _publish_decisions(self, outs: Iterable[Alert | Command]) -> None:
        await self._send_all(
            [
                (ALERTS, out.service, out)
                if isinstance(out, Alert)
                else (CONTROL_COMMANDS, out.target, out)
                for out in outs
            ]
        )

    async def _save(self, *, every_s: float, within_s: float) -> None:
        end = time.monotonic() + within_s
        for partition, snapshot in self._instances.snapshots(time.time_ns(), every_s=every_s):
            await self.publish()  # before the snapshot that knows these windows
            await self._send(MODELS, snapshot.instance, snapshot, partition)
            if time.monotonic() > end:
                break
            await asyncio.sleep(0)

    async def _send_all(self, messages: Iterable[tuple[Topic, str, Any]]) -> None:
        """Publish in order; returns when the brokers have all."""
        posted = []
        for message in messages:
            try:
                posted.append((message, await self._post(*message)))
            except MessageSizeTooLargeError:
                await self._send(*message)
        for message, delivery in posted:
            try:
                await delivery
            except MessageSizeTooLargeError:
                await self._send(*message)
            except KafkaError as e:
                await self._wait_for_broker(e)
                await self._send(*message)

    async def _send(
        self, topic: Topic, key: str, record: Any, partition: int | None = None
    ) -> None:
        """Publish one message; returns when the brokers have it, however long they are away.

        A pack that is too large for them goes in halves; what is too large by itself is left out.
        """
        while True:
            try:
                await (await self._post(topic, key, record, partition))
                return
            except MessageSizeTooLargeError as e:
                if isinstance(record, Pack) and len(record.samples) > 1:
                    middle = len(record.samples) // 2
                    for samples in (record.samples[:middle], record.samples[middle:]):
                        await self._send(topic, key, replace(record, samples=samples), partition)
                else:
                    logger.warning("a message to %s is left out, %.100s: %s", topic.name, key, e)
                return
            except KafkaError as e:
                await self._wait_for_broker(e)

    async def _post(
        self, topic: Topic, key: str, record: Any, partition: int | None = None
    ) -> Awaitable[Any]:
        """Hand a message to the producer; what is returned waits for the brokers."""
        value = self._codec.encode(topic, record)
        delivery: Awaitable[Any] = await self.channel(topic).send(
            key=key.encode(), value=value, partition=partition
        )
        return delivery

    async def _wait_for_broker(self, error: KafkaError) -> None:
        """Before another try; raises an error that another try can't mend."""
        if not error.retriable:
            raise error
        logger.warning("publishing: %s; tried again", error)
        await asyncio.sleep(RETRY_S)

    def _done(self, receipt: Receipt[Event]) -> None:
        for event in self._order.done(receipt):
            event.ack()

    async def _refit(self, refit: Refit) -> None:
        loop = asyncio.get_running_loop()
        install = await loop.run_in_executor(self._fitter, refit.work)
        install()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background work failed", exc_info=error)

    # ------------------------------------------------------------------------ comings and goings

    async def on_revoked(self, *_: Any, **__: Any) -> None:
        """Leave the partitions in a state that another worker can take over."""
        if self._settled.is_set():
            self._settled.clear()
            await self.publish()
            self._order.forget()
            self._instances.forget_tokens()
            await self._save(every_s=0.0, within_s=REVOKE_SAVE_S)

    async def on_assigned(self, *told: Any, **_: Any) -> None:
        """Drop what went to others, and take over what is new."""
        *_app, assigned = told
        names = {self._kafka.topic(topic) for topic in (*TELEMETRY, LATENCY_BATCHES)}
        before = self._mine
        self._mine = frozenset(tp.partition for tp in assigned if tp.topic in names)
        self._instances.keep(self._mine)
        self._services.keep(self._mine)
        if self._taking_over is not None:
            self._taking_over.cancel()
        self._taking_over = self._spawn(self._take_over(self._mine - before))

    async def on_shutdown(self, *_: Any, **__: Any) -> None:
        """Publish and save what there is, while the producer is up."""
        if self._settled.is_set():
            await self.publish()
            self._settled.clear()
            await self._save(every_s=0.0, within_s=REVOKE_SAVE_S)
        for task in self._tasks:
            task.cancel()
        self._fitter.shutdown(wait=False, cancel_futures=True)

    async def _take_over(self, gained: frozenset[int]) -> None:
        group = self._kafka.group(GROUP)
        while gained:
            try:
                left = await asyncio.to_thread(inherit, self._kafka, group=group, partitions=gained)
            except (KafkaException, OSError) as e:
                logger.warning("partitions %s are not taken over yet: %s", sorted(gained), e)
                await asyncio.sleep(RETRY_S)
                continue
            self._instances.prepare(left.snapshots, left.published)
            for partition, profile in left.history:
                self._services.follow(profile, partition=partition)
            break
        self._settled.set()
        self._ready()
