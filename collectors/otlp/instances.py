"""Which of the watched engines a span is of."""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Final

from latencyprism.collectors.address import instance_of, port_of
from latencyprism.collectors.network.targets import Targets, Watch
from latencyprism.collectors.otlp.spans import Attributes

INSTANCE_ID: Final = "service.instance.id"
SERVICE: Final = "service.name"
ADDRESS: Final = "server.address"
PORT: Final = "server.port"

WANTED: Final = frozenset({INSTANCE_ID, SERVICE, ADDRESS, PORT})

_PORT = re.compile(r"\d{1,5}", re.ASCII)
"""Also as text: resource attributes from the environment are."""


class Instances:
    """Finds the instance of a span by what its resource says, at last by who sent it.

    In this order: ``service.instance.id`` that is an instance or in ``services``;
    ``server.address`` with ``server.port``; ``service.name`` in ``services``; the only engine that
    is watched at the sender's address. Resolves the names of ``engines``, which may block: raises
    OSError for one that does not resolve, ValueError for a URL that names no server.
    """

    def __init__(self, engines: Sequence[str], services: Mapping[str, str]) -> None:
        self._services = services
        self._names = {instance_of(url) for url in engines}.union(services.values())
        self._ports = {port_of(url) for url in engines}
        self._targets = Targets([Watch.of(url) for url in engines])

    def find(self, resource: Attributes, span: Attributes, peer: str | None) -> str | None:
        """The instance as ``host:port``; None when nothing tells. ``peer`` is an IP address."""
        return (
            self._named(resource.get(INSTANCE_ID))
            or self._served(span)
            or self._served(resource)
            or self._services.get(str(resource.get(SERVICE)))
            or self._only_at(peer)
        )

    def _named(self, told: object) -> str | None:
        return str(told) if told in self._names else self._services.get(str(told))

    def _served(self, attributes: Attributes) -> str | None:
        host, told = attributes.get(ADDRESS), str(attributes.get(PORT))
        if not isinstance(host, str) or _PORT.fullmatch(told) is None:
            return None
        port = int(told)
        try:
            found = self._targets.find(ipaddress.ip_address(host).packed, port)
        except ValueError:
            found = None
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return found or (name if name in self._names else None)

    def _only_at(self, peer: str | None) -> str | None:
        if peer is None:
            return None
        packed = ipaddress.ip_address(peer).packed
        found = {self._targets.find(packed, port) for port in self._ports} - {None}
        return found.pop() if len(found) == 1 else None
