"""Where the TCP payload of a captured packet lies; pure arithmetic on bytes that may be garbage."""

import mmap
import socket
import struct
from typing import Final, Literal, NamedTuple, TypeAlias

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
LOOP: Final = 108
LINUX_SLL: Final = 113
IPV4: Final = 228
IPV6: Final = 229
LINUX_SLL2: Final = 276
LINK_TYPES: Final = (NULL, ETHERNET, RAW_IP, LOOP, LINUX_SLL, IPV4, IPV6, LINUX_SLL2)

_FRAGMENT_OFFSET: Final = 0x1FFF
_FRAGMENT_HEADER: Final = 44
IPV6_EXTENSIONS: Final = frozenset({0, 43, _FRAGMENT_HEADER, 60})
"""Headers between that of IPv6 and TCP: hop-by-hop, routing, fragment, destination options."""
_VLAN_TAGS = (b"\x81\x00", b"\x88\xa8", b"\x91\x00")
IPV4_TYPE: Final = b"\x08\x00"
_IP_TYPES = (IPV4_TYPE, b"\x86\xdd")
_IPV4_TCP = struct.Struct("!BxH2xHxB2x12sI4xBB").unpack_from
"""Version and header length, length, fragment, protocol, addresses and ports of an IPv4 header
without options; then sequence number, data offset and flags of the TCP header behind it."""
_IPV6_TCP = struct.Struct("!4xHB33x4xI4xBB").unpack_from
"""The same of an IPv6 header: length and next header."""
_TCP = struct.Struct("!I4xBB").unpack_from
_PORTS = struct.Struct("!HH").unpack_from


Segment: TypeAlias = tuple[bytes, int, int, int, int]
"""A TCP segment inside a buffer: key, sequence number, flags, start and stop of the payload.

The key is addresses and ports as they stand in the packet (source first), 12 bytes for IPv4 and 36
for IPv6.
"""


class Ends(NamedTuple):
    """Both ends of a connection: packed addresses and ports, source first."""

    source: bytes
    source_port: int
    destination: bytes
    destination_port: int


def segment(buffer: Buffer, at: int, end: int) -> Segment | None:
    """The TCP segment of the IP packet ``buffer[at:end]``; None for everything else.

    A later fragment is everything else; a first one is a segment whose rest is missing. A packet
    that was captured in part has a payload that ends with what was captured. Padding of the link
    layer is left out.
    """
    if end - at < 40:
        return None
    version, length, fragment, protocol, key, sequence, offset, flags = _IPV4_TCP(buffer, at)
    if version == 0x45:  # IPv4 without options, so nearly all
        tcp = at + 20
        stop = at + length
    elif version >> 4 == 4:
        tcp = at + (version & 0x0F) * 4
        if tcp < at + 20 or tcp + 20 > end:
            return None
        key = buffer[at + 12 : at + 20] + buffer[tcp : tcp + 4]
        stop = at + length
        sequence, offset, flags = _TCP(buffer, tcp + 4)
    elif version >> 4 == 6 and end - at >= 60:
        length, protocol, sequence, offset, flags = _IPV6_TCP(buffer, at)
        fragment = 0
        tcp = at + 40
        key = buffer[at + 8 : at + 44]
        stop = tcp + length
        if protocol in IPV6_EXTENSIONS:
            protocol, tcp, fragment = _extended(buffer, tcp, end, protocol)
            if tcp + 20 > end:
                return None
            key = key[:32] + buffer[tcp : tcp + 4]
            sequence, offset, flags = _TCP(buffer, tcp + 4)
    else:
        return None
    if protocol != socket.IPPROTO_TCP or fragment & _FRAGMENT_OFFSET:
        return None
    if stop > end or not length:  # a packet of 64 KiB or more has no length in its header
        stop = end
    start = tcp + (offset >> 4) * 4
    if start < tcp + 20 or start > stop:
        return None
    return key, sequence, flags, start, stop


def _extended(buffer: Buffer, at: int, end: int, protocol: int) -> tuple[int, int, int]:
    """What follows the extension headers of IPv6 that begin at ``at``: its protocol, where it
    begins, and its place in a fragmented packet, in units of 8 bytes (0 for a first fragment).
    """
    fragment = 0
    while protocol in IPV6_EXTENSIONS and at + 8 <= end:
        if protocol == _FRAGMENT_HEADER:
            fragment |= int.from_bytes(buffer[at + 2 : at + 4], "big") >> 3
            size = 8
        else:
            size = 8 * (buffer[at + 1] + 1)
        protocol, at = buffer[at], at + size
    return protocol, at, fragment


def refusal(buffer: Buffer, at: int, end: int) -> Literal["IP fragments", "other packets"]:
    """What a packet is that holds no segment, as a kind to count."""
    if end - at >= 40:
        version, _, fragment, protocol, *_ = _IPV4_TCP(buffer, at)
        if version >> 4 == 6:
            protocol, _, fragment = _extended(buffer, at + 40, end, buffer[at + 6])
        if protocol == socket.IPPROTO_TCP and fragment & _FRAGMENT_OFFSET:
            return "IP fragments"
    return "other packets"


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
    if link_type in (RAW_IP, IPV4, IPV6):
        return at
    if link_type in (NULL, LOOP):
        return at + 4
    offset = at + (14 if link_type == LINUX_SLL else 0 if link_type == LINUX_SLL2 else 12)
    network = at + 20 if link_type == LINUX_SLL2 else offset + 2
    while (kind := buffer[offset : offset + 2]) in _VLAN_TAGS and network + 4 <= end:
        offset, network = network + 2, network + 4
    return network if kind in _IP_TYPES and network <= end else None
