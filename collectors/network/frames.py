"""Where the TCP payload of a captured packet lies; pure arithmetic on bytes that may be garbage."""

import mmap
import socket
import struct
from typing import Final, NamedTuple, TypeAlias

Buffer: TypeAlias = bytes | mmap.mmap
"""What a packet lies in: both give bytes for a slice and a number for an index."""

FIN: Final = 0x01
SYN: Final = 0x02
RST: Final = 0x04
ACK: Final = 0x10

# Link types of capture files, from the registry of tcpdump.org
NULL: Final = 0
ETHERNET: Final = 1
RAW_IP: Final = 101
LINUX_SLL: Final = 113
LINK_TYPES: Final = (NULL, ETHERNET, RAW_IP, LINUX_SLL)

_VLAN_TAGS = (b"\x81\x00", b"\x88\xa8", b"\x91\x00")
_IP_TYPES = (b"\x08\x00", b"\x86\xdd")
_TCP = struct.Struct("!I4xBB").unpack_from
_PORTS = struct.Struct("!HH").unpack_from


class Segment(NamedTuple):
    """A TCP segment inside a buffer.

    ``key`` is the addresses and ports as they stand in the packet (source first), 12 bytes for
    IPv4 and 36 for IPv6; the payload is ``buffer[start:stop]``.
    """

    key: bytes
    sequence: int
    flags: int
    start: int
    stop: int


class Ends(NamedTuple):
    """Both ends of a connection: packed addresses and ports, source first."""

    source: bytes
    source_port: int
    destination: bytes
    destination_port: int


def segment(buffer: Buffer, at: int, end: int) -> Segment | None:
    """The TCP segment of the IP packet ``buffer[at:end]``; None for everything else.

    Later fragments and IPv6 extension headers are everything else. A packet that was captured in
    part has a payload that ends with what was captured. Padding of the link layer is left out.
    """
    if end - at < 40:
        return None
    version = buffer[at] >> 4
    if version == 4:
        tcp = at + (buffer[at] & 0x0F) * 4
        fragment = (buffer[at + 6] & 0x1F) or buffer[at + 7]
        if tcp < at + 20 or buffer[at + 9] != socket.IPPROTO_TCP or fragment:
            return None
        key = buffer[at + 12 : at + 20] + buffer[tcp : tcp + 4]
        length = buffer[at + 2] << 8 | buffer[at + 3]
        stop = at + length
    elif version == 6:
        if buffer[at + 6] != socket.IPPROTO_TCP:
            return None
        tcp = at + 40
        key = buffer[at + 8 : at + 44]
        length = buffer[at + 4] << 8 | buffer[at + 5]
        stop = tcp + length
    else:
        return None
    if tcp + 20 > end:
        return None
    if stop > end or not length:  # a packet of 64 KiB or more has no length in its header
        stop = end
    sequence, offset, flags = _TCP(buffer, tcp + 4)
    header = (offset >> 4) * 4
    start = tcp + header
    if header < 20 or start > stop:
        return None
    return Segment(key, sequence, flags, start, stop)


def reverse(key: bytes) -> bytes:
    """The key of the other direction."""
    size = (len(key) - 4) // 2
    return key[size : 2 * size] + key[:size] + key[-2:] + key[-4:-2]


def ends(key: bytes) -> Ends:
    """Addresses and ports of a key."""
    size = (len(key) - 4) // 2
    source_port, destination_port = _PORTS(key, 2 * size)
    return Ends(key[:size], source_port, key[size : 2 * size], destination_port)


def network_offset(link_type: int, buffer: Buffer, at: int, end: int) -> int | None:
    """Where the IP packet of the frame ``buffer[at:end]`` begins; None if it holds none.

    ``link_type`` is one of :data:`LINK_TYPES`. VLAN tags are skipped, stacked ones too.
    """
    if link_type == RAW_IP:
        return at
    if link_type == NULL:
        return at + 4
    offset = at + (12 if link_type == ETHERNET else 14)
    while buffer[offset : offset + 2] in _VLAN_TAGS:
        offset += 4
    if offset + 2 > end or buffer[offset : offset + 2] not in _IP_TYPES:
        return None
    return offset + 2
