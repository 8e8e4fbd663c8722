"""The kinds of probes: which programs and maps each consists of, and how it follows the servers.

A tier is open from the moment it is made; closing it takes everything out of the kernel.
"""

import logging
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.kernel import programs
from latencyprism.collectors.kernel.arch import Arch
from latencyprism.collectors.kernel.bpf import (
    Descriptor,
    Kernel,
    Map,
    MapKind,
    Program,
)
from latencyprism.collectors.kernel.btf import Btf
from latencyprism.collectors.kernel.config import KernelConfig, TierName
from latencyprism.collectors.kernel.elf import ElfError, read_function_offsets
from latencyprism.collectors.kernel.frames import LAYOUTS, Layout, layout_of
from latencyprism.collectors.kernel.histogram import VALUE_BYTES, WORDS, Tally, delta, totals
from latencyprism.collectors.kernel.libraries import (
    CUDA_DRIVER,
    CUDA_RUNTIME,
    TLS_LIBRARY,
    libraries,
)
from latencyprism.collectors.kernel.ring import Ring
from latencyprism.collectors.kernel.servers import Server
from latencyprism.collectors.kernel.steps import Engine, Step
from latencyprism.schemas.records import HistogramDelta

logger = logging.getLogger(__name__)

MAX_PROCESSES: Final = 4096
MAX_LISTENING: Final = 1024
_U32: Final = struct.Struct("=I")
_U64: Final = struct.Struct("=Q")
_PAIR: Final = struct.Struct("=II")
_WATCHED: Final = struct.Struct("=I4xQ")
_CONNECTION: Final = struct.Struct("=QQIIQ")
_EVENT: Final = struct.Struct("=QIIIIQ")


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
        now = totals(self.map.get(_U32.pack(place)) or bytes(VALUE_BYTES))
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


class _Tier:
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

    def _build(self) -> None:
        """Load and attach; what is made through the parts is given back when this raises."""
        raise NotImplementedError

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


class RunQueue(_Tier):
    """How long the servers' threads were ready before they ran."""

    name: TierName = "run_queue"
    stages = ("run_queue",)

    def _build(self) -> None:
        layout = programs.SwitchLayout.of(self._setup.btf())
        watched = self._parts.map(MapKind.HASH, "watched", key=4, value=4, entries=MAX_PROCESSES)
        self._watched = Table(watched)
        since = self._parts.map(
            MapKind.LRU_HASH, "since", key=4, value=8, entries=self._setup.config.max_threads
        )
        maps = {"watched": watched.descriptor, "since": since.descriptor}
        code = programs.woken(layout, **maps)
        self._parts.trace("woken", code, layout.wakeup)
        self._parts.trace("woken_new", code, layout.wakeup_new)
        code = programs.switched(layout, **maps, times=self._times.map.descriptor)
        self._parts.trace("switched", code, layout.switch)

    def follow(self, servers: Sequence[Server]) -> None:
        """See :meth:`Tier.follow`."""
        self._watched.set(
            {
                _U32.pack(pid): _U32.pack(self._times.first_of(server.instance))
                for server in servers
                for pid in server.roles
            }
        )


class Sockets(_Tier):
    """When the servers read requests from their connections and wrote to them."""

    name: TierName = "sockets"
    stages = ("server_reply", "server_second_write", "server_write_gap")

    def _build(self) -> None:
        layout = programs.CallLayout.of(self._setup.btf(), self._setup.arch)
        listening = self._parts.map(
            MapKind.HASH, "listening", key=8, value=4, entries=MAX_LISTENING
        )
        self._listening = Table(listening)
        self._connections = self._parts.map(
            MapKind.LRU_HASH,
            "connections",
            key=8,
            value=programs.CONNECTION_BYTES,
            entries=self._setup.config.max_connections,
        )
        code = programs.sockets(
            layout,
            self._setup.arch,
            listening=listening.descriptor,
            connections=self._connections.descriptor,
            times=self._times.map.descriptor,
        )
        self._parts.trace("sockets", code, layout.exit)

    def follow(self, servers: Sequence[Server]) -> None:
        """See :meth:`Tier.follow`; connections of before go on from their next request."""
        wanted: dict[bytes, bytes] = {}
        for server in servers:
            first = self._times.first_of(server.instance)
            wanted |= {_PAIR.pack(*pair): _U32.pack(first) for pair in server.listening}
            for pair in server.connected:
                self._connections.put(_PAIR.pack(*pair), _CONNECTION.pack(0, 0, 0, first, 0))
        before = {_PAIR.unpack(key)[0] for key in self._listening.there()}
        if gone := before - {pid for server in servers for pid in server.roles}:
            for key in list(self._connections.keys()):
                if _PAIR.unpack(key)[0] in gone:
                    self._connections.delete(key)
        self._listening.set(wanted)


class Frames:
    """What vLLM's engine cores received and sent; their iterations come of it."""

    name: TierName = "frames"

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._parts = Parts(setup.kernel)
        self._engines: dict[int, tuple[str, Engine]] = {}
        self._layouts: dict[str, Layout] = {}
        self._tallies = {
            instance: (Tally("engine_queue"), Tally("engine_prefill"))
            for instance in setup.instances
        }
        self._lost_before_event = 0
        self._lost_told = 0
        try:
            self._build()
        except BaseException:
            self._parts.close()
            raise

    def _build(self) -> None:
        layout = programs.CallLayout.of(self._setup.btf(), self._setup.arch)
        cores = self._parts.map(MapKind.HASH, "cores", key=4, value=4, entries=MAX_PROCESSES)
        self._cores = Table(cores)
        scratch = self._parts.map(
            MapKind.PERCPU_ARRAY, "scratch", key=4, value=programs.SCRATCH_BYTES, entries=1
        )
        self._lost = self._parts.map(MapKind.ARRAY, "lost", key=4, value=8, entries=1)
        self._ring = self._parts.ring("frames", self._setup.config.ring_kib << 10)
        code = programs.frames(
            layout,
            self._setup.arch,
            cores=cores.descriptor,
            scratch=scratch.descriptor,
            ring=self._ring.map.descriptor,
            lost=self._lost.descriptor,
            limit=self._setup.config.frame_bytes,
        )
        self._parts.trace("frames", code, layout.exit)

    def version(self, instance: str, version: str) -> None:
        """The engine of an instance is of this version; until it is told, nothing is decoded."""
        layout = layout_of(version)
        if layout is None:
            self._setup.counts[f"vLLM {version[:20]} not known"] += 1
            logger.warning(
                "%s runs vLLM %s, whose frames are not known (%s are): steps are not read",
                instance,
                version,
                ", ".join(".".join(map(str, known)) for known in LAYOUTS),
            )
        elif self._layouts.get(instance) is not layout:
            self._layouts[instance] = layout

    def follow(self, servers: Sequence[Server]) -> None:
        """See :meth:`Tier.follow`; of processes of the role ``core`` with a known version."""
        cores = {
            pid: server.instance
            for server in servers
            if server.instance in self._layouts
            for pid, role in server.roles.items()
            if role == "core"
        }
        self._cores.set({_U32.pack(pid): _U32.pack(0) for pid in cores})
        self._engines = {
            pid: self._engines.get(pid)
            or (instance, Engine(self._layouts[instance], self._setup.counts))
            for pid, instance in cores.items()
        }

    def drain(self) -> None:
        """Take what waits in the ring."""
        for event in self._ring.drain():
            at_ns, pid, descriptor, length, direction, lost = _EVENT.unpack_from(event)
            if lost != self._lost_before_event:
                self._lost_before_event = lost
                for _, engine in self._engines.values():
                    engine.lose()
            if pid not in self._engines:
                continue
            _, engine = self._engines[pid]
            data = event[programs.EVENT_HEADER :]
            if direction == programs.OUTBOUND:
                engine.outbound(at_ns, descriptor, data, length)
            else:
                engine.inbound(at_ns, data)

    def steps(self, now_ns: int) -> dict[str, list[Step]]:
        """Steps that are over since the last call."""
        found: dict[str, list[Step]] = {}
        for instance, engine in self._engines.values():
            steps, waits = engine.take(now_ns)
            found.setdefault(instance, []).extend(steps)
            queue, prefill = self._tallies[instance]
            for wait in waits:
                queue.add(wait.queue_ns)
                prefill.add(wait.prefill_ns)
        return found

    def read(self, interval_s: float) -> dict[str, list[HistogramDelta]]:  # noqa: ARG002
        """See :meth:`Tier.read`."""
        return {
            instance: [growth for tally in tallies if (growth := tally.take()) is not None]
            for instance, tallies in self._tallies.items()
        }

    def lost(self) -> int:
        """See :meth:`Tier.lost`."""
        (total,) = _U64.unpack(self._lost.get(_U32.pack(0)) or bytes(8))
        lost, self._lost_told = total - self._lost_told, total
        return int(lost)

    def runtimes(self) -> Iterable[tuple[int, int]]:
        """See :meth:`Tier.runtimes`."""
        return [program.runtime() for program in self._parts.programs]

    def close(self) -> None:
        """See :meth:`Tier.close`."""
        self._parts.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Functions that are probed in the same way, and what runs at their call and their return."""

    functions: tuple[str, ...]
    entry: Program
    back: Program | None = None


class _Functions(_Tier):
    """Tiers that put probes into functions of the servers' libraries.

    A server whose processes call them more often than ``calls_s`` is left alone from then on. A
    library that is loaded later is found later: processes without one are looked at again after
    1, 2, 4, 8 ... calls of :meth:`follow`.
    """

    def _build(self) -> None:
        self._watched = self._parts.map(
            MapKind.HASH, "watched", key=8, value=programs.WATCHED_BYTES, entries=MAX_PROCESSES
        )
        self._probes = self._load(self._watched.descriptor)
        self._instances: dict[int, str] = {}
        self._attached: dict[int, list[Descriptor]] = {}
        self._loose: list[Descriptor] = []
        self._looks: Counter[int] = Counter()
        self._calls: Counter[int] = Counter()
        self._banned: set[str] = set()

    def _load(self, watched: int) -> tuple[Probe, ...]:
        """The programs, which look up their process in the map ``watched``."""
        raise NotImplementedError

    def _libraries(self, pid: int) -> list[str]:
        """Where the functions may be."""
        raise NotImplementedError

    def follow(self, servers: Sequence[Server]) -> None:
        """See :meth:`Tier.follow`; reads the symbols of the libraries of new processes."""
        now = {
            pid: server.instance
            for server in servers
            if server.instance not in self._banned
            for pid in server.roles
        }
        for pid in self._looks.keys() - now.keys():
            self._forget(pid)
        self._detach()
        self._instances = now
        for pid in now:
            self._looks[pid] += 1
            if pid not in self._attached and self._looks[pid].bit_count() == 1:
                self._attach(pid)

    def _attach(self, pid: int) -> None:
        places = self._places(pid)
        if not places:
            return
        first = self._times.first_of(self._instances[pid])
        self._watched.put(_U64.pack(pid), _WATCHED.pack(first, 0))
        attached = self._attached[pid] = []
        for library, offset, probe in places:
            try:
                for program, returns in ((probe.back, True), (probe.entry, False)):
                    if program is not None:
                        attached.append(
                            self._setup.kernel.attach_uprobe(
                                program, library, offset, pid, returns=returns
                            )
                        )
            except OSError as refused:
                self._setup.counts[f"{self.name} functions not attached"] += 1
                logger.info("%s: %s", self.name, refused)
            else:
                self._setup.counts[f"{self.name} functions attached"] += 1

    def _places(self, pid: int) -> list[tuple[str, int, Probe]]:
        """Where each probe goes, in the first libraries that define any of the functions."""
        names = [name for probe in self._probes for name in probe.functions]
        for library in self._libraries(pid):
            try:
                offsets = read_function_offsets(library, names)
            except (OSError, ElfError) as error:
                self._setup.counts[f"{self.name} libraries not read"] += 1
                logger.info("%s: %s: %s", self.name, library, error)
                continue
            found = {
                offsets[name]: (library, offsets[name], probe)
                for probe in self._probes
                for name in probe.functions
                if name in offsets
            }
            if found:
                return list(found.values())
        return []

    def _forget(self, pid: int) -> None:
        self._watched.delete(_U64.pack(pid))
        self._loose += self._attached.pop(pid, ())
        del self._looks[pid]
        self._calls.pop(pid, None)

    def read(self, interval_s: float) -> dict[str, list[HistogramDelta]]:
        """See :meth:`Tier.read`."""
        rates: Counter[str] = Counter()
        for pid in self._attached:
            value = self._watched.get(_U64.pack(pid))
            calls = _WATCHED.unpack(value)[1] if value is not None else 0
            rates[self._instances[pid]] += calls - self._calls[pid]
            self._calls[pid] = calls
        for instance, calls in rates.items():
            self._setup.counts[f"{self.name} calls"] += calls
            if calls > self._setup.config.calls_s * max(interval_s, 0.1):
                self._ban(instance, calls / max(interval_s, 0.1))
        return super().read(interval_s)

    def _ban(self, instance: str, rate: float) -> None:
        self._setup.counts[f"{self.name} servers left alone"] += 1
        logger.warning(
            "%s calls the functions of tier %s %.0f times a second: they are not probed any more",
            instance,
            self.name,
            rate,
        )
        self._banned.add(instance)
        for pid in [pid for pid, name in self._instances.items() if name == instance]:
            self._forget(pid)
        self._detach()

    def _detach(self) -> None:
        """Take the loose probes off, in a thread: the kernel takes a tenth of a second for each."""
        loose, self._loose = self._loose, []
        if loose:
            threading.Thread(
                target=_close_all, args=(loose,), name="kernel detach", daemon=True
            ).start()

    def close(self) -> None:
        """See :meth:`Tier.close`; nothing is booked from here on, the probes go soon after."""
        for pid in list(self._looks):
            self._forget(pid)
        self._detach()
        super().close()


def _close_all(descriptors: Iterable[Descriptor]) -> None:
    for descriptor in descriptors:
        descriptor.close()


class Tls(_Functions):
    """When the servers read requests and wrote answers inside TLS."""

    name: TierName = "tls"
    stages = ("tls_reply", "tls_first_event", "tls_write")

    def _load(self, watched: int) -> tuple[Probe, ...]:
        arch, config = self._setup.arch, self._setup.config
        reading = self._parts.map(
            MapKind.LRU_HASH, "reading", key=8, value=8, entries=config.max_threads
        ).descriptor
        sessions = self._parts.map(
            MapKind.LRU_HASH,
            "sessions",
            key=16,
            value=programs.TLS_BYTES,
            entries=config.max_connections,
        ).descriptor
        entered = programs.tls_read_entered(arch, watched=watched, reading=reading)
        returned = programs.tls_read_returned(
            arch, watched=watched, reading=reading, sessions=sessions
        )
        write = programs.tls_write_entered(
            arch, watched=watched, sessions=sessions, times=self._times.map.descriptor
        )
        return (
            Probe(
                functions=("SSL_read", "SSL_read_ex"),
                entry=self._parts.uprobe("tls_read", entered),
                back=self._parts.uprobe("tls_read_back", returned),
            ),
            Probe(
                functions=("SSL_write", "SSL_write_ex"),
                entry=self._parts.uprobe("tls_write", write),
            ),
        )

    def _libraries(self, pid: int) -> list[str]:
        return libraries(self._setup.files, pid, TLS_LIBRARY)


class Gpu(_Functions):
    """How long the servers waited for their accelerator, and launched graphs on it.

    Where the CUDA runtime is loaded its functions are probed; they call the driver's, which are
    probed where it is not, as in programs that the runtime was linked into.
    """

    name: TierName = "gpu"
    stages = ("gpu_sync", "gpu_graph_launch")

    def _load(self, watched: int) -> tuple[Probe, ...]:
        functions = (
            (
                "cudaStreamSynchronize",
                "cudaEventSynchronize",
                "cudaDeviceSynchronize",
                "cuStreamSynchronize",
                "cuEventSynchronize",
                "cuCtxSynchronize",
            ),
            ("cudaGraphLaunch", "cuGraphLaunch"),
        )
        return tuple(self._timed(watched, stage, names) for stage, names in enumerate(functions))

    def _timed(self, watched: int, stage: int, names: tuple[str, ...]) -> Probe:
        since = self._parts.map(
            MapKind.LRU_HASH, "since", key=8, value=8, entries=self._setup.config.max_threads
        ).descriptor
        times = self._times.map.descriptor
        entered = programs.entered(watched=watched, since=since)
        returned = programs.returned(watched=watched, since=since, times=times, stage=stage)
        name = self.stages[stage]
        return Probe(
            functions=names,
            entry=self._parts.uprobe(name, entered),
            back=self._parts.uprobe(f"{name}_back", returned),
        )

    def _libraries(self, pid: int) -> list[str]:
        runtime = libraries(self._setup.files, pid, CUDA_RUNTIME)
        return runtime or libraries(self._setup.files, pid, CUDA_DRIVER)


TIERS: Final[Mapping[TierName, Callable[[Setup], Tier]]] = {
    "run_queue": RunQueue,
    "sockets": Sockets,
    "frames": Frames,
    "tls": Tls,
    "gpu": Gpu,
}
