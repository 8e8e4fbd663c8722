from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_machine import INODE, FakeMachine, FakeProcess

from latencyprism.collectors.host import processes, sampler, threads
from latencyprism.collectors.host.counts import Counts
from latencyprism.collectors.host.files import Files, delta
from latencyprism.collectors.host.locate import Target
from latencyprism.collectors.host.sampler import HostSampler
from latencyprism.schemas.records import HostSample, ThreadSample

MS = 1_000_000


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    fake = FakeMachine(tmp_path)
    fake.listening()
    fake.processes[100] = FakeProcess(inode=INODE, waits={100: 0})
    fake.flush()
    return fake


class Ticker:
    """A sampler on a fake machine, one tick every 100 ms of a fake clock."""

    def __init__(self, machine: FakeMachine, target: Target | None = None) -> None:
        self.machine = machine
        # Fake files are replaced, not rewritten in place by a kernel, so none is kept open.
        self.files = Reopening(str(machine.proc), str(machine.sys))
        self.counts = Counts()
        self.cost_ns = 0
        self.sampler = HostSampler(
            self.files,
            [target or Target(instance="h:8000", port=machine.port)],
            host="node",
            counts=self.counts,
            diag=False,
            cpu_ns=self._spend,
        )
        self.now_ns = 0
        self.offset_ns = 10**18

    def __call__(self, advance_ms: int = 100) -> HostSample | None:
        self.machine.flush()
        self.now_ns += advance_ms * MS
        samples = self.sampler.tick(
            wall_ns=self.now_ns + self.offset_ns, monotonic_ns=self.now_ns, lateness_us=5
        )
        return samples[0] if samples else None

    def _spend(self) -> int:
        self.cost_ns += 1
        return self.cost_ns

    def next(self, advance_ms: int = 100) -> HostSample:
        sample = self(advance_ms)
        assert sample is not None
        return sample


class Reopening(Files):
    """A process that died in a fake tree leaves no descriptor that stops to answer."""

    def read(self, path: str) -> bytes | None:
        return self.read_once(path)


@pytest.fixture
def tick(machine: FakeMachine) -> Iterator[Ticker]:
    ticker = Ticker(machine)
    yield ticker
    ticker.sampler.close()


def test_first_tick_only_looks(tick: Ticker) -> None:
    assert tick() is None


def test_machine_and_process_over_an_interval(machine: FakeMachine, tick: Ticker) -> None:
    tick()
    process = machine.processes[100]
    machine.idle += 24
    machine.user += 12
    machine.steal += 4
    machine.psi = 7
    machine.throttled = (3_000_000, 2)
    process.state, process.ticks, process.minor, process.major = "R", 4, 5, 1
    process.waits[100], process.voluntary, process.involuntary = 2_500_000, 8, 9

    sample = tick.next(200)

    assert sample.observed_at_ns == 10**18 + 300 * MS
    assert (sample.instance, sample.source, sample.host) == ("h:8000", "host", "node")
    assert (sample.interval_ns, sample.lateness_us, sample.clock_step_ns) == (200 * MS, 5, 0)
    assert sample.cpu_busy == pytest.approx(0.4)
    assert sample.cpu_steal == pytest.approx(0.1)
    # 40 ms of 2 CPUs in 200 ms are the server's own.
    assert sample.cpu_others == pytest.approx(0.3)
    assert sample.runnable == 3
    assert (sample.psi_cpu_us, sample.psi_memory_us, sample.psi_io_us) == (7, 7, 7)
    assert (sample.net_rx_bytes, sample.net_tx_bytes, sample.tcp_retransmits) == (7, 7, 7)
    assert (sample.throttled_ns, sample.throttled_periods) == (3_000_000, 2)
    (seen,) = sample.processes
    assert (seen.pid, seen.role, seen.state) == (100, "server", "R")
    assert (seen.cpu_ns, seen.runqueue_ns) == (40 * MS, 2_500_000)
    assert (seen.minor_faults, seen.major_faults) == (5, 1)
    assert (seen.voluntary_switches, seen.involuntary_switches) == (8, 9)
    assert (seen.threads, seen.rss_bytes) == (1, 100 * processes.PAGE_BYTES)


def test_cpu_time_is_read_at_every_other_tick_and_others_is_what_is_left_of_both(
    machine: FakeMachine, tick: Ticker
) -> None:
    tick()
    seen = []
    for _ in range(6):
        machine.user += 10
        machine.idle += 10
        machine.processes[100].ticks += 4
        sample = tick.next()
        seen.append((sample.cpu_busy, sample.cpu_others, sample.cpu_steal, sample.runnable))

    assert seen[0] == seen[2] == seen[4] == (None, None, None, None)
    assert seen[1] == seen[3] == seen[5]
    busy, others, steal, runnable = seen[1]
    assert (busy, steal, runnable) == (0.5, 0.0, 3)
    assert others == pytest.approx(0.3)


def test_slow_values_come_once_a_second(tick: Ticker) -> None:
    tick()

    seen = [tick.next().memory_available_bytes for _ in range(20)]

    assert [i for i, value in enumerate(seen, start=1) if value is not None] == [10, 20]
    assert set(seen) == {None, 8192}


def test_disks_are_told_once_a_second_over_that_second(machine: FakeMachine, tick: Ticker) -> None:
    tick()
    seen = []
    for _ in range(20):
        machine.psi += 1
        machine.busy_ms += 25
        sample = tick.next()
        seen.append((sample.disk_read_bytes, sample.disk_write_bytes, sample.disk_busy))

    told = [one for one in seen if one[0] is not None]
    assert told == [(10 * 512, 0, 0.25)] * 2


def test_busiest_threads_come_once_a_second_over_that_second(
    machine: FakeMachine, tick: Ticker
) -> None:
    process = machine.processes[100]
    process.waits = dict.fromkeys(range(100, 112), 0)
    process.names = {111: "EngineCore"}
    tick()
    seen = []
    for _ in range(20):
        process.ticks += 1
        for tid in process.waits:
            process.runs[tid] = process.runs.get(tid, 0) + (tid - 100) * 10
        process.waits[101] += 500
        seen.append(tick.next().hot_threads)

    assert [i for i, hot in enumerate(seen, start=1) if hot] == [10, 20]
    assert len(seen[9]) == sampler.HOT_THREADS
    assert seen[19][:2] == (
        ThreadSample(pid=100, tid=101, name="x", cpu_ns=100, runqueue_ns=5000),
        ThreadSample(pid=100, tid=111, name="EngineCore", cpu_ns=1100, runqueue_ns=0),
    )


def test_clock_that_was_set_is_told_and_intervals_stay_monotonic(tick: Ticker) -> None:
    tick()
    tick.offset_ns -= 3_600_000 * MS

    sample = tick.next()

    assert sample.clock_step_ns == -3_600_000 * MS
    assert sample.interval_ns == 100 * MS


def test_vllm_processes_and_their_roles(machine: FakeMachine, tick: Ticker) -> None:
    machine.processes[100].command = "python server.py"
    machine.processes[101] = FakeProcess(ppid=100, command="VLLM::EngineCore", waits={101: 0})
    machine.processes[102] = FakeProcess(ppid=101, command="VLLM::Worker_TP0", waits={102: 0})
    machine.processes[103] = FakeProcess(
        ppid=100, command="python -c from multiprocessing.resource_tracker import main"
    )
    machine.processes[200] = FakeProcess(command="somebody else")
    tick()

    roles = {process.pid: process.role for process in tick.next().processes}

    assert roles == {100: "api", 101: "core", 102: "worker"}


def test_restarted_server_is_found_within_a_second(machine: FakeMachine, tick: Ticker) -> None:
    tick()
    assert len(tick.next().processes) == 1
    machine.kill(100)
    machine.processes[300] = FakeProcess(inode=INODE + 1, waits={300: 0})
    machine.listening(INODE + 1)

    gone, found = tick.next(), tick.next(1000)

    assert gone.processes == ()
    assert [process.pid for process in found.processes] == [300]
    assert found.processes[0].cpu_ns is None
    machine.processes[300].ticks += 1
    assert tick.next().processes[0].cpu_ns == processes.TICK_NS


def test_server_that_is_down_leaves_the_machine_s_values(
    machine: FakeMachine, tick: Ticker
) -> None:
    machine.kill(100)
    machine.listening(None)
    tick()
    machine.idle += 10

    sample = tick.next(200)

    assert sample.processes == ()
    assert sample.cpu_busy == 0.0
    assert sample.throttled_ns is None


def test_process_number_used_again_is_another_process(machine: FakeMachine, tick: Ticker) -> None:
    tick()
    machine.processes[100].started += 1
    machine.processes[100].ticks = 1_000_000

    assert tick.next().processes == ()
    assert tick.next(1000).processes[0].cpu_ns is None


def test_new_child_is_seen_within_seconds(machine: FakeMachine, tick: Ticker) -> None:
    tick()
    tick()
    machine.processes[101] = FakeProcess(ppid=100, command="VLLM::EngineCore", waits={101: 0})

    assert len(tick.next().processes) == 1
    assert len(tick.next(5000).processes) == 2


def test_kernel_without_counters_gives_null(machine: FakeMachine, tick: Ticker) -> None:
    tick()
    (machine.proc / "100/task/100/schedstat").unlink()
    machine.processes[100].waits = {}
    tick.machine.flush()
    for kind in ("cpu", "memory", "io"):
        (machine.proc / "pressure" / kind).unlink()
    tick.now_ns += 100 * MS
    (sample,) = tick.sampler.tick(wall_ns=0, monotonic_ns=tick.now_ns)

    assert (sample.psi_cpu_us, sample.psi_memory_us, sample.psi_io_us) == (None, None, None)
    assert sample.processes[0].runqueue_ns is None
    assert sample.processes[0].cpu_ns == 0


def test_only_threads_that_move_are_read_between_sweeps(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "MIN_ACTIVE", 1)
    process = machine.processes[100]
    process.waits = dict.fromkeys((100, 101, 102), 0)
    process.runs = {102: 50}
    machine.flush()
    read = threads.Threads(Reopening(str(machine.proc)), 100, Counts())
    assert read.waited_ns() is None
    assert read.sweep() == []
    process.waits |= {101: 7, 102: 9}
    machine.flush()

    assert read.waited_ns() == 9
    assert read.sweep() == [
        threads.Growth(tid=102, ran_ns=0, waited_ns=9),
        threads.Growth(tid=101, ran_ns=0, waited_ns=7),
    ]
    process.waits |= {100: 1, 101: 10, 102: 13}
    machine.flush()
    # 101 is read from now on, 102 went on, 100 sleeps as far as the sweep knows.
    assert read.waited_ns() == 3 + 4
    process.waits |= {101: 15, 102: 14}
    machine.flush()
    assert read.waited_ns() == 6


def test_threads_of_a_large_process_take_turns(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "MAX_SWEPT", 4)
    monkeypatch.setattr(threads, "MIN_ACTIVE", 1)
    monkeypatch.setattr(threads, "MAX_ACTIVE", 1)
    process = machine.processes[100]
    process.waits = dict.fromkeys(range(100, 110), 0)
    machine.flush()
    counts = Counts()
    read = threads.Threads(Reopening(str(machine.proc)), 100, counts)
    for _ in range(4):
        read.sweep()
    process.waits = dict.fromkeys(process.waits, 5)
    machine.flush()

    seen = [one.tid for _ in range(4) for one in read.sweep()]

    assert set(seen) == set(range(100, 110))
    assert counts["threads_beyond_bound"] == 8


@pytest.mark.parametrize(
    ("before", "now", "expected"), [(None, 1, None), (1, None, None), (5, 3, None), (3, 5, 2)]
)
def test_delta(before: int | None, now: int | None, expected: int | None) -> None:
    assert delta(before, now) == expected
