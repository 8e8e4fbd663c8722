"""One direction of a TCP connection, back in order."""

import heapq
from collections.abc import Sequence
from itertools import accumulate
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
        self._waiting: list[tuple[int, int, bytes]] = []
        """Distance to the anchor, time of capture (ns) and payload; a heap."""

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

    @property
    def missing(self) -> int:
        """Bytes that what came behind them waits for."""
        assert self.next is not None
        if self._waiting:
            return distance(self.next, self._anchor + self._waiting[0][0])
        return 0 if self._end is None else distance(self.next, self._end)

    def push(self, at_ns: int, sequence: int, data: bytes) -> Sequence[bytes]:
        """What can be given out now that ``data`` has come, in order: nothing when it is early or
        repeats.
        """
        if sequence == self.next and not self._waiting:
            self.next = (sequence + len(data)) % MODULUS
            return (data,)
        if self.next is None:
            return ()
        if not self._waiting:
            self._anchor = self.next
        heapq.heappush(self._waiting, (distance(self._anchor, sequence), at_ns, data))
        self.held += len(data) + _OVERHEAD
        return [piece for _, piece in self._ready()]

    def leap(self) -> Sequence[tuple[int, bytes]]:
        """Go on behind the missing bytes: what waited there up to the next hole, and when each
        piece of it came.
        """
        assert self.next is not None
        self.next = (self.next + self.missing) % MODULUS
        ready = self._ready()
        times = accumulate((at_ns for at_ns, _ in ready), max)
        return [(at_ns, piece) for at_ns, (_, piece) in zip(times, ready, strict=True)]

    def _ready(self) -> list[tuple[int, bytes]]:
        assert self.next is not None
        position = distance(self._anchor, self.next)
        ready = []
        while self._waiting and self._waiting[0][0] <= position:
            at, at_ns, piece = heapq.heappop(self._waiting)
            self.held -= len(piece) + _OVERHEAD
            fresh = piece[position - at :]
            if fresh:
                ready.append((at_ns, fresh))
                position += len(fresh)
        self.next = (self._anchor + position) % MODULUS
        return ready
