"""Runs the enabled sources of one host, each for itself, and watches what that costs."""

import ctypes
import gc
import logging
import os
import queue
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from latencyprism.collectors.catalogue import BUILDERS, Planned, plan
from latencyprism.collectors.config import CollectorConfig
from latencyprism.collectors.discovery.source import DiscoverySource
from latencyprism.collectors.leading import Leading
from latencyprism.collectors.privileges import NEEDED, drop, needed, permitted
from latencyprism.collectors.publisher import KafkaPublisher, Publisher
from latencyprism.collectors.runner import Runner, SourceState, ThreadClock
from latencyprism.collectors.shedding import NOTHING, Cost, Decision, Share, Shedder
from latencyprism.collectors.source import AbsentError, Source, UnavailableError
from latencyprism.collectors.stacks.choice import Choice
from latencyprism.schemas.codec import SchemaRegistry
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import AgentSample, SourceHealth
from latencyprism.schemas.topics import TELEMETRY_AGENTS

logger = logging.getLogger(__name__)

WATCH_S = 1.0
HEALTH_S = 2.0
"""How often the agent publishes how it does."""
LOG_S = 60.0
"""How often it says so in the log."""
STOP_S = 0.5
"""How long sources may take to end; the contract of :meth:`Source.run`."""
FLUSH_S = 0.4
"""How long the publisher may then take, so that the agent ends within a second."""
LONGEST_ERROR = 500
FIXED = ("agent", "publish", "privileges")
"""Settings that only a restart changes."""

Reread = Callable[[], tuple[CollectorConfig, Collection[str]]]
"""Reads the settings anew: those of the collectors, and the names of others that have changed and
would need a restart. Raises ValueError or OSError when they cannot be used."""


@dataclass(slots=True, eq=False)
class _Group:
    """What became of one entry of the plan."""

    planned: Planned
    runners: list[Runner] = field(default_factory=list)
    unavailable: str | None = None
    """Why there are none."""

    @property
    def refused(self) -> bool:
        """Whether the machine did not permit it, so that it makes sense to try again."""
        return self.unavailable is not None or any(runner.refused for runner in self.runners)

    def health(self) -> list[SourceHealth]:
        """How its sources do."""
        if self.unavailable is None:
            return [runner.status for runner in self.runners]
        name, error = self.planned.name, self.unavailable
        return [SourceHealth(name=name, state="unavailable", failures=0, error=error)]


def process_cost() -> tuple[float, float]:
    """CPU time of this process and of its children that ended, seconds; its resident memory, MB."""
    with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123 - cheaper than a Path, once a second
        pages = int(statm.read().split()[1])
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(used.ru_utime + used.ru_stime for used in usage)
    return cpu_s, pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class Agent:
    """Runs sources into a publisher until told to stop.

    A source that crashes is started again with backoff while the rest go on. Once a second the
    cost of the process is measured and handed to a :class:`Shedder`, and it is looked whether
    discovery found other servers or ``reload`` was set: then only those sources are ended and
    started whose inputs the change touches. ``plan`` gives what to run for a configuration.
    """

    def __init__(
        self,
        config: CollectorConfig,
        publisher: Publisher,
        *,
        plan: Callable[[CollectorConfig], list[Planned]] = plan,
        reread: Reread | None = None,
        boot_ns: int | None = None,
        rng: random.Random | None = None,
        cost: Callable[[], tuple[float, float]] = process_cost,
    ) -> None:
        self.reload = threading.Event()
        """Set it to have the settings read anew within a second."""
        self._config = config
        self._publisher = publisher
        self._leading = Leading(publisher)
        self._plan = plan
        self._reread = reread
        self._found: tuple[str, ...] = ()
        self._followed: tuple[str, ...] = ()
        self._settings_error: str | None = None
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._host = socket.gethostname()
        self._boot_ns = boot_ns if boot_ns is not None else time.time_ns()
        self._began = time.monotonic()
        self._meter = _Meter(cost, publisher)
        self._shedder = Shedder(config.cost)
        self._cost: Cost | None = None
        self._refusals: set[str] = set()
        self._ran = False
        """Whether it has begun to run, so that privileges were given up if they should be."""
        self._groups: list[_Group] = []
        self._groups = self._groups_for(config)

    def prepare(self) -> None:
        """Have the sources open what only a privileged process can."""
        for runner in self._runners():
            runner.prepare()

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop`` is set, then end within about a second.

        Raises ValueError when the client library refuses the Kafka settings.
        """
        self._ran = True
        self._publisher.start()
        for runner in self._runners():
            runner.start()
        try:
            self._watch(stop)
        finally:
            _end(self._runners())
            self._publisher.close(FLUSH_S)
            stats = self._publisher.stats()
            logger.info(
                "Ended: of %d samples %d were dropped; the broker has %d messages",
                *(stats.samples, sum(stats.dropped.values()), stats.packs),
            )

    def apply(self, config: CollectorConfig) -> None:
        """Go on with other settings: sources whose inputs are the same run on untouched.

        Blocks while the sources that go end, at most ``STOP_S``. Raises ValueError, having
        changed nothing, when a setting is wrong. Those in :data:`FIXED` stay as they are.
        """
        config = replace(config, **{name: getattr(self._config, name) for name in FIXED})
        groups = self._groups_for(config)
        gone = [group for group in self._groups if group not in groups]
        new = [group for group in groups if group not in self._groups]
        if gone:
            _end(runner for group in gone for runner in group.runners)
            _give_memory_back()
        if config.cost != self._config.cost:
            for kind in self._shedder.shed:
                self._resume(kind, "the ceilings were changed")
            self._shedder = Shedder(config.cost)
        self._config, self._groups = config, groups
        for kind in set(self._shedder.shed) - {runner.kind for runner in self._runners()}:
            self._shedder.forget(kind)
        for runner in (runner for group in new for runner in group.runners):
            if runner.kind in self._shedder.shed:
                runner.stop("shed", "its kind is shed")
            else:
                runner.start()
        ended, started = (
            ", ".join(runner.name for group in part for runner in group.runners) or "none"
            for part in (gone, new)
        )
        logger.info("Sources ended: %s; started: %s", ended, started)

    def status(self) -> AgentSample:
        """How it does now; from any thread."""
        cost = self._cost
        dropped = self._publisher.stats().dropped
        return AgentSample(
            instance=self._config.agent,
            source="agent",
            observed_at_ns=time.time_ns(),
            host=self._host,
            boot_ns=self._boot_ns,
            uptime_s=time.monotonic() - self._began,
            cpu_pct=cost.cpu_pct if cost else None,
            rss_mb=cost.rss_mb if cost else None,
            published_bytes_s=cost.bytes_s if cost else None,
            dropped={f"{topic} {reason}": count for (topic, reason), count in dropped.items()},
            sources=tuple(health for group in self._groups for health in group.health()),
            settings_error=self._settings_error,
        )

    def _groups_for(self, config: CollectorConfig) -> list[_Group]:
        """The running groups of which these settings change nothing, and new ones, not started."""
        discovering = config.discovery.wanted(config.engines)
        found = self._found if discovering else ()
        wanted = self._plan(replace(config, engines=config.engines + found))
        if discovering:
            inputs = (config.discovery, config.engines)
            wanted.append(Planned("discovery", inputs, self._discovery, config))
        running = [group for group in self._groups if not group.refused]
        return [
            next((group for group in running if group.planned.same_as(planned)), None)
            or self._group(planned)
            for planned in wanted
        ]

    def _group(self, planned: Planned) -> _Group:
        try:
            sources = planned.make()
        except UnavailableError as error:
            why = f"{error}{self._lost(planned.name)}"
            if why not in self._refusals:
                self._refusals.add(why)
                level = logging.INFO if isinstance(error, AbsentError) else logging.WARNING
                logger.log(level, "Source %s is not available: %s", planned.name, why)
            return _Group(planned, unavailable=why)
        runners = [Runner(source, self._leading.of(source.name), self._rng) for source in sources]
        return _Group(planned, runners)

    def _lost(self, kind: str) -> str:
        """What to say of a source that lacks privileges which the agent gave up at its start."""
        wanted = next((many for name, many in NEEDED.items() if name == kind), ())
        if not self._ran or not self._config.privileges.user or permitted().issuperset(wanted):
            return ""
        return "; the agent gave its privileges up when it started, so restart the agent"

    def _discovery(self, config: CollectorConfig) -> list[DiscoverySource]:
        return [DiscoverySource(config.discovery, config.engines, self._take_found)]

    def _take_found(self, urls: tuple[str, ...]) -> None:
        """From the thread of discovery."""
        self._found = urls

    def _runners(self) -> Iterator[Runner]:
        return (runner for group in self._groups for runner in group.runners)

    def _watch(self, stop: threading.Event) -> None:
        told = logged = time.monotonic()
        self._meter.measure(())
        logger.info("Sources: %s", _words(self.status()))
        while not stop.wait(WATCH_S):
            self._cost = self._meter.measure(self._runners())
            self._weigh(self._cost)
            if self.reload.is_set():
                self.reload.clear()
                self._reload()
            elif self._found != self._followed:
                self._try(self._config)
            now = time.monotonic()
            if now - told >= HEALTH_S:
                told = now
                sample = self.status()
                self._publisher.sample(TELEMETRY_AGENTS, sample)
                self._publisher.watermark(TELEMETRY_AGENTS, sample.instance, sample.observed_at_ns)
            if now - logged >= LOG_S:
                logged = now
                logger.info("The agent takes %s; %s", self._cost, _words(self.status()))

    def _reload(self) -> None:
        if self._reread is None:
            return
        try:
            config, others = self._reread()
        except Exception as error:  # noqa: BLE001 - whatever a file holds, watching goes on
            self._refuse(error)
            return
        changed = [name for name in FIXED if getattr(config, name) != getattr(self._config, name)]
        if self._try(config):
            self._settings_error = None
            logger.info("Settings were read again and are in force")
        if changed or others:
            self._refuse(f"only a restart changes {', '.join((*changed, *others))}")

    def _try(self, config: CollectorConfig) -> bool:
        self._followed = self._found
        try:
            self.apply(config)
        except Exception as error:  # noqa: BLE001 - such as of a library that takes no such value
            self._refuse(error)
            return False
        return True

    def _refuse(self, error: Exception | str) -> None:
        self._settings_error = str(error)[:LONGEST_ERROR]
        logger.error("Settings stay as they were: %s", error)

    def _weigh(self, cost: Cost) -> None:
        kinds: dict[str, Share] = {}
        for runner in self._runners():
            if runner.sheddable:
                kinds[runner.kind] = kinds.get(runner.kind, NOTHING) + runner.share
        match self._shedder.observe(cost, kinds):
            case Decision(action="shed", kind=str(kind), reason=reason):
                self._shed(kind, reason)
            case Decision(action="resume", kind=str(kind), reason=reason):
                self._resume(kind, reason)
            case Decision(reason=reason):
                logger.warning("The agent takes %s, and nothing more can be shed", reason)

    def _shed(self, kind: str, reason: str) -> None:
        logger.warning("Shedding %s: %s", kind, reason)
        runners = [runner for runner in self._runners() if runner.kind == kind]
        _end(runners, "shed", f"shed when {reason}")
        _give_memory_back()

    def _resume(self, kind: str, reason: str) -> None:
        logger.warning("Trying %s again: %s", kind, reason)
        for runner in self._runners():
            if runner.kind == kind and runner.shed:
                runner.start()


class _Meter:
    """Measures what the agent and each source took since the last time."""

    def __init__(self, cost: Callable[[], tuple[float, float]], publisher: Publisher) -> None:
        self._process_cost = cost
        self._publisher = publisher
        self._threads = ThreadClock()
        self._at, self._cpu_s, self._bytes = time.monotonic(), 0.0, 0

    def measure(self, runners: Iterable[Runner]) -> Cost:
        now, (cpu_s, rss_mb) = time.monotonic(), self._process_cost()
        published = self._publisher.stats().bytes
        spent_s, interval_s = self._threads.spent_s(), max(now - self._at, 1e-3)
        for runner in runners:
            runner.measure(spent_s, interval_s)
        cost = Cost(
            cpu_pct=100 * (cpu_s - self._cpu_s) / interval_s,
            rss_mb=rss_mb,
            bytes_s=(published - self._bytes) / interval_s,
        )
        self._at, self._cpu_s, self._bytes = now, cpu_s, published
        return cost


def _words(sample: AgentSample) -> str:
    """The sources and what was dropped, for a log."""
    by_state: dict[str, list[str]] = {}
    for source in sample.sources:
        by_state.setdefault(source.state, []).append(source.name)
    states = "; ".join(f"{state}: {', '.join(names)}" for state, names in by_state.items())
    return f"{states or 'none'}; {sum(sample.dropped.values())} samples dropped"


def _end(
    runners: Iterable[Runner], state: SourceState = "stopped", error: str | None = None
) -> None:
    """End sources side by side, within ``STOP_S``."""
    ending = list(runners)
    deadline = time.monotonic() + STOP_S
    for runner in ending:
        runner.stop(state, error)
    for runner in ending:
        if not runner.join(deadline - time.monotonic()):
            logger.warning("Source %s did not end in time", runner.name)


def _give_memory_back() -> None:
    """Return freed memory to the system where the C library can, so that it shows."""
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def set_by_signals(events: Mapping[int, threading.Event]) -> Iterator[None]:
    """Set an event on its signal; outside the main thread, where handlers can't be, not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    # From another thread: this one may hold the event's lock, which is not reentrant. Nor is the
    # start of a thread; SimpleQueue.put is, so that signals may interrupt the handling of others.
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()

    def set_events() -> None:
        while number := arrived.get():
            events[number].set()

    thread = threading.Thread(target=set_events, name="signals", daemon=True)
    thread.start()
    before = {
        number: signal.signal(number, lambda number, _: arrived.put(number)) for number in events
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        arrived.put(0)
        thread.join()


def run_agent(
    config: CollectorConfig,
    kafka: KafkaConfig,
    registry: SchemaRegistry | None = None,
    *,
    reread: Callable[[], tuple[CollectorConfig, KafkaConfig]] | None = None,
    stop: threading.Event | None = None,
    observe: Callable[[Agent], None] | None = None,
) -> None:
    """Collect and publish until SIGTERM, SIGINT, or ``stop``; blocks.

    ``reread`` reads the settings anew on SIGHUP; it raises ValueError or OSError for settings
    that cannot be used, and the old ones stay in force. ``observe`` is called once with the agent
    before it runs and gives its privileges up, to show its status from elsewhere.

    Raises ValueError for an engine's URL or a Kafka setting that is wrong, and
    :class:`~latencyprism.collectors.privileges.PrivilegesError` for privileges that cannot be
    given up.
    """
    stop = stop or threading.Event()
    boot_ns = time.time_ns()
    publisher = KafkaPublisher(
        agent=config.agent,
        boot_ns=boot_ns,
        config=config.publish,
        kafka=kafka,
        registry=registry,
    )

    choice, offsets = Choice(), dict[int, int]()

    def stacks(config: CollectorConfig) -> Sequence[Source]:
        from latencyprism.collectors.stacks.alerts import KafkaAlerts
        from latencyprism.collectors.stacks.source import StacksSource

        # What was heard and taken outlives a source that other servers replace.
        alerts = partial(KafkaAlerts, kafka, registry, offsets=offsets)
        return [StacksSource(config.engines, config.stacks, alerts, choice=choice)]

    def settings() -> tuple[CollectorConfig, Collection[str]]:
        assert reread is not None
        changed, changed_kafka = reread()
        return changed, ("kafka",) if changed_kafka != kafka else ()

    agent = Agent(
        config,
        publisher,
        plan=partial(plan, builders=BUILDERS | {"stacks": stacks}),
        reread=settings if reread is not None else None,
        boot_ns=boot_ns,
    )
    agent.prepare()
    if observe is not None:
        observe(agent)
    if config.privileges.user:
        _drop_privileges(config)
    events: dict[int, threading.Event] = {signal.SIGTERM: stop, signal.SIGINT: stop}
    if reread is not None:
        events[signal.SIGHUP] = agent.reload
    with set_by_signals(events):
        agent.run(stop)


def _drop_privileges(config: CollectorConfig) -> None:
    user, keep = config.privileges.user, config.privileges.keep
    if keep is None:
        keep = tuple(sorted(needed(config)))
    # py-spy is a program of its own.
    drop(user, keep=keep, inherit=NEEDED["stacks"] if "stacks" in config.sources else ())
    logger.info("Runs as %s from now on, with %s", user, ", ".join(keep) or "no capability")
