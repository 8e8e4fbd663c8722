"""HTTP/2 on the wire (RFC 9113, 7541): frames of one direction, and the header blocks in them."""

import logging
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from latencyprism.collectors.network.conversation import RefusedError

if TYPE_CHECKING:
    from hpack import Decoder

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x01
ACK: Final = 0x01
END_HEADERS: Final = 0x04
PADDED: Final = 0x08
WITH_PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 1
"""Identifier of the setting."""

MAX_BLOCK: Final = 1 << 14
"""Longest header block that is read, in bytes as they are sent."""
MAX_TABLE: Final = 1 << 16
"""Largest table of repeated headers that is kept for a direction, in bytes as HPACK counts them."""
_DEFAULT_TABLE: Final = 4096
_DEFAULT_FRAME: Final = 1 << 14
_OTHER_KEPT: Final = 256
"""What is kept of a frame that holds neither data nor headers."""

_LENGTHS: Final = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_OF_CONNECTION: Final = frozenset((SETTINGS, PING, GOAWAY))
_OF_STREAM: Final = frozenset((DATA, HEADERS, PRIORITY, RST_STREAM, PUSH_PROMISE, CONTINUATION))
_OF_HEADERS: Final = frozenset((HEADERS, PUSH_PROMISE, CONTINUATION))
_LENGTH_AND_STREAM: Final = struct.Struct("!IxI").unpack_from
"""Of a head whose kind, the byte behind the length, is 0 as well."""
_FLAGS: Final = {
    DATA: END_STREAM | PADDED,
    HEADERS: END_STREAM | END_HEADERS | PADDED | WITH_PRIORITY,
    SETTINGS: ACK,
    PUSH_PROMISE: END_HEADERS | PADDED,
    PING: ACK,
    CONTINUATION: END_HEADERS,
}


class Frame(NamedTuple):
    """A frame, or of :data:`DATA` a piece of one, whose flags come with the last piece.

    ``payload`` is without padding for :data:`DATA`, whole for frames of headers, and the first
    bytes for others. ``began_ns`` is when the first byte of the frame came.
    """

    kind: int
    flags: int
    stream: int
    payload: bytes
    began_ns: int


class _Head(NamedTuple):
    length: int
    kind: int
    flags: int
    stream: int


def _head(data: bytes) -> _Head | None:
    """What the nine bytes at the start say; None when no frame begins like this."""
    length, kind, flags = int.from_bytes(data[:3], "big"), data[3], data[4]
    stream = int.from_bytes(data[5:9], "big") & 0x7FFFFFFF
    possible = (
        length == _LENGTHS.get(kind, length)
        and not (kind in _OF_STREAM and not stream)
        and not (kind in _OF_CONNECTION and stream)
        and not (kind == SETTINGS and length % 6)
        and not (flags & PADDED and kind in (DATA, HEADERS, PUSH_PROMISE) and not length)
    )
    return _Head(length, kind, flags, stream) if possible else None


def starts_frame(data: bytes) -> bool:
    """Whether a segment looks like the start of a frame: stricter than what the protocol allows,
    because it may as well be the middle of anything.
    """
    if len(data) < HEAD_BYTES or data[5] & 0x80:
        return False
    head = _head(data)
    return (
        head is not None
        and head.kind <= CONTINUATION
        and head.length <= _DEFAULT_FRAME
        and not head.flags & ~_FLAGS.get(head.kind, 0)
    )


def starts_request_frame(data: bytes) -> bool:
    """Whether a segment of a client looks like the start of a request."""
    return starts_frame(data) and data[3] == HEADERS and bool(data[8] & 1)


def starts_settings(data: bytes) -> bool:
    """Whether the first segment of a server looks like HTTP/2."""
    return starts_frame(data) and data[3] == SETTINGS and not data[4] & ACK


class FrameReader:
    """Cuts one direction into frames, the same ones for any pieces it comes in.

    Keeps at most :data:`MAX_BLOCK` bytes.
    """

    __slots__ = ("_began_ns", "_flags", "_head", "_kept", "_kind", "_left", "_padding", "_stream")

    def __init__(self) -> None:
        self._head = b""
        self._kind = self._flags = self._stream = 0
        self._left = 0
        """Bytes of the current frame that are still to come."""
        self._padding: int | None = 0
        """How many of the frame's last bytes are padding; None until its first byte says so."""
        self._kept = b""
        self._began_ns = 0

    def feed(self, at_ns: int, data: bytes) -> Iterator[Frame]:
        """Frames that these bytes complete, and the piece of the one that they leave open.

        Raises :class:`RefusedError` for bytes that are no frames.
        """
        at = 0
        while at < len(data):
            if not self._left:
                if not self._head:
                    self._began_ns = at_ns
                piece = data[at : at + HEAD_BYTES - len(self._head)]
                self._head += piece
                at += len(piece)
                if len(self._head) < HEAD_BYTES:
                    return
                self._begin()
                if self._left:
                    continue
            piece = data[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            if self._kind == DATA:
                yield self._frame(self._content(piece))
            else:
                limit = MAX_BLOCK if self._kind in _OF_HEADERS else _OTHER_KEPT
                self._kept += piece[: limit - len(self._kept)]
                if not self._left:
                    yield self._frame(self._kept)
                    self._kept = b""

    def only_data(self, data: bytes) -> int:
        """Number of the stream, if what comes next is one whole frame of data, without flags; else
        0. That is what most segments of a server that streams are.
        """
        idle = not (self._left or self._head)
        if not idle or data[3:5] != b"\0\0" or len(data) <= HEAD_BYTES:
            return 0
        length, stream = _LENGTH_AND_STREAM(data)
        return stream & 0x7FFFFFFF if length >> 8 == len(data) - HEAD_BYTES else 0

    @property
    def stream(self) -> int:
        """Stream of the current frame, or the newest."""
        return self._stream

    def skip(self, count: int) -> bool:
        """Leave out so many bytes, if the current frame is one of data and goes on behind them."""
        if self._kind != DATA or self._padding is None or count >= self._left:
            return False
        self._left -= count
        return True

    def _begin(self) -> None:
        head = _head(self._head)
        if head is None:
            raise RefusedError("not HTTP/2")
        if head.kind in _OF_HEADERS and head.length > MAX_BLOCK:
            raise RefusedError("oversized HTTP/2 headers")
        self._left, self._kind, self._flags, self._stream = head
        self._padding = None if self._kind == DATA and self._flags & PADDED else 0
        self._head = b""

    def _content(self, piece: bytes) -> bytes:
        """What of a piece is no padding; ``_left`` bytes come after it."""
        if self._padding is None and piece:
            self._padding, piece = piece[0], piece[1:]
            if self._padding > len(piece) + self._left:
                raise RefusedError("not HTTP/2")
        behind = max(0, (self._padding or 0) - self._left)
        return piece[: max(0, len(piece) - behind)]

    def _frame(self, payload: bytes) -> Frame:
        flags = 0 if self._left else self._flags
        return Frame(self._kind, flags, self._stream, payload, self._began_ns)


class Block(NamedTuple):
    """A header block: of a request, an answer, or trailers.

    ``fields`` is None when it could not be read, which leaves its time.
    """

    stream: int
    ends_stream: bool
    fields: Mapping[bytes, bytes] | None
    began_ns: int


class HeaderReader:
    """Puts the header blocks of one direction together, and reads them as long as that is possible.

    It is not for a direction that was joined in the middle (each block builds on those before it),
    without the library ``hpack``, and after a block that cannot be read.
    """

    __slots__ = ("_decoder", "_first", "_fragment")

    def __init__(self, *, whole: bool) -> None:
        self._decoder = _decoder() if whole else None
        self._first: Frame | None = None
        """The frame that began the block whose continuation is awaited."""
        self._fragment = b""

    @property
    def readable(self) -> bool:
        """Whether blocks are read."""
        return self._decoder is not None

    @property
    def incomplete(self) -> bool:
        """Whether nothing but a continuation may come."""
        return self._first is not None

    def allow_table(self, size: int) -> None:
        """The other side permits a table of this size. A smaller one needs no notice: it may be
        used only after the sender has said so.
        """
        if self._decoder is not None:
            wider = min(size, MAX_TABLE)
            self._decoder.max_allowed_table_size = max(self._decoder.max_allowed_table_size, wider)

    def take(self, frame: Frame) -> Block | None:
        """The block that a frame of headers completes; None while it goes on, and for a promise.

        Raises :class:`RefusedError` for frames out of order, and blocks beyond :data:`MAX_BLOCK`.
        """
        if (frame.kind == CONTINUATION) != self.incomplete:
            raise RefusedError("not HTTP/2")
        first = self._first or frame
        if first.stream != frame.stream:
            raise RefusedError("not HTTP/2")
        self._fragment += frame.payload if frame.kind == CONTINUATION else _fragment(frame)
        if len(self._fragment) > MAX_BLOCK:
            raise RefusedError("oversized HTTP/2 headers")
        if not frame.flags & END_HEADERS:
            self._first = first
            return None
        fragment, self._fragment, self._first = self._fragment, b"", None
        fields = self._read(fragment)
        if first.kind == PUSH_PROMISE:
            return None
        return Block(first.stream, bool(first.flags & END_STREAM), fields, first.began_ns)

    def _read(self, fragment: bytes) -> Mapping[bytes, bytes] | None:
        if self._decoder is None:
            return None
        try:
            return dict(self._decoder.decode(fragment, raw=True))
        except (ValueError, IndexError, _hpack_error()):
            self._decoder = None
            return None


def _fragment(frame: Frame) -> bytes:
    """What of a frame of headers belongs to the block."""
    start, stop = 0, len(frame.payload)
    if frame.flags & PADDED:
        start, stop = 1, stop - frame.payload[0]
    if frame.kind == PUSH_PROMISE:
        start += 4
    elif frame.flags & WITH_PRIORITY:
        start += 5
    if start > stop:
        raise RefusedError("not HTTP/2")
    return frame.payload[start:stop]


def _decoder() -> "Decoder | None":
    try:
        from hpack import Decoder
    except ImportError:
        return None
    logging.getLogger("hpack").setLevel(logging.INFO)  # what it logs below that are values
    return Decoder(max_header_list_size=MAX_TABLE)


def _hpack_error() -> type[Exception]:
    from hpack import HPACKError

    return HPACKError


def table_size(settings: bytes) -> int | None:
    """The size of the table that the payload of a frame of settings permits, if it names one."""
    found = None
    for at in range(0, len(settings) - 5, 6):
        if int.from_bytes(settings[at : at + 2], "big") == HEADER_TABLE_SIZE:
            found = int.from_bytes(settings[at + 2 : at + 6], "big")
    return found
