"""What a simulated engine is: its cost of a step, its limits and where it listens."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

Profile = Literal["laptop", "a100"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Duration of one engine step, in ms.

    ``base + per_sequence * decoding + per_context_token * context + per_prefill_token * prompt``,
    times lognormal noise, plus a rare spike.
    """

    base_ms: Annotated[float, Gt(0)]
    per_sequence_ms: Annotated[float, Ge(0)]
    per_context_token_ms: Annotated[float, Ge(0)]
    per_prefill_token_ms: Annotated[float, Ge(0)]
    noise_sigma: Annotated[float, Ge(0)] = 0.1
    """Standard deviation of the log of the noise factor."""
    noise_memory: Annotated[float, Ge(0), Lt(1)] = 0.6
    """Correlation of the log noise of a step with that of the step before."""
    spike_share: Annotated[float, Ge(0), Le(1)] = 0.005
    """Share of steps that a natural spike (collector, scheduler, kernel) lengthens."""
    spike_ms: Annotated[float, Ge(0)] = 8.0
    """Mean of the exponentially distributed spike."""


LAPTOP_LIKE = Coefficients(
    base_ms=6.4,
    per_sequence_ms=0.15,
    per_context_token_ms=0.0006,
    per_prefill_token_ms=0.295,
)
"""A 28M-parameter model on one CPU core: about 9 ms a step, 0.3 ms a prompt token."""

A100_LIKE = Coefficients(
    base_ms=44.13,
    per_sequence_ms=0.198,
    per_context_token_ms=0.000314,
    per_prefill_token_ms=0.1009,
    noise_sigma=0.02,
    spike_ms=20.0,
)
"""Llama-2 70B on eight A100-80GB, fitted by :func:`.fit.fit` to the measurements published with
splitwise-sim (MIT licence, github.com/Mutinifni/splitwise-sim, ``perf_model.csv``)."""

PROFILES: dict[Profile, Coefficients] = {"laptop": LAPTOP_LIKE, "a100": A100_LIKE}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """A continuous-batching engine with chunked prefill and a prefix cache."""

    coefficients: Coefficients = LAPTOP_LIKE
    max_num_seqs: Annotated[int, Ge(1)] = 16
    """Sequences in the running batch."""
    max_batched_tokens: Annotated[int, Ge(1)] = 2048
    """Tokens computed in one step, decode and prefill chunks together."""
    max_model_len: Annotated[int, Ge(2)] = 16_384
    """Prompt and generated tokens of one request."""
    kv_tokens: Annotated[int, Ge(2)] = 131_072
    """Tokens the KV cache holds; a sequence is preempted and recomputed when it is full."""
    block_tokens: Annotated[int, Ge(1)] = 128
    """Tokens of a block of the prefix cache."""
    ingress_ms: Annotated[float, Ge(0)] = 2.0
    """From the first byte of a request until the scheduler sees it; virtual time only (in real
    time the server's own work takes its place)."""

    def __post_init__(self) -> None:
        if self.max_model_len > self.kv_tokens:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit kv_tokens {self.kv_tokens}; "
                "raise kv_tokens or lower max_model_len"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """A simulated OpenAI-compatible server in real time."""

    host: str = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    """0 takes a free one; the ready line tells which."""
    model: str = "small"
    """The one model it serves."""
    seed: int = 0
    """Of the noise in step times."""
    engine: EngineConfig = field(default_factory=EngineConfig)
