"""The host source: a thread that reads the counters at an even pace it can afford."""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from latencyprism.collectors.address import endpoint, instance_of, port_of
from latencyprism.collectors.host.config import HostConfig
from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.sampler import HostSampler
from latencyprism.collectors.network.targets import is_local
from latencyprism.collectors.source import Emit
from latencyprism.schemas.topics import TELEMETRY_HOST

logger = logging.getLogger(__name__)

WATERMARK_S = 0.1
LONGEST_S = 1.0
"""Longest interval a source that costs too much falls back to."""


class Pace:
    """When to sample next: evenly, at half the pace while that costs more than it may.

    ``budget`` is a share of one core, compared with the median cost of the last ``REMEMBERED``
    samples, so that looking for processes every few seconds does not count.
    """

    REMEMBERED = 20

    def __init__(self, interval_s: float, budget: float) -> None:
        self.interval_s = interval_s
        self._shortest_s = interval_s
        self._budget = budget
        self._costs: deque[float] = deque(maxlen=self.REMEMBERED)

    def spent(self, cost_s: float) -> None:
        """Account for the CPU time of one sample, and adapt the interval."""
        self._costs.append(cost_s)
        if len(self._costs) < self.REMEMBERED:
            return
        load = median(self._costs) / (self._budget * self.interval_s)
        if load > 1 and self.interval_s < LONGEST_S:
            self._change(min(2 * self.interval_s, LONGEST_S))
        elif load < 0.25 and self.interval_s > self._shortest_s:
            self._change(max(self.interval_s / 2, self._shortest_s))

    def _change(self, interval_s: float) -> None:
        logger.info(
            "Reading counters takes %.1f ms, so it is done every %g s from now on",
            1000 * median(self._costs),
            interval_s,
        )
        self.interval_s = interval_s
        self._costs.clear()


def local_servers(engines: Sequence[str]) -> list[tuple[str, int]]:
    """Instance and port of those base URLs that point to this machine; resolves names, which may
    block. A name that does not resolve is not this machine's.
    """
    servers = []
    for url in engines:
        if _is_here(str(endpoint(url).hostname)):
            servers.append((instance_of(url), port_of(url)))
        else:
            logger.info("%s is not on this machine, so its host is not watched from here", url)
    return servers


def _is_here(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(is_local(str(address[0])) for *_, address in found)


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

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """See :meth:`Source.run`; waits for ``stop`` when no server is on this machine."""
        servers = local_servers(self._engines)
        if not servers:
            stop.wait()
            return
        files = Files(self._config.proc, self._config.sys)
        sampler = HostSampler(files, servers, host=self._host)
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
                    due += (missed + 1) * pace.interval_s
                mark = self._wall_ns()
                for instance, _ in servers:
                    emit.watermark(TELEMETRY_HOST, instance, mark)
                stop.wait(min(WATERMARK_S, max(due - self._monotonic_ns() / 1e9, 0.0)))
        finally:
            sampler.close()
