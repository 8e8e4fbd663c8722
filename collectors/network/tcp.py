"""One direction of a TCP connection, back in order."""

import heapq
from collections.abc import Sequence
from typing import Final

MODULUS: Final = 1 << 32
"""Sequence numbers start again at 0 here."""

_HALF: Final = 1 << 31
_OVERHEAD: Final = 128
"""Bytes that remembering one waiting segment takes beside its payload."""


def distance(start: int, end: int) -> int:
    """How far a sequence number is ahead of another; negative behind it."""
    return (end - start + _HALF) % MODULUS - _HALF


class Direction:
    """Puts the segments of one direction in order; each byte is given out once.

    ``next`` is the sequence number of the next byte, None before :meth:`start`: until then nothing
    is given out, and when to start is up to the caller. ``held`` is the memory of what waits for a
    missing segment, in bytes; the caller bounds it.
    """

    __slots__ = ("_anchor", "_end", "_waiting", "held", "next")

    def __init__(self) -> None:
        self.next: int | None = None
        self.held = 0
        self._end: int | None = None
        self._anchor = 0
        """What was next when segments began to wait; they are ordered by their distance to it."""
        self._waiting: list[tuple[int, bytes]] = []

    @property
    def ended(self) -> bool:
        """Whether every byte up to the FIN was given out."""
        return self._end is not None and self.next == self._end

    @property
    def incomplete(self) -> bool:
        """Whether something came that an earlier, missing segment holds back."""
        return self.held > 0 or (self._end is not None and self.next != self._end)

    def start(self, sequence: int) -> None:
        """Begin, or begin anew, at the byte with this sequence number."""
        self.stop()
        self.next = sequence

    def stop(self) -> None:
        """Forget everything; nothing is given out until the next :meth:`start`."""
        self.next = self._end = None
        self._waiting.clear()
        self.held = 0

    def finish(self, sequence: int) -> None:
        """Note a FIN that follows the byte before ``sequence``."""
        if self.next is not None:
            self._end = sequence

    def push(self, sequence: int, data: bytes) -> Sequence[bytes]:
        """What can be given out now that ``data`` has come, in order: nothing when it is early or
        repeats.
        """
        if sequence == self.next and not self._waiting:
            self.next = (sequence + len(data)) % MODULUS
            return (data,)
        return () if self.next is None else self._reorder(self.next, sequence, data)

    def _reorder(self, expected: int, sequence: int, data: bytes) -> Sequence[bytes]:
        if not self._waiting:
            self._anchor = expected
        position = distance(self._anchor, expected)
        heapq.heappush(self._waiting, (distance(self._anchor, sequence), data))
        self.held += len(data) + _OVERHEAD
        ready = []
        while self._waiting and self._waiting[0][0] <= position:
            at, piece = heapq.heappop(self._waiting)
            self.held -= len(piece) + _OVERHEAD
            fresh = piece[position - at :]
            if fresh:
                ready.append(fresh)
                position += len(fresh)
        self.next = (self._anchor + position) % MODULUS
        return ready
