"""Reads the kernel's files again and again, keeping them open: half the cost of opening each."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

MAX_OPEN = 512
"""Descriptors kept, half of what a process commonly may have; a file beyond it is opened anew each
time."""
MAX_BYTES = 4 << 20
"""Most that is read of one file."""
CHUNK = 65536
SHORT = 2048
"""A table comes in pieces of about a page, cut between lines; a shorter one is the last."""


T = TypeVar("T")


class Files:
    """Files below ``/proc`` and ``/sys``, or below other roots in tests. Not thread-safe."""

    def __init__(self, proc: str = "/proc", sys: str = "/sys") -> None:
        self.proc = proc
        self.sys = sys
        self._open: dict[str, int] = {}

    def read(self, path: str) -> bytes | None:
        """Content of a file, kept open for the next time; None if it can't be read.

        A descriptor of ``/proc/PID/...`` stays with its process, so after the process is gone this
        is None even when another process has got the same number.
        """
        descriptor = self._open.get(path)
        try:
            if descriptor is None:
                if len(self._open) >= MAX_OPEN:
                    return self.read_once(path)
                descriptor = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(descriptor, CHUNK, 0)
            return data if len(data) < SHORT else data + _rest(descriptor, len(data))
        except OSError:
            self.forget(path)
            return None

    def read_once(self, path: str) -> bytes | None:
        """Content of a file that is not kept open; None if it can't be read."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return _rest(descriptor, 0)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def text(self, path: str) -> str:
        """Content of a file that is not kept open, as text; empty if it can't be read."""
        return (self.read_once(path) or b"").decode(errors="replace")

    def names(self, path: str) -> list[str]:
        """Entries of a folder; empty if it can't be read."""
        try:
            return os.listdir(path)  # noqa: PTH208 - Path objects for all of /proc are dear
        except OSError:
            return []

    def pids(self) -> list[int]:
        """All processes of the machine that are visible here."""
        return [int(name) for name in self.names(self.proc) if name.isdigit()]

    def link(self, path: str) -> str:
        """Where a symbolic link points to; empty if it can't be read."""
        try:
            return os.readlink(path)  # noqa: PTH115 - a Path for each descriptor is dear
        except OSError:
            return ""

    def forget(self, path: str) -> None:
        """Close a file that is not going to be read again."""
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def close(self) -> None:
        """Close everything; reading opens it again."""
        while self._open:
            self.forget(next(iter(self._open)))


def _rest(descriptor: int, offset: int) -> bytes:
    data = b""
    while offset + len(data) < MAX_BYTES:
        piece = os.pread(descriptor, CHUNK, offset + len(data))
        data += piece
        if len(piece) < SHORT:
            break
    return data


class Parsed(Generic[T]):
    """A file that is kept open, and what stands in it: parsed anew only when it changed, which many
    counters seldom do. ``parse`` gets nothing when the file can't be read.
    """

    __slots__ = ("_data", "_files", "_parse", "_path", "_value")

    def __init__(self, files: Files, path: str, parse: Callable[[bytes], T]) -> None:
        self._data = b""
        self._files = files
        self._path = path
        self._parse = parse
        self._value = parse(b"")

    def read(self) -> T:
        """What stands in the file now."""
        data = self._files.read(self._path) or b""
        if data != self._data:
            self._value = self._parse(data)
            self._data = data
        return self._value

    def close(self) -> None:
        """Close the file; reading opens it again."""
        self._files.forget(self._path)


class Growth:
    """Counters in a file that is kept open: how far each grew between two readings. ``parse`` gives
    their totals, always as many, and nothing when the file does not tell.
    """

    __slots__ = ("_before", "_files", "_parse", "_path", "_unchanged", "data")

    def __init__(
        self, files: Files, path: str, parse: Callable[[bytes], tuple[int, ...] | None]
    ) -> None:
        self.data = b""
        """What was read last."""
        self._files = files
        self._path = path
        self._parse = parse
        self._before: tuple[int, ...] | None = None
        self._unchanged: tuple[int | None, ...] | None = None

    def read(self) -> tuple[int | None, ...] | None:
        """Growth since the last call, None for a counter that was reset; None at first, and when
        the file does not tell.
        """
        data = self._files.read(self._path) or b""
        if data == self.data:
            return self._unchanged
        before, now = self._before, self._parse(data)
        self.data = data
        self._before = now
        self._unchanged = None if now is None else (0,) * len(now)
        if before is None or now is None:
            return None
        return tuple(map(delta, before, now))

    def close(self) -> None:
        """Close the file; reading opens it again."""
        self._files.forget(self._path)


def delta(before: int | None, now: int | None) -> int | None:
    """Growth of a counter; None if either end is unknown, or it was reset."""
    if before is None or now is None or now < before:
        return None
    return now - before
