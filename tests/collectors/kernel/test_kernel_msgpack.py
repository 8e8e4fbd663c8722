import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latencyprism.collectors.kernel.msgpack import (
    CutError,
    ShapeError,
    array,
    integer,
    is_nil,
    mapping,
    number,
    skip,
    text,
)


def pack(value: Any) -> bytes:
    """An encoder of the test's own, by the tables of the specification."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int() if 0 <= value < 128:
            return bytes((value,))
        case int() if -32 <= value < 0:
            return bytes((value + 256,))
        case int() if value < 0:
            return b"\xd3" + struct.pack(">q", value)
        case int():
            return b"\xcf" + struct.pack(">Q", value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            data = value.encode()
            return (
                bytes((0xA0 | len(data),))
                if len(data) < 32
                else b"\xda" + struct.pack(">H", len(data))
            ) + data
        case bytes():
            return b"\xc6" + struct.pack(">I", len(value)) + value
        case list():
            head = (
                bytes((0x90 | len(value),))
                if len(value) < 16
                else b"\xdd" + struct.pack(">I", len(value))
            )
            return head + b"".join(map(pack, value))
        case dict():
            head = (
                bytes((0x80 | len(value),))
                if len(value) < 16
                else b"\xde" + struct.pack(">H", len(value))
            )
            return head + b"".join(pack(key) + pack(item) for key, item in value.items())
    raise TypeError(value)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8), inner, max_size=20)
    ),
    max_leaves=30,
)


@settings(max_examples=40)
@given(st.lists(VALUES, min_size=1, max_size=3))
def test_skip_finds_the_end_of_any_values(values: list[Any]) -> None:
    data = b"".join(map(pack, values))

    assert skip(data + b"rest", 0, len(values)) == len(data)


@settings(max_examples=40)
@given(VALUES)
def test_a_value_that_is_cut_off_is_told(value: Any) -> None:
    data = pack(value)

    for end in range(len(data)):
        with pytest.raises(CutError):
            skip(data[:end], 0)


@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_integers(value: int) -> None:
    data = pack(value)

    assert integer(data, 0) == (value, len(data))
    assert number(data, 0) == (value, len(data))


@pytest.mark.parametrize(
    ("data", "value"),
    [(b"\xcc\xff", 255), (b"\xcd\x01\x00", 256), (b"\xce\x00\x01\x00\x00", 65536),
     (b"\xd0\x80", -128), (b"\xd1\x80\x00", -32768), (b"\xd2\xff\xff\xff\xff", -1), (b"\xe0", -32)],
)  # fmt: skip
def test_integers_of_every_width(data: bytes, value: int) -> None:
    assert integer(data, 0) == (value, len(data))


@given(st.floats(allow_nan=False))
def test_numbers_of_64_bits(value: float) -> None:
    assert number(pack(value), 0) == (value, 9)


def test_numbers_of_32_bits() -> None:
    assert number(b"\xca" + struct.pack(">f", 0.5), 0) == (0.5, 5)


@given(st.text(max_size=300))
def test_texts(value: str) -> None:
    data = pack(value)

    assert text(b"x" + data, 1) == (value.encode(), 1 + len(data))


def test_containers_tell_their_size_and_where_they_begin() -> None:
    assert array(pack([1, 2]), 0) == (2, 1)
    assert array(pack([1] * 20), 0) == (20, 5)
    assert mapping(pack({"a": 1}), 0) == (1, 1)
    assert mapping(pack({str(k): k for k in range(20)}), 0) == (20, 3)


def test_nil_is_told_from_values() -> None:
    assert is_nil(b"\xc0", 0)
    assert not is_nil(b"\x00", 0)


@pytest.mark.parametrize("read", [array, mapping, text, integer, number])
def test_another_kind_of_value_is_refused(read: Any) -> None:
    with pytest.raises(ShapeError):
        read(b"\xc0", 0)


def test_extensions_are_skipped() -> None:
    for data in (
        b"\xd4\x01x",
        b"\xd8\x01" + bytes(16),
        b"\xc7\x03\x01abc",
        b"\xc9\x00\x00\x00\x01\x01x",
    ):
        assert skip(data, 0) == len(data)


def test_a_first_byte_that_no_value_has_is_refused() -> None:
    with pytest.raises(ShapeError):
        skip(b"\xc1", 0)


@given(st.binary(max_size=200))
def test_any_bytes_are_walked_through_or_refused(data: bytes) -> None:
    try:
        end = skip(data, 0)
    except (CutError, ShapeError):
        return
    assert 0 < end <= len(data)


def test_a_length_beyond_the_data_ends_at_once() -> None:
    with pytest.raises(CutError):
        skip(b"\xdd\xff\xff\xff\xff" + bytes(1000), 0)
