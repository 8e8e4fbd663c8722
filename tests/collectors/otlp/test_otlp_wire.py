"""The wire format, against the runtime that everybody else uses."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from latencyprism.collectors.otlp.wire import Wire, WireError, double, encoded, signed

spans = st.builds(
    Span,
    trace_id=st.binary(max_size=16),
    name=st.text(max_size=200),
    kind=st.integers(0, 5),
    start_time_unix_nano=st.integers(0, (1 << 64) - 1),
    flags=st.integers(0, (1 << 32) - 1),
    dropped_links_count=st.integers(0, (1 << 32) - 1),
    status=st.builds(Status, code=st.integers(0, 2), message=st.text(max_size=10)),
)


def fields(data: bytes, max_fields: int = 1000) -> list[tuple[int, int | bytes]]:
    return [
        (number, value if isinstance(value, int) else bytes(value))
        for number, value in Wire(max_fields).fields(memoryview(data))
    ]


@given(spans)
def test_any_message_is_read_as_it_was_written(span: Span) -> None:
    told = {descriptor.number: value for descriptor, value in span.ListFields()}

    read = dict(fields(span.SerializeToString()))
    assert read == {
        number: value.encode()
        if isinstance(value, str)
        else value.SerializeToString()
        if isinstance(value, Status)
        else value
        for number, value in told.items()
    }


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False))
def test_signed_numbers_and_floats(number: int, real: float) -> None:
    ((_, varint),) = fields(AnyValue(int_value=number).SerializeToString())
    ((_, fixed),) = fields(AnyValue(double_value=real).SerializeToString())

    assert isinstance(varint, int)
    assert isinstance(fixed, int)
    assert (signed(varint), double(fixed)) == (number, real)


@given(st.integers(1, 1000), st.integers(0, (1 << 64) - 1) | st.binary(max_size=300))
def test_what_is_written_is_read(number: int, value: int | bytes) -> None:
    assert fields(encoded(number, value)) == [(number, value)]


def test_the_runtime_reads_what_is_written() -> None:
    written = encoded(1, b"key") + encoded(2, encoded(3, 300))

    assert KeyValue.FromString(written) == KeyValue(key="key", value=AnyValue(int_value=300))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x0a\x05abc", "cut off in a field"),
        (b"\x09\x01", "cut off in a field"),
        (b"\x0d\x01", "cut off in a field"),
        (b"\x08", "cut off in a number"),
        (b"\x08\xff", "cut off in a number"),
        (b"\x08" + b"\xff" * 11, "more than 64 bits"),
        (b"\x0b", "kind 3"),
        (b"\x0f", "kind 7"),
        (b"\x02\x00", "without a number"),
        (b"\x12\x00" * 1001, "too many fields"),
        (b"\x0a" + b"\xff" * 9 + b"\x01", "cut off in a field"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        fields(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read = fields(data)
    except WireError:
        return
    assert all(isinstance(value, bytes) or 0 <= value < 1 << 64 for _, value in read)


def test_floats_are_little_endian() -> None:
    assert double(struct.unpack("<Q", struct.pack("<d", 0.25))[0]) == 0.25
