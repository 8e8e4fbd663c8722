"""Which server a connection belongs to."""

import ipaddress
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from latencyprism.collectors.address import endpoint, instance_of, port_of

MAX_ADDRESSES = 1024
"""Addresses of which it is remembered whether they are this host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A server whose traffic is watched.

    ``address`` is its IP address; None, a loopback and an address of this host stand for every
    address of this host, because clients reach the same server by any of them.
    """

    instance: str
    port: int
    address: str | None = None

    @classmethod
    def of(cls, url: str) -> "Watch":
        """Watch the server of a base URL such as ``http://127.0.0.1:8000``.

        A host name is resolved, which may block. Raises ValueError for anything but http or https
        with a host, OSError for a name that does not resolve.
        """
        host, port = str(endpoint(url).hostname), port_of(url)
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            address = ipaddress.ip_address(found[0][4][0])
        return cls(
            instance=instance_of(url),
            port=port,
            address=None if address.is_unspecified else str(address),
        )


def is_local(address: str) -> bool:
    """Whether an IP address is one of this host's, by asking the kernel to bind it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


class Targets:
    """Finds the instance of a server's address and port.

    The exact address counts first; else a server of this host with the same port, when the address
    is this host's. ``local`` tells whether one is. Raises ValueError when nothing is watched.
    """

    def __init__(
        self, watches: Iterable[Watch], *, local: Callable[[str], bool] = is_local
    ) -> None:
        self._exact: dict[tuple[bytes, int], str] = {}
        self._here: dict[int, str] = {}
        self._local = local
        self._known: dict[bytes, bool] = {}
        self.ports: set[int] = set()
        self.instances: list[str] = []
        ambiguous = set()
        for watch in watches:
            self.ports.add(watch.port)
            self.instances.append(watch.instance)
            if watch.address is not None:
                address = ipaddress.ip_address(watch.address)
                self._exact[address.packed, watch.port] = watch.instance
            if watch.address is None or local(watch.address):
                if watch.port in self._here:
                    ambiguous.add(watch.port)
                self._here[watch.port] = watch.instance
        for port in ambiguous:
            del self._here[port]
        if not self.instances:
            raise ValueError("no server to watch")

    def find(self, address: bytes, port: int) -> str | None:
        """Instance at a packed address; None when nobody watches it. Asks the kernel once for
        each new address of a watched port.
        """
        if port not in self.ports:
            return None
        exact = self._exact.get((address, port))
        if exact is not None or port not in self._here:
            return exact
        return self._here[port] if self._is_local(address) else None

    def _is_local(self, address: bytes) -> bool:
        known = self._known.get(address)
        if known is None:
            known = self._local(str(ipaddress.ip_address(address)))
            if len(self._known) >= MAX_ADDRESSES:
                self._known.clear()
            self._known[address] = known
        return known
