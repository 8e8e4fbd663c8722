"""One tick of the host source: counters before and after → one HostSample an instance."""

import logging
from dataclasses import dataclass, field
from typing import Any

from latencyprism.collectors.host.cgroups import MAX_GROUPS, cpu_groups, throttling
from latencyprism.collectors.host.clock import clock_error
from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.processes import Server
from latencyprism.collectors.host.system import System, SystemCounters
from latencyprism.collectors.host.tcp import TcpProbe
from latencyprism.schemas.records import HostSample, ProcessSample

logger = logging.getLogger(__name__)

SECOND = 1_000_000_000
DISCOVER_NS = 5 * SECOND
SLOW_NS = SECOND
"""Between two looks at what changes slowly or costs much, memory, clock and round trips; null in
the samples between."""

DELTAS = (
    "psi_cpu_us",
    "psi_memory_us",
    "psi_io_us",
    "disk_read_bytes",
    "disk_write_bytes",
    "net_rx_bytes",
    "net_tx_bytes",
    "tcp_retransmits",
)


@dataclass(slots=True)
class _Watched:
    instance: str
    server: Server
    groups: list[str] = field(default_factory=list)
    throttled: dict[str, tuple[int, int]] = field(default_factory=dict)
    discovered_ns: int | None = None


def delta(before: int | None, now: int | None) -> int | None:
    """Growth of a counter; None if either end is unknown, or it was reset."""
    if before is None or now is None or now < before:
        return None
    return now - before


class HostSampler:
    """Reads the machine and the servers of the given ports; the caller keeps the time.

    ``servers`` are pairs of instance and port. Not thread-safe.
    """

    def __init__(self, files: Files, servers: list[tuple[str, int]], *, host: str) -> None:
        self._files = files
        self._host = host
        self._system = System(files)
        self._watched = [_Watched(instance, Server(files, port)) for instance, port in servers]
        self._tcp: TcpProbe | None = None
        self._before: SystemCounters | None = None
        self._wall_ns = 0
        self._monotonic_ns = 0
        self._slow_ns: int | None = None

    def tick(
        self, *, wall_ns: int, monotonic_ns: int, lateness_us: int | None = None
    ) -> list[HostSample]:
        """Samples of the time since the last tick, one an instance; none the first time."""
        slow = self._slow_ns is None or monotonic_ns - self._slow_ns >= SLOW_NS
        if slow:
            self._slow_ns = monotonic_ns
        now, before = self._system.read(), self._before
        interval_ns = monotonic_ns - self._monotonic_ns
        step_ns = wall_ns - self._wall_ns - interval_ns
        self._before, self._wall_ns, self._monotonic_ns = now, wall_ns, monotonic_ns
        machine = self._machine(before, now, slow=slow) if before else {}
        samples = []
        for watched in self._watched:
            self._discover(watched, monotonic_ns)
            processes, died = watched.server.read()
            if died:
                watched.discovered_ns = None
            throttled = self._throttled(watched)
            if before is None:
                continue
            samples.append(
                HostSample(
                    instance=watched.instance,
                    source="host",
                    observed_at_ns=wall_ns,
                    host=self._host,
                    interval_ns=interval_ns,
                    lateness_us=lateness_us,
                    processes=tuple(processes),
                    throttled_ns=throttled[0] if throttled else None,
                    throttled_periods=throttled[1] if throttled else None,
                    cpu_others=_others(before, now, processes, interval_ns),
                    tcp_rtt_us=self._rtt_us(watched.server.port) if slow else None,
                    clock_step_ns=step_ns,
                    **machine,
                )
            )
        return samples

    def _discover(self, watched: _Watched, monotonic_ns: int) -> None:
        last = watched.discovered_ns
        if last is not None and monotonic_ns - last < DISCOVER_NS:
            return
        watched.discovered_ns = monotonic_ns
        self._system.find_disks()
        if watched.server.discover():
            logger.info(
                "Processes of %s: %s",
                watched.instance,
                ", ".join(f"{p.pid} {p.role}" for p in watched.server.processes.values()) or "none",
            )
        groups = dict.fromkeys(
            group for pid in watched.server.processes for group in cpu_groups(self._files, pid)
        )
        for gone in set(watched.groups) - set(groups):
            self._files.forget(gone)
        watched.groups = list(groups)[:MAX_GROUPS]

    def _throttled(self, watched: _Watched) -> tuple[int, int] | None:
        now = {
            group: known
            for group in watched.groups
            if (known := throttling(self._files.read(group))) is not None
        }
        before, watched.throttled = watched.throttled, now
        grown = [
            (now[group][0] - before[group][0], now[group][1] - before[group][1])
            for group in now.keys() & before.keys()
        ]
        if not grown:
            return None
        return sum(time_ns for time_ns, _ in grown), sum(periods for _, periods in grown)

    def _machine(
        self, before: SystemCounters, now: SystemCounters, *, slow: bool
    ) -> dict[str, Any]:
        machine: dict[str, Any] = {
            name: delta(getattr(before, name), getattr(now, name)) for name in DELTAS
        }
        if now.cpu is not None:
            machine["runnable"] = now.cpu.runnable
            machine["cpu_busy"] = _busy(before, now)
            machine["cpu_steal"] = _share(before, now, "steal")
        if slow:
            error = clock_error()
            machine["clock_error_us"] = error[0] if error else None
            machine["memory_available_bytes"] = self._system.memory_available()
        return machine

    def _rtt_us(self, port: int) -> float | None:
        try:
            if self._tcp is None:
                self._tcp = TcpProbe()
            return self._tcp.rtt_us(port)
        except OSError as error:
            # An answer may still be on its way; a new socket does not get it.
            logger.debug("No round trips: %s", error)
            if self._tcp is not None:
                self._tcp.close()
                self._tcp = None
            return None

    def close(self) -> None:
        """Close everything kept open."""
        for watched in self._watched:
            watched.server.close()
        if self._tcp is not None:
            self._tcp.close()
            self._tcp = None
        self._files.close()


def _share(before: SystemCounters, now: SystemCounters, name: str) -> float | None:
    """Share of a kind of CPU time between two readings; None when no tick went by."""
    if before.cpu is None or now.cpu is None:
        return None
    total = now.cpu.total - before.cpu.total
    part = getattr(now.cpu, name) - getattr(before.cpu, name)
    # The kernel lets idle time go back a little when a CPU wakes.
    return min(max(part / total, 0.0), 1.0) if total > 0 else None


def _busy(before: SystemCounters, now: SystemCounters) -> float | None:
    idle = _share(before, now, "idle")
    return None if idle is None else 1.0 - idle


def _others(
    before: SystemCounters,
    now: SystemCounters,
    processes: list[ProcessSample],
    interval_ns: int,
) -> float | None:
    """Share of the machine that everybody but these processes used; null unless all are known."""
    busy = _busy(before, now)
    used = [process.cpu_ns for process in processes]
    if busy is None or now.cpu is None or not now.cpu.cpus or interval_ns <= 0 or None in used:
        return None
    own = sum(ns for ns in used if ns is not None) / (now.cpu.cpus * interval_ns)
    return min(max(busy - own, 0.0), 1.0)
