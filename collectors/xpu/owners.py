"""Which watched servers use a device."""

from collections.abc import Iterable, Iterator

from latencyprism.collectors.host.counts import Counts
from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.locate import Locator, Target
from latencyprism.collectors.host.ray import RayWorkers
from latencyprism.collectors.host.server import Server
from latencyprism.collectors.host.sockets import Sockets
from latencyprism.collectors.xpu.reading import Reading


class Owners:
    """Maps devices to the servers of this host, by the processes that the host source finds.

    A device is a server's when one of the server's processes computes on it as far as its driver
    tells, holds its device file open, or listens on the port by which it is read.
    """

    def __init__(self, files: Files, servers: Iterable[Target], ports: Iterable[int] = ()) -> None:
        counts = Counts()
        self._files = files
        self._locator = Locator(files, counts)
        ray = RayWorkers(files, counts)
        self._servers = [
            Server(files, target, locator=self._locator, ray=ray, counts=counts)
            for target in servers
        ]
        self._sockets = Sockets(f"{files.proc}/net", None)
        self._ports = tuple(ports)
        self._pids: dict[int, str] = {}
        self._held: dict[str, set[str]] = {}
        self._listening: dict[int, set[str]] = {}

    def refresh(self) -> None:
        """Find the processes of every server again; looks through all that may be read."""
        for server in self._servers:
            server.discover()
        self._pids = {
            pid: server.target.instance for server in self._servers for pid in server.processes
        }
        held: dict[str, set[str]] = {}
        for pid, instance in self._pids.items():
            for opened in self._open_files(pid):
                held.setdefault(opened, set()).add(instance)
        self._listening = {
            port: {
                instance
                for listener in self._sockets.listeners(port)
                for instance in held.get(f"socket:[{listener.inode}]", ())
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

    def close(self) -> None:
        """Close what is kept open."""
        for server in self._servers:
            server.close()
        self._locator.close()

    def _open_files(self, pid: int) -> Iterator[str]:
        folder = f"{self._files.proc}/{pid}/fd"
        return (self._files.link(f"{folder}/{name}") for name in self._files.names(folder))
