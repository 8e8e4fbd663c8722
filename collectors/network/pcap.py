"""Recorded packets: the classic capture file of tcpdump, and the same tap over it."""

import logging
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.frames import LINK_TYPES, Buffer, network_offset
from latencyprism.collectors.network.tap import Tap
from latencyprism.schemas.records import RequestTiming

log = logging.getLogger(__name__)

_HEADER_BYTES: Final = 24
_MAGIC: Final = {
    b"\xd4\xc3\xb2\xa1": ("<", 1000),
    b"\xa1\xb2\xc3\xd4": (">", 1000),
    b"\x4d\x3c\xb2\xa1": ("<", 1),
    b"\xa1\xb2\x3c\x4d": (">", 1),
}
"""Byte order, and nanoseconds of a unit of the fraction of a second."""


def read(path: Path) -> Iterator[tuple[int, Buffer, int, int]]:
    """IP packets of a capture file: time (ns since the epoch), buffer, start and end in it.

    Frames that hold no IP are left out. A file that was cut short, as that of a killed tcpdump,
    ends there with a warning. Raises ValueError for anything but a classic capture of a known link
    type, OSError when it can't be read.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        known = _MAGIC.get(header[:4])
        if known is None or len(header) < _HEADER_BYTES:
            raise ValueError(f"{path} is no capture file in pcap format (pcapng is not read)")
        order, unit_ns = known
        link_type = struct.unpack_from(order + "I", header, 20)[0] & 0xFFFF
        if link_type not in LINK_TYPES:
            raise ValueError(f"{path} has link type {link_type}, not one of {LINK_TYPES}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            record = struct.Struct(order + "3I")
            at = _HEADER_BYTES
            while at < len(buffer):
                start = at + 16
                if start > len(buffer):
                    break
                seconds, fraction, size = record.unpack_from(buffer, at)
                end = start + size
                if end > len(buffer):
                    break
                network = network_offset(link_type, buffer, start, end)
                if network is not None:
                    yield seconds * 1_000_000_000 + fraction * unit_ns, buffer, network, end
                at = end
            if at != len(buffer):
                log.warning("%s: the packet at byte %d is cut short", path, at)


def replay(path: Path, tap: Tap, config: NetworkConfig) -> Iterator[RequestTiming]:
    """The parts that the source would have reported live, on the clock of the packets.

    What is open at the end stays open. Raises as :func:`read`.
    """
    interval_ns = config.part_interval_ms * 1_000_000
    now_ns = due_ns = 0
    for now_ns, buffer, at, end in read(path):
        if now_ns >= due_ns:
            yield from tap.flush(now_ns)
            due_ns = now_ns + interval_ns
        tap.packet(now_ns, buffer, at, end)
    yield from tap.flush(now_ns)
