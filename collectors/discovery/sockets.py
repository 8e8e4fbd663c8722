"""Listening TCP sockets of this network namespace, and the processes that hold them."""

import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

LISTEN = "0A"
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


def listeners(proc: Path) -> dict[int, Listener]:
    """Listening sockets by inode, at most ``MAX_SOCKETS``.

    Cheap with many connections: the kernel lists the listening ones first, and no more is read.
    """
    found = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError), (proc / "self/net" / name).open() as table:
            for listener in listening(table):
                found[listener.inode] = listener
                if len(found) >= MAX_SOCKETS:
                    break
    return found


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
    packed = struct.pack(f"={len(words)}I", *words)
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
