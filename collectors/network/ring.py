"""The edge to the kernel: packets of one interface through memory shared with it.

``AF_PACKET`` with a ``TPACKET_V3`` ring, as described in the kernel's packet_mmap documentation.
The kernel fills blocks of packets and hands over a block when it is full, or ``block_timeout_ms``
after it was begun (twice that when the timer just missed it); reading it costs no system call.
"""

import ctypes
import fcntl
import mmap
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, TypeAlias

from latencyprism.collectors.network.bpf import Instruction, encode
from latencyprism.collectors.network.frames import Buffer

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
IFF_UP: Final = 0x1
IFF_LOOPBACK: Final = 0x8

BLOCK_BYTES: Final = 1 << 18
"""Larger than any packet; a block is also how much is read before others may run."""
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

    def drain(self, take: TakePacket) -> bool:
        """Hand over up to a ring full of packets; whether it is empty now. Does not block."""

    def lost(self) -> int:
        """Packets that found the ring full since the last call."""

    def fileno(self) -> int:
        """Descriptor that is readable when packets wait."""

    def close(self) -> None:
        """Give it back."""


class Ring:
    """Packets of one interface that pass the filter.

    On the loopback each packet is taken once, as received. Raises PermissionError without
    CAP_NET_RAW, OSError for an interface that does not exist or a kernel without packet sockets.
    """

    def __init__(
        self,
        interface: str,
        program: Sequence[Instruction],
        *,
        ring_mib: int,
        block_timeout_ms: int,
    ) -> None:
        self.interface = interface
        self.hold_ns = 2 * block_timeout_ms * 1_000_000 + _TIMER_SLACK_NS
        self.newest_ns = 0
        self._blocks = max(2, (ring_mib << 20) // BLOCK_BYTES)
        self._at = 0
        try:
            # Protocol 0 delivers nothing until bind, so nothing comes in before the filter
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
        except PermissionError as e:
            raise PermissionError(
                e.errno,
                "capturing packets needs CAP_NET_RAW: run as root, or give the service "
                "AmbientCapabilities=CAP_NET_RAW (in a container, cap_add: NET_RAW)",
            ) from e
        try:
            self._memory = self._set_up(program, block_timeout_ms)
        except BaseException:
            self._socket.close()
            raise

    def _set_up(self, program: Sequence[Instruction], block_timeout_ms: int) -> mmap.mmap:
        sock = self._socket
        code = ctypes.create_string_buffer(encode(program))
        sock.setsockopt(
            socket.SOL_SOCKET,
            SO_ATTACH_FILTER,
            struct.pack("@HP", len(program), ctypes.addressof(code)),
        )
        sock.setsockopt(SOL_PACKET, PACKET_VERSION, TPACKET_V3)
        if interface_flags(self.interface) & IFF_LOOPBACK:
            sock.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        size = self._blocks * BLOCK_BYTES
        frames = size // _FRAME_BYTES
        sock.setsockopt(
            SOL_PACKET,
            PACKET_RX_RING,
            struct.pack(
                "=7I", BLOCK_BYTES, self._blocks, _FRAME_BYTES, frames, block_timeout_ms, 0, 0
            ),
        )
        memory = mmap.mmap(sock.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        sock.bind((self.interface, ETH_P_ALL))
        return memory

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

    def fileno(self) -> int:
        """See :class:`PacketRing`."""
        return self._socket.fileno()

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
        self.dropped = 0

    def drain(self, take: TakePacket) -> bool:
        """See :class:`PacketRing`."""
        while self.packets:
            at_ns, packet = self.packets.popleft()
            take(at_ns, packet, 0, len(packet))
            self.newest_ns = at_ns
        return True

    def lost(self) -> int:
        """See :class:`PacketRing`."""
        dropped, self.dropped = self.dropped, 0
        return dropped

    def fileno(self) -> int:
        """None: nothing ever waits unseen."""
        return -1

    def close(self) -> None:
        """Nothing to give back."""


def interface_flags(interface: str) -> int:
    """``IFF_`` flags of an interface. Raises OSError naming it when it does not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFFLAGS, struct.pack("16sH14x", interface.encode(), 0))
        except OSError as e:
            raise OSError(e.errno, f"network interface {interface!r}: {e.strerror}") from e
    return int(struct.unpack_from("H", answer, 16)[0])


def choose_interfaces(*, elsewhere: bool) -> list[str]:
    """The loopback and, when a server is reached ``elsewhere`` too, every other interface that is
    up.
    """
    names = [name for _, name in socket.if_nameindex()]
    flags = {name: interface_flags(name) for name in names}
    return [
        name for name in names if flags[name] & IFF_UP and (elsewhere or flags[name] & IFF_LOOPBACK)
    ]
