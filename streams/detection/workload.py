"""Observations as rows of (workload features, log latency), one table a stage."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from latencyprism.streams.observation import Observation

Floats = npt.NDArray[np.float64]

FEATURES: Mapping[str, tuple[str, ...]] = {
    "ingress": ("decoding", "requests_ahead"),
    "prefill": ("prompt_tokens", "decoding", "requests_ahead", "tokens_ahead"),
    "decode": (
        "batch",
        "joined",
        "prefill_tokens",
        "context_tokens",
        "waiting",
        "batch_before",
    ),
    "egress": ("step_ms", "decoding", "joined"),
    "flow": ("decoding", "waiting", "waiting_tokens"),
}
"""Workload of each judged stage; all are taken as log(1 + x)."""

LEAST_LATENCY_MS = 0.2
LEAST_GAPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Observations of one stage in one window."""

    features: Floats
    """(n, d) in the order of :data:`FEATURES`."""
    log_latency: Floats
    """(n,) natural logarithm of milliseconds."""

    def __len__(self) -> int:
        return len(self.log_latency)


@dataclass(slots=True)
class StepMemory:
    """What the step before the window's first had: its batch, and how long nothing has moved."""

    batch: float = 0.0
    progress_ns: int = 0


def stage_rows(observation: Observation, memory: StepMemory) -> dict[str, Rows]:
    """Rows of every stage that the window tells something about; updates ``memory``."""
    rows = {
        "ingress": _ingress(observation),
        "prefill": _prefill(observation),
        "decode": _decode(observation, memory),
        "egress": _egress(observation),
        "flow": _flow(observation, memory),
    }
    return {stage: found for stage, found in rows.items() if found is not None and len(found)}


def _rows(latency_ms: Floats, *columns: npt.NDArray[np.generic]) -> Rows:
    table = np.empty((len(latency_ms), len(columns)))
    for index, column in enumerate(columns):
        table[:, index] = column
    kept = np.isfinite(latency_ms)
    if not kept.all():
        table, latency_ms = table[kept], latency_ms[kept]
    return Rows(
        features=np.log1p(np.fmax(table, 0.0)),
        log_latency=np.log(np.maximum(latency_ms, LEAST_LATENCY_MS)),
    )


def _ingress(observation: Observation) -> Rows:
    first = observation.first_tokens
    return _rows(first.headers_ms - np.nan_to_num(first.upload_ms), first.decoding, first.ahead)


def _prefill(observation: Observation) -> Rows:
    first = observation.first_tokens
    fresh = first.prompt_tokens - np.nan_to_num(first.cached_tokens)
    return _rows(first.ttft_ms, fresh, first.decoding, first.ahead, first.ahead_tokens)


def _decode(observation: Observation, memory: StepMemory) -> Rows | None:
    steps = observation.steps
    if not len(steps.end_ns):
        return None
    emitted = (steps.decode_sequences + steps.joined).astype(np.float64)
    before = np.concatenate(([memory.batch], emitted[:-1]))
    memory.batch = float(emitted[-1])
    return _rows(
        steps.duration_ms,
        steps.decode_sequences,
        steps.joined,
        steps.prefill_tokens,
        steps.context_tokens,
        steps.waiting,
        before,
    )


def _egress(observation: Observation) -> Rows | None:
    """Cadence of the streams given the cadence of the engine: what is left is the way out."""
    gaps, steps = observation.chunk_gaps_ms, observation.steps
    if len(gaps) < LEAST_GAPS or not len(steps.end_ns):
        return None
    return _rows(
        np.array([np.median(gaps)]),
        np.array([np.median(steps.duration_ms)]),
        np.array([observation.open_requests.decoding]),
        np.array([steps.joined.sum()]),
    )


def _flow(observation: Observation, memory: StepMemory) -> Rows | None:
    """Time since any open request moved: a token came, or it arrived at an idle server."""
    waiting = observation.open_requests
    if len(observation.steps.end_ns):
        memory.progress_ns = int(observation.steps.end_ns[-1])
    if not waiting.decoding and not waiting.waiting:
        memory.progress_ns = observation.end_ns
        return None
    silence = (observation.end_ns - memory.progress_ns) / 1e6
    if not waiting.decoding and len(waiting.waiting_ms):
        silence = min(silence, float(waiting.waiting_ms.max()))
    return _rows(
        np.array([silence]),
        np.array([waiting.decoding]),
        np.array([waiting.waiting]),
        np.array([np.nansum(waiting.waiting_tokens)]),
    )


def summary(observation: Observation) -> dict[str, float]:
    """Workload of the window by name, as people read it; only what was seen."""
    steps, first = observation.steps, observation.first_tokens
    open_requests, engine = observation.open_requests, observation.last_engine
    named = {
        "requests_started": float(observation.requests_started),
        "decoding": float(open_requests.decoding),
        "waiting": float(open_requests.waiting),
        "joined": float(len(first.at_ns)),
    }
    if len(steps.end_ns):
        named["batch"] = float((steps.decode_sequences + steps.joined).mean())
        named["context_tokens"] = float(np.nanmean(np.nan_to_num(steps.context_tokens)))
    if len(first.at_ns) and np.isfinite(first.prompt_tokens).any():
        named["prompt_tokens"] = float(np.nansum(first.prompt_tokens))
    if engine is not None:
        for name in ("running", "waiting", "kv_usage"):
            value = getattr(engine, name)
            if value is not None:
                named[f"engine_{name}"] = value
    return named
