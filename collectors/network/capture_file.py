"""Recorded packets: the capture files of tcpdump (pcap) and Wireshark (pcapng), read in place.

Layouts are those of the IETF drafts "PCAP Capture File Format" and "PCAP Next Generation (pcapng)
Capture File Format".
"""

import logging
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from latencyprism.collectors.network.frames import (
    ETHERNET,
    IPV4_TYPE,
    LINK_TYPES,
    Buffer,
    network_offset,
)

log = logging.getLogger(__name__)

Packet: TypeAlias = tuple[int, Buffer, int, int]
"""Time (ns since the epoch), buffer, and where in it the IP packet begins and ends."""

MAX_PACKET: Final = 1 << 18
"""No tool captures more of a packet, in bytes; a larger one means that the file is damaged."""
LATEST_NS: Final = 1 << 62
"""2116; a later time is none, and with what is added to it would soon fit no number of 64 bits."""

_PCAP: Final = {
    b"\xd4\xc3\xb2\xa1": ("<", 1000),
    b"\xa1\xb2\xc3\xd4": (">", 1000),
    b"\x4d\x3c\xb2\xa1": ("<", 1),
    b"\xa1\xb2\x3c\x4d": (">", 1),
}
"""Byte order, and nanoseconds of a unit of the fraction of a second, by magic number."""
_PCAP_HEADER: Final = 24

_SECTION_MAGIC: Final = b"\n\r\r\n"
_INTERFACE: Final = 1
_SIMPLE_PACKET: Final = 3
_PACKET_HEADERS: Final = {2: "HxxIII4x", _SIMPLE_PACKET: "I", 6: "IIII4x"}
"""Blocks that hold a packet, old, simple and enhanced, and what stands before its data:
interface, time in two halves, size; of a simple one its original size."""
_ORDERS: Final = {b"\x1a\x2b\x3c\x4d": ">", b"\x4d\x3c\x2b\x1a": "<"}
_TIME_RESOLUTION: Final = 9
_TIME_OFFSET: Final = 14

_COMPRESSED: Final = {
    b"\x1f\x8b": "gzip -d",
    b"\x28\xb5\x2f\xfd": "zstd -d",
    b"\xfd7zX": "xz -d",
}


def read(path: Path) -> Iterator[Packet]:
    """IP packets of a capture file, in the order of the file.

    Frames that hold no IP are left out. A file that was cut short, as that of a killed tcpdump,
    ends there with a warning. Raises ValueError for what is no capture file, of an unknown link
    type, or damaged, naming the byte; OSError when it can't be read.
    """
    with path.open("rb") as file:
        magic = file.read(4)
        for prefix, command in _COMPRESSED.items():
            if magic.startswith(prefix):
                raise ValueError(f"{path} is compressed: unpack it first ({command})")
        if magic not in _PCAP and magic != _SECTION_MAGIC:
            raise ValueError(
                f"{path} is no capture file: byte 0 begins neither pcap nor pcapng; "
                "record one with tcpdump -w FILE"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            yield from (_pcapng if magic == _SECTION_MAGIC else _pcap)(path, buffer)


def _pcap(path: Path, buffer: mmap.mmap) -> Iterator[Packet]:
    order, unit_ns = _PCAP[buffer[:4]]
    if len(buffer) < _PCAP_HEADER:
        log.warning("%s: the header at byte 0 is cut short", path)
        return
    link_type = _known_link(path, struct.unpack_from(order + "I", buffer, 20)[0] & 0xFFFF, 20)
    ethernet = link_type == ETHERNET
    record = struct.Struct(order + "3I").unpack_from
    at, total = _PCAP_HEADER, len(buffer)
    while at + 16 <= total:
        seconds, fraction, size = record(buffer, at)
        if size > MAX_PACKET:
            raise _damaged(path, at, f"a packet of {size} bytes")
        start = at + 16
        end = start + size
        if end > total:
            break
        if ethernet and buffer[start + 12 : start + 14] == IPV4_TYPE:  # nearly always
            network: int | None = start + 14
        else:
            network = network_offset(link_type, buffer, start, end)
        if network is not None:
            yield seconds * 1_000_000_000 + fraction * unit_ns, buffer, network, end
        at = end
    if at != total:
        log.warning("%s: the packet at byte %d is cut short", path, at)


@dataclass(frozen=True, slots=True)
class _Interface:
    """Where packets were captured: its link, and how its clock counts."""

    link_type: int
    ticks_per_s: int = 1_000_000
    offset_s: int = 0

    def time_ns(self, ticks: int) -> int:
        return self.offset_s * 1_000_000_000 + ticks * 1_000_000_000 // self.ticks_per_s


def _pcapng(path: Path, buffer: mmap.mmap) -> Iterator[Packet]:
    order, interfaces, at_ns = "<", list[_Interface](), 0
    at, total = 0, len(buffer)
    while at + 12 <= total:
        if buffer[at : at + 4] == _SECTION_MAGIC:
            found = _ORDERS.get(buffer[at + 8 : at + 12])
            if found is None:
                raise _damaged(path, at + 8, "a section without byte order")
            order, interfaces = found, []
        kind, size = struct.unpack_from(order + "2I", buffer, at)
        if size < 12 or size % 4:
            raise _damaged(path, at + 4, f"a block of {size} bytes")
        body, end = at + 8, at + size - 4
        if end + 4 > total:
            break
        if kind == _INTERFACE:
            interfaces.append(_interface(path, buffer, body, end, order))
        elif kind in _PACKET_HEADERS:
            number, ticks, start, stop = _packet(path, buffer, body, end, order, kind)
            if number >= len(interfaces):
                raise _damaged(path, body, f"a packet of interface {number}, which has no block")
            interface = interfaces[number]
            if ticks is not None:
                at_ns = interface.time_ns(ticks)
                if not 0 <= at_ns < LATEST_NS:
                    raise _damaged(path, body, "a time that is none")
            network = network_offset(interface.link_type, buffer, start, stop)
            if network is not None:
                yield at_ns, buffer, network, stop
        at += size
    if at != total:
        log.warning("%s: the block at byte %d is cut short", path, at)


def _packet(
    path: Path, buffer: mmap.mmap, at: int, end: int, order: str, kind: int
) -> tuple[int, int | None, int, int]:
    """The block of a packet: its interface, its time in ticks, and where its data begin and end.

    A simple block has no time: None; that of the packet before it is the nearest.
    """
    header = struct.Struct(order + _PACKET_HEADERS[kind])
    start = at + header.size
    if start > end:
        raise _damaged(path, at, "a block too short for a packet")
    fields = header.unpack_from(buffer, at)
    if kind == _SIMPLE_PACKET:
        return 0, None, start, min(start + fields[0], end)
    number, high, low, size = fields
    if start + size > end:
        raise _damaged(path, at, f"a packet of {size} bytes in a block of {end - at}")
    return number, high << 32 | low, start, start + size


def _interface(path: Path, buffer: mmap.mmap, at: int, end: int, order: str) -> _Interface:
    if end - at < 8:
        raise _damaged(path, at, "a block too short for an interface")
    link_type = _known_link(path, struct.unpack_from(order + "H", buffer, at)[0], at)
    ticks_per_s, offset_s = 1_000_000, 0
    at += 8
    while at + 4 <= end:
        code, size = struct.unpack_from(order + "2H", buffer, at)
        value = buffer[at + 4 : min(at + 4 + size, end)]
        if code == _TIME_RESOLUTION and size == 1 and value:
            exponent = value[0] & 0x7F
            ticks_per_s = 2**exponent if value[0] & 0x80 else 10**exponent
        elif code == _TIME_OFFSET and len(value) == 8:
            (offset_s,) = struct.unpack(order + "q", value)
        at += 4 + (size + 3) // 4 * 4
    return _Interface(link_type, ticks_per_s, offset_s)


def _known_link(path: Path, link_type: int, at: int) -> int:
    if link_type not in LINK_TYPES:
        raise ValueError(
            f"{path}: link type {link_type} at byte {at} is not read, only {LINK_TYPES}; "
            "capture on an interface such as eth0, lo or any"
        )
    return link_type


def _damaged(path: Path, at: int, what: str) -> ValueError:
    return ValueError(
        f"{path} is damaged at byte {at}: {what}; a copy of the part before it can be read"
    )
