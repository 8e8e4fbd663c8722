"""What gateways log and what exporters send."""

import contextlib

from latencyprism.collectors.gateway.access import LineError
from latencyprism.collectors.gateway.lines import message, read
from latencyprism.collectors.otlp import instances
from latencyprism.collectors.otlp.requests import WANTED, is_possible, is_request, timing
from latencyprism.collectors.otlp.spans import Decoder, Export, MalformedError

_DECODER = Decoder(WANTED, instances.WANTED, max_spans=1000, max_fields=100_000)
_INSTANCES = instances.Instances(["http://127.0.0.1:8000"], {"chat": "127.0.0.1:8001"})


def target_access_log_line(data: bytes) -> None:
    with contextlib.suppress(LineError):
        for access in read(message(data)):
            assert access.arrival_ns <= access.end_ns


def target_otlp_protobuf(data: bytes) -> None:
    with contextlib.suppress(MalformedError):
        _report(_DECODER.protobuf(data))


def target_otlp_json(data: bytes) -> None:
    with contextlib.suppress(MalformedError):
        _report(_DECODER.json(data))


def _report(export: Export) -> None:
    for resource, span in export.spans:
        if is_request(span) and is_possible(span):
            instance = _INSTANCES.find(resource, span.attributes, "127.0.0.1")
            assert instance is not None
            request = timing(span, instance)
            assert request.end_ns is not None
            assert request.arrival_ns <= request.end_ns
