"""An engine with continuous batching on paper: what its steps were, and what a tap would tell."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from latencyprism.schemas.codec import Pack
from latencyprism.schemas.records import RequestTiming
from latencyprism.streams.judge import Judgement
from latencyprism.streams.observation import Observation

INSTANCE = "127.0.0.1:8000"
T0 = 1_800_000_000_000_000_000
"""A whole multiple of the window."""
MS = 1_000_000
PART_MS = 100


@dataclass(kw_only=True)
class Stream:
    """One request of the engine; times in ms from ``T0``."""

    name: str
    arrival: float
    prompt_tokens: int = 100
    tokens: int = 10
    emitted: list[int] = field(default_factory=list)
    """Times of its content events, ns."""
    end_ns: int = 0

    @property
    def arrival_ns(self) -> int:
        return T0 + round(self.arrival * MS)


@dataclass(frozen=True, kw_only=True)
class TrueStep:
    """One iteration as it was."""

    end_ns: int
    duration_ms: float
    decode: int
    joined: int
    left: int


def run_engine(
    streams: Iterable[Stream],
    *,
    step_ms: float = 10.0,
    prefill_ms_per_token: float = 0.1,
    spread_ms: float = 0.3,
) -> list[TrueStep]:
    """Let the engine work the requests off; fills in when each emitted, returns the steps.

    Every request that waits joins the next step. The streams of a step are written out one after
    the other, ``spread_ms`` apart.
    """
    waiting = sorted(streams, key=lambda s: s.arrival)
    running: list[Stream] = []
    steps: list[TrueStep] = []
    now = T0
    while waiting or running:
        if not running:
            now = max(now, waiting[0].arrival_ns)
        joining = [s for s in waiting if s.arrival_ns <= now]
        waiting = [s for s in waiting if s.arrival_ns > now]
        tokens = sum(s.prompt_tokens for s in joining)
        duration = step_ms + prefill_ms_per_token * tokens
        now += round(duration * MS)
        batch = running + joining
        for place, stream in enumerate(batch):
            stream.emitted.append(now + round(place * spread_ms * MS))
        left = [s for s in batch if len(s.emitted) == s.tokens]
        for stream in left:
            stream.end_ns = stream.emitted[-1] + MS // 10
        steps.append(
            TrueStep(
                end_ns=now,
                duration_ms=duration,
                decode=len(running),
                joined=len(joining),
                left=len(left),
            )
        )
        running = [s for s in batch if s not in left]
    return steps


def timing(name: str = "r", part: int = 0, **changes: Any) -> RequestTiming:
    """A part with the fields that matter; times in ns."""
    fields: dict[str, Any] = {
        "request_id": name,
        "part": part,
        "state": "open",
        "instance": INSTANCE,
        "source": "network",
        "observed_at_ns": T0,
        "endpoint": "/v1/completions",
        "arrival_ns": T0,
        "chunks_before": 0,
    }
    return RequestTiming(**(fields | changes))


def parts_of(stream: Stream) -> list[RequestTiming]:
    """What a network tap tells of a request, every ``PART_MS`` while it has news."""
    moments = sorted({stream.arrival_ns, *stream.emitted, stream.end_ns})
    ticks = sorted({moment // (PART_MS * MS) for moment in moments})
    parts = []
    before = 0
    for part, tick in enumerate(ticks):
        limit = (tick + 1) * PART_MS * MS
        here = [at for at in stream.emitted if tick * PART_MS * MS <= at < limit]
        ended = stream.end_ns < limit
        seen = stream.emitted and stream.emitted[0] < limit
        parts.append(
            timing(
                stream.name,
                part,
                state="complete" if ended else "open",
                observed_at_ns=max(moment for moment in moments if moment < limit),
                model="small",
                streaming=True if seen else None,
                status=200 if seen else None,
                arrival_ns=stream.arrival_ns,
                request_end_ns=stream.arrival_ns,
                first_token_ns=stream.emitted[0] if seen else None,
                end_ns=stream.end_ns if ended else None,
                chunks_before=before,
                chunk_base_ns=here[0] if here else None,
                chunk_deltas_us=deltas_us(here),
                request_bytes=50 + 5 * stream.prompt_tokens,
                prompt_tokens=stream.prompt_tokens if ended else None,
            )
        )
        before += len(here)
    return parts


def deltas_us(times_ns: Sequence[int]) -> tuple[int, ...]:
    """Microseconds from each time to the next."""
    return tuple((b - a) // 1_000 for a, b in itertools.pairwise(times_ns))


def packs_of(parts: Iterable[RequestTiming], *, until_ms: int) -> list[Pack[RequestTiming]]:
    """A pack every ``PART_MS`` up to that time, with the watermark of its end."""
    by_tick: dict[int, list[RequestTiming]] = {}
    for part in parts:
        by_tick.setdefault((part.observed_at_ns - T0) // (PART_MS * MS), []).append(part)
    return [
        pack(
            sequence=tick,
            watermark_ns=T0 + (tick + 1) * PART_MS * MS,
            samples=by_tick.get(tick, ()),
        )
        for tick in range(until_ms // PART_MS)
    ]


def pack(
    *,
    watermark_ns: int,
    sequence: int = 0,
    agent: str = "tap",
    boot_ns: int = 1,
    samples: Iterable[RequestTiming] = (),
) -> Pack[RequestTiming]:
    """A pack of one agent."""
    return Pack(
        agent=agent,
        boot_ns=boot_ns,
        sequence=sequence,
        watermark_ns=watermark_ns,
        samples=tuple(samples),
    )


class KeepingJudge:
    """Keeps what it is shown and calls everything normal."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []
        self.learned = b"nothing"

    @property
    def version(self) -> str:
        return "keeping-1"

    def judge(self, observation: Observation) -> Judgement:
        self.seen.append(observation)
        return Judgement(
            verdict="normal",
            reason="kept",
            features={"batch": float(observation.open_requests.decoding)},
            version=self.version,
        )

    def refit(self) -> None:
        return None

    def state(self) -> bytes:
        return self.learned

    def restore(self, state: bytes) -> None:
        if state == b"damaged":
            raise ValueError("the state is damaged")
        self.learned = state
