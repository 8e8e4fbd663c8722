"""Which server a connection belongs to."""

import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from latencyprism.collectors.address import addresses_of, instance_of, is_local, port_of

MAX_ADDRESSES = 1024
"""Addresses of which it is remembered whether they are this host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A server whose traffic is watched.

    ``addresses`` are its IP addresses. None at all, a loopback and an address of this host stand
    for every address of this host, because clients reach the same server by any of them.
    """

    instance: str
    port: int
    addresses: tuple[str, ...] = ()

    @classmethod
    def of(cls, url: str) -> "Watch":
        """Watch the server of a base URL such as ``http://127.0.0.1:8000``; resolves its name, and
        raises, as :func:`~latencyprism.collectors.address.addresses_of`.
        """
        return cls(instance=instance_of(url), port=port_of(url), addresses=addresses_of(url))

    def here(self, local: Callable[[str], bool]) -> bool:
        """Whether it is reached by this host's addresses; ``local`` tells whether one is."""
        return not self.addresses or any(map(local, self.addresses))


class Targets:
    """Finds the instance of a server's address and port.

    The exact address counts first; else a server of this host with the same port, when the address
    is this host's. ``local`` tells whether one is.
    """

    def __init__(
        self, watches: Iterable[Watch], *, local: Callable[[str], bool] = is_local
    ) -> None:
        self._local = local
        self._known: dict[bytes, bool] = {}
        self.assign(watches)

    def assign(self, watches: Iterable[Watch]) -> None:
        """Watch these from now on, and no others."""
        self._exact: dict[tuple[bytes, int], str] = {}
        self._here: dict[int, str] = {}
        self._known.clear()
        self.ports: set[int] = set()
        self.instances: list[str] = []
        ambiguous = set()
        for watch in watches:
            self.ports.add(watch.port)
            self.instances.append(watch.instance)
            for address in watch.addresses:
                self._exact[ipaddress.ip_address(address).packed, watch.port] = watch.instance
            if watch.here(self._local):
                if watch.port in self._here:
                    ambiguous.add(watch.port)
                self._here[watch.port] = watch.instance
        for port in ambiguous:
            del self._here[port]

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
