"""Streams of events: where one ends in what an engine sends piece by piece."""

import re
from collections.abc import Sequence
from typing import Final

_DONE = re.compile(rb"(?:^|\n)data: ?\[DONE\]")
_LONGEST_END: Final = 3


class EventSplitter:
    """Cuts the body of an event stream into events, the same ones for any pieces it comes in.

    An event is given out, its end included, with the piece that completes it. Of an event larger
    than ``max_bytes`` only the head and the last quarter are kept and given out (usage stands at
    the end), and ``oversized`` counts it. Lines end with LF or CR LF; CR alone, which no engine
    writes, is not taken for an end.
    """

    __slots__ = (
        "_carry",
        "_head_bytes",
        "_large",
        "_max_bytes",
        "_tail_bytes",
        "_torn",
        "oversized",
    )

    _USUAL_END = b"\n\n"
    _END = re.compile(rb"\n\r?\n")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tail_bytes = max(_LONGEST_END, max_bytes // 4)
        self._head_bytes = max_bytes - self._tail_bytes
        self._carry = b""
        self._large = False
        self._torn = False
        self.oversized = 0

    @property
    def between(self) -> bool:
        """Whether the next byte begins an event."""
        return not (self._carry or self._torn)

    def feed(self, data: bytes) -> Sequence[bytes]:
        """Events that this piece completes, oldest first."""
        end = self._USUAL_END
        if (
            self.between
            and data.find(end) == len(data) - len(end) >= 0
            and data.find(b"\r") < 0
            and len(data) <= self._max_bytes
        ):  # what an engine sends most often
            return (data,)
        text = self._carry + data
        events = []
        start, search = 0, max(0, len(self._carry) - _LONGEST_END + 1)
        while found := self._END.search(text, search):
            if not self._torn:
                events.append(self._complete(text[start : found.end()]))
            self._torn = False
            start = search = found.end()
        self._carry = self._keep(text[start:])
        return events

    def tear(self) -> None:
        """Bytes are missing here: the event they belong to is not given out, nor is what follows
        up to the next end.
        """
        self.restart()
        self._torn = True

    def restart(self) -> None:
        """Forget what came; the next byte begins an event."""
        self._carry = b""
        self._large = self._torn = False

    def _complete(self, event: bytes) -> bytes:
        if not self._large and len(event) <= self._max_bytes:
            return event
        self._large = False
        self.oversized += 1
        return event[: self._head_bytes] + event[-self._tail_bytes :]

    def _keep(self, rest: bytes) -> bytes:
        """The head, and as much of the tail as is given out or may belong to an end to come."""
        if len(rest) <= self._max_bytes:
            return rest
        self._large = True
        return rest[: self._head_bytes] + rest[-self._tail_bytes :]


class LineSplitter(EventSplitter):
    """The same for JSON lines (NDJSON), of which each is an event."""

    __slots__ = ()

    _USUAL_END = b"\n"
    _END = re.compile(rb"\n")


def is_done(event: bytes) -> bool:
    """Whether it is the ``[DONE]`` that OpenAI-compatible streams end with."""
    return _DONE.search(event) is not None
