"""Tiers at the kernel's tracepoints: waits for a CPU, connections, the engine's own messages."""

import logging
import struct
from collections.abc import Iterable, Sequence
from typing import Final

from latencyprism.collectors.kernel import programs
from latencyprism.collectors.kernel.bpf import MapKind
from latencyprism.collectors.kernel.config import TierName
from latencyprism.collectors.kernel.frames import LAYOUTS, Layout, layout_of
from latencyprism.collectors.kernel.histogram import Tally
from latencyprism.collectors.kernel.servers import Server
from latencyprism.collectors.kernel.steps import Engine, Step
from latencyprism.collectors.kernel.tier import (
    MAX_PROCESSES,
    U32,
    U64,
    HistogramTier,
    Parts,
    Setup,
    Table,
)
from latencyprism.schemas.records import HistogramDelta

logger = logging.getLogger(__name__)

MAX_LISTENING: Final = 1024
_PAIR: Final = struct.Struct("=II")
_CONNECTION: Final = struct.Struct("=QQII")
_EVENT: Final = struct.Struct("=QIIIIQ")


class RunQueue(HistogramTier):
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
                U32.pack(pid): U32.pack(self._times.first_of(server.instance))
                for server in servers
                for pid in server.roles
            }
        )


class Sockets(HistogramTier):
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
            wanted |= {_PAIR.pack(*pair): U32.pack(first) for pair in server.listening}
            for pair in server.connected:
                self._connections.put(_PAIR.pack(*pair), _CONNECTION.pack(0, 0, 0, first))
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
            self._layouts.pop(instance, None)
            self._setup.counts[f"vLLM {version[:20]} not known"] += 1
            logger.warning(
                "%s runs vLLM %s, whose frames are not known (%s are): steps are not read",
                instance,
                version,
                ", ".join(".".join(map(str, known)) for known in LAYOUTS),
            )
        else:
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
        self._cores.set({U32.pack(pid): U32.pack(0) for pid in cores})
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
        (total,) = U64.unpack(self._lost.get(U32.pack(0)) or bytes(8))
        lost, self._lost_told = total - self._lost_told, total
        return int(lost)

    def runtimes(self) -> Iterable[tuple[int, int]]:
        """See :meth:`Tier.runtimes`."""
        return [program.runtime() for program in self._parts.programs]

    def close(self) -> None:
        """See :meth:`Tier.close`."""
        self._parts.close()
