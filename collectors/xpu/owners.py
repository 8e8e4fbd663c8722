"""Which watched servers use a device."""

import os
from collections.abc import Iterable, Iterator

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.processes import descendants, holders
from latencyprism.collectors.host.tcp import listeners
from latencyprism.collectors.xpu.reading import Reading


class Owners:
    """Maps devices to the servers of this host, by the tree of the process that listens.

    A device is a server's when one of the server's processes computes on it as far as its driver
    tells, holds its device file open, or listens on the port by which it is read.
    """

    def __init__(
        self, files: Files, servers: Iterable[tuple[str, int]], ports: Iterable[int] = ()
    ) -> None:
        self._files = files
        self._servers = tuple(servers)
        self._ports = tuple(ports)
        self._pids: dict[int, str] = {}
        self._held: dict[str, set[str]] = {}
        self._listening: dict[int, set[str]] = {}

    def refresh(self) -> None:
        """Find the processes of every server again; looks through all that may be read."""
        self._pids = {
            pid: instance
            for instance, port in self._servers
            if (sockets := listeners(self._files, port))
            for pid in descendants(self._files, holders(self._files, sockets))
        }
        held: dict[str, set[str]] = {}
        for pid, instance in self._pids.items():
            for opened in self._open_files(pid):
                held.setdefault(opened, set()).add(instance)
        self._listening = {
            port: {
                instance
                for inode in listeners(self._files, port)
                for instance in held.get(f"socket:[{inode}]", ())
            }
            for port in self._ports
        }
        self._held = {opened: who for opened, who in held.items() if opened.startswith("/dev/")}

    def of(self, reading: Reading) -> list[str]:
        """Instances that use a device, sorted; empty when none is known to."""
        found = {self._pids[pid] for pid in reading.pids if pid in self._pids}
        for file in reading.files:
            found |= self._held.get(file, set())
        if reading.port is not None:
            found |= self._listening.get(reading.port, set())
        return sorted(found)

    def _open_files(self, pid: int) -> Iterator[str]:
        folder = f"{self._files.proc}/{pid}/fd"
        for name in self._files.names(folder):
            try:
                yield os.readlink(f"{folder}/{name}")  # noqa: PTH115 - many, and a Path each is dear
            except OSError:
                continue
