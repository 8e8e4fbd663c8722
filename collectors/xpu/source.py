"""The accelerator source: readings of every way become samples, each device told once."""

import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.source import targets
from latencyprism.collectors.source import Emit, UnavailableError
from latencyprism.collectors.xpu.config import XpuConfig
from latencyprism.collectors.xpu.owners import Owners
from latencyprism.collectors.xpu.poller import Answer, Poller, Way
from latencyprism.collectors.xpu.reading import Reading
from latencyprism.collectors.xpu.sampler import SOURCE, Sampler
from latencyprism.collectors.xpu.tpu_kinds import host_and_port
from latencyprism.collectors.xpu.ways import missing, ways
from latencyprism.schemas.topics import TELEMETRY_XPU

CLAIM_S = 10.0
"""For so long a device that was read by a nearer way is not taken from a farther one."""
MAX_CLAIMS = 8192
"""Ids that are remembered as claimed; beyond it all are forgotten, and claimed anew."""
LEAVE_S = 0.3
"""How long the ways may take to end; one that hangs is left behind."""


def unavailable(config: XpuConfig) -> UnavailableError | None:
    """Why no accelerator can be read here; None when one can."""
    return missing(config)


class Claims:
    """Which way tells of a device, when several do: the nearest."""

    def __init__(self, order: Sequence[str], monotonic_s: Callable[[], float]) -> None:
        self._rank = {name: rank for rank, name in enumerate(order)}
        self._monotonic_s = monotonic_s
        self._claims: dict[str, tuple[int, float]] = {}

    def take(self, way: str, readings: Sequence[Reading]) -> list[Reading]:
        """Those readings that no nearer way tells of."""
        rank, now_s = self._rank[way], self._monotonic_s()
        taken = [r for r in readings if not self._nearer(r, rank, now_s)]
        if len(self._claims) > MAX_CLAIMS:
            self._claims.clear()
        for reading in taken:
            for identity in (reading.device, *reading.aliases):
                self._claims[identity] = (rank, now_s + CLAIM_S)
        return taken

    def _nearer(self, reading: Reading, rank: int, now_s: float) -> bool:
        for identity in (reading.device, *reading.aliases):
            holder, until_s = self._claims.get(identity, (rank, now_s))
            if holder < rank and until_s > now_s:
                return True
        return False


class XpuSource:
    """Watches the accelerators of this host; see :class:`~latencyprism.collectors.source.Source`.

    Devices are mapped to those servers of ``engines`` that are on this host.
    """

    name = SOURCE

    def __init__(
        self,
        engines: Sequence[str],
        config: XpuConfig,
        *,
        host: str | None = None,
        ways: Callable[[XpuConfig], list[Way]] = ways,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = tuple(engines)
        self._config = config
        self._host = host or socket.gethostname()
        self._ways = ways
        self._wall_ns = wall_ns
        self._monotonic_s = monotonic_s
        self._counts: Counter[str] = Counter()
        self._pollers: list[Poller] = []

    @property
    def counts(self) -> Mapping[str, int]:
        """Samples, errors of devices, critical errors and duplicates since the start, and what
        each way met, under its name; from any thread.
        """
        found = dict(self._counts)
        for poller in self._pollers:
            found |= {f"{poller.name} {kind}": count for kind, count in poller.counts.items()}
        return found

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """Read until ``stop``.

        Raises :class:`UnavailableError` when no way finds anything to read, ValueError for a URL or
        address that is none.
        """
        config = self._config
        servers = targets(self._engines)
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._pollers = [
            Poller(
                way,
                answers.put,
                retry_s=config.retry_ms / 1000,
                wall_ns=self._wall_ns,
                monotonic_s=self._monotonic_s,
            )
            for way in self._ways(config)
        ]
        files = Files(config.proc)
        ports = [host_and_port(address)[1] for address in config.tpu_addresses]
        owners = Owners(files, servers, ports)
        try:
            for poller in self._pollers:
                poller.start()
            self._collect(answers, owners, emit, stop)
        finally:
            for poller in self._pollers:
                poller.stop()
            deadline_s = time.monotonic() + LEAVE_S
            for poller in self._pollers:
                poller.join(deadline_s - time.monotonic())
            owners.close()
            files.close()

    def _collect(
        self,
        answers: "queue.SimpleQueue[Answer]",
        owners: Owners,
        emit: Emit,
        stop: threading.Event,
    ) -> None:
        config, monotonic_s = self._config, self._monotonic_s
        sampler = Sampler(self._host, owners)
        claims = Claims([poller.name for poller in self._pollers], monotonic_s)
        promised_ns = 0
        promise_s = search_s = silence_s = monotonic_s()
        while not stop.is_set():
            now_s = monotonic_s()
            if now_s >= search_s:
                owners.refresh()
                search_s = now_s + config.owners_interval_ms / 1000
            if now_s >= silence_s:
                silence_s = now_s + config.slow_interval_ms / 1000
                self._look_for_silence(answers)
            if now_s >= promise_s:
                promise_s = now_s + config.interval_ms / 1000
                promised_ns = self._wall_ns()
                for instance in sampler.instances:
                    emit.watermark(TELEMETRY_XPU, instance, promised_ns)
            try:
                answer = answers.get(timeout=max(promise_s - monotonic_s(), 0.001))
            except queue.Empty:
                continue
            # It may have been read just before the promise, and is handed over after it.
            at_ns = max(answer.at_ns, promised_ns)
            taken = claims.take(answer.way, answer.readings)
            self._counts["duplicates"] += len(answer.readings) - len(taken)
            for sample in sampler.samples(taken, at_ns):
                emit.sample(TELEMETRY_XPU, sample)
                self._counts["samples"] += 1
                self._counts["device_errors"] += sample.error is not None
                self._counts["critical_errors"] += sample.xid is not None

    def _look_for_silence(self, answers: "queue.SimpleQueue[Answer]") -> None:
        """Report the devices of a way that hangs; end when no way has found any so far."""
        pollers = self._pollers
        if all(poller.tried.is_set() and not poller.found.is_set() for poller in pollers):
            why = "; ".join(f"{poller.name}: {poller.reason}" for poller in pollers)
            raise UnavailableError(why or "no way of reading accelerators is enabled")
        for poller in pollers:
            if poller.silent_s() > self._config.silence_ms / 1000:
                answers.put(Answer(poller.name, self._wall_ns(), poller.unanswered()))
