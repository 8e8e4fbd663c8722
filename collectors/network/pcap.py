"""Recorded packets through the same tap: the twin of the source without a kernel."""

import ipaddress
from collections.abc import Collection, Iterator
from pathlib import Path

from latencyprism.collectors.network.capture_file import read
from latencyprism.collectors.network.tap import Tap
from latencyprism.schemas.records import RequestTiming


class AnyServer:
    """Takes whoever is sent a request for a server, on these ports, or on all if there are none."""

    def __init__(self, ports: Collection[int] = ()) -> None:
        self._ports = frozenset(ports)

    def find(self, address: bytes, port: int) -> str | None:
        """Name of the server at a packed address, as host:port."""
        if self._ports and port not in self._ports:
            return None
        host = str(ipaddress.ip_address(address))
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def replay(path: Path, tap: Tap, *, interval_ms: int = 100) -> Iterator[RequestTiming]:
    """The parts that the source would have reported live every ``interval_ms``, on the clock of the
    packets.

    What is open at the end stays open. Raises as
    :func:`~latencyprism.collectors.network.capture_file.read`.
    """
    interval_ns = interval_ms * 1_000_000
    now_ns = due_ns = 0
    packet = tap.packet
    for now_ns, buffer, at, end in read(path):
        if now_ns >= due_ns:
            yield from tap.flush(now_ns)
            due_ns = now_ns + interval_ns
        packet(now_ns, buffer, at, end)
    yield from tap.flush(now_ns)
