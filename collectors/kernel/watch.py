"""What the kernel source does between two waits. No threads, no kernel of its own."""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from latencyprism.collectors.kernel.servers import Server
from latencyprism.collectors.kernel.steps import SETTLE_NS, batch
from latencyprism.collectors.kernel.tier import Setup, Tier
from latencyprism.collectors.kernel.tracepoints import Frames
from latencyprism.collectors.source import Emit
from latencyprism.schemas.records import HistogramDelta, KernelSample
from latencyprism.schemas.topics import TELEMETRY_KERNEL, TELEMETRY_STEPS

logger = logging.getLogger(__name__)

SOURCE: Final = "kernel"
"""What the records call their source."""
HOLD_NS: Final = SETTLE_NS + 100_000_000
"""A step is told of so long after its end at the latest, but for one whose message was held up."""


class Watch:
    """What happens at each tick: follow, drain, report.

    ``find`` tells the servers there are, ``versions`` which version of its engine an instance has
    turned out to run since it was last asked.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        find: Callable[[], list[Server]],
        versions: Callable[[], list[tuple[str, str]]],
        setup: Setup,
        *,
        host: str,
        wall_ns: Callable[[], int],
        monotonic_ns: Callable[[], int],
    ) -> None:
        self._tiers = tiers
        self._frames = next((tier for tier in tiers if isinstance(tier, Frames)), None)
        self._find = find
        self._versions = versions
        self._setup = setup
        self._host = host
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._read_ns = monotonic_ns()
        self._found_ns = 0
        self._found: list[Server] = []

    def tick(self, emit: Emit) -> None:
        """Do what is due now."""
        now_ns, wall_ns = self._monotonic_ns(), self._wall_ns()
        if now_ns - self._found_ns >= self._setup.config.discover_s * 1e9:
            self._found_ns = now_ns
            self._found = [server for server in self._find() if server.here]
            self._follow()
        if self._frames is not None:
            self._steps(emit, self._frames, now_ns, wall_ns)
        if now_ns - self._read_ns >= self._setup.config.interval_ms * 1_000_000:
            self._sample(emit, now_ns, wall_ns)
            self._read_ns = now_ns
        for server in self._found:
            emit.watermark(TELEMETRY_KERNEL, server.instance, wall_ns)
            if self._frames is not None:
                emit.watermark(TELEMETRY_STEPS, server.instance, wall_ns - HOLD_NS)

    def _follow(self) -> None:
        for instance, version in self._versions():
            if self._frames is not None and instance in self._setup.instances:
                self._frames.version(instance, version)
        for tier in self._tiers:
            try:
                tier.follow(self._found)
            except OSError as error:
                self._setup.counts[f"{tier.name} not followed"] += 1
                logger.warning("Kernel probes of tier %s: %s", tier.name, error)

    def _steps(self, emit: Emit, frames: Frames, now_ns: int, wall_ns: int) -> None:
        frames.drain()
        for instance, steps in frames.steps(now_ns).items():
            record = batch(
                steps,
                instance=instance,
                source=SOURCE,
                model=None,
                offset_ns=wall_ns - now_ns,
            )
            if record is not None:
                emit.sample(TELEMETRY_STEPS, record)

    def _sample(self, emit: Emit, now_ns: int, wall_ns: int) -> None:
        interval_ns = now_ns - self._read_ns
        grown: dict[str, list[HistogramDelta]] = {name: [] for name in self._setup.instances}
        lost = 0
        for tier in self._tiers:
            for instance, histograms in tier.read(interval_ns / 1e9).items():
                grown[instance] += histograms
            lost += tier.lost()
            if self._setup.config.measure:
                self._measure(tier)
        self._setup.counts["lost"] += lost
        for server in self._found:
            emit.sample(
                TELEMETRY_KERNEL,
                KernelSample(
                    instance=server.instance,
                    source=SOURCE,
                    observed_at_ns=wall_ns,
                    host=self._host,
                    interval_ns=interval_ns,
                    histograms=tuple(grown[server.instance]),
                    lost=lost,
                ),
            )

    def _measure(self, tier: Tier) -> None:
        times, runs = zip(*tier.runtimes(), strict=True)
        self._setup.counts[f"{tier.name} ran"] = sum(runs)
        self._setup.counts[f"{tier.name} ran_ns"] = sum(times)
