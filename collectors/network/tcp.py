"""One direction of a TCP connection, back in order."""

import heapq
from collections.abc import Sequence
from typing import Final

_MODULUS: Final = 1 << 32
_HALF: Final = 1 << 31
_OVERHEAD: Final = 128
"""Bytes that remembering one waiting segment takes beside its payload."""


class Direction:
    """Puts the segments of one direction in order; each byte is given out once.

    ``held`` is the memory of what waits for a missing segment, in bytes: the caller bounds it.
    Joins are the caller's too: nothing is given out before :meth:`start`.
    """

    __slots__ = ("_base", "_end", "_read", "_waiting", "held")

    def __init__(self) -> None:
        self._base: int | None = None
        self._read = 0
        self._end: int | None = None
        self._waiting: list[tuple[int, bytes]] = []
        self.held = 0

    @property
    def started(self) -> bool:
        """Whether it is known which byte comes next."""
        return self._base is not None

    @property
    def ended(self) -> bool:
        """Whether every byte up to the FIN was given out."""
        return self._end is not None and self._read >= self._end

    @property
    def incomplete(self) -> bool:
        """Whether something came that an earlier, missing segment holds back."""
        return self.held > 0 or (self._end is not None and self._read < self._end)

    def start(self, sequence: int) -> None:
        """Begin, or begin anew, at the byte with this sequence number."""
        self._base = sequence
        self._read = 0
        self._end = None
        self._waiting.clear()
        self.held = 0

    def stop(self) -> None:
        """Forget everything; nothing is given out until the next :meth:`start`."""
        self.start(0)
        self._base = None

    def starts_at(self, sequence: int) -> bool:
        """Whether it began at this sequence number and gave out nothing yet."""
        return self._base == sequence and not self._read

    def finish(self, sequence: int) -> None:
        """Note a FIN that follows the byte before ``sequence``."""
        if self._base is not None:
            self._end = self._read + self._distance(self._base, sequence)

    def push(self, sequence: int, data: bytes) -> Sequence[bytes]:
        """What can be given out now that ``data`` has come, in order; empty most often when it
        repeats or is early.
        """
        if self._base is None:
            return ()
        ahead = self._distance(self._base, sequence)
        if ahead == 0 and not self._waiting:
            self._read += len(data)
            return (data,)
        if ahead > 0:
            heapq.heappush(self._waiting, (self._read + ahead, data))
            self.held += len(data) + _OVERHEAD
            return ()
        ready = [data[-ahead:]] if len(data) > -ahead else []
        self._read += sum(map(len, ready))
        while self._waiting and self._waiting[0][0] <= self._read:
            at, early = heapq.heappop(self._waiting)
            self.held -= len(early) + _OVERHEAD
            fresh = early[self._read - at :]
            if fresh:
                ready.append(fresh)
                self._read += len(fresh)
        return ready

    def _distance(self, base: int, sequence: int) -> int:
        """How far ahead of the next byte a sequence number is; negative behind it."""
        return (sequence - base - self._read + _HALF) % _MODULUS - _HALF
