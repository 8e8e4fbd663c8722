"""How the messages of HTTP/1.1 follow each other in one direction (RFC 9112): head, body, end.

The head is parsed by httptools; where the body ends is found here, because a parser that cannot be
told of missing bytes cannot go on behind them.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from latencyprism.collectors.network.conversation import RefusedError

MAX_HEAD: Final = 1 << 16
"""Longest head, in bytes; also the most that is searched for a boundary behind a hole."""

CHUNKED: Final = -1
"""Length of a body that comes in chunks."""
UNTIL_CLOSE: Final = -2
"""Length of a body that ends with its connection."""

Hole = Literal["inside", "starts", "ends"]
"""What follows missing bytes: more of the same, the start of a chunk, or the end of the body."""

_MAX_LINE: Final = 4096
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?")
_CHUNK: Final = rb"(?:([0-9a-fA-F]{1,8})\r\n(?=data:|event:|id:|:|\{)|0\r\n\r\n)"
_CHUNK_HERE = re.compile(_CHUNK)
_CHUNK_LATER = re.compile(rb"\r\n" + _CHUNK)
_LONGEST_CHUNK: Final = 2 + 8 + 2 + 6

_Step: TypeAlias = Callable[[bytes], bytes]


class Messages(ABC):
    """Reads one direction, given in order, in any pieces. A subclass takes what is found.

    Keeps no more than a head, or one line of a chunked body.
    """

    __slots__ = ("_aligned", "_carry", "_left", "_searched", "_step", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        """Time of the newest bytes given."""
        self._step: _Step = self._head
        self._carry = b""
        self._left = 0
        """Bytes of the body, or of its current chunk, that are still to come."""
        self._searched = 0
        self._aligned = False

    # ------------------------------------------------------------------ what a subclass takes

    @abstractmethod
    def on_start(self) -> None:
        """The first byte of a message came."""

    @abstractmethod
    def on_head(self, head: bytes) -> int:
        """A head came, its empty line included. How long the body is: a number of bytes, or
        :data:`CHUNKED`, or :data:`UNTIL_CLOSE`. Raises RefusedError.
        """

    @abstractmethod
    def on_body(self, data: bytes) -> None:
        """The next piece of the body came."""

    @abstractmethod
    def on_hole(self, count: int, hole: Hole) -> None:
        """So many bytes of the body were not read."""

    @abstractmethod
    def on_end(self) -> None:
        """The message has ended."""

    @abstractmethod
    def searchable(self) -> bool:
        """Whether the body is a stream of events, of which a later chunk can be recognised; where
        one can be, :meth:`on_lost_end` has to be made too.
        """

    def on_lost_end(self) -> None:
        """The message has ended somewhere in a hole, and the next one follows."""
        raise AssertionError(f"{type(self).__name__} has no searchable bodies")

    @abstractmethod
    def plausible(self, head: bytes) -> bool:
        """Whether a message can begin like this, of which more is to come."""

    # ------------------------------------------------------------------ what the owner calls

    @property
    def until_close(self) -> bool:
        """Whether the current message ends with its connection."""
        return self._step == self._endless

    @property
    def adrift(self) -> bool:
        """Whether it is not known, behind a hole, where in the body the next byte belongs."""
        return self._step == self._search

    @property
    def between_chunks(self) -> bool:
        """Whether the next byte begins a chunk."""
        return self._step == self._size and not self._carry

    def feed(self, at_ns: int, data: bytes) -> None:
        """Take the next bytes. Raises RefusedError for what is no HTTP/1.1."""
        self.now_ns = at_ns
        while data:
            data = self._step(data)

    def skip(self, at_ns: int, count: int) -> bool:
        """The next ``count`` bytes are missing; False when nothing can be told of what follows.

        Where the body or chunk is longer than that, its end stays known. Else the start of the next
        chunk of a stream of events is searched for.
        """
        step, self.now_ns = self._step, at_ns
        if step == self._endless:
            self.on_hole(count, "inside")
        elif step in (self._sized, self._chunk) and count <= self._left:
            self._left -= count
            self.on_hole(count, "inside" if self._left or step == self._chunk else "ends")
            step(b"")
        elif step in (self._chunk, self._chunk_end, self._size, self._search) and self.searchable():
            self._carry = b""
            self._step, self._searched, self._aligned = self._search, 0, True
            self.on_hole(count, "inside")
        else:
            return False
        return True

    # ------------------------------------------------------------------ where the bytes belong

    def _head(self, data: bytes) -> bytes:
        if not self._carry:
            data = data.lstrip(b"\r\n")  # a body may be followed by an empty line too many
            if not data:
                return b""
            self.on_start()
        text = self._carry + data
        end = text.find(b"\r\n\r\n", max(0, len(self._carry) - 3)) + 4
        if end < 4:
            if len(text) > MAX_HEAD or not self.plausible(text):
                raise RefusedError("not HTTP/1.1")
            self._carry = text
            return b""
        self._carry = b""
        length = self.on_head(text[:end])
        if length > 0:
            self._left, self._step = length, self._sized
        elif length == CHUNKED:
            self._step = self._size
        elif length == UNTIL_CLOSE:
            self._step = self._endless
        else:
            self._end()
        return text[end:]

    def _end(self) -> None:
        self._step = self._head
        self.on_end()

    def _endless(self, data: bytes) -> bytes:
        self.on_body(data)
        return b""

    def _sized(self, data: bytes) -> bytes:
        rest = self._take(data)
        if not self._left:
            self._end()
        return rest

    def _take(self, data: bytes) -> bytes:
        body, rest = data[: self._left], data[self._left :]
        self._left -= len(body)
        if body:
            self.on_body(body)
        return rest

    def _line(self, data: bytes) -> tuple[bytes | None, bytes]:
        """The next line, without its end, and what follows; None until it has ended."""
        text = self._carry + data
        end = text.find(b"\r\n")
        if end < 0:
            if len(text) > _MAX_LINE:
                raise RefusedError("not HTTP/1.1")
            self._carry = text
            return None, b""
        self._carry = b""
        return text[:end], text[end + 2 :]

    def _size(self, data: bytes) -> bytes:
        line, rest = self._line(data)
        if line is not None:
            size = _SIZE.fullmatch(line)
            if size is None:
                raise RefusedError("not HTTP/1.1")
            self._left = int(size[1], 16)
            self._step = self._chunk if self._left else self._trailer
        return rest

    def _chunk(self, data: bytes) -> bytes:
        rest = self._take(data)
        if not self._left:
            self._step = self._chunk_end
        return rest

    def _chunk_end(self, data: bytes) -> bytes:
        line, rest = self._line(data)
        if line is not None:
            if line:
                raise RefusedError("not HTTP/1.1")
            self._step = self._size
        return rest

    def _trailer(self, data: bytes) -> bytes:
        line, rest = self._line(data)
        if line == b"":
            self._end()
        return rest

    def _search(self, data: bytes) -> bytes:
        """Find the next chunk of a stream of events behind a hole, or its end.

        A server sends a chunk as a whole, so that a chunk often begins a segment.
        """
        if self._aligned and data.startswith(b"HTTP/1."):
            self._step = self._head
            self.on_lost_end()
            return data
        text = self._carry + data
        found = (_CHUNK_HERE.match(text) if self._aligned else None) or _CHUNK_LATER.search(text)
        if found is None:
            self._searched += len(data)
            if self._searched > MAX_HEAD:
                raise RefusedError("missing segments")
            self._aligned = False
            self._carry = text[-_LONGEST_CHUNK:]
            self.on_hole(len(data), "inside")
            return b""
        self._carry = b""
        self._left, self._step = int(found[1] or b"0", 16), self._chunk
        self.on_hole(0, "starts")
        if not self._left:
            self._end()
        return text[found.end() :]
