"""The network source: a thread that drains the ring and reports what the tap makes of it."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.ring import PacketRing, Ring
from latencyprism.collectors.network.tap import Tap
from latencyprism.collectors.network.targets import Targets, Watch
from latencyprism.collectors.source import Emit
from latencyprism.schemas.topics import TELEMETRY_REQUESTS

log = logging.getLogger(__name__)

SKEW_NS: Final = 1_000_000
"""Packets taken by different CPUs may stand in the ring in another order than that of their times,
by far less than this."""
CLOCK_STEP_NS: Final = 50_000_000
"""A change of the wall clock against the monotonic one between two reports that is no slewing."""
LOOK_S: Final = 0.04
"""How often it is looked whether the ring fills up before the next report is due."""


class Reports:
    """What happens between two waits: drain, flush, move the watermark. No threads, no sockets.

    Packets are taken all at once when a report is due, which costs half as much as taking each
    block when it comes; or earlier, when the ring fills up.

    The watermark is what was seen for sure. A drained ring has handed over every packet older than
    its ``hold_ns``, and everything older than the newest packet handed over, give or take
    :data:`SKEW_NS`; of the two the later counts. All news up to there are emitted first, so a
    window that ends before the watermark is complete.
    """

    def __init__(
        self,
        ring: PacketRing,
        tap: Tap,
        instances: Sequence[str],
        *,
        interval_ms: int,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._ring = ring
        self._tap = tap
        self._instances = instances
        self._interval_ns = interval_ms * 1_000_000
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._next_ns = monotonic_ns()
        self._offset_ns = wall_ns() - monotonic_ns()

    def step(self, emit: Emit) -> float:
        """Do what is due now; seconds until the next report is."""
        late_ns = self._monotonic_ns() - self._next_ns
        if late_ns < 0:
            if self._ring.filling():
                self._ring.drain(self._tap.packet)
            return -late_ns / 1e9
        self._next_ns += (1 + late_ns // self._interval_ns) * self._interval_ns
        self._check_clock()
        self._report(emit)
        return max(0.0, (self._next_ns - self._monotonic_ns()) / 1e9)

    def _check_clock(self) -> None:
        """Times from before a step of the wall clock mean nothing after it."""
        offset_ns = self._wall_ns() - self._monotonic_ns()
        step_ns, self._offset_ns = offset_ns - self._offset_ns, offset_ns
        if abs(step_ns) > CLOCK_STEP_NS:
            log.warning("the clock was set by %.3f s: open exchanges are given up", step_ns / 1e9)
            self._ring.drain(self._tap.packet)
            self._tap.forget("clock set")
            self._ring.newest_ns = 0

    def _report(self, emit: Emit) -> None:
        now_ns = self._wall_ns()
        drained = self._ring.drain(self._tap.packet)
        sure_ns = now_ns - self._ring.hold_ns if drained else 0
        watermark_ns = max(sure_ns, self._ring.newest_ns - SKEW_NS)
        lost = self._ring.lost()
        if lost:
            log.warning("the kernel dropped %d packets: the ring was full", lost)
            self._tap.packets_lost(lost, watermark_ns)
        for part in self._tap.flush(watermark_ns):
            emit.sample(TELEMETRY_REQUESTS, part)
        for instance in self._instances:
            emit.watermark(TELEMETRY_REQUESTS, instance, watermark_ns)


class NetworkSource:
    """Watches the servers of the base URLs; see :class:`~latencyprism.collectors.source.Source`."""

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
        """Capture until ``stop``; returns within 100 ms of it.

        Raises PermissionError without CAP_NET_RAW, OSError when a host name does not resolve or
        the interface does not exist, ValueError for a URL that names no server.
        """
        config = self._config
        targets = Targets([Watch.of(url) for url in self._engines])
        ports = sorted(targets.ports)
        ring = Ring(
            config.interface,
            ports,
            ring_mib=config.ring_mib,
            block_timeout_ms=config.block_timeout_ms,
        )
        try:
            self._tap = Tap(targets, config)
            reports = Reports(
                ring, self._tap, targets.instances, interval_ms=config.part_interval_ms
            )
            log.info("watching ports %s on %s", ports, config.interface or "every interface")
            while not stop.is_set():
                time.sleep(min(reports.step(emit), LOOK_S))
        finally:
            ring.close()
