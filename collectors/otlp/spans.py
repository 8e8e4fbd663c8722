"""Export requests of OTLP, as protobuf or JSON: the few facts wanted of each span.

Field numbers and names are those of opentelemetry/proto/{collector/trace,trace,resource,common}/v1.
An attribute that is not asked for by name is passed over, whatever it holds.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from latencyprism.collectors.otlp.wire import Wire, WireError, double, signed

Value = str | int | float
Attributes = Mapping[str, Value]

MAX_TEXT: Final = 256
"""Longest text that is kept, in characters; a longer value counts as not told."""
MAX_INT: Final = 1 << 63
STATUS_ERROR: Final = 2

_HEX: Final = re.compile(r"[0-9a-fA-F]+", re.ASCII)


class MalformedError(ValueError):
    """A message that is not of OTLP; the text says why, and holds nothing of the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What is read of a span."""

    name: str
    trace_id: str
    """32 hex digits; empty when it has none."""
    span_id: str
    kind: int
    start_ns: int
    end_ns: int
    failed: bool
    attributes: Attributes
    """Those asked for, by name."""


@dataclass(slots=True, kw_only=True)
class Export:
    """The spans of one message that have an attribute that was asked for."""

    spans: list[tuple[Attributes, Span]] = field(default_factory=list)
    """Each with attributes of its resource."""
    others: int = 0
    """Spans with none."""
    excess: int = 0
    """Spans beyond the bound."""

    def add(self, resource: Attributes, span: Span, most: int) -> None:
        """Take one span."""
        if not span.attributes:
            self.others += 1
        elif len(self.spans) >= most:
            self.excess += 1
        else:
            self.spans.append((resource, span))


class Decoder:
    """Reads messages, each for itself.

    ``wanted`` and ``wanted_of_resource`` name the attributes to read. Holds the message and at most
    ``max_spans`` spans. Raises :class:`MalformedError`.
    """

    def __init__(
        self,
        wanted: Collection[str],
        wanted_of_resource: Collection[str],
        *,
        max_spans: int,
        max_fields: int,
    ) -> None:
        self._wanted = frozenset(wanted)
        self._wanted_bytes = {name.encode(): name for name in wanted}
        self._of_resource = frozenset(wanted_of_resource)
        self._of_resource_bytes = {name.encode(): name for name in wanted_of_resource}
        self._max_spans = max_spans
        self._max_fields = max_fields

    def protobuf(self, body: bytes) -> Export:
        """An ``ExportTraceServiceRequest``."""
        wire, export = Wire(self._max_fields), Export()
        try:
            for of_resource in _inside(wire, memoryview(body), 1):
                resource: dict[str, Value] = {}
                for message in _inside(wire, of_resource, 1):
                    for pair in _inside(wire, message, 1):
                        _read_pair(wire, pair, self._of_resource_bytes, resource)
                for of_scope in _inside(wire, of_resource, 2):
                    for message in _inside(wire, of_scope, 2):
                        span = _span(wire, message, self._wanted_bytes)
                        export.add(resource, span, self._max_spans)
        except WireError as error:
            raise MalformedError(f"no protobuf of OTLP: {error}") from error
        return export

    def json(self, body: bytes) -> Export:
        """The same as JSON: ids are hex digits, 64-bit integers may be strings."""
        if body.count(b"{") + body.count(b"[") > self._max_fields:
            raise MalformedError("no JSON of OTLP: too many objects")
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise MalformedError("no JSON") from error
        export = Export()
        for of_resource in _objects(message, "resourceSpans"):
            told = of_resource.get("resource")
            resource = _attributes(told if isinstance(told, dict) else {}, self._of_resource)
            for of_scope in _objects(of_resource, "scopeSpans"):
                for fields in _objects(of_scope, "spans"):
                    export.add(resource, _span_of(fields, self._wanted), self._max_spans)
        return export


def _inside(wire: Wire, data: memoryview, wanted: int) -> Iterator[memoryview]:
    """The messages in a field; fields of other numbers are passed over."""
    for number, value in wire.fields(data):
        if number == wanted:
            yield _bytes(value)


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise WireError("a number where a message is expected")
    return value


def _integer(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise WireError("a message where a number is expected")
    return value


def _span(wire: Wire, data: memoryview, wanted: Mapping[bytes, str]) -> Span:
    name = trace_id = span_id = ""
    kind = start_ns = end_ns = status = 0
    attributes: dict[str, Value] = {}
    for number, value in wire.fields(data):
        if number == 9:
            _read_pair(wire, _bytes(value), wanted, attributes)
        elif number == 1:
            trace_id = _identity(_bytes(value).hex(), 32)
        elif number == 2:
            span_id = _identity(_bytes(value).hex(), 16)
        elif number == 5:
            name = _text(_bytes(value)) or ""
        elif number == 6:
            kind = _integer(value)
        elif number == 7:
            start_ns = _integer(value)
        elif number == 8:
            end_ns = _integer(value)
        elif number == 15:
            for inner, code in wire.fields(_bytes(value)):
                status = _integer(code) if inner == 3 else status
    return Span(
        name=name,
        trace_id=trace_id,
        span_id=span_id,
        kind=kind,
        start_ns=start_ns,
        end_ns=end_ns,
        failed=status == STATUS_ERROR,
        attributes=attributes,
    )


def _read_pair(
    wire: Wire, data: memoryview, wanted: Mapping[bytes, str], into: dict[str, Value]
) -> None:
    """Take over a ``KeyValue`` if its key is wanted and its value is plain."""
    name, told = None, None
    for number, field_value in wire.fields(data):
        if number == 1:
            name = wanted.get(bytes(_bytes(field_value)))
            if name is None:
                return
        elif number == 2:
            told = _bytes(field_value)
    if name is None or told is None:
        return
    for number, inner in wire.fields(told):
        value: Value | None = None
        if number == 1:
            value = _text(_bytes(inner))
        elif number == 3:
            value = signed(_integer(inner))
        elif number == 4:
            value = double(_integer(inner))
        if value is not None:
            into[name] = value


def _text(data: memoryview) -> str | None:
    return str(data, "utf-8", "replace") if len(data) <= MAX_TEXT else None


def _objects(of: Any, name: str) -> Iterator[dict[str, Any]]:
    """The objects in a list that may be missing."""
    if not isinstance(of, dict):
        raise MalformedError("an object is expected")
    found = of.get(name)
    if found is None:
        return
    if not isinstance(found, list):
        raise MalformedError(f"{name} is no list")
    for entry in found:
        if not isinstance(entry, dict):
            raise MalformedError(f"{name} holds something that is no object")
        yield entry


def _attributes(of: dict[str, Any], wanted: Collection[str]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for pair in _objects(of, "attributes"):
        name, told = pair.get("key"), pair.get("value")
        if isinstance(name, str) and name in wanted and isinstance(told, dict):
            value = _plain(told)
            if value is not None:
                found[name] = value
    return found


def _plain(told: dict[str, Any]) -> Value | None:
    match told:
        case {"stringValue": str(text)}:
            return text if len(text) <= MAX_TEXT else None
        case {"intValue": str() | int() as number}:
            return _json_integer(number)
        case {"doubleValue": float() | int() as number}:
            return _json_double(number)
        case _:
            return None


def _json_double(told: float) -> float:
    try:
        return float(told)
    except OverflowError:
        return math.inf


def _json_integer(told: Any) -> int:
    """A number, or the string of one; 0, as protobuf has it, when it is missing."""
    if told is None:
        return 0
    if isinstance(told, str) and len(told) <= 20 and told.isascii():
        try:
            told = int(told)
        except ValueError:
            raise MalformedError("a text where a number is expected") from None
    if type(told) is not int or not -MAX_INT <= told < 2 * MAX_INT:
        raise MalformedError("something else where a 64-bit number is expected")
    return told


def _span_of(fields: dict[str, Any], wanted: Collection[str]) -> Span:
    name, status = fields.get("name"), fields.get("status")
    code = status.get("code") if isinstance(status, dict) else None
    return Span(
        name=name if isinstance(name, str) and len(name) <= MAX_TEXT else "",
        trace_id=_identity(fields.get("traceId"), 32),
        span_id=_identity(fields.get("spanId"), 16),
        kind=_json_integer(fields.get("kind")),
        start_ns=_json_integer(fields.get("startTimeUnixNano")),
        end_ns=_json_integer(fields.get("endTimeUnixNano")),
        failed=code == STATUS_ERROR,
        attributes=_attributes(fields, wanted),
    )


def _identity(told: Any, digits: int) -> str:
    """An id in lower case; empty for one that is invalid, as one of zeros is."""
    if not isinstance(told, str) or len(told) != digits or _HEX.fullmatch(told) is None:
        return ""
    return told.lower() if told.strip("0") else ""
