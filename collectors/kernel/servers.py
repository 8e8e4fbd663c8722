"""The processes and sockets of the watched servers: what the probes are limited to."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from latencyprism.collectors.host.counts import Counts
from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.inetdiag import ESTABLISHED
from latencyprism.collectors.host.locate import Locator, Place, Target
from latencyprism.collectors.host.ray import RayWorkers
from latencyprism.collectors.host.server import Server as HostServer

MAX_DESCRIPTORS: Final = 16_384
"""Descriptors of one process that are looked at."""

Descriptors = frozenset[tuple[int, int]]
"""Pairs of a process and one of its descriptors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server at the moment."""

    instance: str
    here: bool
    """Whether it is, as far as known, on this machine."""
    roles: dict[int, str]
    """What each process does, as the host source names it."""
    listening: Descriptors
    connected: Descriptors
    """Connections of processes that are new; the probes see later ones for themselves."""


class Servers:
    """Finds the servers again and again, as the host source does. Not thread-safe."""

    def __init__(self, files: Files, targets: Sequence[Target]) -> None:
        self._files = files
        counts = Counts()
        self._locator = Locator(files, counts)
        ray = RayWorkers(files, counts)
        self._sockets = [
            _Sockets(
                files,
                HostServer(files, target, locator=self._locator, ray=ray, counts=counts),
            )
            for target in targets
        ]

    def find(self) -> list[Server]:
        """The servers now, in the order of their settings; blocks for some milliseconds."""
        return [sockets.find() for sockets in self._sockets]

    def close(self) -> None:
        """Close what is kept open."""
        for sockets in self._sockets:
            sockets.server.close()
        self._locator.close()


class _Sockets:
    """One server, and the descriptors of its sockets, read when it listens anew."""

    def __init__(self, files: Files, server: HostServer) -> None:
        self.server = server
        self._files = files
        self._place: Place | None = None
        self._listening: Descriptors = frozenset()

    def find(self) -> Server:
        self.server.discover()
        before, self._place = self._place, self.server.place
        connected: Descriptors = frozenset()
        if self._place is not before:
            new = self._place.holders.keys() if self._place else ()
            self._listening, connected = self._look(self._place, new)
        return Server(
            instance=self.server.target.instance,
            here=self.server.is_here,
            roles={pid: process.role for pid, process in self.server.processes.items()},
            listening=self._listening,
            connected=connected,
        )

    def _look(self, place: Place | None, pids: Collection[int]) -> tuple[Descriptors, Descriptors]:
        if place is None:
            return frozenset(), frozenset()
        inodes = {listener.inode for listener in place.listeners}
        found = place.sockets.of_server(place.port, place.listeners) or []
        open_now = {one.inode for one in found if one.state == ESTABLISHED and one.inode}
        held = [(pid, *pair) for pid in pids for pair in self._held(pid)]
        return (
            frozenset((pid, number) for pid, number, inode in held if inode in inodes),
            frozenset((pid, number) for pid, number, inode in held if inode in open_now),
        )

    def _held(self, pid: int) -> list[tuple[int, int]]:
        """Descriptors and inodes of the sockets of a process."""
        folder = f"{self._files.proc}/{pid}/fd"
        found = []
        for name in self._files.names(folder)[:MAX_DESCRIPTORS]:
            link = self._files.link(f"{folder}/{name}")
            if link.startswith("socket:["):
                found.append((int(name), int(link[8:-1])))
        return found
