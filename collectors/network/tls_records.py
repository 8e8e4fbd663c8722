"""TLS on the wire, without keys: records of one direction, and what the hellos tell in the clear
(RFC 8446, 5246).
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from latencyprism.collectors.network.conversation import RefusedError

HANDSHAKE: Final = 22
APPLICATION: Final = 23
_KINDS: Final = range(20, 25)  # change cipher spec, alert, handshake, application data, heartbeat
_HEAD_BYTES: Final = 5
_MAX_RECORD: Final = (1 << 14) + 2048
MAX_HELLO: Final = 1 << 13
"""Longest hello that is read; with keys that quantum computers do not break they take 2 KiB."""

_CLIENT_HELLO: Final = 1
_SERVER_HELLO: Final = 2
_ALPN: Final = 16
_SUPPORTED_VERSIONS: Final = 43
_TLS13: Final = 0x0304

_OVERHEAD_12: Final = (  # what a record holds beside its text, by cipher suite
    (range(0x009C, 0x00A8), 24),  # AES-GCM: nonce and tag
    (range(0xC02B, 0xC033), 24),
    (range(0xC09C, 0xC0A0), 24),  # AES-CCM
    (range(0xC0A0, 0xC0A4), 16),  # AES-CCM with a tag of 8 bytes
    (range(0xC0AC, 0xC0AE), 24),
    (range(0xC0AE, 0xC0B0), 16),
    (range(0xCCA8, 0xCCAF), 16),  # ChaCha20-Poly1305
)
OVERHEAD_13: Final = 17
"""The tag and the hidden kind."""
_CCM_8_13: Final = 0x1305


class Record(NamedTuple):
    """A record that is complete; ``hello`` is the first handshake record of a direction."""

    kind: int
    length: int
    hello: bytes


def starts_record(data: bytes) -> bool:
    """Whether a segment looks like the start of a record of application data."""
    return (
        len(data) >= _HEAD_BYTES
        and data[:3] == b"\x17\x03\x03"
        and 0 < int.from_bytes(data[3:5], "big") <= _MAX_RECORD
    )


class RecordReader:
    """Cuts one direction into records, the same ones for any pieces it comes in.

    Keeps at most :data:`MAX_HELLO` bytes. ``whole`` is a direction from its first byte on.
    """

    __slots__ = ("_head", "_hello", "_kind", "_left", "_length", "_wants_hello")

    def __init__(self, *, whole: bool) -> None:
        self._head = b""
        self._kind = self._length = 0
        self._left = 0
        """Bytes of the current record that are still to come."""
        self._wants_hello = whole
        self._hello = b""

    def feed(self, data: bytes) -> Iterator[Record]:
        """Records that these bytes complete. Raises :class:`RefusedError` for what are none."""
        at = 0
        while at < len(data):
            if not self._left:
                piece = data[at : at + _HEAD_BYTES - len(self._head)]
                self._head += piece
                at += len(piece)
                if len(self._head) < _HEAD_BYTES:
                    return
                self._begin()
                continue
            piece = data[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            if self._wants_hello and self._kind == HANDSHAKE:
                self._hello += piece[: MAX_HELLO - len(self._hello)]
            if not self._left:
                yield self._record()

    def skip(self, count: int) -> bool:
        """Leave out so many bytes, if the current record goes on behind them."""
        if not 0 < count < self._left:
            return False
        self._left -= count
        return True

    def _begin(self) -> None:
        head, self._head = self._head, b""
        self._kind, self._length = head[0], int.from_bytes(head[3:5], "big")
        if self._kind not in _KINDS or head[1] != 3 or not 0 < self._length <= _MAX_RECORD:
            raise RefusedError("not TLS")
        self._left = self._length

    def _record(self) -> Record:
        hello, self._hello = self._hello, b""
        if self._kind == HANDSHAKE:
            self._wants_hello = False
        return Record(self._kind, self._length, hello)


class ServerHello(NamedTuple):
    """What a server chose."""

    tls13: bool
    overhead: int | None
    """Bytes of a record of application data that are no text; None for suites that pad."""
    http2: bool | None
    """Whether it chose HTTP/2; None where that is hidden."""


def offers_http2(hello: bytes) -> bool:
    """Whether a client's hello permits HTTP/2; False for anything that is no such hello."""
    body = _message(hello, _CLIENT_HELLO)
    if body is None:
        return False
    for size in (1, 2, 1):  # session, cipher suites, compression
        body.take(body.number(size))
    return _http2(body.extensions().get(_ALPN, b""))


def server_hello(hello: bytes) -> ServerHello | None:
    """What a server's hello tells; None for anything that is no such hello."""
    body = _message(hello, _SERVER_HELLO)
    if body is None:
        return None
    body.take(body.number(1))
    suite = body.number(2)
    body.take(1)
    extensions = body.extensions()
    if int.from_bytes(extensions.get(_SUPPORTED_VERSIONS, b""), "big") == _TLS13:
        overhead = 9 if suite == _CCM_8_13 else OVERHEAD_13
        return ServerHello(tls13=True, overhead=overhead, http2=None)
    return ServerHello(
        tls13=False,
        overhead=next((size for suites, size in _OVERHEAD_12 if suite in suites), None),
        http2=_http2(extensions.get(_ALPN, b"")),
    )


def _message(data: bytes, kind: int) -> "_Reader | None":
    """A hello behind its version and random number; None when it is of another kind."""
    if data[:1] != bytes([kind]):
        return None
    body = _Reader(data[4 : 4 + int.from_bytes(data[1:4], "big")])
    body.take(2 + 32)
    return body


def _http2(alpn: bytes) -> bool:
    """Whether a list of protocols names HTTP/2."""
    body = _Reader(alpn)
    body.take(2)
    while body.left:
        if body.take(body.number(1)) == b"h2":
            return True
    return False


class _Reader:
    """Takes a structure apart; past its end there is nothing, and numbers are 0."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def take(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        self._at += size
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def extensions(self) -> dict[int, bytes]:
        """Extensions by their number."""
        block, found = _Reader(self.take(self.number(2))), {}
        while block.left:
            kind = block.number(2)
            found[kind] = block.take(block.number(2))
        return found
