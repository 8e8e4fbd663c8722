"""The wire format of Protocol Buffers, read field by field without building messages.

https://protobuf.dev/programming-guides/encoding. The runtime that is generated code for would make
350 MB of objects out of 4 MB of empty spans, and a string of every prompt; this makes nothing of
what nobody asked for, and stops at a number of fields.
"""

import struct
from collections.abc import Iterator
from typing import Final

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5
LONGEST_VARINT: Final = 10

_DOUBLE: Final = struct.Struct("<d")
_FIXED64: Final = struct.Struct("<Q")


class WireError(ValueError):
    """Bytes that are no such message, or one of too many fields."""


class Wire:
    """Reads one message and those inside it; together at most ``max_fields`` fields."""

    def __init__(self, max_fields: int) -> None:
        self._left = max_fields

    def fields(self, data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
        """Number and value of each field: bytes of what has a length, else an unsigned integer."""
        at, end = 0, len(data)
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise WireError("too many fields")
            key = data[at]
            if key < 0x80:  # one byte, as nearly always; a call costs more than the rest
                at += 1
            else:
                key, at = _varint(data, at)
            number, kind = key >> 3, key & 7
            if kind == BYTES:
                length, at = _varint(data, at)
                value: int | memoryview = data[at : at + length]
                at += length
            elif kind == VARINT:
                value, at = _varint(data, at)
            elif kind == FIXED64:
                value = int.from_bytes(data[at : at + 8], "little")
                at += 8
            elif kind == FIXED32:
                value = int.from_bytes(data[at : at + 4], "little")
                at += 4
            else:
                raise WireError(f"a field of kind {kind}")
            if at > end:
                raise WireError("cut off in a field")
            if number == 0:
                raise WireError("a field without a number")
            yield number, value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The integer at a place, and where the next byte stands."""
    try:
        byte = data[at]
        if byte < 0x80:
            return byte, at + 1
        value, shift = byte & 0x7F, 7
        for index in range(at + 1, at + LONGEST_VARINT):
            byte = data[index]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, index + 1
            shift += 7
    except IndexError:
        raise WireError("cut off in a number") from None
    raise WireError("a number of more than 64 bits")


def signed(value: int) -> int:
    """A field of type int32 or int64."""
    return value - (1 << 64) if value >> 63 else value


def double(value: int) -> float:
    """A field of type double."""
    number: float = _DOUBLE.unpack(_FIXED64.pack(value))[0]
    return number


def encoded(number: int, value: int | bytes) -> bytes:
    """One field: a number as varint, bytes with their length."""
    if isinstance(value, int):
        return _encoded_varint(number << 3 | VARINT) + _encoded_varint(value)
    return _encoded_varint(number << 3 | BYTES) + _encoded_varint(len(value)) + value


def _encoded_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
