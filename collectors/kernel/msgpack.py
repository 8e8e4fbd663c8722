"""Walks through MessagePack without building what it holds. Pure; the format is msgpack.org's."""

import struct
from typing import Final

_FLOAT32: Final = struct.Struct(">f")
_FLOAT64: Final = struct.Struct(">d")
_FIXED: Final = {
    **dict.fromkeys((*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3), 0),
    **dict.fromkeys((0xCC, 0xD0), 1),
    **dict.fromkeys((0xCD, 0xD1, 0xD4), 2),
    0xD5: 3,
    **dict.fromkeys((0xCA, 0xCE, 0xD2), 4),
    0xD6: 5,
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 8),
    0xD7: 9,
    0xD8: 17,
    **{0xA0 | length: length for length in range(32)},
    **dict.fromkeys(range(0x80, 0xA0), 0),
}
"""First byte of a value → bytes that follow it, where the first byte tells that."""
_SIZES: Final = [_FIXED.get(first, -1) for first in range(256)]
_ITEMS: Final = [
    (first & 0xF) * (2 if first < 0x90 else 1) if 0x80 <= first < 0xA0 else 0
    for first in range(256)
]
"""Values inside the array or map of such a first byte."""
_SIZED: Final = {
    **dict.fromkeys((0xC4, 0xD9), (1, 0)),
    **dict.fromkeys((0xC5, 0xDA), (2, 0)),
    **dict.fromkeys((0xC6, 0xDB), (4, 0)),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
}
"""First byte of bytes, text or an extension → bytes of its length, and bytes beside its content."""
_TEXT: Final = frozenset((0xD9, 0xDA, 0xDB))
_INTEGERS: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: -1, 0xD1: -2, 0xD2: -4, 0xD3: -8}
NIL: Final = 0xC0


class CutError(ValueError):
    """The bytes end before the value does."""


class ShapeError(ValueError):
    """Another kind of value stands there than was expected."""


def skip(data: bytes, at: int, count: int = 1) -> int:
    """Where the next value begins after ``count`` values; never reads a byte twice."""
    try:
        while count:
            first = data[at]
            size = _SIZES[first]
            if size >= 0:
                at += 1 + size
                count += _ITEMS[first] - 1
            elif first in _SIZED:
                length_bytes, beside = _SIZED[first]
                length, at = _length(data, at + 1, length_bytes)
                at += length + beside
                count -= 1
            else:
                items, each, at = _container(data, at + 1, first)
                count += items * each - 1
    except IndexError:
        raise CutError from None
    if at > len(data):
        raise CutError
    return at


def array(data: bytes, at: int) -> tuple[int, int]:
    """Number of elements of an array, and where the first begins."""
    return _items(data, at, 1)


def mapping(data: bytes, at: int) -> tuple[int, int]:
    """Number of pairs of a map, and where the first begins."""
    return _items(data, at, 2)


def text(data: bytes, at: int) -> tuple[bytes, int]:
    """A text as its bytes, and where the next value begins."""
    first = _byte(data, at)
    if 0xA0 <= first <= 0xBF:
        length, start = first & 0x1F, at + 1
    elif first in _TEXT:
        length, start = _length(data, at + 1, _SIZED[first][0])
    else:
        raise ShapeError
    end = start + length
    if end > len(data):
        raise CutError
    return data[start:end], end


def integer(data: bytes, at: int) -> tuple[int, int]:
    """A whole number, and where the next value begins."""
    first = _byte(data, at)
    if first < 0x80:
        return first, at + 1
    if first >= 0xE0:
        return first - 0x100, at + 1
    if first not in _INTEGERS:
        raise ShapeError
    size = _INTEGERS[first]
    end = at + 1 + abs(size)
    if end > len(data):
        raise CutError
    return int.from_bytes(data[at + 1 : end], "big", signed=size < 0), end


def number(data: bytes, at: int) -> tuple[float, int]:
    """A number, and where the next value begins."""
    layout = {0xCA: _FLOAT32, 0xCB: _FLOAT64}.get(_byte(data, at))
    if layout is None:
        return integer(data, at)
    if at + 1 + layout.size > len(data):
        raise CutError
    return float(layout.unpack_from(data, at + 1)[0]), at + 1 + layout.size


def is_nil(data: bytes, at: int) -> bool:
    """Whether nothing is said there."""
    return _byte(data, at) == NIL


def _items(data: bytes, at: int, each: int) -> tuple[int, int]:
    items, per_item, after = _container(data, at + 1, _byte(data, at))
    if per_item != each:
        raise ShapeError
    return items, after


def _container(data: bytes, at: int, first: int) -> tuple[int, int, int]:
    """Items, values of each, and where the first begins, of the array or map of a first byte."""
    if 0x80 <= first <= 0x8F:
        return first & 0xF, 2, at
    if 0x90 <= first <= 0x9F:
        return first & 0xF, 1, at
    if first not in (0xDC, 0xDD, 0xDE, 0xDF):
        raise ShapeError
    items, after = _length(data, at, 2 if first in (0xDC, 0xDE) else 4)
    return items, 1 if first in (0xDC, 0xDD) else 2, after


def _length(data: bytes, at: int, size: int) -> tuple[int, int]:
    if at + size > len(data):
        raise CutError
    return int.from_bytes(data[at : at + size], "big"), at + size


def _byte(data: bytes, at: int) -> int:
    if at >= len(data):
        raise CutError
    return data[at]
