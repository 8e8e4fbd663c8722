"""The edge to the kernel: packets through memory shared with it.

``AF_PACKET`` with a ``TPACKET_V3`` ring, as described in the kernel's packet_mmap documentation.
The kernel fills blocks of packets and hands over a block when it is full, or ``block_timeout_ms``
after it was begun (twice that when the timer just missed it); reading it costs no system call.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, TypeAlias

from latencyprism.collectors.network.bpf import encode, server_filter
from latencyprism.collectors.network.frames import Buffer

log = logging.getLogger(__name__)

TakePacket: TypeAlias = Callable[[int, Buffer, int, int], None]
"""Takes the time of capture (ns since the epoch), a buffer, and where in it the IP packet lies."""

SOL_PACKET: Final = 263
PACKET_RX_RING: Final = 5
PACKET_STATISTICS: Final = 6
PACKET_VERSION: Final = 10
PACKET_IGNORE_OUTGOING: Final = 23
TPACKET_V3: Final = 2
SO_ATTACH_FILTER: Final = 26
ETH_P_ALL: Final = 3
SIOCGIFFLAGS: Final = 0x8913
IFF_LOOPBACK: Final = 0x8

BLOCK_BYTES: Final = 1 << 17
"""Larger than a packet of 64 KiB. A block handed over for its age is mostly empty, so the more
blocks, the longer the reader may be held up."""
_FRAME_BYTES: Final = 2048  # only how the kernel wants the ring described
_STATUS: Final = 8  # offsets in struct tpacket_block_desc
_COUNT: Final = 12
_NEWEST: Final = 40
_USER: Final = 1
_TIMER_SLACK_NS: Final = 10_000_000

_U32 = struct.Struct("=I")
_TWO_U32 = struct.Struct("=2I")
_PACKET = struct.Struct("=4I8xH").unpack_from  # struct tpacket3_hdr: next, sec, nsec, size, mac


class PacketRing(Protocol):
    """Where packets come from; :class:`Ring` and its twin in memory, :class:`MemoryRing`."""

    hold_ns: int
    """A packet older than this was handed over, if the ring was drained since."""
    newest_ns: int
    """Time of the newest packet handed over; 0 before the first."""

    def filling(self) -> bool:
        """Whether a quarter of it or more waits to be drained."""

    def drain(self, take: TakePacket) -> bool:
        """Hand over up to a ring full of packets; whether it is empty now. Does not block."""

    def lost(self) -> int:
        """Packets that found the ring full since the last call."""

    def interrupted(self) -> bool:
        """Whether the interface went down since the last call; it is listened to again by itself
        when it comes up.
        """

    def close(self) -> None:
        """Give it back."""


class Ring:
    """TCP packets of the servers' ports on one interface, or on all of them when it is empty.

    On the loopback each packet is taken once, as received. It belongs to the network namespace of
    the thread that makes it. When the kernel has not so much memory in one piece the ring is
    halved, down to 1 MiB, with a warning. Raises PermissionError without CAP_NET_RAW, OSError for
    an interface that does not exist, a kernel without packet sockets or memory for the smallest
    ring, ValueError for ports that cannot be filtered.
    """

    def __init__(
        self, interface: str, ports: Sequence[int], *, ring_mib: int, block_timeout_ms: int
    ) -> None:
        self.hold_ns = 2 * block_timeout_ms * 1_000_000 + _TIMER_SLACK_NS
        self.newest_ns = 0
        self._at = 0
        try:
            # What comes in before the filter does not get into the ring: making it purges that
            protocol = 0 if interface else socket.htons(ETH_P_ALL)
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, protocol)
        except PermissionError as e:
            raise PermissionError(
                e.errno,
                "capturing packets needs CAP_NET_RAW: run as root, or give the service "
                "AmbientCapabilities=CAP_NET_RAW (in a container, cap_add: NET_RAW)",
            ) from e
        try:
            self._filter(interface, ports)
            self.size_mib = self._share(ring_mib, block_timeout_ms)
            """What of it could be had."""
            size = self.size_mib << 20
            self._blocks = size // BLOCK_BYTES
            access = mmap.PROT_READ | mmap.PROT_WRITE
            self._memory = mmap.mmap(self._socket.fileno(), size, mmap.MAP_SHARED, access)
            if interface:
                self._socket.bind((interface, ETH_P_ALL))
            self.lost()
        except BaseException:
            self._socket.close()
            raise

    def _filter(self, interface: str, ports: Sequence[int]) -> None:
        flags = _interface_flags(interface) if interface else 0
        if flags & IFF_LOOPBACK:
            self._socket.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        program = server_filter(ports, loopback=None if interface else _loopback_index())
        code = ctypes.create_string_buffer(encode(program))
        described = struct.pack("@HP", len(program), ctypes.addressof(code))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)

    def _share(self, ring_mib: int, block_timeout_ms: int) -> int:
        """Let the kernel share memory; how much, MiB."""
        self._socket.setsockopt(SOL_PACKET, PACKET_VERSION, TPACKET_V3)
        while True:
            size = ring_mib << 20
            blocks, frames = size // BLOCK_BYTES, size // _FRAME_BYTES
            request = struct.pack(
                "=7I", BLOCK_BYTES, blocks, _FRAME_BYTES, frames, block_timeout_ms, 0, 0
            )
            try:
                self._socket.setsockopt(SOL_PACKET, PACKET_RX_RING, request)
            except OSError as e:
                if e.errno != errno.ENOMEM or ring_mib == 1:
                    raise
                log.warning("no memory for a ring of %d MiB: trying half of it", ring_mib)
                ring_mib //= 2
                continue
            return ring_mib

    def filling(self) -> bool:
        """See :class:`PacketRing`."""
        block = (self._at + self._blocks // 4) % self._blocks * BLOCK_BYTES
        return bool(_U32.unpack_from(self._memory, block + _STATUS)[0] & _USER)

    def drain(self, take: TakePacket) -> bool:
        """See :class:`PacketRing`."""
        memory = self._memory
        for _ in range(self._blocks):
            block = self._at * BLOCK_BYTES
            if not _U32.unpack_from(memory, block + _STATUS)[0] & _USER:
                return True
            count, first = _TWO_U32.unpack_from(memory, block + _COUNT)
            packet = block + first
            for _ in range(count):
                step, seconds, nanoseconds, size, mac = _PACKET(memory, packet)
                at = packet + mac
                take(seconds * 1_000_000_000 + nanoseconds, memory, at, at + size)
                packet += step
            seconds, nanoseconds = _TWO_U32.unpack_from(memory, block + _NEWEST)
            self.newest_ns = seconds * 1_000_000_000 + nanoseconds
            _U32.pack_into(memory, block + _STATUS, 0)
            self._at = (self._at + 1) % self._blocks
        return False

    def lost(self) -> int:
        """See :class:`PacketRing`; the kernel's counters start again with each reading."""
        statistics = self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 12)
        return int(_TWO_U32.unpack_from(statistics)[1])

    def interrupted(self) -> bool:
        """See :class:`PacketRing`."""
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ENETDOWN

    def close(self) -> None:
        """See :class:`PacketRing`."""
        self._memory.close()
        self._socket.close()


class MemoryRing:
    """A ring that holds what a test puts into it; ``take`` gets the packets oldest first."""

    def __init__(self, packets: Iterable[tuple[int, bytes]] = (), *, hold_ns: int = 0) -> None:
        self.hold_ns = hold_ns
        self.newest_ns = 0
        self.packets = deque(packets)
        self.full = 1000
        """Packets of which four quarters are one ring."""
        self.dropped = 0
        self.down = False

    def filling(self) -> bool:
        """See :class:`PacketRing`."""
        return len(self.packets) >= self.full // 4

    def drain(self, take: TakePacket) -> bool:
        """See :class:`PacketRing`."""
        for _ in range(min(len(self.packets), self.full)):
            at_ns, packet = self.packets.popleft()
            take(at_ns, packet, 0, len(packet))
            self.newest_ns = at_ns
        return not self.packets

    def lost(self) -> int:
        """See :class:`PacketRing`."""
        dropped, self.dropped = self.dropped, 0
        return dropped

    def interrupted(self) -> bool:
        """See :class:`PacketRing`."""
        down, self.down = self.down, False
        return down

    def close(self) -> None:
        """Nothing to give back."""


def _interface_flags(interface: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFFLAGS, struct.pack("16sH14x", interface.encode(), 0))
        except OSError as e:
            raise OSError(e.errno, f"network interface {interface!r}: {e.strerror}") from e
    return int(struct.unpack_from("H", answer, 16)[0])


def _loopback_index() -> int | None:
    return next(
        (i for i, name in socket.if_nameindex() if _interface_flags(name) & IFF_LOOPBACK), None
    )
