"""Log lines as datagrams, as HAProxy and nginx send them to a syslog server; never blocks."""

import ipaddress
import os
import socket
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from latencyprism.collectors.address import in_use_advice

RECEIVE_BYTES: Final = 4 << 20
"""Memory asked of the kernel for datagrams not read yet; without CAP_NET_ADMIN it gives less."""
SO_RCVBUFFORCE: Final = 33
SO_RXQ_OVFL: Final = 40
"""Both from linux asm-generic/socket.h; the latter tells how many datagrams were dropped so far."""
DROPS_BYTES: Final = 4
MAX_UNIX_PATH: Final = 107

UdpAddress = tuple[str, int]


def udp_address(value: str) -> UdpAddress | None:
    """Address of ``127.0.0.1:5140`` or ``[::1]:5140``; None of the path of a Unix socket.

    Raises ValueError for anything else.
    """
    if value.startswith("/"):
        if len(value.encode()) > MAX_UNIX_PATH:
            raise ValueError(f"syslog {value!r}: a socket's path has at most {MAX_UNIX_PATH} bytes")
        return None
    try:
        parts = urlsplit(f"//{value}")
        host, port = str(ipaddress.ip_address(parts.hostname or "")), parts.port
    except ValueError:
        host, port = "", None
    if port is None or parts.path:
        raise ValueError(
            f"syslog {value!r}: expected an IP address and a port, such as 127.0.0.1:5140, or the "
            "absolute path of a socket"
        )
    return host, port


class Datagrams:
    """One bound socket; each datagram is one line.

    Raises OSError, naming the address, when it cannot be bound. A socket file that nobody listens
    on is replaced; the own one is removed by :meth:`close`.
    """

    def __init__(
        self, address: str, counts: Counter[str], *, max_line_bytes: int, mode: int
    ) -> None:
        self.behind = False
        """Whether the last :meth:`read` left something unread."""
        self._counts = counts
        self._max_line = max_line_bytes
        self._drops = 0
        self._path: Path | None = None
        target = udp_address(address)
        try:
            self._socket = self._bind_unix(address, mode) if target is None else _bind_udp(target)
        except OSError as error:
            advice = in_use_advice(
                error,
                find="ss -lxp" if target is None else "ss -lunp",
                setting="collectors.gateway.syslog",
            )
            raise type(error)(error.errno, f"{error.strerror}: syslog {address}{advice}") from error
        self._socket.settimeout(0)
        _ask_memory(self._socket)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)

    @property
    def port(self) -> int:
        """Port that UDP datagrams come to."""
        port: int = self._socket.getsockname()[1]
        return port

    def read(self, most: int) -> Iterator[bytes]:
        """The datagrams that came, of at most about ``most`` bytes."""
        left = most
        self.behind = False
        while True:
            if left <= 0:
                self.behind = True
                return
            try:
                line, ancillary, flags, _ = self._socket.recvmsg(
                    self._max_line, socket.CMSG_SPACE(DROPS_BYTES)
                )
            except BlockingIOError:
                return
            left -= len(line) + 64  # empty ones take time too
            self._note_drops(ancillary)
            if flags & socket.MSG_TRUNC:
                self._counts["oversized lines"] += 1
            elif line:
                yield line

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _note_drops(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, SO_RXQ_OVFL):
                drops = int.from_bytes(data[:DROPS_BYTES], sys.byteorder)
                self._counts["lost datagrams"] += (drops - self._drops) % (1 << 32)
                self._drops = drops

    def _bind_unix(self, address: str, mode: int) -> socket.socket:
        path = Path(address)
        _remove_stale(path)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            made.bind(address)
            path.chmod(mode)
        except OSError:
            made.close()
            raise
        self._path = path
        return made


def _bind_udp(address: UdpAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    made = socket.socket(family, socket.SOCK_DGRAM)
    try:
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _remove_stale(path: Path) -> None:
    """Remove a socket file that nobody listens on; another file stays and makes bind fail."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)


def _ask_memory(made: socket.socket) -> None:
    try:
        made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BYTES)
    except PermissionError:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
