"""Reads the kernel's files again and again, keeping them open: half the cost of opening each."""

import os
from contextlib import suppress

MAX_OPEN = 384
"""Descriptors kept; the one opened first is closed beyond it."""
CHUNK = 65536
SHORT = 2048
"""A table comes in pieces of about a page, cut between lines; a shorter one is the last."""


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
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._open[path] = descriptor
                if len(self._open) > MAX_OPEN:
                    self.forget(next(iter(self._open)))
            return _read_all(descriptor)
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
            return _read_all(descriptor)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def names(self, path: str) -> list[str]:
        """Entries of a folder; empty if it can't be read."""
        try:
            return os.listdir(path)  # noqa: PTH208 - Path objects for all of /proc are dear
        except OSError:
            return []

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


def _read_all(descriptor: int) -> bytes:
    data = piece = os.pread(descriptor, CHUNK, 0)
    while len(piece) >= SHORT:
        piece = os.pread(descriptor, CHUNK, len(data))
        data += piece
    return data
