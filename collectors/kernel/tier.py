"""What every kind of probes is made of, and how it follows the servers.

A tier is open from the moment it is made; closing it takes everything out of the kernel.
"""

import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.kernel.arch import Arch
from latencyprism.collectors.kernel.bpf import Kernel, Map, MapKind, Program
from latencyprism.collectors.kernel.btf import Btf
from latencyprism.collectors.kernel.config import KernelConfig, TierName
from latencyprism.collectors.kernel.histogram import VALUE_BYTES, WORDS, delta, totals
from latencyprism.collectors.kernel.ring import Ring
from latencyprism.collectors.kernel.servers import Server
from latencyprism.schemas.records import HistogramDelta

MAX_PROCESSES: Final = 4096
U32: Final = struct.Struct("=I")
U64: Final = struct.Struct("=Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What every tier is made from. ``btf`` reads the kernel's types when they are first asked."""

    kernel: Kernel
    arch: Arch
    btf: Callable[[], Btf]
    files: Files
    config: KernelConfig
    instances: tuple[str, ...]
    counts: Counter[str]


class Tier(Protocol):
    """One kind of probes."""

    name: TierName

    def follow(self, servers: Sequence[Server]) -> None:
        """Watch the processes of these servers and no others from now on."""

    def read(self, interval_s: float) -> dict[str, list[HistogramDelta]]:
        """Growth of each instance's histograms since the last call, which was so long ago."""

    def lost(self) -> int:
        """Events since the last call that found no room."""

    def runtimes(self) -> Iterable[tuple[int, int]]:
        """Nanoseconds and runs of each program, while they are measured."""

    def close(self) -> None:
        """Take it out of the kernel."""


class Histograms:
    """One array of histograms: for each instance those of the same stages."""

    def __init__(self, parts: "Parts", instances: Sequence[str], stages: Sequence[str]) -> None:
        self._instances = tuple(instances)
        self._stages = tuple(stages)
        count = len(self._instances) * len(self._stages)
        self.map = parts.map(MapKind.PERCPU_ARRAY, "times", key=4, value=VALUE_BYTES, entries=count)
        self._last: list[tuple[int, ...]] = [(0,) * WORDS] * count

    def first_of(self, instance: str) -> int:
        """Index of the instance's first histogram."""
        return self._instances.index(instance) * len(self._stages)

    def read(self) -> dict[str, list[HistogramDelta]]:
        """See :meth:`Tier.read`."""
        return {
            instance: [
                growth
                for place, stage in enumerate(self._stages, self.first_of(instance))
                if (growth := self._growth(place, stage)) is not None
            ]
            for instance in self._instances
        }

    def _growth(self, place: int, stage: str) -> HistogramDelta | None:
        now = totals(self.map.get(U32.pack(place)) or bytes(VALUE_BYTES))
        before, self._last[place] = self._last[place], now
        return delta(stage, before, now)


class Table:
    """A map kept equal to what is wanted, by the fewest changes."""

    def __init__(self, map_: Map) -> None:
        self.map = map_
        self._held: dict[bytes, bytes] = {}

    def there(self) -> list[bytes]:
        """Keys that it holds now."""
        return list(self._held)

    def set(self, wanted: Mapping[bytes, bytes]) -> None:
        """Make it hold this. Raises OSError when it is full."""
        for key in self._held.keys() - wanted.keys():
            self.map.delete(key)
            del self._held[key]
        for key, value in wanted.items():
            if self._held.get(key) != value:
                self.map.put(key, value)
                self._held[key] = value


class Parts:
    """Maps, programs and attachments that are given back together, the last one first."""

    def __init__(self, kernel: Kernel) -> None:
        self.programs: list[Program] = []
        self._kernel = kernel
        self._stack = ExitStack()

    def map(self, kind: MapKind, name: str, *, key: int, value: int, entries: int) -> Map:
        """See :meth:`Kernel.create_map`."""
        made = self._kernel.create_map(kind, name, key=key, value=value, entries=entries)
        self._stack.callback(made.close)
        return made

    def ring(self, name: str, size: int) -> Ring:
        """A ring buffer."""
        ring = Ring(self._kernel, name, size)
        self._stack.callback(ring.close)
        return ring

    def trace(self, name: str, code: bytes, tracepoint: int) -> None:
        """Run a program at a tracepoint."""
        program = self._keep(self._kernel.load_tracing(name, code, tracepoint))
        self._stack.callback(self._kernel.attach_tracepoint(program).close)

    def uprobe(self, name: str, code: bytes) -> Program:
        """A program to be attached to functions."""
        return self._keep(self._kernel.load_uprobe(name, code))

    def _keep(self, program: Program) -> Program:
        self.programs.append(program)
        self._stack.callback(program.close)
        return program

    def close(self) -> None:
        """Give everything back."""
        self._stack.close()


class HistogramTier(ABC):
    """What all tiers with histograms in the kernel share."""

    name: TierName
    stages: tuple[str, ...]

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._parts = Parts(setup.kernel)
        try:
            self._times = Histograms(self._parts, setup.instances, self.stages)
            self._build()
        except BaseException:
            self._parts.close()
            raise

    @abstractmethod
    def _build(self) -> None:
        """Load and attach; what is made through the parts is given back when this raises."""

    def read(self, interval_s: float) -> dict[str, list[HistogramDelta]]:  # noqa: ARG002
        """See :meth:`Tier.read`."""
        return self._times.read()

    def lost(self) -> int:
        """See :meth:`Tier.lost`; histograms lose nothing."""
        return 0

    def runtimes(self) -> Iterable[tuple[int, int]]:
        """See :meth:`Tier.runtimes`."""
        return [program.runtime() for program in self._parts.programs]

    def close(self) -> None:
        """See :meth:`Tier.close`."""
        self._parts.close()
