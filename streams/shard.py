"""What one worker holds: the pipelines of its instances and of its services. Pure.

The keys of both are spread over partitions, and a worker holds those of the partitions that are
assigned to it.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

from latencyprism.schemas.codec import Pack
from latencyprism.schemas.records import Ack, Alert, BatchProfile, Command, ModelSnapshot
from latencyprism.schemas.topics import Topic
from latencyprism.streams.config import NS_PER_S, ServiceConfig, StreamsConfig
from latencyprism.streams.detection.judge import MixtureJudge
from latencyprism.streams.judge import Judge
from latencyprism.streams.pipeline import InstancePipeline
from latencyprism.streams.service import ServicePipeline

logger = logging.getLogger(__name__)

T = TypeVar("T")

HOLD_NS: Final = 10 * NS_PER_S
"""Wall time after which a message is done with though its windows are not closed."""
WINDOWS_AT_ONCE: Final = 8
"""Windows of one instance that are closed before others have their turn."""
TICK_NS: Final = NS_PER_S


@dataclass(slots=True)
class _Instance(Generic[T]):
    """One pipeline and what is to be known of it beside."""

    pipeline: InstancePipeline
    partition: int
    published_ns: int
    """End of the newest window that was published before this worker took over."""
    closed_ns: int = 0
    """End of the newest window that was closed."""
    saved_ns: int = 0
    """Wall time of the newest snapshot."""
    saved_until_ns: int = -1
    """``closed_ns`` of the newest snapshot."""
    held: dict[str, deque[tuple[int, int, T]]] = field(default_factory=dict)
    """By topic (watermark, wall time of arrival, token) of the messages not done with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Windows to be published, and how far each instance is published once they are."""

    profiles: tuple[BatchProfile, ...]
    until_ns: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """Work for another thread, which gives the installation to be done where the judge is."""

    instance: str
    work: Callable[[], Callable[[], None]]


class InstanceShard(Generic[T]):
    """Instances of one worker. Not thread-safe; wall times are passed in.

    Each message comes with a token that is given back, by :meth:`published`, once it need not be
    read again: the windows that it touches are published and a message with an earlier watermark
    of its topic is kept. Whoever starts again from the messages whose tokens were not given back
    closes the windows that were not published, complete.

    :meth:`advance` is to be called for each instance every 50 to 100 ms. On the event clock windows
    are closed as the watermark passes them, too, and refits are done at once, so that what comes
    out depends on the packs alone; on the wall clock :meth:`refits` tells what is to be done.
    """

    def __init__(
        self, config: StreamsConfig, *, judge: Callable[[str], Judge] | None = None
    ) -> None:
        """``judge`` makes the judge of an instance; None for the configured mixture."""
        self._config = config
        self._judge = judge or (lambda _: MixtureJudge(config.detection))
        self._instances: dict[str, _Instance[T]] = {}
        self._snapshots: dict[str, ModelSnapshot] = {}
        self._published: dict[str, int] = {}
        self._closed: list[BatchProfile] = []
        self._refits: list[Refit] = []

    def __len__(self) -> int:
        return len(self._instances)

    def __iter__(self) -> Iterator[str]:
        """Instances at this moment."""
        return iter(tuple(self._instances))

    @property
    def waiting(self) -> int:
        """Windows closed and not yet drained."""
        return len(self._closed)

    def prepare(self, snapshots: Iterable[ModelSnapshot], published: Mapping[str, int]) -> None:
        """Take note of what earlier workers learned and how far (window end) they published.

        Each is used when its instance is first heard of; what was published is known of all.
        """
        for snapshot in snapshots:
            if snapshot.instance not in self._instances:
                self._snapshots[snapshot.instance] = snapshot
        self._published.update(published)

    def add(
        self,
        topic: Topic,
        instance: str,
        pack: Pack[Any],
        now_ns: int,
        *,
        partition: int = 0,
        token: T | None = None,
    ) -> None:
        """Take a pack. Raises nothing for what is in it."""
        known = self._instances.get(instance)
        if known is None:
            known = self._instances[instance] = self._make(instance, partition, now_ns)
        if token is not None:
            held = known.held.setdefault(topic.name, deque())
            held.append((pack.watermark_ns, now_ns, token))
        known.pipeline.add(topic, pack, now_ns)
        if self._config.clock == "event":
            self.advance(instance, now_ns)

    def advance(self, instance: str, now_ns: int) -> None:
        """Close the windows of an instance that are due.

        Takes some milliseconds, on the event clock some hundred where a refit is due. An instance
        whose pipeline fails begins anew.
        """
        known = self._instances.get(instance)
        if known is None:
            return
        if self._config.clock == "event":
            while self._close(instance, known, now_ns, limit=1):
                if (work := known.pipeline.judge.refit()) is not None:
                    work()()
        elif (
            self._close(instance, known, now_ns, limit=WINDOWS_AT_ONCE)
            and (work := known.pipeline.judge.refit()) is not None
        ):
            self._refits.append(Refit(instance=instance, work=work))

    def drain(self) -> Closed:
        """Windows closed since the last time, in order for each instance."""
        profiles, self._closed = tuple(self._closed), []
        until_ns = {name: known.closed_ns for name, known in self._instances.items()}
        return Closed(profiles=profiles, until_ns=until_ns)

    def published(self, closed: Closed, now_ns: int) -> list[T]:
        """Tokens of the messages that are done with, now that these windows are published."""
        done: list[T] = []
        for instance, until_ns in closed.until_ns.items():
            known = self._instances.get(instance)
            for held in known.held.values() if known else ():
                while held and (
                    (len(held) > 1 and held[1][0] <= until_ns) or held[0][1] < now_ns - HOLD_NS
                ):
                    done.append(held.popleft()[2])
        return done

    def refits(self) -> list[Refit]:
        """Refits that are due, each told once."""
        due, self._refits = self._refits, []
        return due

    def snapshots(self, now_ns: int, *, every_s: float) -> Iterator[tuple[int, ModelSnapshot]]:
        """(partition, snapshot) of the instances that learned since their last one, ``every_s`` or
        more ago. Those that have been silent for very long are dropped after it.

        A snapshot knows the windows that were closed when it was taken: publish those before it,
        or whoever takes over may learn them twice.
        """
        for name, known in list(self._instances.items()):
            gone = known.pipeline.forgettable(now_ns)
            due = now_ns - known.saved_ns >= every_s * NS_PER_S
            if (due or gone) and known.closed_ns > known.saved_until_ns:
                known.saved_ns, known.saved_until_ns = now_ns, known.closed_ns
                yield known.partition, known.pipeline.snapshot()
            if gone:
                self._instances.pop(name, None)

    def keep(self, partitions: Iterable[int]) -> None:
        """Drop the instances of all other partitions."""
        kept = set(partitions)
        for name in [n for n, known in self._instances.items() if known.partition not in kept]:
            del self._instances[name]

    def forget_tokens(self) -> None:
        """Give no token back that was taken until now: their messages come again."""
        for known in self._instances.values():
            known.held.clear()

    def _make(self, instance: str, partition: int, now_ns: int) -> _Instance[T]:
        pipeline = InstancePipeline(instance, config=self._config, judge=self._judge(instance))
        snapshot = self._snapshots.pop(instance, None)
        if snapshot is not None and pipeline.restore(snapshot):
            logger.info("%s goes on with model %s", instance, snapshot.version)
        return _Instance(
            pipeline=pipeline,
            partition=partition,
            published_ns=self._published.pop(instance, 0),
            saved_ns=now_ns,
        )

    def _close(self, instance: str, known: _Instance[T], now_ns: int, *, limit: int) -> bool:
        """Close windows; whether there were any."""
        try:
            profiles = known.pipeline.advance(now_ns, limit=limit)
        except Exception:
            # One instance's trouble must not stop the others; without its state it can go on.
            logger.exception("%s: its windows cannot be closed; it begins anew", instance)
            del self._instances[instance]
            return False
        if profiles:
            known.closed_ns = profiles[-1].window_end_ns
        self._closed += [p for p in profiles if p.window_end_ns > known.published_ns]
        return bool(profiles)


class ServiceShard:
    """Services of one worker. Not thread-safe; times are event times near the wall clock, or of
    another day in a replay.
    """

    def __init__(self, config: StreamsConfig) -> None:
        self._config = ServiceConfig(fleet=config.fleet, sculpting=config.sculpting)
        self._services: dict[str, tuple[ServicePipeline, int]] = {}
        """Pipeline and partition of each."""
        self._ticked_ns = 0

    def add(
        self, profile: BatchProfile, now_ns: int, *, partition: int = 0
    ) -> list[Alert | Command]:
        """Take a profile; the alerts that changed and the commands that follow from them."""
        pipeline, _ = self._services.setdefault(
            profile.service,
            (ServicePipeline(profile.service, config=self._config), partition),
        )
        return self._outs(profile.service, partial(pipeline.add, profile, now_ns))

    def follow(self, profile: BatchProfile, *, partition: int = 0) -> list[Alert | Command]:
        """Take a profile with its own time as the present, ticks included, as in a replay."""
        now_ns = profile.closed_at_ns
        ticked = self.tick(now_ns) if now_ns - self._ticked_ns >= TICK_NS else []
        return [*ticked, *self.add(profile, now_ns, partition=partition)]

    def tick(self, now_ns: int) -> list[Alert | Command]:
        """Renew leases and resolve alerts of the silent; to be called every second."""
        self._ticked_ns = now_ns
        return [
            out
            for service, (pipeline, _) in tuple(self._services.items())
            for out in self._outs(service, partial(pipeline.tick, now_ns))
        ]

    def acknowledge(self, ack: Ack) -> None:
        """Take a router's answer to a command of any of the services."""
        for pipeline, _ in self._services.values():
            pipeline.acknowledge(ack)

    def keep(self, partitions: Iterable[int]) -> None:
        """Drop the services of all other partitions."""
        kept = set(partitions)
        self._services = {n: entry for n, entry in self._services.items() if entry[1] in kept}

    def _outs(
        self, service: str, work: Callable[[], list[Alert | Command]]
    ) -> list[Alert | Command]:
        """What comes of the work; nothing of a service whose pipeline fails, which begins anew."""
        try:
            return work()
        except Exception:
            # One service's trouble must not stop the others; its leases run out by themselves.
            logger.exception(
                "service %.100s: its profiles cannot be decided on; it begins anew", service
            )
            del self._services[service]
            return []
