"""Asks the kernel about its TCP sockets: the ``inet_diag`` netlink protocol, written out.

See ``linux/netlink.h``, ``linux/inet_diag.h`` and ``linux/tcp.h``. The filter runs in the kernel,
so that sockets of other ports cost no bytes; but the kernel goes through its whole table of
connections for each request, some 0.5 ms. Needs no privilege.
"""

import os
import socket
import struct
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass

MAX_SOCKETS = 4096
"""Sockets taken from one answer; the kernel is not asked for the rest."""
MAX_DATAGRAMS = 1024
"""Datagrams of one answer."""
BUFFER_BYTES = 1 << 17
TIMEOUT_S = 0.1

ESTABLISHED, LISTEN = 1, 10
"""States of a TCP socket."""

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST_DUMP = 0x301
_DUMP_INTERRUPTED = 0x10
_REQ_BYTECODE = 1
_SOURCE_PORT_AT_LEAST, _SOURCE_PORT_AT_MOST = 2, 3
_INFO = 2

_HEADER = struct.Struct("=IHHII")
_CODE = struct.Struct("=i")
_REQUEST = struct.Struct("=BBBBI48s")
_OPERATION = struct.Struct("=BBHBBH")
_ATTRIBUTE = struct.Struct("=HH")
_SOCKET = struct.Struct("=xBxxH38xQ4xI8xI")
"""State, port (network order), cookie, receive queue and inode of struct inet_diag_msg."""
_RTT = struct.Struct("=68xI28xI")
"""tcpi_rtt and tcpi_total_retrans of struct tcp_info, which only ever grows at its end."""
_LIMITED = struct.Struct("=176xQ")
"""tcpi_rwnd_limited; kernels before 4.10 have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSocket:
    """One socket of this network namespace."""

    state: int
    port: int
    inode: int
    cookie: int
    """The kernel's number for it, never used twice."""
    queued: int
    """Of a listening socket: connections that wait to be accepted; else: bytes to be read."""
    rtt_us: int | None = None
    retransmits: int | None = None
    """Segments sent again since the connection was made."""
    client_limited_us: int | None = None
    """Time since then in which the peer's receive window was full."""


def request(*, family: int, states: int, port: int, sequence: int, info: bool = True) -> bytes:
    """Netlink message that asks for the sockets of a local port in any of ``states``, a mask with
    bit ``1 << state`` set, with their TCP_INFO or without.
    """
    at_least = _OPERATION.pack(_SOURCE_PORT_AT_LEAST, 8, 20, 0, 0, port)
    at_most = _OPERATION.pack(_SOURCE_PORT_AT_MOST, 8, 12, 0, 0, port)
    extensions = 1 << (_INFO - 1) if info else 0
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, extensions, 0, states, bytes(48))
    code = at_least + at_most
    body += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(code), _REQ_BYTECODE) + code
    length = _HEADER.size + len(body)
    return _HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, sequence, 0) + body


def parse(
    data: bytes, *, sequence: int, counts: MutableMapping[str, int]
) -> tuple[list[TcpSocket], bool]:
    """Sockets in one datagram of the answer to the request ``sequence``, and whether it was the
    last.

    What is malformed, of another request or of an unknown kind is left out and counted, by the
    ``netlink_*`` kinds. Raises OSError with the kernel's code when it refuses the request.
    """
    found: list[TcpSocket] = []
    offset = 0
    while offset < len(data):
        if offset + _HEADER.size > len(data):
            counts["netlink_truncated"] += 1
            break
        length, kind, flags, answered, _ = _HEADER.unpack_from(data, offset)
        start, end = offset + _HEADER.size, offset + length
        if end < start or end > len(data):
            counts["netlink_truncated"] += 1
            break
        offset += (length + 3) & ~3
        if answered != sequence:
            counts["netlink_stale"] += 1
            continue
        if flags & _DUMP_INTERRUPTED:
            # The table changed meanwhile, so that sockets may be missing or come twice.
            counts["netlink_interrupted"] += 1
        if kind == _SOCK_DIAG_BY_FAMILY:
            if start + _SOCKET.size > end:
                counts["netlink_truncated"] += 1
            else:
                found.append(_socket(data[start:end], counts))
        elif kind in (_NLMSG_DONE, _NLMSG_ERROR):
            _raise_code(data[start:end], counts)
            return found, True
        else:
            counts["netlink_unexpected"] += 1
    return found, False


def _raise_code(payload: bytes, counts: MutableMapping[str, int]) -> None:
    if len(payload) < _CODE.size:
        counts["netlink_truncated"] += 1
        return
    (code,) = _CODE.unpack_from(payload)
    if code < 0:
        raise OSError(-code, f"inet_diag refused: {os.strerror(-code)}")


def _socket(message: bytes, counts: MutableMapping[str, int]) -> TcpSocket:
    state, port, cookie, queued, inode = _SOCKET.unpack_from(message)
    rtt_us = retransmits = limited_us = None
    info = _attribute(message, _INFO, counts)
    if info is not None:
        if len(info) >= _RTT.size:
            rtt_us, retransmits = _RTT.unpack_from(info)
        if len(info) >= _LIMITED.size:
            (limited_us,) = _LIMITED.unpack_from(info)
    return TcpSocket(
        state=state,
        port=socket.ntohs(port),
        inode=inode,
        cookie=cookie,
        queued=queued,
        rtt_us=rtt_us,
        retransmits=retransmits,
        client_limited_us=limited_us,
    )


def _attribute(message: bytes, wanted: int, counts: MutableMapping[str, int]) -> bytes | None:
    """Content of the first attribute of a kind; those of other kinds are passed over."""
    offset = _SOCKET.size
    while offset < len(message):
        if offset + _ATTRIBUTE.size > len(message):
            counts["netlink_attributes"] += 1
            return None
        length, kind = _ATTRIBUTE.unpack_from(message, offset)
        if length < _ATTRIBUTE.size or offset + length > len(message):
            counts["netlink_attributes"] += 1
            return None
        if kind == wanted:
            return message[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3
    return None


def open_socket() -> socket.socket:
    """A netlink socket of the calling thread's network namespace. Raises OSError where the kernel
    has no ``inet_diag``.
    """
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG)
    try:
        opened.bind((0, 0))
        opened.settimeout(TIMEOUT_S)
    except OSError:
        opened.close()
        raise
    return opened


class InetDiag:
    """Asks for the sockets of one network namespace, that of the sockets that ``opener`` opens. Not
    thread-safe.
    """

    def __init__(
        self,
        counts: MutableMapping[str, int],
        opener: Callable[[], socket.socket] = open_socket,
    ) -> None:
        self._counts = counts
        self._opener = opener
        self._sequence = 0
        self._socket: socket.socket | None = None

    def sockets(
        self, port: int, states: Iterable[int], *, family: int, info: bool = True
    ) -> list[TcpSocket]:
        """Sockets of a local port, at most ``MAX_SOCKETS``; more are left out and counted.

        Blocks for at most 0.1 s a datagram. Raises OSError when the kernel refuses or does not
        answer.
        """
        self._sequence = self._sequence % 0xFFFFFFFF + 1
        mask = sum(1 << state for state in states)
        message = request(family=family, states=mask, port=port, sequence=self._sequence, info=info)
        try:
            if self._socket is None:
                self._socket = self._opener()
            self._socket.send(message)
            return self._answer(self._socket)
        except OSError:
            self._counts["netlink_errors"] += 1
            self.close()
            raise

    def _answer(self, opened: socket.socket) -> list[TcpSocket]:
        found: list[TcpSocket] = []
        for _ in range(MAX_DATAGRAMS):
            some, last = parse(
                opened.recv(BUFFER_BYTES), sequence=self._sequence, counts=self._counts
            )
            found += some
            if last:
                return found
            if len(found) >= MAX_SOCKETS:
                break
        # A new socket is spared the rest of the answer, and may ask at once.
        self.close()
        self._counts["sockets_beyond_bound"] += 1
        return found[:MAX_SOCKETS]

    def close(self) -> None:
        """Close the socket; asking opens it again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
