"""Follows a log file through rotation, truncation and absence; never blocks, bounded in memory."""

import errno
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

MAX_MOVED: Final = 4
"""Logs that were moved away and are still read; the oldest is closed beyond it."""
TAIL_BYTES: Final = 256
"""More than the parts of a line that are the same in each."""
FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
"""Non-blocking, because a path can turn into a pipe that nobody writes to."""

Identity = tuple[int, int]


@dataclass(slots=True, kw_only=True, eq=False)
class _Log:
    """One open file."""

    descriptor: int
    identity: Identity
    offset: int = 0
    tail: bytes = b""
    """What stands before the offset, as far as it was read: the file goes on as long as it does."""
    changed_ns: int = 0
    """When it was last written to, as the file tells."""
    rest: bytes = b""
    """Begin of a line whose end was not written yet."""
    cut: bool = False
    """Whether the line that goes on is left out: too long, or begun before reading did."""
    grown_s: float = 0.0
    """When it last had something new."""


class Follower:
    """The lines of one log file, each once, whole, in order of the file.

    A file that was renamed is read until nothing came for ``linger_s``, the one that took its path
    from its beginning. A file that was truncated is read anew; lines written between its copy and
    its truncation are lost. What happens to the path (absent, forbidden, a directory) is logged
    once and waited out. Holds at most a line of ``max_line_bytes`` of each of 5 files, and a read
    of one.
    """

    def __init__(
        self,
        path: str,
        counts: Counter[str],
        *,
        from_start: bool = False,
        linger_s: float = 10.0,
        max_line_bytes: int = 16_384,
        max_behind_bytes: int = 64 << 20,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.behind = False
        """Whether the last :meth:`read` left something unread."""
        self._counts = counts
        self._from_start = from_start
        self._linger_s = linger_s
        self._max_line = max_line_bytes
        self._max_behind = max_behind_bytes
        self._monotonic = monotonic
        self._current: _Log | None = None
        self._moved: list[_Log] = []
        self._looked = False
        """Whether it is known what was at the path when reading began."""
        self._trouble: str | None = None

    def read(self, most: int) -> Iterator[bytes]:
        """The new lines, without their ends, of at most about ``most`` bytes."""
        self.open()
        left = most
        self.behind = False
        for log in (*self._moved, *([self._current] if self._current else [])):
            size = self._size(log)
            while left > 0 and (data := self._take(log, min(left, size - log.offset))):
                left -= len(data)
                yield from self._lines(log, data)
            self.behind = self.behind or log.offset < size
        self._let_go()

    def close(self) -> None:
        """Close every file; a later :meth:`read` begins as if it were the first."""
        for log in (*self._moved, *([self._current] if self._current else [])):
            os.close(log.descriptor)
        self._moved, self._current, self._looked = [], None, False

    def __del__(self) -> None:
        # A source that is ended may be run again and go on where it was, so nobody calls close.
        self.close()

    def open(self) -> None:
        """Open what is at the path unless it is open."""
        try:
            descriptor = self._new_descriptor()
        except OSError as error:
            self._complain(error)
            return
        if descriptor is None:
            return
        if self._trouble is not None:
            logger.info("%s can be read again", self.path)
            self._trouble = None
        found = os.fstat(descriptor)
        log = _Log(descriptor=descriptor, identity=_identity(found), grown_s=self._monotonic())
        if not self._looked and not self._from_start:
            log.offset = found.st_size
            log.cut = found.st_size > 0 and os.pread(descriptor, 1, found.st_size - 1) != b"\n"
        self._looked = True
        if self._current is not None:
            self._counts["rotated files"] += 1
            self._moved.append(self._current)
        self._current = log
        while len(self._moved) > MAX_MOVED:
            self._counts["moved files given up"] += 1
            os.close(self._moved.pop(0).descriptor)

    def _new_descriptor(self) -> int | None:
        """Of the file at the path; None when it is open already. Raises OSError."""
        found = Path(self.path).stat()
        if self._current is not None and _identity(found) == self._current.identity:
            return None
        _check_regular(found)
        descriptor = os.open(self.path, FLAGS)
        try:  # again, since the path may have become another file meanwhile
            _check_regular(os.fstat(descriptor))
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _size(self, log: _Log) -> int:
        """Size of a file, after making up for its truncation, or for being too far behind."""
        found = os.fstat(log.descriptor)
        size = found.st_size
        if size < log.offset or not self._goes_on(log, found.st_mtime_ns):
            self._counts["truncated files"] += 1
            log.offset, log.tail, log.rest, log.cut = 0, b"", b"", False
        if size - log.offset > self._max_behind:
            self._counts["skipped bytes"] += size - log.offset
            log.offset, log.tail, log.rest, log.cut = size, b"", b"", True
        return size

    def _goes_on(self, log: _Log, changed_ns: int) -> bool:
        """Whether what was read is still there: a truncated file may have grown beyond it."""
        if changed_ns == log.changed_ns:
            return True
        log.changed_ns = changed_ns
        return os.pread(log.descriptor, len(log.tail), log.offset - len(log.tail)) == log.tail

    def _take(self, log: _Log, most: int) -> bytes:
        if most <= 0:
            return b""
        data = os.pread(log.descriptor, most, log.offset)
        if data:
            log.offset += len(data)
            log.tail = (log.tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
            log.grown_s = self._monotonic()
        return data

    def _lines(self, log: _Log, data: bytes) -> Iterator[bytes]:
        lines = (log.rest + data).split(b"\n")
        log.rest = lines.pop()
        for line in lines:
            if log.cut:
                log.cut = False
            elif len(line) > self._max_line:
                self._counts["oversized lines"] += 1
            elif line:
                yield line
        if log.cut:
            log.rest = b""
        elif len(log.rest) > self._max_line:
            self._counts["oversized lines"] += 1
            log.rest, log.cut = b"", True

    def _let_go(self) -> None:
        """Close the moved files that are no longer written to."""
        quiet_s = self._monotonic() - self._linger_s
        for log in [log for log in self._moved if log.grown_s < quiet_s and not self.behind]:
            self._moved.remove(log)
            os.close(log.descriptor)

    def _complain(self, error: OSError) -> None:
        absent = isinstance(error, FileNotFoundError)
        self._looked = self._looked or absent
        trouble = error.strerror or str(error)
        if trouble == self._trouble:
            return
        known = self._current is not None or bool(self._trouble)
        self._trouble = trouble
        if absent and known:  # for a moment in every rotation
            logger.info("%s does not exist; waiting for it", self.path)
        else:
            self._counts["times a log could not be read"] += 1
            logger.warning("%s cannot be read (%s); waiting for it", self.path, trouble)


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


def _check_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
