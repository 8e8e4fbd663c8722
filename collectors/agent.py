"""Runs the enabled sources of one host, each for itself, and watches what that costs."""

import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from latencyprism.collectors.config import CollectorConfig, CostConfig, SourceName
from latencyprism.collectors.engine.scraper import EngineSource
from latencyprism.collectors.host.source import HostSource
from latencyprism.collectors.publisher import KafkaPublisher, Publisher, PublisherStats
from latencyprism.collectors.source import Emit, Source
from latencyprism.schemas.codec import SchemaRegistry
from latencyprism.schemas.connection import KafkaConfig

logger = logging.getLogger(__name__)

SHED_ORDER: tuple[SourceName, ...] = ("network", "host", "xpu", "engine")
"""Which kind of source goes first when the agent costs too much: the one whose cost grows with the
traffic, then those that read many times a second. The last one running is never shed."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
HEALTHY_S = 60.0
"""After running so long, a source that fails again is started again at once, almost."""
WATCH_S = 1.0
STOP_S = 0.5
"""How long sources may take to end; the contract of :meth:`Source.run`."""
FLUSH_S = 0.4
"""How long the publisher may then take, so that the agent ends within a second."""

SourceState = Literal["running", "backoff", "shed", "unavailable", "stopped"]


class UnavailableError(Exception):
    """This machine does not permit a source; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A source that was asked for and can't run here."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """How one source does."""

    name: str
    state: SourceState
    failures: int = 0
    """Times it crashed, or ended by itself."""
    error: str | None = None
    """Why it is not running, or last was not; None if it always was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """The agent at one moment."""

    agent: str
    boot_ns: int
    """When this run began, ns since the epoch."""
    uptime_s: float
    sources: tuple[SourceStatus, ...]
    cpu_pct: float | None
    """CPU time of the whole process over the last second, % of one core."""
    rss_mb: float | None
    """Resident memory of the process, 10^6 bytes."""
    published_bytes_s: float | None
    """Bytes the broker acknowledged over the last second."""
    publisher: PublisherStats


def backoff_s(failures: int, rng: random.Random) -> float:
    """Pause before the start after so many failures in a row: doubling, bounded, with jitter."""
    return float(
        min(FIRST_BACKOFF_S * 2 ** min(failures - 1, 16), LONGEST_BACKOFF_S) * rng.uniform(0.5, 1)
    )


class Shedder:
    """Decides from the cost of each second whether to shed a source or to try one again."""

    def __init__(self, config: CostConfig) -> None:
        self._config = config
        self._over_s = 0
        self._under_s = 0

    def observe(self, cpu_pct: float, rss_mb: float) -> Literal["shed", "resume"] | None:
        """Take the cost of one more second."""
        over = cpu_pct > self._config.cpu_pct or rss_mb > self._config.rss_mb
        self._over_s = self._over_s + 1 if over else 0
        self._under_s = 0 if over else self._under_s + 1
        if self._over_s >= self._config.patience_s:
            self._over_s = 0
            return "shed"
        if self._under_s >= self._config.resume_s:
            self._under_s = 0
            return "resume"
        return None


class Runner:
    """One source in its thread, started again when it fails."""

    def __init__(self, source: Source, emit: Emit, rng: random.Random) -> None:
        self.kind = source.name.partition(" ")[0]
        self._source = source
        self._emit = emit
        self._rng = rng
        self._state: SourceState = "stopped"
        self._failures = 0
        self._error: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def status(self) -> SourceStatus:
        """How the source does; from any thread."""
        return SourceStatus(
            name=self._source.name,
            state=self._state,
            failures=self._failures,
            error=self._error,
        )

    @property
    def shed(self) -> bool:
        """Whether it was ended because of its cost."""
        return self._state == "shed"

    @property
    def sheddable(self) -> bool:
        """Whether ending it would save anything."""
        return self._state in ("running", "backoff")

    def start(self) -> None:
        """Run the source from now on."""
        self._stop = threading.Event()
        self._state = "running"
        self._thread = threading.Thread(
            target=self._run, args=(self._stop,), name=self._source.name, daemon=True
        )
        self._thread.start()

    def stop(self, state: SourceState = "stopped", error: str | None = None) -> None:
        """Ask the source to end, without waiting for it."""
        self._stop.set()
        if self._state != "unavailable":
            self._state, self._error = state, error or self._error

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; whether it came."""
        if self._thread is None:
            return True
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    def _run(self, stop: threading.Event) -> None:
        in_a_row = 0
        while not stop.is_set():
            began = time.monotonic()
            try:
                self._source.run(self._emit, stop)
                error = "ended by itself"
            except PermissionError as refused:
                self._give_up(refused, stop)
                return
            except Exception as crash:  # the other sources must go on
                logger.exception("Source %s crashed", self._source.name)
                error = f"{type(crash).__name__}: {crash}"
            if stop.is_set():
                return
            in_a_row = 1 if time.monotonic() - began > HEALTHY_S else in_a_row + 1
            pause_s = backoff_s(in_a_row, self._rng)
            self._failures += 1
            self._state, self._error = "backoff", error
            logger.warning(
                "Source %s: %s; starting it again in %.1f s", self._source.name, error, pause_s
            )
            if not stop.wait(pause_s):
                self._state = "running"

    def _give_up(self, refused: PermissionError, stop: threading.Event) -> None:
        if not stop.is_set():
            self._state, self._error = "unavailable", str(refused)
            logger.warning("Source %s is not permitted: %s", self._source.name, refused)


def process_cost() -> tuple[float, float]:
    """CPU time of this process so far, seconds, and its resident memory, 10^6 bytes."""
    with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123 - cheaper than a Path, once a second
        pages = int(statm.read().split()[1])
    return time.process_time(), pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class Agent:
    """Runs sources into a publisher until told to stop.

    A source that crashes is started again with backoff while the rest go on. Once a second the
    cost of the process is measured; above its ceiling for a while, kinds of sources are ended in
    the order of ``SHED_ORDER``, and tried again after a long time below it.
    """

    def __init__(
        self,
        config: CollectorConfig,
        publisher: Publisher,
        sources: Sequence[Source | Unavailable],
        *,
        boot_ns: int | None = None,
        rng: random.Random | None = None,
        cost: Callable[[], tuple[float, float]] = process_cost,
    ) -> None:
        rng = rng or random.Random()  # noqa: S311 - jitter
        self._config = config
        self._publisher = publisher
        self._unavailable = [source for source in sources if isinstance(source, Unavailable)]
        self._runners = [
            Runner(source, publisher, rng)
            for source in sources
            if not isinstance(source, Unavailable)
        ]
        self._boot_ns = boot_ns if boot_ns is not None else time.time_ns()
        self._began = time.monotonic()
        self._cost = cost
        self._shedder = Shedder(config.cost)
        self._cpu_pct: float | None = None
        self._rss_mb: float | None = None
        self._bytes_s: float | None = None

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop`` is set, then end within about a second."""
        for missing in self._unavailable:
            logger.warning("Source %s is not available: %s", missing.name, missing.reason)
        self._publisher.start()
        for runner in self._runners:
            runner.start()
        try:
            self._watch(stop)
        finally:
            self._end()

    def status(self) -> AgentStatus:
        """A snapshot; from any thread."""
        return AgentStatus(
            agent=self._config.agent,
            boot_ns=self._boot_ns,
            uptime_s=time.monotonic() - self._began,
            sources=(
                *(runner.status for runner in self._runners),
                *(
                    SourceStatus(name=missing.name, state="unavailable", error=missing.reason)
                    for missing in self._unavailable
                ),
            ),
            cpu_pct=self._cpu_pct,
            rss_mb=self._rss_mb,
            published_bytes_s=self._bytes_s,
            publisher=self._publisher.stats(),
        )

    def _watch(self, stop: threading.Event) -> None:
        at, (cpu_s, _) = time.monotonic(), self._cost()
        sent = self._publisher.stats().bytes
        while not stop.wait(WATCH_S):
            now, (now_cpu_s, rss_mb) = time.monotonic(), self._cost()
            now_sent = self._publisher.stats().bytes
            self._cpu_pct = 100 * (now_cpu_s - cpu_s) / (now - at)
            self._bytes_s = (now_sent - sent) / (now - at)
            self._rss_mb = rss_mb
            at, cpu_s, sent = now, now_cpu_s, now_sent
            match self._shedder.observe(self._cpu_pct, rss_mb):
                case "shed":
                    self._shed()
                case "resume":
                    self._resume()

    def _shed(self) -> None:
        kinds = {runner.kind for runner in self._runners if runner.sheddable}
        dearest = next((kind for kind in SHED_ORDER if kind in kinds), None)
        cost = f"{self._cpu_pct:.1f} % of a core and {self._rss_mb:.0f} MB"
        if dearest is None or len(kinds) < 2:
            logger.warning("The agent takes %s, and nothing more can be shed", cost)
            return
        logger.warning("The agent takes %s: shedding %s", cost, dearest)
        for runner in self._runners:
            if runner.kind == dearest and runner.sheddable:
                runner.stop("shed", f"shed while the agent took {cost}")

    def _resume(self) -> None:
        kinds = {runner.kind for runner in self._runners if runner.shed}
        cheapest = next((kind for kind in reversed(SHED_ORDER) if kind in kinds), None)
        for runner in self._runners:
            if runner.kind == cheapest and runner.shed and runner.join(0):
                logger.info("Trying %s again", cheapest)
                runner.start()

    def _end(self) -> None:
        deadline = time.monotonic() + STOP_S
        for runner in self._runners:
            runner.stop()
        for runner in self._runners:
            if not runner.join(deadline - time.monotonic()):
                logger.warning("Source %s did not end in time", runner.status.name)
        self._publisher.close(FLUSH_S)


def build_sources(config: CollectorConfig) -> list[Source | Unavailable]:
    """The enabled sources, with those that this machine does not permit as :class:`Unavailable`.

    Raises ValueError naming an engine's URL that is wrong.
    """
    builders: dict[SourceName, Callable[[CollectorConfig], Sequence[Source]]] = {
        "engine": _engine_sources,
        "host": _host_source,
        "network": _network_source,
        "xpu": _xpu_source,
    }
    sources: list[Source | Unavailable] = []
    for name in dict.fromkeys(config.sources):
        try:
            sources += builders[name](config)
        except UnavailableError as error:
            sources.append(Unavailable(name, str(error)))
        except ImportError as error:
            sources.append(
                Unavailable(name, f"{error}; install the extra latencyprism[collectors]")
            )
    return sources


def _engine_sources(config: CollectorConfig) -> Sequence[Source]:
    return [EngineSource(url, config.engine) for url in dict.fromkeys(config.engines)]


def _host_source(config: CollectorConfig) -> Sequence[Source]:
    return [HostSource(config.engines, config.host)]


def _network_source(config: CollectorConfig) -> Sequence[Source]:
    from latencyprism.collectors.network.source import NetworkSource

    if not may_capture():
        raise UnavailableError(
            "capturing packets needs CAP_NET_RAW; run as root, or give the capability to the "
            "service (AmbientCapabilities=CAP_NET_RAW, or setcap cap_net_raw+ep on the interpreter)"
        )
    return [NetworkSource(config.engines, config.network)] if config.engines else []


def _xpu_source(config: CollectorConfig) -> Sequence[Source]:
    from latencyprism.collectors.xpu import source

    reason = source.unavailable()
    if reason is not None:
        raise UnavailableError(reason)
    return [source.XpuSource(config.engines, config.xpu)]


def may_capture() -> bool:
    """Whether this process may open a packet socket."""
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    except OSError:
        return False
    return True


@contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Set ``stop`` on SIGTERM and SIGINT; outside the main thread, where handlers can't be, not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)

    def handle(*_: object) -> None:
        # From another thread: this one may hold the event's lock, which is not reentrant.
        threading.Thread(target=stop.set).start()

    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def run_agent(
    config: CollectorConfig,
    kafka: KafkaConfig,
    registry: SchemaRegistry | None = None,
    *,
    stop: threading.Event | None = None,
    observe: Callable[[Agent], None] | None = None,
) -> None:
    """Collect and publish until SIGTERM, SIGINT, or ``stop``; blocks.

    ``observe`` is called once with the agent before it runs, to show its status from elsewhere.
    Raises ValueError for an engine's URL or a Kafka setting that is wrong.
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
    agent = Agent(config, publisher, build_sources(config), boot_ns=boot_ns)
    if observe is not None:
        observe(agent)
    with stopped_by_signals(stop):
        agent.run(stop)
