"""Which watched server a process belongs to."""

from collections.abc import Iterable

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.processes import descendants, holders
from latencyprism.collectors.host.tcp import listeners


class Owners:
    """Maps processes to the servers of this host, by the tree of the process that listens."""

    def __init__(self, files: Files, servers: Iterable[tuple[str, int]]) -> None:
        self._files = files
        self._servers = tuple(servers)
        self._instances: dict[int, str] = {}

    def refresh(self) -> None:
        """Find the processes of every server again; looks through all that may be read."""
        self._instances = {
            pid: instance
            for instance, port in self._servers
            if (sockets := listeners(self._files, port))
            for pid in descendants(self._files, holders(self._files, sockets))
        }

    def of(self, pids: Iterable[int]) -> list[str]:
        """Instances that the processes belong to, sorted; those of no server are left out."""
        return sorted({self._instances[pid] for pid in pids if pid in self._instances})
