"""Timings of the requests a gateway forwards, for hosts where packets may not be captured.

Nothing of a prompt or an answer is kept: events are looked at for whether they have content, and
for their usage block.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from latencyprism.schemas.records import RequestState, RequestTiming
from latencyprism.schemas.topics import TELEMETRY_REQUESTS, Topic

EVERY_S = 0.1
"""How often open streams are reported and the watermark moves."""
MAX_EVENT_BYTES = 1 << 20
"""A longer event, or a longer whole answer, is passed on but not looked into."""


class Emit(Protocol):
    """Where samples go; never blocks, never raises."""

    def sample(self, topic: Topic, sample: Any) -> None:
        """Take one record."""

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:
        """Promise that no earlier sample of this topic and instance will follow."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One forwarded request. All times are read when a method is called."""

    timings: "GatewayTimings"
    request_id: str
    instance: str
    endpoint: str
    arrival_ns: int
    model: str | None
    streaming: bool | None
    request_bytes: int
    trace_id: str | None
    part: int = 0
    state: RequestState = "open"
    status: int | None = None
    newest_ns: int = 0
    news: bool = True
    first_byte_ns: int | None = None
    first_token_ns: int | None = None
    end_ns: int | None = None
    chunks_before: int = 0
    chunks_ns: list[int] = field(default_factory=list)
    response_bytes: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    _buffer: bytearray = field(default_factory=bytearray, init=False)
    _blind: bool = field(default=False, init=False)

    def answered(self, status: int, *, streaming: bool) -> None:
        """The head of the answer has come."""
        self.first_byte_ns = self._event()
        self.status, self.streaming, self.response_bytes = status, streaming, 0

    def data(self, data: bytes) -> None:
        """A part of the answer's body has come."""
        now_ns = self._event()
        self.response_bytes = (self.response_bytes or 0) + len(data)
        if self._blind:
            return
        self._buffer += data
        if self.streaming:
            *events, rest = self._buffer.replace(b"\r\n", b"\n").split(b"\n\n")
            self._buffer = rest
            for event in events:
                self._look(event, now_ns)
        if len(self._buffer) > MAX_EVENT_BYTES:
            self._blind = True
            self._buffer.clear()

    def ended(self, *, complete: bool) -> None:
        """The answer has ended, or was cut."""
        self.end_ns = self._event()
        if not self.streaming and not self._blind:
            self._usage(_object(self._buffer))
        self._buffer.clear()
        self.state = "complete" if complete else "aborted"
        self.timings.close(self)

    def _event(self) -> int:
        self.newest_ns = self.timings.clock_ns()
        self.news = True
        return self.newest_ns

    def _look(self, event: bytearray, now_ns: int) -> None:
        for line in event.split(b"\n"):
            if not line.startswith(b"data:"):
                continue
            value = _object(line[5:])
            self._usage(value)
            choices = value.get("choices")
            if isinstance(choices, list) and any(_has_content(choice) for choice in choices):
                self.first_token_ns = self.first_token_ns or now_ns
                self.chunks_ns.append(now_ns)

    def _usage(self, value: dict[str, Any]) -> None:
        usage = value.get("usage")
        if not isinstance(usage, dict):
            return
        self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.completion_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _count(details.get("cached_tokens"))


class GatewayTimings:
    """Makes :class:`RequestTiming` parts; used within one event loop.

    Holds one :class:`Exchange` an open request, each at most :data:`MAX_EVENT_BYTES` and the chunk
    times of the last :data:`EVERY_S`.
    """

    def __init__(
        self,
        emit: Emit,
        instances: tuple[str, ...],
        *,
        gateway: str,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.clock_ns = clock_ns
        self._emit = emit
        self._instances = instances
        self._prefix = f"{gateway}-{clock_ns():x}"
        self._number = 0
        self._open: dict[str, Exchange] = {}

    def begin(
        self, *, instance: str, endpoint: str, body: bytes, traceparent: str | None
    ) -> Exchange:
        """A request is about to be sent to an instance; waiting in the gateway does not count."""
        self._number += 1
        asked = _object(body) if len(body) <= MAX_EVENT_BYTES else {}
        model, now_ns = asked.get("model"), self.clock_ns()
        exchange = Exchange(
            timings=self,
            request_id=f"{self._prefix}-{self._number}",
            instance=instance,
            endpoint=endpoint,
            arrival_ns=now_ns,
            newest_ns=now_ns,
            model=model if isinstance(model, str) else None,
            streaming=None,
            request_bytes=len(body),
            trace_id=_trace_id(traceparent),
        )
        self._open[exchange.request_id] = exchange
        return exchange

    def tick(self) -> None:
        """Report what is new and move the watermarks; to be called every :data:`EVERY_S`."""
        fresh = [exchange for exchange in self._open.values() if exchange.news]
        for exchange in sorted(fresh, key=lambda exchange: exchange.newest_ns):
            self._report(exchange)
        now_ns = self.clock_ns()
        for instance in self._instances:
            self._emit.watermark(TELEMETRY_REQUESTS, instance, now_ns)

    def close(self, exchange: Exchange) -> None:
        """Report the last part of an exchange and forget it."""
        self._report(exchange)
        del self._open[exchange.request_id]

    def _report(self, exchange: Exchange) -> None:
        chunks = exchange.chunks_ns
        since_us = [(chunk_ns - chunks[0]) // 1000 for chunk_ns in chunks]
        self._emit.sample(
            TELEMETRY_REQUESTS,
            RequestTiming(
                request_id=exchange.request_id,
                part=exchange.part,
                state=exchange.state,
                instance=exchange.instance,
                source="gateway",
                observed_at_ns=exchange.newest_ns,
                endpoint=exchange.endpoint,
                model=exchange.model,
                streaming=exchange.streaming,
                status=exchange.status,
                arrival_ns=exchange.arrival_ns,
                request_end_ns=exchange.arrival_ns,
                first_byte_ns=exchange.first_byte_ns,
                first_token_ns=exchange.first_token_ns,
                end_ns=exchange.end_ns,
                chunks_before=exchange.chunks_before,
                chunk_base_ns=chunks[0] if chunks else None,
                chunk_deltas_us=tuple(max(0, b - a) for a, b in pairwise(since_us)),
                request_bytes=exchange.request_bytes,
                response_bytes=exchange.response_bytes,
                prompt_tokens=exchange.prompt_tokens,
                cached_tokens=exchange.cached_tokens,
                completion_tokens=exchange.completion_tokens,
                trace_id=exchange.trace_id,
            ),
        )
        exchange.part += 1
        exchange.chunks_before += len(chunks)
        exchange.chunks_ns = []
        exchange.news = False


def _object(data: bytes | bytearray) -> dict[str, Any]:
    """The JSON object that the bytes hold; empty for anything else, such as ``[DONE]``."""
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _has_content(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text"))
    return any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls"))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _trace_id(traceparent: str | None) -> str | None:
    parts = (traceparent or "").split("-")
    if len(parts) >= 4 and len(parts[1]) == 32:
        return parts[1].lower()
    return None
