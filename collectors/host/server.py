"""The processes of an inference server: found by the port they listen on."""

import logging
from collections.abc import Iterable, MutableMapping

from latencyprism.collectors.host.cgroups import Group, Hierarchies
from latencyprism.collectors.host.counts import Counts
from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.locate import Locator, Place, Target
from latencyprism.collectors.host.processes import (
    LAUNCHER,
    MAX_PROCESSES,
    Process,
    children_of,
    descendants,
    role_of,
)
from latencyprism.collectors.host.ray import RayWorkers
from latencyprism.schemas.records import ProcessSample

logger = logging.getLogger(__name__)

THOROUGH = 12
"""Every so many discoveries, and when the holders changed, Ray's workers are looked for and the
children of all threads are read."""


class Server:
    """The processes of one server: those that hold its listening socket, a launcher above them, all
    that descend from these, all of their container, and the Ray workers that serve them.
    """

    def __init__(
        self,
        files: Files,
        target: Target,
        *,
        locator: Locator,
        ray: RayWorkers,
        counts: MutableMapping[str, int],
    ) -> None:
        self.target = target
        self.place: Place | None = None
        self.processes: dict[int, Process] = {}
        self.quotas: list[Group] = []
        """Groups whose CPU quotas can keep it from running."""
        self.memory: Group | None = None
        """Group that holds the memory of the listening process."""
        self.container: Group | None = None
        """Group of the container in which the listening process lives, if it does."""
        self._files = files
        self._locator = locator
        self._ray = ray
        self._counts = counts
        self._hierarchies = Hierarchies(files)
        self._launchers: list[int] = []
        self._ray_workers: list[int] = []
        self._countdown = 0

    @property
    def is_here(self) -> bool:
        """Whether this machine is, as far as known, the server's."""
        return self.target.address is None or self.place is not None

    def discover(self) -> bool:
        """Find the processes again; whether they changed."""
        before = self.place
        thorough = self._countdown <= 0
        # Who could not be told from the socket before may be readable by now.
        known = None if thorough and before and not before.holders else before
        self.place = self._locator.find(self.target, known)
        if before is not None and self.place is not before:
            self._locator.drop(before)
        thorough |= self.place is not before
        self._countdown = THOROUGH if thorough else self._countdown - 1
        if thorough:
            self._hierarchies = Hierarchies(self._files)
        roles = self._roles(thorough=thorough)
        roles_before = {process.pid: process.role for process in self.processes.values()}
        for pid in self.processes.keys() - roles.keys():
            self.processes.pop(pid).close()
        for pid, role in roles.items():
            if pid in self.processes:
                self.processes[pid].role = role
            else:
                self.processes[pid] = Process(self._files, pid, role, self._counts)
        return roles != roles_before

    def _roles(self, *, thorough: bool) -> dict[int, str]:
        holders = list(self.place.holders) if self.place else []
        if thorough:
            self._watch_container(holders)
            self._launchers = [pid for pid in map(self._launcher, holders) if pid is not None]
        members = self._hierarchies.members(self.container) if self.container else []
        found = self._descendants([*self._launchers, *holders, *members], thorough=thorough)
        if thorough:
            self._ray_workers = self._ray.of(self.target.instance, found)
        workers = self._descendants(self._ray_workers, thorough=thorough)
        found = list(dict.fromkeys([*found, *workers]))
        if len(found) >= MAX_PROCESSES:
            self._counts["processes_beyond_bound"] += 1
        roles: dict[int, str] = {}
        for pid in found[:MAX_PROCESSES]:
            role = role_of(self._locator.command_line(pid), listens=pid in holders)
            if role is not None and (pid in self.processes or self._lives(pid)):
                roles[pid] = role
        if "core" in roles.values():
            # The process that talks to the engine's core is its web server, whatever its title.
            roles |= {pid: "api" for pid in holders if roles.get(pid) == "server"}
        if thorough or roles.keys() != self.processes.keys():
            self._watch_quotas(roles)
        return roles

    def _watch_container(self, holders: list[int]) -> None:
        paths = self._hierarchies.memberships(holders[0]) if holders else {}
        self.memory = self._hierarchies.group(paths, "memory")
        self.container = self._hierarchies.container(paths)

    def _watch_quotas(self, pids: Iterable[int]) -> None:
        paths = (self._hierarchies.memberships(pid) for pid in pids)
        groups = (self._hierarchies.group(path, "cpu") for path in paths)
        self.quotas = list(dict.fromkeys(group for group in groups if group is not None))

    def _launcher(self, pid: int) -> int | None:
        """The process above one that starts all parts of a server."""
        fields = self._files.text(f"{self._files.proc}/{pid}/stat").rpartition(")")[2].split()
        parent = int(fields[1]) if len(fields) > 1 else 0
        return parent if LAUNCHER.match(self._locator.command_line(parent)) else None

    def _descendants(self, pids: Iterable[int], *, thorough: bool) -> list[int]:
        def children(pid: int) -> list[int]:
            if pid in self.processes:
                return self.processes[pid].threads.children(anew=thorough)
            return children_of(self._files, pid)

        return descendants(self._files, pids, children)

    def _lives(self, pid: int) -> bool:
        return self._files.read_once(f"{self._files.proc}/{pid}/stat") is not None

    def read(self) -> tuple[list[ProcessSample], bool]:
        """Samples of the living processes, and whether one died since the last discovery."""
        samples = []
        died = False
        for pid, process in list(self.processes.items()):
            sample = process.read()
            if sample is None:
                died = True
                self.processes.pop(pid).close()
            else:
                samples.append(sample)
        return samples, died

    def close(self) -> None:
        """Close what is kept open."""
        for process in self.processes.values():
            process.close()
        self.processes.clear()
        if self.place is not None:
            self._locator.drop(self.place)
            self.place = None


def roles_on(files: Files, port: int) -> dict[int, str]:
    """Process → its part of the server that listens on a port of this machine, or of the only
    container here that does; empty when none can be seen. Blocks for some milliseconds.
    """
    counts = Counts()
    locator = Locator(files, counts)
    server = Server(
        files,
        Target(instance=f"port {port}", port=port),
        locator=locator,
        ray=RayWorkers(files, counts),
        counts=counts,
    )
    try:
        server.discover()
        return {pid: process.role for pid, process in server.processes.items()}
    finally:
        server.close()
        locator.close()
