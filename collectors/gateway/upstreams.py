"""Which instance a server of the log is."""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from latencyprism.collectors.address import instance_of
from latencyprism.collectors.network.targets import Targets, Watch

MAX_KNOWN: Final = 1024
"""Servers of which it is remembered what they are."""


class Upstreams:
    """Finds the instance of what a log calls a server.

    Names of ``servers`` count first, then the watched engines by address, as the network source
    finds them. Host names of ``engines`` are resolved once, which may block: raises OSError for one
    that does not resolve, ValueError for a URL that names no server.
    """

    def __init__(
        self, engines: Sequence[str], servers: Mapping[str, str], *, all_upstreams: bool
    ) -> None:
        self._servers = servers
        self._all = all_upstreams
        self._names = {instance_of(url) for url in engines}
        self._targets = Targets([Watch.of(url) for url in engines])
        self._known: dict[str, str | None] = {}

    @property
    def instances(self) -> set[str]:
        """All that can be found, as far as it is known yet."""
        found = {instance for instance in self._known.values() if instance is not None}
        return found.union(self._names, self._servers.values())

    def find(self, upstream: str) -> str | None:
        """The instance, as ``host:port``; None of a server that is not watched."""
        if upstream not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[upstream] = self._servers.get(upstream) or self._of_address(upstream)
        return self._known[upstream]

    def _of_address(self, upstream: str) -> str | None:
        if upstream in self._names:
            return upstream
        try:
            parts = urlsplit(f"//{upstream}")
            host, port = parts.hostname, parts.port
        except ValueError:
            return None
        if host is None or port is None or parts.netloc != upstream:
            return None
        try:
            address = ipaddress.ip_address(host).packed
        except ValueError:
            return upstream if self._all else None
        return self._targets.find(address, port) or (upstream if self._all else None)
