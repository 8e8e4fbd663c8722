"""The host source on the real machine, with real processes."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from latencyprism.collectors.host.config import HostConfig
from latencyprism.collectors.host.counts import KINDS
from latencyprism.collectors.host.locate import Target
from latencyprism.collectors.host.source import HostSource, Pace, local_servers, targets
from latencyprism.collectors.publisher import MemoryPublisher
from latencyprism.schemas.records import HostSample, ProcessSample
from latencyprism.schemas.topics import TELEMETRY_HOST, Topic

SERVER = textwrap.dedent("""
    import socket, subprocess, sys, time
    server = socket.create_server(("127.0.0.1", 0))
    burner = "import time\\nwhile True: sum(range(10000))"
    child = subprocess.Popen(["VLLM::EngineCore", "-c", burner], executable=sys.executable)
    print(server.getsockname()[1], child.pid, flush=True)
    time.sleep(600)
""")


class Server:
    """A process that listens, with a child that burns CPU time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        port, child = self.process.stdout.readline().split()
        self.port, self.child = int(port), int(child)
        self.url = f"http://127.0.0.1:{self.port}"

    def end(self) -> None:
        for pid in (self.child, self.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Recorder(MemoryPublisher):
    """Remembers samples and watermarks in the order they came."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[HostSample] = []
        self.marks: list[tuple[int, float]] = []

    def sample(self, topic: Topic, sample: Any) -> None:
        assert topic is TELEMETRY_HOST
        if self.marks:
            assert sample.observed_at_ns >= self.marks[-1][0], "older than the watermark"
        self.samples.append(sample)

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:
        assert topic is TELEMETRY_HOST
        assert instance
        self.marks.append((watermark_ns, time.monotonic()))


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.end()


@pytest.fixture
def watched(server: Server) -> Iterator[Recorder]:
    recorder, stop = Recorder(), threading.Event()
    source = HostSource([server.url], HostConfig(interval_ms=50), host="here")
    thread = threading.Thread(target=source.run, args=(recorder, stop))
    thread.start()
    yield recorder
    began = time.monotonic()
    stop.set()
    thread.join(5)
    assert time.monotonic() - began < 0.5


def wait_for(
    recorder: Recorder, condition: Callable[[HostSample], bool], timeout_s: float = 15
) -> HostSample:
    deadline = time.monotonic() + timeout_s
    seen = len(recorder.samples)
    while time.monotonic() < deadline:
        for sample in recorder.samples[seen:]:
            seen += 1
            if condition(sample):
                return sample
        time.sleep(0.01)
    raise AssertionError(f"not seen, last {recorder.samples[-1:]}")


def process(sample: HostSample, pid: int) -> ProcessSample | None:
    return next((p for p in sample.processes if p.pid == pid), None)


def state(sample: HostSample, pid: int) -> str:
    found = process(sample, pid)
    return found.state if found else "gone"


def test_burning_child_is_found_and_its_cpu_time_counted(server: Server, watched: Recorder) -> None:
    def burns(sample: HostSample) -> bool:
        core = process(sample, server.child)
        return core is not None and bool(core.cpu_ns) and core.runqueue_ns is not None

    sample = wait_for(watched, burns)
    api, core = process(sample, server.process.pid), process(sample, server.child)

    assert sample.instance == f"127.0.0.1:{server.port}"
    assert sample.host == "here"
    assert api is not None
    assert core is not None
    assert (api.role, core.role) == ("api", "core")
    assert core.rss_bytes is not None
    assert core.rss_bytes > 1_000_000
    assert sample.cpu_busy is None or 0 < sample.cpu_busy <= 1
    assert sample.net_rx_bytes is not None
    assert abs(sample.clock_step_ns or 0) < 50_000_000


def test_stopped_child_is_seen_stopped(server: Server, watched: Recorder) -> None:
    wait_for(watched, lambda s: process(s, server.child) is not None)
    os.kill(server.child, signal.SIGSTOP)
    stopped = wait_for(watched, lambda s: state(s, server.child) == "T")
    later = wait_for(watched, lambda s: process(s, server.child) is not None)
    os.kill(server.child, signal.SIGCONT)
    wait_for(watched, lambda s: state(s, server.child) != "T")

    assert stopped.processes
    core = process(later, server.child)
    assert core is not None
    assert core.cpu_ns in (0, 10_000_000)


def test_killed_child_is_gone(server: Server, watched: Recorder) -> None:
    wait_for(watched, lambda s: process(s, server.child) is not None)
    os.kill(server.child, signal.SIGKILL)

    # Its parent does not wait for it, so it stays as a zombie.
    sample = wait_for(watched, lambda s: state(s, server.child) == "Z")
    assert process(sample, server.process.pid) is not None


def test_watermarks_come_at_least_every_200_ms(watched: Recorder) -> None:
    wait_for(watched, lambda _: len(watched.samples) > 20)
    times = [at for _, at in watched.marks]

    gaps = sorted(b - a for a, b in pairwise(times))
    # A busy machine may stall this test itself once.
    assert gaps[-2] < 0.2


ENGINES = [
    "http://127.0.0.1:8000",
    "http://192.0.2.1:8000",
    "http://no-such-host.invalid",
    "http://localhost",
]


def test_servers_of_other_addresses_may_be_containers_here() -> None:
    assert targets(ENGINES) == [
        Target(instance="127.0.0.1:8000", port=8000),
        Target(instance="192.0.2.1:8000", port=8000, address="192.0.2.1"),
        Target(instance="localhost:80", port=80),
    ]


def test_only_servers_of_this_machine_s_addresses_are_local() -> None:
    assert local_servers(ENGINES) == [("127.0.0.1:8000", 8000), ("localhost:80", 80)]


@pytest.mark.parametrize("engine", ["http://192.0.2.1:8000", "http://no-such-host.invalid"])
def test_of_a_server_elsewhere_nothing_is_told(engine: str) -> None:
    recorder, stop = Recorder(), threading.Event()
    source = HostSource([engine], HostConfig(interval_ms=10))
    thread = threading.Thread(target=source.run, args=(recorder, stop))
    thread.start()
    time.sleep(0.2)
    stop.set()
    thread.join(5)

    assert not thread.is_alive()
    assert (recorder.samples, recorder.marks) == ([], [])


def test_counts_are_all_there_from_the_start() -> None:
    source = HostSource([], HostConfig())

    assert set(source.counts) == set(KINDS)
    assert not any(source.counts.values())


def intervals_at(pace: Pace, costs_s: list[float]) -> list[float]:
    intervals = []
    for cost_s in costs_s:
        pace.spent(cost_s)
        intervals.append(pace.interval_s)
    return intervals


def test_pace_slows_down_while_dear_and_recovers() -> None:
    pace = Pace(0.1, budget=0.02)

    assert set(intervals_at(pace, [0.001] * 40)) == {0.1}
    assert intervals_at(pace, [0.05] * 200)[-1] == 1.0
    assert intervals_at(pace, [0.0001] * 200)[-1] == 0.1


def test_pace_is_not_moved_by_rare_dear_samples() -> None:
    pace = Pace(0.1, budget=0.02)

    assert set(intervals_at(pace, ([0.2] + [0.001] * 9) * 20)) == {0.1}
