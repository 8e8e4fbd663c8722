"""The TCP sockets of one network namespace, and what they tell about a server."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from latencyprism.collectors.host.inetdiag import ESTABLISHED, LISTEN, InetDiag, TcpSocket
from latencyprism.collectors.host.tcp import TABLES, listening


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A socket that listens."""

    family: socket.AddressFamily
    inode: int


class Sockets:
    """Sockets of the namespace whose tables lie in the folder ``net``, such as
    ``/proc/123/net``. ``diag`` is asked where there is one; the tables cost the kernel ten times as
    much and tell only who listens. Not thread-safe.
    """

    def __init__(self, net: str, diag: InetDiag | None) -> None:
        self._net = net
        self._diag = diag

    def listeners(
        self, port: int, families: Iterable[socket.AddressFamily] = tuple(TABLES)
    ) -> frozenset[Listener]:
        """The sockets that listen on a port."""
        return frozenset(
            Listener(family=family, inode=inode)
            for family in families
            for inode in self._inodes(port, family)
        )

    def _inodes(self, port: int, family: socket.AddressFamily) -> list[int]:
        if self._diag is not None:
            try:
                found = self._diag.sockets(port, [LISTEN], family=family, info=False)
                return [one.inode for one in found]
            except OSError:
                pass  # counted; the table may tell
        return list(listening(f"{self._net}/{TABLES[family]}", port))

    def of_server(self, port: int, listeners: frozenset[Listener]) -> list[TcpSocket] | None:
        """Listening sockets and connections of a server's port; None when nobody can be asked.

        Only the families in which the server listens are asked for: a connection has that of its
        listener, and each question costs the kernel a walk through all its connections.
        """
        if self._diag is None:
            return None
        families = {listener.family for listener in listeners}
        try:
            return [
                one
                for family in sorted(families)
                for one in self._diag.sockets(port, [ESTABLISHED, LISTEN], family=family)
            ]
        except OSError:
            return None

    def close(self) -> None:
        """Close what is open."""
        if self._diag is not None:
            self._diag.close()


class ConnectionTotals:
    """Turns totals of connections that come and go into growth. What a connection counted between
    the last reading and its end is lost.
    """

    def __init__(self) -> None:
        self._totals: dict[int, TcpSocket] | None = None
        self._missing: dict[int, TcpSocket] = {}

    def grow(self, sockets: list[TcpSocket]) -> dict[str, Any]:
        """Fields of a HostSample from the sockets of a server's port; growth is since the last call
        and null at first.
        """
        open_now = {one.cookie: one for one in sockets if one.state == ESTABLISHED}
        before = self._totals
        round_trips = [one.rtt_us for one in open_now.values() if one.rtt_us is not None]
        growth = (
            None
            if before is None
            else [
                _growth(before.get(cookie) or self._missing.get(cookie), one)
                for cookie, one in open_now.items()
            ]
        )
        # The kernel may pass over a connection while others come and go: it is remembered for one
        # more reading, lest its whole life be counted when it is back.
        self._missing = {c: one for c, one in (before or {}).items() if c not in open_now}
        self._totals = open_now
        return {
            "connections": len(open_now),
            "accept_queue": sum(one.queued for one in sockets if one.state == LISTEN),
            "tcp_rtt_us": median(round_trips) if round_trips else None,
            "server_retransmits": _sum(growth, 0),
            "client_limited_us": _sum(growth, 1),
        }

    def forget(self) -> None:
        """Begin anew, such as after a reading that failed."""
        self._totals = None
        self._missing = {}


Growth = tuple[int | None, int | None]


def _growth(before: TcpSocket | None, now: TcpSocket) -> Growth:
    return (
        _since(before.retransmits if before else 0, now.retransmits),
        _since(before.client_limited_us if before else 0, now.client_limited_us),
    )


def _since(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else max(now - before, 0)


def _sum(growth: list[Growth] | None, which: int) -> int | None:
    """Null when any connection's is unknown; no connection, no growth."""
    if growth is None:
        return None
    total = 0
    for one in growth:
        value = one[which]
        if value is None:
            return None
        total += value
    return total
