"""Finds who listens on a server's port: here, in a container, or behind Docker's proxy."""

import ipaddress
import logging
import re
from collections.abc import MutableMapping
from dataclasses import dataclass

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.inetdiag import InetDiag, open_socket
from latencyprism.collectors.host.processes import holders
from latencyprism.collectors.host.sockets import Listener, Sockets
from latencyprism.collectors.namespaces import call_in

logger = logging.getLogger(__name__)

COMMAND_CHARS = 4096
"""Of a command line, which may have millions."""
MAX_NAMESPACES = 256
"""Network namespaces that are looked through."""

_PROXY = re.compile(
    r"(?:\S*/)?docker-proxy (?=.*-container-ip (?P<address>\S+))(?=.*-container-port (?P<port>\d+))"
)
_LEAF = re.compile(r"\|-- (\S+)\s+/32 host LOCAL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server to look for: ``address`` is None when it is this machine's, else that of what may be
    a container here, or another machine.
    """

    instance: str
    port: int
    address: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a server listens; ``holders`` are processes with the descriptor that is the socket, as
    a path, and empty when no process may be looked at.
    """

    sockets: Sockets
    port: int
    listeners: frozenset[Listener]
    holders: dict[int, str]


def proxied(command_line: str) -> tuple[str, int] | None:
    """Address and port of the container to which a command line of Docker's proxy leads; None for
    any other program.
    """
    match = _PROXY.match(command_line)
    return (match["address"], int(match["port"])) if match else None


def addresses(fib_trie: str, if_inet6: str) -> set[str]:
    """A namespace's own addresses, from its /proc/PID/net/fib_trie and if_inet6."""
    found = set(_LEAF.findall(fib_trie))
    for line in if_inet6.splitlines():
        digits = line.split(" ", 1)[0]
        if len(digits) == 32:
            try:
                found.add(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
            except ValueError:
                continue
    return found


class Locator:
    """Looks for servers; ``diag`` False keeps to the tables in /proc, as a fake tree needs."""

    def __init__(
        self, files: Files, counts: MutableMapping[str, int], *, diag: bool = True
    ) -> None:
        self._files = files
        self._counts = counts
        self._diag = diag
        self._here = Sockets(f"{files.proc}/net", InetDiag(counts) if diag else None)

    def find(self, target: Target, known: Place | None) -> Place | None:
        """Where a server listens now; None when nobody does, or it can't be told who. ``known`` is
        what was found before: as long as it holds, nothing else is looked at. Close the sockets of
        a place that is not used any more by :meth:`drop`.
        """
        if known is not None and self._holds(known):
            return known
        here = None if target.address else self._place(self._here, target.port, None)
        if here is None:
            return self._elsewhere(target.port, target.address)
        for pid in here.holders:
            behind = proxied(self.command_line(pid))
            there = self._elsewhere(behind[1], behind[0]) if behind else None
            if there is not None:
                return there
        return here

    def command_line(self, pid: int) -> str:
        """Begin of the command line of a process, its arguments joined by spaces."""
        text = self._files.text(f"{self._files.proc}/{pid}/cmdline")
        return text[:COMMAND_CHARS].replace("\0", " ")

    def _holds(self, place: Place) -> bool:
        sockets = {f"socket:[{listener.inode}]" for listener in place.listeners}
        families = {listener.family for listener in place.listeners}
        return place.sockets.listeners(place.port, families) == place.listeners and all(
            self._files.link(descriptor) in sockets for descriptor in place.holders.values()
        )

    def _place(self, sockets: Sockets, port: int, pids: list[int] | None) -> Place | None:
        """The place if somebody listens there; its holders are among ``pids``, or any process."""
        listeners = sockets.listeners(port)
        if not listeners:
            return None
        inodes = {listener.inode for listener in listeners}
        found = holders(self._files, inodes, pids)
        if not found:
            self._counts["unreadable_servers"] += 1
            logger.warning("Port %d is open, but no process that may be read", port)
        return Place(sockets=sockets, port=port, listeners=listeners, holders=found)

    def _elsewhere(self, port: int, address: str | None) -> Place | None:
        """The place in another namespace that has the address and listens on the port; without an
        address, the only one that listens on it.
        """
        found: list[tuple[Sockets, list[int]]] = []
        for pids in self._namespaces():
            net = f"{self._files.proc}/{pids[0]}/net"
            if address is not None and address not in self._addresses(net):
                continue
            sockets = self._enter(net, pids[0])
            if sockets.listeners(port):
                found.append((sockets, pids))
            else:
                sockets.close()
        if len(found) == 1:
            return self._place(found[0][0], port, found[0][1])
        for sockets, _ in found:
            sockets.close()
        if found:
            self._counts["ambiguous_servers"] += 1
            logger.warning(
                "Port %d is open in %d network namespaces; name the server by its container's "
                "address to tell which is meant",
                port,
                len(found),
            )
        return None

    def _addresses(self, net: str) -> set[str]:
        return addresses(self._files.text(f"{net}/fib_trie"), self._files.text(f"{net}/if_inet6"))

    def _namespaces(self) -> list[list[int]]:
        """Processes by network namespace, this one's left out."""
        proc = self._files.proc
        found: dict[str, list[int]] = {}
        unreadable = False
        for pid in self._files.pids():
            namespace = self._files.link(f"{proc}/{pid}/ns/net")
            unreadable |= not namespace
            if namespace:
                found.setdefault(namespace, []).append(pid)
        self._counts["unreadable_namespaces"] += unreadable
        found.pop(self._files.link(f"{proc}/self/ns/net"), None)
        return list(found.values())[:MAX_NAMESPACES]

    def _enter(self, net: str, pid: int) -> Sockets:
        if not self._diag:
            return Sockets(net, None)
        path = f"{self._files.proc}/{pid}/ns/net"
        try:
            opened = call_in(path, open_socket)
        except OSError as error:
            logger.debug("The sockets of %s can't be asked for: %s", path, error)
            return Sockets(net, None)
        opened.close()
        return Sockets(net, InetDiag(self._counts, lambda: call_in(path, open_socket)))

    def drop(self, place: Place) -> None:
        """Close the sockets of a place in another namespace."""
        if place.sockets is not self._here:
            place.sockets.close()

    def close(self) -> None:
        """Close what is open."""
        self._here.close()
