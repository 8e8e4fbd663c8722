"""Reads the kernel's ring buffer, which this process shares, without a system call an event.

Layout as in the kernel's document "BPF ring buffer": a page with the consumer's position, a page
with the producers', then the data twice in a row, so that no event is cut at the end.
"""

import mmap
import struct
from collections import deque
from collections.abc import Iterator
from typing import Final, Protocol

from latencyprism.collectors.kernel.bpf import Kernel, Map, MapKind

_POSITION: Final = struct.Struct("=Q")
_LENGTH: Final = struct.Struct("=I")
_HEADER_BYTES: Final = 8
_BUSY, _DISCARDED = 1 << 31, 1 << 30


class Events(Protocol):
    """Where events come from; :class:`Ring` and its twin in memory, :class:`MemoryEvents`."""

    def drain(self) -> Iterator[bytes]:
        """The events that wait, oldest first, at most a ring full."""

    def close(self) -> None:
        """Give it back."""


class Ring:
    """A ring buffer of ``size`` bytes, a power of two of at least a page. Raises OSError."""

    def __init__(self, kernel: Kernel, name: str, size: int) -> None:
        self.map: Map = kernel.create_map(MapKind.RING, name, key=0, value=0, entries=size)
        self._size = size
        page = mmap.PAGESIZE
        descriptor = self.map.descriptor
        try:
            self._consumer = mmap.mmap(descriptor, page)
            self._producer = mmap.mmap(
                descriptor, page + 2 * size, prot=mmap.PROT_READ, offset=page
            )
        except BaseException:
            self.map.close()
            raise

    def drain(self) -> Iterator[bytes]:
        """See :class:`Events`; an event that is being written ends it, to be read the next time."""
        data, page, mask = self._producer, mmap.PAGESIZE, self._size - 1
        (at,) = _POSITION.unpack_from(self._consumer)
        (end,) = _POSITION.unpack_from(data)
        while at < end:
            start = page + (at & mask)
            (header,) = _LENGTH.unpack_from(data, start)
            if header & _BUSY:
                return
            length = header & ~_DISCARDED
            if not header & _DISCARDED:
                start += _HEADER_BYTES
                yield data[start : start + length]
            at += (length + _HEADER_BYTES + 7) & ~7
            _POSITION.pack_into(self._consumer, 0, at)

    def close(self) -> None:
        """See :class:`Events`."""
        self._consumer.close()
        self._producer.close()
        self.map.close()


class MemoryEvents:
    """Events that a test puts there."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()

    def drain(self) -> Iterator[bytes]:
        """See :class:`Events`."""
        while self.waiting:
            yield self.waiting.popleft()

    def close(self) -> None:
        """Nothing to give back."""
