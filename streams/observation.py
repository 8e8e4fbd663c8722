"""What one closed window of one instance saw, before anybody judged it.

Built by :mod:`latencyprism.streams.pipeline`, judged by :mod:`latencyprism.streams.detection`.
Arrays are parallel, one element a step or a request; NaN stands for what was not seen.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from latencyprism.schemas.records import EngineSample, HostSample, StageTime, XpuSample

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def _floats() -> Floats:
    return np.empty(0, np.float64)


def _ints() -> Ints:
    return np.empty(0, np.int64)


def _bools() -> Bools:
    return np.empty(0, np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Engine iterations known to be over in the window, oldest first; see :mod:`.steps`."""

    end_ns: Ints = field(default_factory=_ints)
    """When the first stream emitted; a little before the window where the others went on in it."""
    duration_ms: Floats = field(default_factory=_floats)
    """From the end of the step before (or from the arrival that woke an idle engine)."""
    decode_sequences: Ints = field(default_factory=_ints)
    """Streams that ran in the step, newly joined ones excluded; also those whose token came in an
    event together with a later one."""
    joined: Ints = field(default_factory=_ints)
    """Streams whose first token came out of the step."""
    left: Ints = field(default_factory=_ints)
    """Streams that ended with the step."""
    prefill_tokens: Floats = field(default_factory=_floats)
    """Prompt tokens of the joined streams, less cached ones; NaN when unknown."""
    context_tokens: Floats = field(default_factory=_floats)
    """Sum of prompt and generated tokens over the decoding streams; NaN when unknown."""
    waiting: Ints = field(default_factory=_ints)
    """Requests open at the end of the step that have no first token yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """Requests whose first token came in the window, oldest first."""

    at_ns: Ints = field(default_factory=_ints)
    ttft_ms: Floats = field(default_factory=_floats)
    """First event with content minus arrival of the first request byte."""
    headers_ms: Floats = field(default_factory=_floats)
    """First response byte minus arrival."""
    upload_ms: Floats = field(default_factory=_floats)
    """Last request byte minus first."""
    prompt_tokens: Floats = field(default_factory=_floats)
    tokens_estimated: Bools = field(default_factory=_bools)
    """Whether ``prompt_tokens`` is an estimate from the size of the request."""
    cached_tokens: Floats = field(default_factory=_floats)
    request_bytes: Floats = field(default_factory=_floats)
    decoding: Ints = field(default_factory=_ints)
    """Streams that were decoding when this one arrived."""
    ahead: Ints = field(default_factory=_ints)
    """Requests without a first token when this one arrived."""
    ahead_tokens: Floats = field(default_factory=_floats)
    """Their prompt tokens together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequests:
    """Requests still open at the end of the window; the raw material of stalls."""

    decoding: int = 0
    """Open requests that have a first token."""
    waiting: int = 0
    """Open requests without one."""
    waiting_ms: Floats = field(default_factory=_floats)
    """Age of each waiting request, ms."""
    waiting_tokens: Floats = field(default_factory=_floats)
    """Prompt tokens of each waiting request; NaN when unknown."""
    silence_ms: Floats = field(default_factory=_floats)
    """Time since the last chunk of each decoding request, ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One closed window of one instance."""

    instance: str
    model: str | None
    start_ns: int
    end_ns: int
    closed_ns: int
    """Event time (watermark) when it was closed; never before ``end_ns``."""
    requests_started: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    chunks: int = 0
    steps: Steps = field(default_factory=Steps)
    first_tokens: FirstTokens = field(default_factory=FirstTokens)
    open_requests: OpenRequests = field(default_factory=OpenRequests)
    chunk_gaps_ms: Floats = field(default_factory=_floats)
    """Gaps between consecutive content events of a stream that ended in the window, all streams."""
    stages: tuple[StageTime, ...] = ()
    """Stages of the requests that ended in the window."""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    remainder_ms: float | None = None
    engine: tuple[EngineSample, ...] = ()
    """Scrapes that ended in the window; mostly none or one."""
    last_engine: EngineSample | None = None
    """Newest fresh scrape up to the end of the window."""
    host: tuple[HostSample, ...] = ()
    xpu: tuple[XpuSample, ...] = ()
    late_samples: int = 0
    silent_sources: tuple[str, ...] = ()
