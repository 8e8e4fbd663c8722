"""Sockets of a port: who listens, and how the kernel sees its connections.

The connections come from ``inet_diag`` netlink (see ``linux/inet_diag.h`` and ``linux/tcp.h``),
whose filter runs in the kernel, so that other ports cost nothing here.
"""

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from latencyprism.collectors.host.files import Files

LISTEN = "0A"
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST_DUMP = 0x301
NLMSG_ERROR, NLMSG_DONE = 2, 3
INET_DIAG_REQ_BYTECODE = 1
INET_DIAG_BC_S_GE, INET_DIAG_BC_S_LE = 2, 3
INET_DIAG_INFO = 2
ESTABLISHED = 1 << 1

_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48s")
_OPERATION = struct.Struct("=BBHBBH")
_ATTRIBUTE = struct.Struct("=HH")
_MESSAGE_BYTES = 72
"""struct inet_diag_msg, after which the attributes follow."""
_RTT = struct.Struct("=I")
_RTT_OFFSET = 68
"""Of tcpi_rtt in struct tcp_info, in microseconds; the structure only ever grows at its end."""


def listeners(files: Files, port: int) -> set[int]:
    """Inodes of the sockets that listen on a port in this network namespace."""
    return {
        inode
        for table in ("net/tcp", "net/tcp6")
        for listening, inode in _listening(f"{files.proc}/{table}")
        if listening == port
    }


def _listening(table: str) -> Iterator[tuple[int, int]]:
    """Port and inode of the listening sockets, which the kernel shows before all others."""
    try:
        with Path(table).open() as lines:
            next(lines, None)
            for line in lines:
                fields = line.split()
                if fields[3] != LISTEN:
                    return
                yield int(fields[1].rpartition(":")[2], 16), int(fields[9])
    except OSError:
        return


def request(family: int, port: int) -> bytes:
    """Netlink message that asks for the TCP_INFO of all connections from a local port."""
    at_least = _OPERATION.pack(INET_DIAG_BC_S_GE, 8, 20, 0, 0, port)
    at_most = _OPERATION.pack(INET_DIAG_BC_S_LE, 8, 12, 0, 0, port)
    body = _REQUEST.pack(
        family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), 0, ESTABLISHED, bytes(48)
    )
    code = at_least + at_most
    body += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(code), INET_DIAG_REQ_BYTECODE) + code
    length = _HEADER.size + len(body)
    return _HEADER.pack(length, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, 1, 0) + body


def round_trips(data: bytes) -> tuple[list[int], bool]:
    """Smoothed round trips, microseconds, in one netlink datagram, and whether it is the last.

    Raises OSError when the kernel refuses the request.
    """
    found: list[int] = []
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, offset)
        if kind == NLMSG_DONE:
            return found, True
        if kind == NLMSG_ERROR:
            (code,) = struct.unpack_from("=i", data, offset + _HEADER.size)
            raise OSError(-code, "inet_diag refused")
        found += _round_trip(data[offset + _HEADER.size + _MESSAGE_BYTES : offset + length])
        offset += max((length + 3) & ~3, _HEADER.size)
    return found, False


def _round_trip(attributes: bytes) -> Iterator[int]:
    offset = 0
    while offset + _ATTRIBUTE.size <= len(attributes):
        length, kind = _ATTRIBUTE.unpack_from(attributes, offset)
        start = offset + _ATTRIBUTE.size
        if kind == INET_DIAG_INFO and length >= _ATTRIBUTE.size + _RTT_OFFSET + _RTT.size:
            yield _RTT.unpack_from(attributes, start + _RTT_OFFSET)[0]
        offset += max((length + 3) & ~3, _ATTRIBUTE.size)


class TcpProbe:
    """Asks the kernel about the connections of a port; needs no privilege."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG)
        self._socket.bind((0, 0))
        self._socket.settimeout(0.1)

    def rtt_us(self, port: int) -> float | None:
        """Median round trip over the connections to a server's port, microseconds; None without
        any. Blocks for at most 0.1 s a datagram. Raises OSError where there is no inet_diag.
        """
        found: list[int] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            self._socket.send(request(family, port))
            last = False
            while not last:
                some, last = round_trips(self._socket.recv(1 << 17))
                found += some
        return median(found) if found else None

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
