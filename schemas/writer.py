"""Writes records in Avro's binary form, by functions composed from the schema.

It exists for its speed: a collector agent encodes hundreds of records a second on a machine that is
not its own. It takes only what fits exactly, and raises for all else; fastavro, which tells what is
wrong, is the reference that a test compares it with byte by byte.

The bytes of names, numbers and times are remembered: an exchange tells most of them again with
each of its parts, and a call that finds them costs no Python frame.
"""

import struct
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, TypeAlias, cast

Encode: TypeAlias = Callable[[Any], bytes]
"""Bytes of one value. Raises TypeError, ValueError, LookupError or AttributeError when it does not
fit."""

INT_BITS = 31
LONG_BITS = 63
REMEMBERED = 2048
"""Values of one type whose bytes are kept: some 0.3 MB a type, and ten types."""

_DOUBLE = struct.Struct("<d")
_NULL, _VALUE, _END = b"\x00", b"\x02", b"\x00"


def compile_writer(schema: Any) -> Encode:
    """The encoder of a parsed schema, as :func:`fastavro.parse_schema` gives it.

    Records are read by attribute. Of unions only ``null`` and one other type are known, as this
    project's schemas have them. Raises ValueError for any other schema.
    """
    return _compile(schema, {})


def _compile(schema: Any, named: dict[str, Encode]) -> Encode:
    if isinstance(schema, list):
        return _optional(schema, named)
    kind = schema["type"] if isinstance(schema, Mapping) else schema
    if kind in _PRIMITIVES:
        return _PRIMITIVES[kind]
    if isinstance(schema, str) and schema in named:
        return named[schema]
    match kind:
        case "record":
            encode = _record(schema, named)
        case "enum":
            encode = _enum(schema["symbols"])
        case "array":
            return partial(_array, _compile(schema["items"], named))
        case "map":
            return partial(_map, _compile(schema["values"], named))
        case _:
            raise ValueError(f"no writer for the schema {kind!r}")
    named[schema["name"]] = encode
    return encode


_remembering = lru_cache(maxsize=REMEMBERED)
"""What is refused is not remembered; so no True or 1.0, which equal 1, stands for it."""


@_remembering
def encode_long(value: int) -> bytes:
    """Zigzag code of a whole number.

    Raises TypeError for anything but an int, ValueError beyond 64 bits.
    """
    return _varint(value, LONG_BITS)


@_remembering
def _int(value: int) -> bytes:
    return _varint(value, INT_BITS)


def _varint(value: int, bits: int) -> bytes:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no int")
    if not -(1 << bits) <= value < 1 << bits:
        raise ValueError(f"{value} is no whole number of {bits + 1} bits")
    rest = value << 1 ^ value >> bits
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


@_remembering
def _string(value: str) -> bytes:
    if type(value) is not str:
        raise TypeError(f"{value!r} is no string")
    data = value.encode()
    return encode_long(len(data)) + data


def _double(value: float) -> bytes:
    if type(value) is not float and type(value) is not int:
        raise TypeError(f"{value!r} is no number")
    return _DOUBLE.pack(value)


def _boolean(value: bool) -> bytes:  # noqa: FBT001 - the value is what it is about
    if type(value) is not bool:
        raise TypeError(f"{value!r} is no boolean")
    return b"\x01" if value else b"\x00"


def _bytes(value: bytes) -> bytes:
    if type(value) is not bytes:
        raise TypeError(f"{value!r} is no bytes")
    return encode_long(len(value)) + value


_PRIMITIVES: Mapping[str, Encode] = {
    "int": _int,
    "long": encode_long,
    "string": _string,
    "double": _double,
    "boolean": _boolean,
    "bytes": _bytes,
}


def _record(schema: Mapping[str, Any], named: dict[str, Encode]) -> Encode:
    names = [field["name"] for field in schema["fields"]]
    encoders = [_compile(field["type"], named) for field in schema["fields"]]
    if len(names) < 2:  # attrgetter gives a single value bare
        raise ValueError(f"no writer for {schema['name']}, a record of {len(names)} fields")
    values = cast("Callable[[Any], tuple[Any, ...]]", attrgetter(*names))

    def encode(value: Any) -> bytes:
        return b"".join([of(field) for of, field in zip(encoders, values(value), strict=True)])

    return encode


def _optional(branches: list[Any], named: dict[str, Encode]) -> Encode:
    if len(branches) != 2 or branches[0] != "null":
        raise ValueError(f"no writer for the union {branches!r}")
    of = _compile(branches[1], named)

    def encode(value: Any) -> bytes:
        return _NULL if value is None else _VALUE + of(value)

    # Not double: -0.0 equals 0.0, and measured values do not come again.
    return _remembering(encode) if branches[1] in ("int", "long", "string") else encode


def _enum(symbols: list[str]) -> Encode:
    return {symbol: encode_long(number) for number, symbol in enumerate(symbols)}.__getitem__


def _array(of: Encode, value: Any) -> bytes:
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is no array")
    if not value:
        return _END
    return b"".join([encode_long(len(value)), *map(of, value), _END])


def _map(of: Encode, value: Any) -> bytes:
    if not value:
        return _END
    pairs = [_string(key) + of(item) for key, item in value.items()]
    return b"".join([encode_long(len(pairs)), *pairs, _END])
