"""Writes records in Avro's binary form, by functions compiled from the schema.

It exists for its speed: a collector agent encodes hundreds of records a second on a machine that is
not its own. It takes only what fits exactly, and raises for all else; fastavro, which tells what is
wrong, is the reference that a test compares it with byte by byte.
"""

import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeAlias, cast

Out: TypeAlias = bytearray
Write: TypeAlias = Callable[[Out, Any], None]
"""Appends one value. Raises TypeError, ValueError or AttributeError when it does not fit."""

INT_BITS = 31
LONG_BITS = 63
LONGEST_KEPT = 64
"""Characters of strings whose bytes are kept: names and ids come again and again."""

_DOUBLE = struct.Struct("<d")


def compile_writer(schema: Any) -> Write:
    """The writer of a parsed schema, as :func:`fastavro.parse_schema` gives it.

    Records are read by attribute. Of unions only ``null`` and one other type are known, as this
    project's schemas have them. Raises ValueError for any other schema.
    """
    return _compile(schema, {})


def _compile(schema: Any, named: dict[str, Write]) -> Write:
    if isinstance(schema, list):
        return _optional(schema, named)
    kind = schema["type"] if isinstance(schema, Mapping) else schema
    if kind in _PRIMITIVES:
        return _PRIMITIVES[kind]
    if isinstance(schema, str) and schema in named:
        return named[schema]
    match kind:
        case "record":
            write = _record(schema, named)
        case "enum":
            write = _enum(schema["symbols"])
        case "array":
            return _array(_compile(schema["items"], named))
        case "map":
            return _map(_compile(schema["values"], named))
        case _:
            raise ValueError(f"no writer for the schema {kind!r}")
    named[schema["name"]] = write
    return write


def _long(out: Out, value: Any) -> None:
    out += varint(value)


def _int(out: Out, value: Any) -> None:
    if not -(1 << INT_BITS) <= value < 1 << INT_BITS:
        raise ValueError(f"{value} is no int of 32 bits")
    out += varint(value)


@lru_cache(maxsize=4096, typed=True)
def varint(value: int) -> bytes:
    """Zigzag code of a whole number; times and sizes of an exchange come with each of its parts.

    Raises TypeError for anything but an int, ValueError beyond 64 bits.
    """
    if type(value) is not int:
        raise TypeError(f"{value!r} is no int")
    if not -(1 << LONG_BITS) <= value < 1 << LONG_BITS:
        raise ValueError(f"{value} is no long of 64 bits")
    rest = value << 1 ^ value >> LONG_BITS
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def _string(out: Out, value: Any) -> None:
    out += _short_string(value) if len(value) <= LONGEST_KEPT else _bytes_of(value)


def _bytes_of(value: str) -> bytes:
    if type(value) is not str:
        raise TypeError(f"{value!r} is no string")
    data = value.encode()
    return varint(len(data)) + data


_short_string = lru_cache(maxsize=4096)(_bytes_of)


def _double(out: Out, value: Any) -> None:
    if type(value) is not float and type(value) is not int:
        raise TypeError(f"{value!r} is no number")
    out += _DOUBLE.pack(value)


def _boolean(out: Out, value: Any) -> None:
    if type(value) is not bool:
        raise TypeError(f"{value!r} is no boolean")
    out.append(value)


def _bytes(out: Out, value: Any) -> None:
    if type(value) is not bytes:
        raise TypeError(f"{value!r} is no bytes")
    out += varint(len(value))
    out += value


_PRIMITIVES: Mapping[str, Write] = {
    "int": _int,
    "long": _long,
    "string": _string,
    "double": _double,
    "boolean": _boolean,
    "bytes": _bytes,
}


def _record(schema: Mapping[str, Any], named: dict[str, Write]) -> Write:
    names = [field["name"] for field in schema["fields"]]
    writers = [_compile(field["type"], named) for field in schema["fields"]]
    if len(names) < 2:  # attrgetter gives a single value bare
        raise ValueError(f"no writer for {schema['name']}, a record of {len(names)} fields")
    values = cast("Callable[[Any], tuple[Any, ...]]", attrgetter(*names))

    def write(out: Out, value: Any) -> None:
        for write_field, field in zip(writers, values(value), strict=True):
            write_field(out, field)

    return write


def _optional(branches: list[Any], named: dict[str, Write]) -> Write:
    if len(branches) != 2 or branches[0] != "null":
        raise ValueError(f"no writer for the union {branches!r}")
    write_value = _compile(branches[1], named)

    def write(out: Out, value: Any) -> None:
        if value is None:
            out.append(0)
        else:
            out.append(2)
            write_value(out, value)

    return write


def _enum(symbols: list[str]) -> Write:
    codes = {symbol: varint(number) for number, symbol in enumerate(symbols)}

    def write(out: Out, value: Any) -> None:
        if value not in codes:
            raise ValueError(f"{value!r} is none of {symbols}")
        out += codes[value]

    return write


def _array(write_item: Write) -> Write:
    def write(out: Out, value: Any) -> None:
        if isinstance(value, str | bytes):
            raise TypeError(f"{value!r} is no array")
        if value:
            out += varint(len(value))
            for item in value:
                write_item(out, item)
        out.append(0)

    return write


def _map(write_value: Write) -> Write:
    def write(out: Out, value: Any) -> None:
        if value:
            out += varint(len(value))
            for key, item in value.items():
                _string(out, key)
                write_value(out, item)
        out.append(0)

    return write
