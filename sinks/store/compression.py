"""The encodings of ClickHouse's HTTP clients, with a bound on what a body unpacks to. Pure."""

import sys
import zlib
from collections.abc import Callable
from typing import Protocol

import lz4.frame  # type: ignore[import-untyped] # it has no stubs

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


class TooLargeError(ValueError):
    """The body is larger than is allowed."""


class UnknownEncodingError(ValueError):
    """The body is in an encoding that is not understood, or is not in the one it claims."""


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes | None: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


_DECOMPRESSORS: dict[str, Callable[[], _Decompressor]] = {
    "gzip": lambda: zlib.decompressobj(31),
    "deflate": zlib.decompressobj,
    "lz4": lz4.frame.LZ4FrameDecompressor,
    "zstd": zstd.ZstdDecompressor,
}
_COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "lz4": lz4.frame.compress,
    "zstd": zstd.compress,
    "gzip": lambda data: zlib.compress(data, 1, 31),
}
"""Cheapest first: this is loopback."""


def decompress(data: bytes, encoding: str, limit: int) -> bytes:
    """The body in plain, at most ``limit`` bytes of it.

    Raises :class:`TooLargeError` and :class:`UnknownEncodingError`.
    """
    if encoding in ("", "identity"):
        return data
    make = _DECOMPRESSORS.get(encoding)
    if make is None:
        known = ", ".join(_DECOMPRESSORS)
        raise UnknownEncodingError(f"Content-Encoding {encoding!r} is none of {known}")
    plain, rest = bytearray(), data
    while rest:  # a body may be several frames, one behind the other
        frame = make()
        try:
            plain += frame.decompress(rest, limit + 1 - len(plain))
        except (zlib.error, zstd.ZstdError, RuntimeError, EOFError) as e:
            raise UnknownEncodingError(f"the body is not {encoding}: {e}") from e
        if len(plain) > limit:
            raise TooLargeError(f"the body unpacks to more than {limit} bytes")
        if not frame.eof:
            raise UnknownEncodingError(f"the {encoding} body ends too early")
        rest = frame.unused_data or b""
    return bytes(plain)


def choose(accepted: str) -> str | None:
    """Encoding for an answer out of an Accept-Encoding header; None for none."""
    offers = {offer.split(";")[0].strip() for offer in accepted.split(",")}
    return next((encoding for encoding in _COMPRESSORS if encoding in offers), None)


def compress(data: bytes, encoding: str) -> bytes:
    """The body in an encoding that :func:`choose` gave."""
    return _COMPRESSORS[encoding](data)
