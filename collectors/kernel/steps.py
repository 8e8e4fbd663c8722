"""Puts together what an engine's iterations did, from its own messages. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from latencyprism.collectors.kernel.frames import (
    MAX_STREAMS,
    Aborted,
    Added,
    Layout,
    Messages,
    Outputs,
    decode_inbound,
    decode_outputs,
)
from latencyprism.collectors.kernel.msgpack import CutError, ShapeError
from latencyprism.schemas.records import StepBatch

MAX_REQUESTS: Final = 16_384
"""Requests of one engine that are remembered; the oldest is forgotten beyond it."""
SAME_STEP_NS: Final = 300_000
"""Messages about one step, one for each API server, are made within this time."""
SETTLE_NS: Final = 20_000_000
"""After so long no further message about a step comes."""
CLOCK_SLACK_NS: Final = 10_000_000_000
"""A time in a message that is further from when it was sent is not believed."""
_UNKNOWN: Final = object()
LEAST_BODY: Final = 16
"""Shorter messages wake threads and tell nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration; times on the monotonic clock. -1 means that it is not known."""

    start_ns: int
    end_ns: int
    decode_sequences: int
    joined: int
    left: int
    prefill_tokens: int
    context_tokens: int


@dataclass(slots=True)
class _Open:
    """The newest step while messages about it may still come."""

    end_ns: int
    descriptors: set[int]
    """Connections on which messages about it came, one each."""
    scheduled_ns: int | None = None
    decode_sequences: int = 0
    joined: int = 0
    left: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0
    active: int | None = None

    def same_as(self, other: "_Open") -> bool:
        """Whether the other tells more about the same step."""
        return (
            abs(self.end_ns - other.end_ns) < SAME_STEP_NS
            and not self.descriptors & other.descriptors
        )

    def merge(self, other: "_Open") -> None:
        """Add what the other tells."""
        self.descriptors |= other.descriptors
        known = [at for at in (self.scheduled_ns, other.scheduled_ns) if at is not None]
        self.scheduled_ns = min(known, default=None)
        self.decode_sequences += other.decode_sequences
        self.joined += other.joined
        self.left += other.left
        self.prefill_tokens = _sum(self.prefill_tokens, other.prefill_tokens)
        self.context_tokens = _sum(self.context_tokens, other.context_tokens)
        self.active = self.active if other.active is None else other.active


def _sum(one: int, other: int) -> int:
    """Of counts that may be unknown."""
    return -1 if min(one, other) < 0 else one + other


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """How long one request waited for the engine, and how long its prompt took, in nanoseconds."""

    queue_ns: int
    prefill_ns: int


class Engine:
    """The iterations of one engine core process; bounded in requests and connections.

    A step ends when the engine says so, and begins when the one before ended or, when there was
    nothing to do, when its first request was scheduled. A prompt that is prefilled in several steps
    counts whole in the last, as in the engine's own metrics; a step in which nothing came out
    because all it did was such a part has -1 prefill tokens. What a request that was preempted is
    prefilled again is not told.
    """

    def __init__(self, layout: Layout, counts: Counter[str]) -> None:
        self._layout = layout
        self._counts = counts
        self._streams: dict[int, Messages] = {}
        self._talking: set[int] = set()
        """Connections on which outputs were seen."""
        self._context: dict[bytes, int | None] = {}
        """Tokens of each request so far, None when its beginning was not seen."""
        self._aborted = 0
        self._arrived_ns: int | None = None
        """First request since the last step."""
        self._before: _Open | None = None
        self._open: _Open | None = None
        self._steps: list[Step] = []
        self._waits: list[Waited] = []

    def lose(self) -> None:
        """Messages were lost: begin anew with each connection."""
        self._close()
        for stream in self._streams.values():
            stream.lose()
        self._context.clear()
        self._before = None

    def inbound(self, at_ns: int, data: bytes) -> None:
        """The first bytes of what the engine received."""
        try:
            messages = decode_inbound(data, self._layout)
        except (CutError, ShapeError):
            self._counts["requests not decoded"] += 1
            return
        for message in messages:
            match message:
                case Added():
                    self._counts["requests"] += 1
                    self._arrived_ns = self._arrived_ns or at_ns
                    self._remember(message.request, message.prompt_tokens)
                case Aborted():
                    self._abort(message.requests)

    def _abort(self, requests: tuple[bytes, ...]) -> None:
        self._counts["aborts"] += len(requests)
        for request in requests:
            if self._context.pop(request, _UNKNOWN) is not _UNKNOWN:
                self._aborted += 1

    def outbound(self, at_ns: int, descriptor: int, piece: bytes, length: int) -> None:
        """The first bytes of what it sent on a connection, and how many there were."""
        stream = self._streams.get(descriptor)
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                self._counts["connections not followed"] += 1
                return
            stream = self._streams[descriptor] = Messages(self._counts)
        for body in stream.add(piece, length):
            if len(body) < LEAST_BODY:
                continue
            try:
                outputs = decode_outputs(body, self._layout)
            except (CutError, ShapeError):
                self._counts["frames not decoded"] += 1
            else:
                self._outputs(at_ns, descriptor, outputs)

    def take(self, now_ns: int) -> tuple[list[Step], list[Waited]]:
        """Steps that are over, and waits, since the last call."""
        if self._open is not None and now_ns - self._open.end_ns > SETTLE_NS:
            self._close()
        steps, self._steps = self._steps, []
        waits, self._waits = self._waits, []
        return steps, waits

    def _outputs(self, sent_ns: int, descriptor: int, outputs: Outputs) -> None:
        self._counts["frames"] += 1
        believed = 0 <= sent_ns - outputs.at_ns < CLOCK_SLACK_NS
        end_ns = outputs.at_ns if believed else sent_ns
        told = bool(outputs.plain or outputs.outputs)
        if not told and not (outputs.active and descriptor in self._talking):
            return  # statistics alone
        self._talking.add(descriptor)
        part = self._part(end_ns, descriptor, outputs)
        if self._open is not None and self._open.same_as(part):
            self._open.merge(part)
            return
        self._close()
        self._open = part

    def _part(self, end_ns: int, descriptor: int, outputs: Outputs) -> _Open:
        part = _Open(
            end_ns=end_ns,
            descriptors={descriptor},
            active=outputs.active,
            left=self._aborted,
        )
        self._aborted = 0
        if not outputs.plain and not outputs.outputs:
            part.prefill_tokens = -1
        self._counts["tokens"] += len(outputs.plain)
        for request in outputs.plain:
            self._decode(part, request, 1)
        for output in outputs.outputs:
            self._counts["tokens"] += output.tokens
            if output.prompt_tokens is not None and output.computed_tokens is not None:
                part.joined += 1
                part.prefill_tokens += output.computed_tokens
                self._remember(output.request, output.prompt_tokens + output.tokens)
                if end_ns == outputs.at_ns:  # else its clock is not this machine's
                    self._wait(part, end_ns, output.queued_ns, output.scheduled_ns)
            elif output.tokens:
                self._decode(part, output.request, output.tokens)
            if output.finished:
                part.left += 1
                self._context.pop(output.request, None)
        return part

    def _decode(self, part: _Open, request: bytes, tokens: int) -> None:
        before = self._context.get(request)
        part.decode_sequences += 1
        if before is None:
            part.context_tokens = -1
            self._remember(request, None)
        else:
            if part.context_tokens >= 0:
                part.context_tokens += before
            self._context[request] = before + tokens

    def _wait(
        self, part: _Open, end_ns: int, queued_ns: int | None, scheduled_ns: int | None
    ) -> None:
        if queued_ns is None or scheduled_ns is None or not queued_ns <= scheduled_ns <= end_ns:
            return
        self._waits.append(
            Waited(queue_ns=scheduled_ns - queued_ns, prefill_ns=end_ns - scheduled_ns)
        )
        part.scheduled_ns = min(part.scheduled_ns or scheduled_ns, scheduled_ns)

    def _remember(self, request: bytes, tokens: int | None) -> None:
        self._context[request] = tokens
        if len(self._context) > MAX_REQUESTS:
            self._context.pop(next(iter(self._context)))
            self._counts["requests forgotten"] += 1

    def _close(self) -> None:
        """The open step is over."""
        step, self._open = self._open, None
        if step is None:
            return
        start_ns = self._start_ns(step)
        if start_ns is not None and start_ns <= step.end_ns:
            self._counts["steps"] += 1
            self._steps.append(
                Step(
                    start_ns=start_ns,
                    end_ns=step.end_ns,
                    decode_sequences=step.decode_sequences,
                    joined=step.joined,
                    left=step.left,
                    prefill_tokens=step.prefill_tokens,
                    context_tokens=step.context_tokens,
                )
            )
        else:
            self._counts["steps without a beginning"] += 1
        self._before = step
        self._arrived_ns = None

    def _start_ns(self, step: _Open) -> int | None:
        before = self._before
        if before is not None and (before.active is None or before.active):
            return before.end_ns
        return step.scheduled_ns or self._arrived_ns


def batch(
    steps: Iterable[Step], *, instance: str, source: str, model: str | None, offset_ns: int
) -> StepBatch | None:
    """The steps as a record; ``offset_ns`` leads from the monotonic clock to the epoch. None when
    there are none.
    """
    steps = sorted(steps, key=lambda step: step.end_ns)
    if not steps:
        return None
    return StepBatch(
        instance=instance,
        source=source,
        observed_at_ns=steps[-1].end_ns + offset_ns,
        model=model,
        start_ns=tuple(step.start_ns + offset_ns for step in steps),
        duration_us=tuple((step.end_ns - step.start_ns) // 1000 for step in steps),
        decode_sequences=tuple(step.decode_sequences for step in steps),
        joined=tuple(step.joined for step in steps),
        left=tuple(step.left for step in steps),
        prefill_tokens=tuple(step.prefill_tokens for step in steps),
        context_tokens=tuple(step.context_tokens for step in steps),
    )
