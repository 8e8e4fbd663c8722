"""Messages as exporters send them, made by the runtime that they use."""

from collections.abc import Mapping
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from latencyprism.collectors.otlp.requests import WANTED
from latencyprism.collectors.otlp.spans import Decoder
from latencyprism.schemas.records import RequestTiming
from latencyprism.schemas.topics import Topic

START_NS = 1_796_061_087_435_045_376
TRACE = "571fe960ba379c0f1028f146a2be2e72"
SPAN = "00f067aa0ba902b7"
VLLM: Mapping[str, Any] = {
    "gen_ai.latency.time_to_first_token": 0.618466,
    "gen_ai.latency.e2e": 0.841083,
    "gen_ai.latency.time_in_queue": 0.000019,
    "gen_ai.usage.prompt_tokens": 540,
    "gen_ai.usage.completion_tokens": 20,
    "gen_ai.latency.time_in_model_prefill": 0.401417,
    "gen_ai.latency.time_in_model_decode": 0.222811,
    "gen_ai.latency.time_in_model_inference": 0.624228,
    "gen_ai.request.id": "cmpl-1",
    "gen_ai.request.max_tokens": 20,
    "gen_ai.request.n": 1,
}


class Collected:
    """Keeps the requests that a receiver emits."""

    def __init__(self) -> None:
        self.requests: list[RequestTiming] = []

    def sample(self, topic: Topic, sample: Any) -> None:
        assert topic.name == "telemetry.requests"
        self.requests.append(sample)

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:
        raise AssertionError(f"{topic.name} {instance}: spans have no watermark ({watermark_ns})")


def decoder(**bounds: int) -> Decoder:
    return Decoder(WANTED, {"service.name"}, **({"max_spans": 100, "max_fields": 10_000} | bounds))


def attribute(name: str, value: Any) -> KeyValue:
    match value:
        case bool():
            told = AnyValue(bool_value=value)
        case str():
            told = AnyValue(string_value=value)
        case int():
            told = AnyValue(int_value=value)
        case float():
            told = AnyValue(double_value=value)
        case _:
            told = value
    return KeyValue(key=name, value=told)


def span(attributes: Mapping[str, Any] = VLLM, **changes: Any) -> Span:
    fields: dict[str, Any] = {
        "trace_id": bytes.fromhex(TRACE),
        "span_id": bytes.fromhex(SPAN),
        "name": "llm_request",
        "kind": Span.SPAN_KIND_SERVER,
        "start_time_unix_nano": START_NS,
        "end_time_unix_nano": START_NS + 841_682_801,
        "attributes": [attribute(name, value) for name, value in attributes.items()],
        "status": Status(),
    }
    return Span(**(fields | changes))


def message(*spans: Span, resource: Mapping[str, Any] | None = None) -> bytes:
    told = Resource(attributes=[attribute(n, v) for n, v in (resource or {}).items()])
    scope = ScopeSpans(spans=spans)
    export = ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(resource=told, scope_spans=[scope])]
    )
    body: bytes = export.SerializeToString()
    return body
