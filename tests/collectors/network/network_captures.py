"""Writes capture files, block by block."""

import struct
from collections.abc import Sequence
from pathlib import Path

from latencyprism.collectors.network import frames

ETHERNET_HEADER = bytes(12) + b"\x08\x00"


def pcap(
    packets: Sequence[tuple[int, bytes]],
    *,
    link_type: int = frames.RAW_IP,
    order: str = "<",
    nanoseconds: bool = True,
) -> bytes:
    """A file of tcpdump; packets are times (ns) and frames."""
    magic, unit = (0xA1B23C4D, 1) if nanoseconds else (0xA1B2C3D4, 1000)
    parts = [struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, 65535, link_type)]
    for at_ns, frame in packets:
        seconds, fraction = divmod(at_ns, 10**9)
        size = len(frame)
        parts += [struct.pack(order + "4I", seconds, fraction // unit, size, size), frame]
    return b"".join(parts)


def block(kind: int, body: bytes, order: str = "<") -> bytes:
    """A block of pcapng."""
    body += bytes(-len(body) % 4)
    size = struct.pack(order + "I", len(body) + 12)
    return struct.pack(order + "I", kind) + size + body + size


def section(order: str = "<") -> bytes:
    return block(0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1), order)


def option(code: int, value: bytes, order: str = "<") -> bytes:
    return struct.pack(order + "2H", code, len(value)) + value + bytes(-len(value) % 4)


def interface(link_type: int, *options: bytes, order: str = "<") -> bytes:
    return block(1, struct.pack(order + "HHI", link_type, 0, 0) + b"".join(options), order)


def enhanced(frame: bytes, ticks: int, *, number: int = 0, order: str = "<") -> bytes:
    size = len(frame)
    head = struct.pack(order + "5I", number, ticks >> 32, ticks & 0xFFFFFFFF, size, size)
    return block(6, head + frame, order)


def old(frame: bytes, ticks: int, *, number: int = 0, order: str = "<") -> bytes:
    size = len(frame)
    head = struct.pack(order + "HHIIII", number, 0, ticks >> 32, ticks & 0xFFFFFFFF, size, size)
    return block(2, head + frame, order)


def simple(frame: bytes, order: str = "<") -> bytes:
    return block(3, struct.pack(order + "I", len(frame)) + frame, order)


def saved(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
