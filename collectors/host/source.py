"""The host source: a thread that reads the counters at an even pace it can afford."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from latencyprism.collectors.address import endpoint, instance_of, is_local, port_of
from latencyprism.collectors.host.config import HostConfig
from latencyprism.collectors.host.counts import Counts
from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.locate import Target
from latencyprism.collectors.host.sampler import HostSampler
from latencyprism.collectors.source import Emit
from latencyprism.schemas.topics import TELEMETRY_HOST

logger = logging.getLogger(__name__)

WATERMARK_S = 0.1
LONGEST_S = 1.0
"""Longest interval a source that costs too much falls back to."""


class Pace:
    """When to sample next: evenly, at half the pace while that costs more than it may.

    ``budget`` is a share of one core, compared with the median cost of every ``GROUP`` samples, so
    that looking for processes every few seconds does not count.
    """

    GROUP = 20

    def __init__(self, interval_s: float, budget: float) -> None:
        self.interval_s = interval_s
        self._shortest_s = interval_s
        self._budget = budget
        self._costs: list[float] = []

    def spent(self, cost_s: float) -> None:
        """Account for the CPU time of one sample, and adapt the interval."""
        self._costs.append(cost_s)
        if len(self._costs) < self.GROUP:
            return
        usual_s = median(self._costs)
        self._costs.clear()
        load = usual_s / (self._budget * self.interval_s)
        if load > 1 and self.interval_s < LONGEST_S:
            self._change(min(2 * self.interval_s, LONGEST_S), usual_s)
        elif load < 0.25 and self.interval_s > self._shortest_s:
            self._change(max(self.interval_s / 2, self._shortest_s), usual_s)

    def _change(self, interval_s: float, usual_s: float) -> None:
        logger.info(
            "Reading counters takes %.1f ms, so it is done every %g s from now on",
            1000 * usual_s,
            interval_s,
        )
        self.interval_s = interval_s


def targets(engines: Sequence[str]) -> list[Target]:
    """Where to look for the servers of those base URLs; resolves names, which may block. One whose
    name does not resolve is left out.
    """
    found = []
    for url in engines:
        addresses = _resolve(str(endpoint(url).hostname))
        if not addresses:
            logger.warning("%s: the name does not resolve, so its host is not watched", url)
            continue
        here = any(is_local(address) for address in addresses)
        found.append(
            Target(
                instance=instance_of(url),
                port=port_of(url),
                address=None if here else addresses[0],
            )
        )
    return found


def local_servers(engines: Sequence[str]) -> list[tuple[str, int]]:
    """Instance and port of those base URLs that point to this machine's own addresses; resolves
    names, which may block.
    """
    return [(found.instance, found.port) for found in targets(engines) if found.address is None]


def _resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


class HostSource:
    """Watches the machine and the processes of the servers on it."""

    name = "host"

    def __init__(
        self,
        engines: Sequence[str],
        config: HostConfig,
        *,
        host: str | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engines = engines
        self._config = config
        self._host = host or socket.gethostname()
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._counts = Counts()

    @property
    def counts(self) -> Mapping[str, int]:
        """What it met since it was made, by the kinds of :data:`counts.KINDS`."""
        return dict(self._counts)

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """See :meth:`Source.run`; waits for ``stop`` when there is no server to look for."""
        servers = targets(self._engines)
        if not servers:
            stop.wait()
            return
        files = Files(self._config.proc, self._config.sys)
        sampler = HostSampler(files, servers, host=self._host, counts=self._counts)
        pace = Pace(self._config.interval_ms / 1000, self._config.cpu_pct / 100)
        due = self._monotonic_ns() / 1e9
        try:
            while not stop.is_set():
                now = self._monotonic_ns() / 1e9
                if now >= due:
                    began = time.thread_time()
                    wall_ns, monotonic_ns = self._wall_ns(), self._monotonic_ns()
                    for sample in sampler.tick(
                        wall_ns=wall_ns,
                        monotonic_ns=monotonic_ns,
                        lateness_us=int((now - due) * 1e6),
                    ):
                        emit.sample(TELEMETRY_HOST, sample)
                    pace.spent(time.thread_time() - began)
                    missed = (now - due) // pace.interval_s
                    self._counts["missed_ticks"] += int(missed)
                    due += (missed + 1) * pace.interval_s
                mark = self._wall_ns()
                for instance in sampler.here:
                    emit.watermark(TELEMETRY_HOST, instance, mark)
                # Half the CPU time of waiting for the event, which may wait as long as that.
                time.sleep(min(WATERMARK_S, max(due - self._monotonic_ns() / 1e9, 0.0)))
        finally:
            sampler.close()
