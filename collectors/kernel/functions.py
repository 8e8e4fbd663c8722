"""Tiers at functions of the servers' libraries: TLS and the waits for a GPU."""

import logging
import struct
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from latencyprism.collectors.kernel import programs
from latencyprism.collectors.kernel.bpf import Descriptor, MapKind, Program
from latencyprism.collectors.kernel.config import TierName
from latencyprism.collectors.kernel.elf import ElfError, read_function_offsets
from latencyprism.collectors.kernel.libraries import (
    CUDA_DRIVER,
    CUDA_RUNTIME,
    TLS_LIBRARY,
    libraries,
)
from latencyprism.collectors.kernel.servers import Server
from latencyprism.collectors.kernel.tier import MAX_PROCESSES, U64, HistogramTier
from latencyprism.schemas.records import HistogramDelta

logger = logging.getLogger(__name__)

_WATCHED: Final = struct.Struct("=I4xQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Functions that are probed in the same way, and what runs at their call and their return."""

    functions: tuple[str, ...]
    entry: Program
    back: Program | None = None


class _Functions(HistogramTier):
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

    @abstractmethod
    def _load(self, watched: int) -> tuple[Probe, ...]:
        """The programs, which look up their process in the map ``watched``."""

    @abstractmethod
    def _libraries(self, pid: int) -> list[str]:
        """Where the functions may be."""

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
        self._watched.put(U64.pack(pid), _WATCHED.pack(first, 0))
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
        self._watched.delete(U64.pack(pid))
        self._loose += self._attached.pop(pid, ())
        del self._looks[pid]
        self._calls.pop(pid, None)

    def read(self, interval_s: float) -> dict[str, list[HistogramDelta]]:
        """See :meth:`Tier.read`."""
        rates: Counter[str] = Counter()
        for pid in self._attached:
            value = self._watched.get(U64.pack(pid))
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
