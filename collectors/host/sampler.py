"""One tick of the host source: counters before and after → one HostSample an instance."""

import logging
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from latencyprism.collectors.host.cgroups import Memory, Quotas, memory_by_node
from latencyprism.collectors.host.clock import clock_error
from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.locate import Locator, Target
from latencyprism.collectors.host.numa import Numa
from latencyprism.collectors.host.processes import Process
from latencyprism.collectors.host.ray import RayWorkers
from latencyprism.collectors.host.rhythm import Rhythm
from latencyprism.collectors.host.server import Server
from latencyprism.collectors.host.sockets import ConnectionTotals
from latencyprism.collectors.host.system import System
from latencyprism.collectors.host.threads import Growth
from latencyprism.schemas.records import HostSample, ProcessSample, ThreadSample

logger = logging.getLogger(__name__)

SECOND = 1_000_000_000
DISCOVER_NS = 5 * SECOND
SLOW_NS = SECOND
"""Between two looks at what changes slowly or costs much: memory, disks, clock, connections, all
threads; null in the samples between."""
NUMA_NS = 10 * SECOND
"""Between two looks at which nodes hold the server's memory; the kernel sums it up for each."""
EQUIPMENT_NS = 60 * SECOND
"""Between two looks for disks and CPUs."""
HOT_THREADS = 8


@dataclass(slots=True)
class _Watched:
    """A server, and what was read of it before."""

    server: Server
    quotas: Quotas
    discovery: Rhythm = field(default_factory=lambda: Rhythm(DISCOVER_NS))
    sweeps: Rhythm = field(default_factory=lambda: Rhythm(SLOW_NS))
    questions: Rhythm = field(default_factory=lambda: Rhythm(SLOW_NS))
    placement: Rhythm = field(default_factory=lambda: Rhythm(NUMA_NS))
    connections: ConnectionTotals = field(default_factory=ConnectionTotals)
    memory: Memory | None = None
    cpus: set[int] = field(default_factory=set)
    """CPUs on which its threads ran since its memory's nodes were looked at last."""
    own_ns: int = 0
    own_known: bool = True
    """CPU time of its processes since that of the machine was read last, and whether all told."""

    def watch_groups(self, files: Files) -> None:
        """Read from now on what the server's control groups count."""
        self.quotas.watch(self.server.quotas)
        group = self.server.memory
        if self.memory is not None and self.memory.group != group:
            self.memory.close()
            self.memory = None
        if self.memory is not None:
            self.memory.find_limit()
        elif group is not None:
            self.memory = Memory(files, group)


class HostSampler:
    """Reads the machine and the servers on it; the caller keeps the time. ``diag`` False leaves out
    what netlink tells, as a fake ``/proc`` needs. Not thread-safe.
    """

    def __init__(
        self,
        files: Files,
        targets: Sequence[Target],
        *,
        host: str,
        counts: MutableMapping[str, int],
        diag: bool = True,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._files = files
        self._host = host
        self._counts = counts
        self._cpu_ns = cpu_ns
        self._system = System(files)
        self._numa = Numa(files)
        self._locator = Locator(files, counts, diag=diag)
        ray = RayWorkers(files, counts)
        self._watched = [
            _Watched(
                server=Server(files, target, locator=self._locator, ray=ray, counts=counts),
                quotas=Quotas(files),
            )
            for target in targets
        ]
        self._begun = False
        self._wall_ns = 0
        self._monotonic_ns = 0
        self._slow = Rhythm(SLOW_NS)
        self._equipment = Rhythm(EQUIPMENT_NS)

    @property
    def here(self) -> list[str]:
        """Instances that are on this machine as far as known; the others may be elsewhere."""
        return [w.server.target.instance for w in self._watched if w.server.is_here]

    def tick(
        self, *, wall_ns: int, monotonic_ns: int, lateness_us: int | None = None
    ) -> list[HostSample]:
        """Samples of the time since the last tick, one an instance on this machine; none the first
        time.
        """
        machine = self._system.read(monotonic_ns)
        interval_ns = monotonic_ns - self._monotonic_ns
        step_ns = wall_ns - self._wall_ns - interval_ns
        begun, self._begun = self._begun, True
        self._wall_ns, self._monotonic_ns = wall_ns, monotonic_ns
        if self._equipment.due(monotonic_ns):
            self._system.find()
            self._equipment.done(monotonic_ns, 0)
        slow = self._slow.due(monotonic_ns)
        if slow:
            machine |= self._slow_machine(monotonic_ns)
        samples = []
        for watched in self._watched:
            server = watched.server
            if watched.discovery.due(monotonic_ns):
                self._discover(watched, monotonic_ns)
            processes, died = server.read()
            if died:
                watched.discovery.hasten()
            throttled = watched.quotas.throttled() or (None, None)
            seldom = self._seldom(watched, monotonic_ns, slow=slow)
            if not begun or not server.is_here:
                continue
            samples.append(
                HostSample(
                    instance=server.target.instance,
                    source="host",
                    observed_at_ns=wall_ns,
                    host=self._host,
                    interval_ns=interval_ns,
                    lateness_us=lateness_us,
                    processes=tuple(processes),
                    throttled_ns=throttled[0],
                    throttled_periods=throttled[1],
                    cpu_others=self._others(watched, machine.get("cpu_busy"), processes),
                    clock_step_ns=step_ns,
                    **machine,
                    **seldom,
                )
            )
        self._counts["samples"] += len(samples)
        return samples

    def _discover(self, watched: _Watched, monotonic_ns: int) -> None:
        began = self._cpu_ns()
        server = watched.server
        before = server.place
        if server.discover():
            logger.info(
                "Processes of %s: %s",
                server.target.instance,
                ", ".join(f"{p.pid} {p.role}" for p in server.processes.values()) or "none",
            )
        if server.place is not before:
            watched.connections.forget()
        watched.watch_groups(self._files)
        for process in server.processes.values():
            process.sweep_next()
        watched.discovery.done(monotonic_ns, self._cpu_ns() - began)

    def _seldom(self, watched: _Watched, monotonic_ns: int, *, slow: bool) -> dict[str, Any]:
        """Fields that are not read at every tick, those for which it is time."""
        fields: dict[str, Any] = {}
        if watched.sweeps.due(monotonic_ns):
            fields["hot_threads"] = self._hot_threads(watched, monotonic_ns)
        if watched.questions.due(monotonic_ns):
            fields |= self._connections(watched, monotonic_ns)
        if slow and watched.memory is not None:
            fields |= watched.memory.read()
        if self._numa.nodes and watched.placement.due(monotonic_ns):
            fields["numa_remote_share"] = self._remote_share(watched, monotonic_ns)
        return fields

    def _hot_threads(self, watched: _Watched, monotonic_ns: int) -> tuple[ThreadSample, ...]:
        began = self._cpu_ns()
        moved = [
            (process, thread)
            for process in watched.server.processes.values()
            for thread in process.sweep()
        ]
        hot = tuple(
            ThreadSample(
                pid=process.pid,
                tid=thread.tid,
                name=process.threads.name(thread.tid),
                cpu_ns=thread.ran_ns,
                runqueue_ns=thread.waited_ns,
            )
            for process, thread in nlargest(HOT_THREADS, moved, key=_heat)
        )
        if self._numa.nodes:
            self._note_cpus(watched, hot)
        watched.sweeps.done(monotonic_ns, self._cpu_ns() - began)
        return hot

    def _note_cpus(self, watched: _Watched, hot: tuple[ThreadSample, ...]) -> None:
        processes = watched.server.processes
        seen = [process.cpu for process in processes.values()]
        seen += [processes[thread.pid].threads.cpu(thread.tid) for thread in hot]
        watched.cpus |= {cpu for cpu in seen if cpu is not None}

    def _connections(self, watched: _Watched, monotonic_ns: int) -> dict[str, Any]:
        began = self._cpu_ns()
        place = watched.server.place
        sockets = place.sockets.of_server(place.port, place.listeners) if place else None
        fields: dict[str, Any] = {}
        if sockets is None:
            watched.connections.forget()
        else:
            fields = watched.connections.grow(sockets)
        watched.questions.done(
            monotonic_ns, self._cpu_ns() - began, idle=not fields.get("connections")
        )
        return fields

    def _remote_share(self, watched: _Watched, monotonic_ns: int) -> float | None:
        began = self._cpu_ns()
        # Only a container's group holds the server's memory and nobody else's.
        group = watched.server.memory if watched.server.container else None
        memory = memory_by_node(self._files, group) if group else {}
        share = self._numa.remote_share(memory, watched.cpus)
        watched.cpus.clear()
        watched.placement.done(monotonic_ns, self._cpu_ns() - began)
        return share

    def _slow_machine(self, monotonic_ns: int) -> dict[str, Any]:
        began = self._cpu_ns()
        error = clock_error()
        fields = self._system.read_slow(monotonic_ns)
        fields["clock_error_us"] = error[0] if error else None
        fields["numa_misses"] = self._numa.misses()
        self._slow.done(monotonic_ns, self._cpu_ns() - began)
        return fields

    def _others(
        self, watched: _Watched, busy: float | None, processes: list[ProcessSample]
    ) -> float | None:
        """Share of the machine that everybody but these processes used since ``busy`` was read
        last; null unless all are known, such as when who listens may not be looked at.
        """
        place = watched.server.place
        if place is not None and not place.holders:
            watched.own_known = False
        for process in processes:
            if process.cpu_ns is None:
                watched.own_known = False
            else:
                watched.own_ns += process.cpu_ns
        if busy is None:
            return None
        own_ns, known = watched.own_ns, watched.own_known
        watched.own_ns, watched.own_known = 0, True
        capacity_ns = self._system.cpus * self._system.cpu_interval_ns
        return max(busy - own_ns / capacity_ns, 0.0) if known and capacity_ns > 0 else None

    def close(self) -> None:
        """Close everything kept open."""
        for watched in self._watched:
            watched.server.close()
        self._locator.close()
        self._files.close()


def _heat(moved: tuple[Process, Growth]) -> int:
    return moved[1].ran_ns + moved[1].waited_ns
