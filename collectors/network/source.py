"""The network source: a thread that drains the rings and reports what the tap makes of it."""

import logging
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from latencyprism.collectors.network.bpf import server_filter
from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.ring import PacketRing, Ring, choose_interfaces
from latencyprism.collectors.network.tap import Tap
from latencyprism.collectors.network.targets import Targets, Watch
from latencyprism.collectors.source import Emit
from latencyprism.schemas.topics import TELEMETRY_REQUESTS

log = logging.getLogger(__name__)

SKEW_NS = 1_000_000
"""Packets taken by different CPUs may stand in a ring in another order than that of their times,
by far less than this."""
CLOCK_STEP_NS = 50_000_000
"""A change of the wall clock against the monotonic one between two reports that is no slewing."""


class Reports:
    """What happens between two waits: drain, flush, move the watermark. No threads, no sockets.

    The watermark is what was seen for sure. A drained ring has handed over every packet older than
    its ``hold_ns``, and everything older than the newest packet handed over, give or take
    :data:`SKEW_NS`; of the two the later counts, and of several rings the earliest. All news up
    to there are emitted first, so a window that ends before the watermark is complete.
    """

    def __init__(
        self,
        rings: Sequence[PacketRing],
        tap: Tap,
        instances: Sequence[str],
        *,
        interval_ms: int,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._rings = rings
        self._tap = tap
        self._instances = instances
        self._interval_ns = interval_ms * 1_000_000
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._next_ns = monotonic_ns()
        self._offset_ns = wall_ns() - monotonic_ns()

    def step(self, emit: Emit) -> float:
        """Take what waits and report if it is time; seconds until the next report is due."""
        now_ns = self._wall_ns()
        drained = [ring.drain(self._tap.packet) for ring in self._rings]
        due = self._next_ns - self._monotonic_ns()
        if due > 0:
            return due / 1e9
        self._next_ns += self._interval_ns * (1 + (-due) // self._interval_ns)
        self._check_clock()
        frontier_ns = min(
            max(ring.newest_ns - SKEW_NS, now_ns - ring.hold_ns if empty else 0)
            for ring, empty in zip(self._rings, drained, strict=True)
        )
        self._report(emit, frontier_ns)
        return max(0.0, (self._next_ns - self._monotonic_ns()) / 1e9)

    def _check_clock(self) -> None:
        """Times from before a step of the wall clock mean nothing after it."""
        offset_ns = self._wall_ns() - self._monotonic_ns()
        step_ns, self._offset_ns = offset_ns - self._offset_ns, offset_ns
        if abs(step_ns) > CLOCK_STEP_NS:
            log.warning("the clock was set by %.3f s: open exchanges are given up", step_ns / 1e9)
            self._tap.forget("clock set")
            for ring in self._rings:
                ring.newest_ns = 0

    def _report(self, emit: Emit, frontier_ns: int) -> None:
        lost = sum(ring.lost() for ring in self._rings)
        if lost:
            log.warning("the kernel dropped %d packets: the ring was full", lost)
            self._tap.packets_lost(lost, frontier_ns)
        for part in self._tap.flush(frontier_ns):
            emit.sample(TELEMETRY_REQUESTS, part)
        for instance in self._instances:
            emit.watermark(TELEMETRY_REQUESTS, instance, frontier_ns)


class NetworkSource:
    """Watches the servers of the base URLs; see :class:`~latencyprism.collectors.source.Source`.

    Raises ValueError for a URL that names no server.
    """

    name = "network"

    def __init__(self, engines: Sequence[str], config: NetworkConfig) -> None:
        self._engines = tuple(engines)
        self._config = config
        self._tap: Tap | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        """What was seen, refused and lost since the last start, by kind; a copy."""
        return dict(self._tap.counts) if self._tap is not None else {}

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """Capture until ``stop``; returns within 200 ms of it.

        Raises PermissionError without CAP_NET_RAW, OSError when a host name does not resolve or
        an interface does not exist, ValueError for a URL that names no server.
        """
        config = self._config
        targets = Targets([Watch.of(url) for url in self._engines])
        program = server_filter(sorted(targets.ports))
        names = config.interfaces or choose_interfaces(elsewhere=targets.elsewhere)
        rings: list[Ring] = []
        try:
            for name in names:
                rings.append(  # noqa: PERF401 those opened must be closed when the next one fails
                    Ring(
                        name,
                        program,
                        ring_mib=config.ring_mib,
                        block_timeout_ms=config.block_timeout_ms,
                    )
                )
            tap = self._tap = Tap(targets, config)
            reports = Reports(rings, tap, targets.instances, interval_ms=config.part_interval_ms)
            log.info("watching ports %s on %s", sorted(targets.ports), ", ".join(names))
            self._loop(rings, reports, emit, stop)
        finally:
            for ring in rings:
                ring.close()

    def _loop(
        self, rings: Sequence[Ring], reports: Reports, emit: Emit, stop: threading.Event
    ) -> None:
        waiting = select.poll()
        for ring in rings:
            waiting.register(ring, select.POLLIN)
        while not stop.is_set():
            seconds = reports.step(emit)
            waiting.poll(min(seconds * 1000, self._config.part_interval_ms))
