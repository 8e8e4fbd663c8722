"""What the tests of the kernel source share: tiers in the real kernel, processes to watch."""

import contextlib
import functools
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.kernel import btf, needs
from latencyprism.collectors.kernel.arch import this_arch
from latencyprism.collectors.kernel.bpf import Kernel
from latencyprism.collectors.kernel.config import KernelConfig, TierName
from latencyprism.collectors.kernel.histogram import BOUNDS_S
from latencyprism.collectors.kernel.servers import Server
from latencyprism.collectors.kernel.source import examine
from latencyprism.collectors.kernel.tier import Setup, Tier
from latencyprism.collectors.kernel.tiers import TIERS
from latencyprism.collectors.source import UnavailableError
from latencyprism.schemas.records import HistogramDelta
from latencyprism.schemas.topics import Topic

INSTANCE = "127.0.0.1:8000"


@functools.cache
def this_btf() -> btf.Btf:
    return btf.Btf((Path("/sys") / btf.VMLINUX).read_bytes())


def make_setup(config: KernelConfig | None = None, *instances: str) -> Setup:
    return Setup(
        kernel=Kernel(this_arch()),
        arch=this_arch(),
        btf=this_btf,
        files=Files(),
        config=config or KernelConfig(),
        instances=instances or (INSTANCE,),
        counts=Counter(),
    )


def skip_unless_permitted(*tiers: TierName) -> None:
    """Skip the test where this machine lacks what the tiers need, or refuses all the same."""
    lacks = needs.missing(examine("/proc", "/sys"))
    wanted = dict.fromkeys(lack for tier in tiers for lack in lacks[tier])
    if wanted:
        pytest.skip(f"needs {', '.join(wanted)}")


@contextlib.contextmanager
def tier(name: TierName, setup: Setup) -> Iterator[Any]:
    """A tier in the kernel, closed afterwards."""
    skip_unless_permitted(name)
    try:
        opened: Tier = TIERS[name](setup)
    except (PermissionError, UnavailableError) as refused:
        pytest.skip(f"this kernel refuses {name}: {refused}")
    try:
        yield opened
    finally:
        opened.close()


def server(
    *pids: int,
    instance: str = INSTANCE,
    role: str = "server",
    listening: Sequence[tuple[int, int]] = (),
    connected: Sequence[tuple[int, int]] = (),
) -> Server:
    return Server(
        instance=instance,
        here=True,
        roles=dict.fromkeys(pids, role),
        listening=frozenset(listening),
        connected=frozenset(connected),
    )


class Child:
    """A Python process that runs ``code``, says a line when it is ready, and takes lines."""

    def __init__(self, code: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.pid = self.process.pid
        try:
            self.first = self.hear()
        except BaseException:
            self.close()
            raise

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        return line.strip()

    def say(self, text: str = "") -> str:
        """Give it a line, and wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.hear()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()


@contextlib.contextmanager
def child(code: str, *arguments: str, env: dict[str, str] | None = None) -> Iterator[Child]:
    process = Child(code, *arguments, env=env)
    try:
        yield process
    finally:
        process.close()


def by_stage(histograms: Sequence[HistogramDelta]) -> dict[str, HistogramDelta]:
    return {histogram.stage: histogram for histogram in histograms}


def count_between(histogram: HistogramDelta, low_s: float, high_s: float) -> float:
    """Observations in buckets that may hold times from ``low_s`` to ``high_s``."""
    lower = (0.0, *BOUNDS_S)
    upper = (*BOUNDS_S, float("inf"))
    return sum(
        count
        for count, start, end in zip(histogram.counts, lower, upper, strict=True)
        if end > low_s and start < high_s
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class Heard:
    """An emit that remembers."""

    samples: dict[str, list[Any]] = field(default_factory=dict)
    watermarks: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def sample(self, topic: Topic, sample: Any) -> None:
        self.samples.setdefault(topic.name, []).append(sample)

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:
        self.watermarks.setdefault((topic.name, instance), []).append(watermark_ns)
