"""What the span of one request says, under one set of names for all engines.

vLLM's ``llm_request`` (its ``SpanAttributes``, V0 and V1), the root span of an SGLang request, and
TGI's handlers; token counts also under the names of OpenTelemetry's GenAI conventions. Times of the
first two are seconds, those of TGI texts as Rust prints a ``Duration``.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Final

from latencyprism.collectors.otlp.spans import Attributes, Span, Value
from latencyprism.schemas.records import RequestTiming

SOURCE: Final = "otlp"
OUTGOING: Final = frozenset({3, 4})
"""Span kinds CLIENT and PRODUCER: of callers, who are not the engine."""
EARLIEST_NS: Final = 946_684_800_000_000_000
"""2000-01-01."""
LATEST_NS: Final = 4_102_444_800_000_000_000
"""2100-01-01."""
LONGEST_S: Final = 7 * 86_400.0
MAX_TOKENS: Final = 1 << 31
SLACK_S: Final = 0.001
"""By how much a stage may be longer than the whole, since both are taken from two clocks."""

E2E: Final = ("gen_ai.latency.e2e", "total_time")
TTFT: Final = ("gen_ai.latency.time_to_first_token",)
QUEUE: Final = ("gen_ai.latency.time_in_queue", "queue_time")
PREFILL: Final = ("gen_ai.latency.time_in_model_prefill",)
DECODE: Final = ("gen_ai.latency.time_in_model_decode",)
INFERENCE: Final = ("gen_ai.latency.time_in_model_inference", "inference_time")
PROMPT: Final = ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens")
COMPLETION: Final = ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens")
CACHED: Final = (
    "gen_ai.usage.cached_tokens",
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.cache_read_input_tokens",
)
LIMIT: Final = ("gen_ai.request.max_tokens",)
MODEL: Final = ("gen_ai.response.model", "gen_ai.request.model")
PATH: Final = ("url.path", "http.route", "http.target")
METHOD: Final = ("http.request.method", "http.method")
STATUS: Final = ("http.response.status_code", "http.status_code")
SERVER: Final = ("server.address", "server.port")

WANTED: Final = frozenset(
    (
        *(*E2E, *TTFT, *QUEUE, *PREFILL, *DECODE, *INFERENCE),
        *(*PROMPT, *COMPLETION, *CACHED, *LIMIT),
        *(*MODEL, *PATH, *METHOD, *STATUS, *SERVER),
    )
)

_DURATION = re.compile(r"(\d{1,12})(?:\.(\d{1,9}))?(s|ms|µs|us|ns)", re.ASCII)
_UNITS: Final[Mapping[str, float]] = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "ns": 1e-9}


def is_request(span: Span) -> bool:
    """Whether a span is an engine's account of a whole request."""
    if span.kind in OUTGOING:
        return False
    return _told(span.attributes, E2E) is not None and any(
        _told(span.attributes, names) is not None for names in (TTFT, QUEUE, INFERENCE)
    )


def is_possible(span: Span) -> bool:
    """Whether a span's times are ones that a clock can have told."""
    return EARLIEST_NS <= span.start_ns <= span.end_ns < LATEST_NS


def request_id(span: Span) -> str:
    """Id of a request: the same whenever its span is received."""
    told = f"{span.trace_id}|{span.span_id}|{span.start_ns}|{span.name}"
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def timing(span: Span, instance: str) -> RequestTiming:
    """The record of a span for which :func:`is_request` and :func:`is_possible` hold.

    A stage that is longer than the whole counts as not told, as vLLM has it of requests that ended
    before they got there.
    """
    attributes = span.attributes
    whole_s = _seconds(_told(attributes, E2E))
    arrival_ns = span.start_ns
    end_ns = span.end_ns if whole_s is None else arrival_ns + round(whole_s * 1e9)
    longest_s = (end_ns - arrival_ns) / 1e9 + SLACK_S
    first_token_s = _stage_s(attributes, TTFT, longest_s)
    return RequestTiming(
        request_id=request_id(span),
        part=0,
        state="aborted" if span.failed else "complete",
        instance=instance,
        source=SOURCE,
        observed_at_ns=end_ns,
        endpoint=(_text(_told(attributes, PATH)) or span.name).split("?", 1)[0],
        model=_text(_told(attributes, MODEL)),
        status=_status(_told(attributes, STATUS)),
        arrival_ns=arrival_ns,
        first_token_ns=(
            min(arrival_ns + round(first_token_s * 1e9), end_ns) if first_token_s else None
        ),
        end_ns=end_ns,
        chunks_before=0,
        prompt_tokens=_tokens(_told(attributes, PROMPT)),
        cached_tokens=_tokens(_told(attributes, CACHED)),
        completion_tokens=_tokens(_told(attributes, COMPLETION)),
        trace_id=span.trace_id or None,
        method=_text(_told(attributes, METHOD)),
        max_tokens=_tokens(_told(attributes, LIMIT)),
        queue_us=_us(_stage_s(attributes, QUEUE, longest_s)),
        prefill_us=_us(_stage_s(attributes, PREFILL, longest_s)),
        decode_us=_us(_stage_s(attributes, DECODE, longest_s)),
    )


def _told(attributes: Attributes, names: tuple[str, ...]) -> Value | None:
    return next((attributes[name] for name in names if name in attributes), None)


def _seconds(value: Value | None) -> float | None:
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None:
            return None
        value = float(f"{match[1]}.{match[2] or 0}") * _UNITS[match[3]]
    if value is None or not math.isfinite(value) or not 0 <= value <= LONGEST_S:
        return None
    return float(value)


def _stage_s(attributes: Attributes, names: tuple[str, ...], longest_s: float) -> float | None:
    spent_s = _seconds(_told(attributes, names))
    return spent_s if spent_s is not None and spent_s <= longest_s else None


def _us(spent_s: float | None) -> int | None:
    return None if spent_s is None else round(spent_s * 1e6)


def _tokens(value: Value | None) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and 0 <= value <= MAX_TOKENS else None


def _status(value: Value | None) -> int | None:
    return value if isinstance(value, int) and 100 <= value <= 999 else None


def _text(value: Value | None) -> str | None:
    return value if isinstance(value, str) and value else None
