"""Listening TCP sockets of this network namespace, and the processes that hold them."""

import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from itertools import islice
from pathlib import Path

PROC = Path("/proc")
LISTEN = "0A"
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLMSG_DONE = 3
DUMP = 0x301
"""NLM_F_REQUEST with NLM_F_DUMP."""
TIMEOUT_S = 0.2
BUFFER_BYTES = 1 << 17
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48s")
_SOCKET = struct.Struct("!B3xH2x16s44x")
"""Family, port and address of struct inet_diag_msg, in network order."""
_INODE = struct.Struct("=68xI")
"""Its inode, in the machine's order."""
MAX_SOCKETS = 10_000
MAX_PROCESSES = 50_000
COMMAND_BYTES = 4096
"""How much of a command line is looked at."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket."""

    inode: int
    address: IPv4Address | IPv6Address
    port: int


@dataclass(frozen=True, slots=True)
class Process:
    """A process, as far as it matters here."""

    pid: int
    parent: int
    command: str
    """Its arguments joined by spaces."""


def listeners(proc: Path = PROC) -> dict[int, Listener]:
    """Listening sockets by inode, at most ``MAX_SOCKETS``; of this machine's own when ``proc`` is
    where that is mounted.

    The kernel is asked by netlink, which costs a tenth of a millisecond; where that is refused,
    and for another ``proc``, the tables there are read, which costs some milliseconds.
    """
    if proc == PROC:
        with suppress(OSError):
            return {listener.inode: listener for listener in islice(_asked(), MAX_SOCKETS)}
    found: dict[int, Listener] = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError), (proc / "self/net" / name).open() as table:
            for listener in islice(listening(table), MAX_SOCKETS - len(found)):
                found[listener.inode] = listener
    return found


def _asked() -> Iterator[Listener]:
    """From inet_diag: see linux/inet_diag.h and linux/netlink.h. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(TIMEOUT_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            states = 1 << int(LISTEN, 16)
            body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, states, bytes(48))
            kernel.send(
                _HEADER.pack(_HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, DUMP, 0, 0) + body
            )
            done = False
            while not done:
                found, done = answered(kernel.recv(BUFFER_BYTES))
                yield from found


def answered(data: bytes) -> tuple[list[Listener], bool]:
    """Sockets of one datagram, and whether it was the last. Raises OSError for a refusal and for
    what is no answer.
    """
    found: list[Listener] = []
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        if kind == NLMSG_DONE:
            return found, True
        if (
            kind != SOCK_DIAG_BY_FAMILY
            or not _HEADER.size + _INODE.size <= length <= len(data) - at
        ):
            raise OSError(f"netlink answers with a message of kind {kind} and {length} bytes")
        family, port, address = _SOCKET.unpack_from(data, at + _HEADER.size)
        (inode,) = _INODE.unpack_from(data, at + _HEADER.size)
        packed = address[:4] if family == socket.AF_INET else address
        found.append(Listener(inode, _plain(packed), port))
        at += -(-length // 4) * 4
    return found, False


def listening(table: Iterable[str]) -> Iterator[Listener]:
    """Sockets of a table as the kernel prints it, up to the first one that does not listen; rows
    that cannot be read are passed over.
    """
    rows = iter(table)
    next(rows, None)
    for row in rows:
        fields = row.split()
        if len(fields) < 10 or fields[3] != LISTEN:
            return
        with suppress(ValueError, struct.error):
            address, port = fields[1].split(":")
            yield Listener(int(fields[9]), _address(address), int(port, 16) & 0xFFFF)


def _address(text: str) -> IPv4Address | IPv6Address:
    # Words of 32 bits in the machine's order, each printed as a number.
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return _plain(struct.pack(f"={len(words)}I", *words))


def _plain(packed: bytes) -> IPv4Address | IPv6Address:
    if len(packed) == 4:
        return IPv4Address(packed)
    address = IPv6Address(packed)
    return address.ipv4_mapped or address


def processes(proc: Path) -> Iterator[Process]:
    """Processes that can be seen; kernel threads and those that end meanwhile are left out."""
    with os.scandir(proc) as entries:
        names = [entry.name for entry in entries if entry.name.isdigit()]
    for name in names[:MAX_PROCESSES]:
        with suppress(OSError, ValueError, IndexError):
            command = _start_of(f"{proc}/{name}/cmdline")
            if command:
                # After the name, which stands in parentheses and may hold anything.
                stat = _start_of(f"{proc}/{name}/stat").rpartition(b")")[2].split()
                text = command.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
                yield Process(int(name), int(stat[1]), text)


def _start_of(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - thousands of them
        return file.read(COMMAND_BYTES) or b""


def held(proc: Path, pid: int) -> set[int] | None:
    """Inodes of the sockets that a process holds; None when it is not permitted to look."""
    found = set()
    try:
        with os.scandir(proc / str(pid) / "fd") as entries:
            for entry in entries:
                with suppress(OSError, ValueError):
                    link = os.readlink(entry.path)  # noqa: PTH115 - the text of the link is wanted
                    if link.startswith("socket:["):
                        found.add(int(link[8:-1]))
    except PermissionError:
        return None
    except OSError:
        return set()
    return found


def own_name() -> str:
    """The machine's name where it stands for an address of its own, else 127.0.0.1."""
    name = socket.gethostname()
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((address[0], 0))
                return name
    return "127.0.0.1"
