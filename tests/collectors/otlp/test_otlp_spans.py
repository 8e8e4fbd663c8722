"""Protobuf and JSON say the same, and nothing else is kept."""

import json
import sys
import tracemalloc
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from otlp_messages import SPAN, START_NS, TRACE, VLLM, decoder, message, span

from latencyprism.collectors.otlp.spans import MalformedError, Span

SECRET = "why is the sky blue"
TEXTS = {
    "gen_ai.prompt": SECRET,
    "gen_ai.completion": SECRET,
    "gen_ai.input.messages": SECRET,
    "gen_ai.output.messages": AnyValue(
        array_value=ArrayValue(values=[AnyValue(string_value=SECRET)])
    ),
    "gen_ai.system_instructions": SECRET,
    "traceloop.entity.input": SECRET,
}


def as_json(body: bytes) -> bytes:
    """The message as OTLP has it in JSON: ids are hex digits there."""
    export = ExportTraceServiceRequest.FromString(body)
    told = MessageToDict(export, use_integers_for_enums=True)
    for of_resource, message_of in zip(
        told.get("resourceSpans", []), export.resource_spans, strict=True
    ):
        for of_scope, scope in zip(
            of_resource.get("scopeSpans", []), message_of.scope_spans, strict=True
        ):
            for fields, one in zip(of_scope.get("spans", []), scope.spans, strict=True):
                fields |= {"traceId": one.trace_id.hex(), "spanId": one.span_id.hex()}
    return json.dumps(told).encode()


def test_every_field_of_a_span() -> None:
    body = message(span(), resource={"service.name": "vllm", "host.name": "h"})

    export = decoder().protobuf(body)
    ((resource, read),) = export.spans
    assert resource == {"service.name": "vllm"}
    assert read == Span(
        name="llm_request",
        trace_id=TRACE,
        span_id=SPAN,
        kind=2,
        start_ns=START_NS,
        end_ns=START_NS + 841_682_801,
        failed=False,
        attributes={
            name: value
            for name, value in VLLM.items()
            if name not in ("gen_ai.request.id", "gen_ai.request.n")
        },
    )
    assert decoder().json(as_json(body)) == export


def test_a_failed_span_and_one_without_ids() -> None:
    failed = span(status=Status(code=Status.STATUS_CODE_ERROR, message="text"))
    nameless = span(trace_id=b"\0" * 16, span_id=b"x", name="n" * 257)
    body = message(failed, nameless)

    export = decoder().protobuf(body)
    assert [(s.failed, s.trace_id, s.span_id, s.name) for _, s in export.spans] == [
        (True, TRACE, SPAN, "llm_request"),
        (False, "", "", ""),
    ]
    assert decoder().json(as_json(body)) == export


def test_a_resource_after_its_spans_counts() -> None:
    body = message(span(), resource={"service.name": "vllm"})
    (resource_spans,) = ExportTraceServiceRequest.FromString(body).resource_spans
    resource, scopes = resource_spans.resource, resource_spans.scope_spans[0]
    inside = b"".join(
        bytes([tag]) + _length(part) + part
        for tag, part in ((0x12, scopes.SerializeToString()), (0x0A, resource.SerializeToString()))
    )

    assert decoder().protobuf(b"\x0a" + _length(inside) + inside) == decoder().protobuf(body)


def _length(part: bytes) -> bytes:
    assert 128 <= len(part) < 1 << 14 or len(part) < 128
    return bytes([len(part)]) if len(part) < 128 else bytes([len(part) & 127 | 128, len(part) >> 7])


def test_text_of_prompts_and_answers_is_not_even_read() -> None:
    body = message(span({**TEXTS, **VLLM}), span(TEXTS), resource=TEXTS)
    assert SECRET.encode() in body

    for export in (decoder().protobuf(body), decoder().json(as_json(body))):
        assert (len(export.spans), export.others) == (1, 1)
        assert SECRET not in repr(export)


def test_a_long_text_counts_as_not_told() -> None:
    body = message(span({**VLLM, "gen_ai.response.model": "m" * 257}))

    for export in (decoder().protobuf(body), decoder().json(as_json(body))):
        ((_, read),) = export.spans
        assert "gen_ai.response.model" not in read.attributes


def test_spans_beyond_the_bound_are_counted() -> None:
    body = message(*[span()] * 5, span({}))

    for export in (decoder(max_spans=3).protobuf(body), decoder(max_spans=3).json(as_json(body))):
        assert (len(export.spans), export.excess, export.others) == (3, 2, 1)


@pytest.mark.parametrize(
    ("unit", "tags"),
    [
        (b"\x12\x00", (0x12, 0x0A)),  # empty spans
        (b"\x4a\x00", (0x12, 0x12, 0x0A)),  # empty attributes
        (b"\x0a\x00", ()),
    ],
)
def test_small_things_in_great_number_take_no_memory(unit: bytes, tags: tuple[int, ...]) -> None:
    body = unit * 500_000
    for tag in tags:
        body = bytes([tag]) + _varint(len(body)) + body
    tracemalloc.start()
    with pytest.raises(MalformedError, match="too many fields"):
        decoder(max_fields=100_000).protobuf(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 100_000


def _varint(value: int) -> bytes:
    return bytes([*((value >> shift & 127) | 128 for shift in (0, 7, 14)), value >> 21])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"nonsense",
        b"\xff\xfe",
        b'{"resourceSpans":{}}',
        b'{"resourceSpans":[1]}',
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"startTimeUnixNano":"x"}]}]}]}',
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"kind":1.5}]}]}]}',
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"kind":true}]}]}]}',
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"startTimeUnixNano":99999999999999999999}]}]}]}',
        b"[" * 100_000,
        b"{}" * 100_000,
        b'{"resourceSpans":' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_json_of_otlp_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedError):
        decoder(max_fields=150_000).json(body)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"stringValue": 5},
        {"intValue": None},
        {"boolValue": True},
        {"arrayValue": {"values": []}},
        {"doubleValue": "1.0"},
    ],
)
def test_values_that_are_not_plain_count_as_not_told(told: dict[str, Any]) -> None:
    pair = {"key": "gen_ai.latency.e2e", "value": told}
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [pair]}]}]}]}

    export = decoder().json(json.dumps(body).encode())
    assert (export.spans, export.others) == ([], 1)


values = (
    st.text(max_size=10)
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
)


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from(sorted(VLLM)), values),
            st.integers(0, (1 << 63) - 1),
            st.binary(min_size=16, max_size=16),
        ),
        max_size=4,
    )
)
def test_both_encodings_say_the_same(told: list[tuple[dict[str, Any], int, bytes]]) -> None:
    spans: list[SpanMessage] = [
        span(attributes, start_time_unix_nano=start, trace_id=trace)
        for attributes, start, trace in told
    ]
    body = message(*spans)

    assert decoder().protobuf(body) == decoder().json(as_json(body))


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for read in (decoder().protobuf, decoder().json):
        try:
            export = read(body)
        except MalformedError:
            continue
        assert sys.getsizeof(export.spans) < 1000
