"""What the source does at each tick, with tiers that are made up."""

import errno
from collections.abc import Iterable, Sequence

from kernel_support import INSTANCE, Heard, make_setup, server

from latencyprism.collectors.kernel.btf import BtfError
from latencyprism.collectors.kernel.config import KernelConfig, TierName
from latencyprism.collectors.kernel.servers import Server
from latencyprism.collectors.kernel.source import explain
from latencyprism.collectors.kernel.watch import Watch
from latencyprism.schemas.records import HistogramDelta
from latencyprism.schemas.topics import TELEMETRY_KERNEL

START_NS = 10**18
S = 1_000_000_000


class FakeTier:
    name: TierName = "run_queue"

    def __init__(self) -> None:
        self.followed: list[Sequence[Server]] = []
        self.intervals: list[float] = []
        self.lost_now = 0
        self.refuses = False

    def follow(self, servers: Sequence[Server]) -> None:
        self.followed.append(servers)
        if self.refuses:
            raise OSError(errno.ENOSPC, "full")

    def read(self, interval_s: float) -> dict[str, list[HistogramDelta]]:
        self.intervals.append(interval_s)
        return {INSTANCE: [HistogramDelta(stage="run_queue", count=1.0, sum=0.5)]}

    def lost(self) -> int:
        lost, self.lost_now = self.lost_now, 0
        return lost

    def runtimes(self) -> Iterable[tuple[int, int]]:
        return [(1000, 10), (500, 5)]

    def close(self) -> None: ...


class Bench:
    def __init__(self, config: KernelConfig | None = None) -> None:
        self.now_ns = 0
        self.tier = FakeTier()
        self.servers = [server(7)]
        self.setup = make_setup(config)
        self.heard = Heard()
        self.watch = Watch(
            [self.tier],
            lambda: self.servers,
            list,
            self.setup,
            host="h",
            wall_ns=lambda: START_NS + self.now_ns,
            monotonic_ns=lambda: self.now_ns + 5 * S,
        )

    def ticks(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            self.now_ns += S // 20
            self.watch.tick(self.heard)


def test_a_sample_is_told_every_second_with_what_was_measured() -> None:
    bench = Bench()
    bench.ticks(2)

    first, second = bench.heard.samples[TELEMETRY_KERNEL.name]

    assert (second.instance, second.source, second.host) == (INSTANCE, "kernel", "h")
    assert second.observed_at_ns == START_NS + 2 * S
    assert first.interval_ns == second.interval_ns == S
    assert [h.stage for h in second.histograms] == ["run_queue"]
    assert bench.tier.intervals == [1.0, 1.0]


def test_watermarks_move_at_every_tick() -> None:
    bench = Bench()
    bench.ticks(1)

    marks = bench.heard.watermarks[TELEMETRY_KERNEL.name, INSTANCE]

    assert marks == [START_NS + tick * S // 20 for tick in range(1, 21)]


def test_servers_are_looked_for_at_their_own_pace() -> None:
    bench = Bench(KernelConfig(discover_s=0.5))
    bench.ticks(2)

    assert len(bench.tier.followed) == 4


def test_a_server_of_another_machine_is_not_told_of() -> None:
    bench = Bench()
    bench.servers = [
        Server(
            instance=INSTANCE, here=False, roles={}, listening=frozenset(), connected=frozenset()
        )
    ]
    bench.ticks(2)

    assert not bench.heard.samples
    assert not bench.heard.watermarks


def test_what_was_lost_is_told_and_counted() -> None:
    bench = Bench()
    bench.tier.lost_now = 3
    bench.ticks(2)

    assert [sample.lost for sample in bench.heard.samples[TELEMETRY_KERNEL.name]] == [3, 0]
    assert bench.setup.counts["lost"] == 3


def test_a_tier_that_can_t_follow_is_counted_and_goes_on() -> None:
    bench = Bench()
    bench.tier.refuses = True
    bench.ticks(2)

    assert bench.setup.counts["run_queue not followed"] == 1
    assert len(bench.heard.samples[TELEMETRY_KERNEL.name]) == 2


def test_probes_are_measured_when_that_is_set() -> None:
    bench = Bench(KernelConfig(measure=True))
    bench.ticks(1)

    assert bench.setup.counts["run_queue ran"] == 15
    assert bench.setup.counts["run_queue ran_ns"] == 1500


def test_a_refusal_says_what_to_do() -> None:
    assert "give CAP_BPF and CAP_PERFMON" in explain(PermissionError(errno.EPERM, "no"))
    assert "CONFIG_DEBUG_INFO_BTF" in explain(BtfError("this kernel has no type task_struct"))
    assert "CONFIG_UPROBES" in explain(FileNotFoundError(errno.ENOENT, "uprobe/type"))
    assert "ulimit -l" in explain(OSError(errno.ENOMEM, "no memory"))
    assert "leave the tier out" in explain(OSError(errno.EINVAL, "odd"))
