"""What an engine counts about itself: cumulative histograms, from which both its /metrics page and
simulated scrapes are made."""

from bisect import bisect_left
from dataclasses import dataclass, field

from latencyprism.simulator.engine import Completed, Served

# Bounds of vLLM 0.32, seconds and tokens.
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
           10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
            10.0, 20.0, 40.0, 80.0)  # fmt: skip
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
              120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_LENGTH = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0)
_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0,
                16384.0)  # fmt: skip

NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class Histogram:
    """Counts by bucket, not cumulated; the last bucket has no upper bound."""

    bounds: tuple[float, ...]
    sum: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Take one value; a bound belongs to the bucket below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> "Histogram":
        """The histogram as it is now."""
        return Histogram(self.bounds, self.sum, list(self.counts))


BOUNDS = {
    "ttft": _TTFT_S,
    "itl": _TOKEN_S,
    "tpot": _TOKEN_S,
    "e2e": _REQUEST_S,
    "queue": _REQUEST_S,
    "prefill": _REQUEST_S,
    "decode": _REQUEST_S,
    "inference": _REQUEST_S,
    "iteration_tokens": _STEP_TOKENS,
    "prompt_tokens": _LENGTH,
    "generation_tokens": _LENGTH,
}
"""Bounds by the names of HistogramDelta.stage."""


class EngineStats:
    """Histograms of one engine by name; times in seconds."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}

    def take(self, completed: Completed) -> None:
        """Count what one step brought; a request's own times are counted when it ends, its TTFT
        when it is known."""
        histograms = self.histograms
        histograms["iteration_tokens"].observe(
            completed.step.prefill_tokens + completed.step.decode_sequences
        )
        for first_ms in completed.first_tokens_ms:
            histograms["ttft"].observe(first_ms / 1e3)
        for gap_ms in completed.gaps_ms:
            histograms["itl"].observe(gap_ms / 1e3)
        for served in completed.served:
            self._serve(served)

    def _serve(self, served: Served) -> None:
        request = served.request
        decode_s = (served.finished_ns - served.first_token_ns) / NS_PER_S
        for name, value in (
            ("e2e", (served.finished_ns - request.arrival_ns) / NS_PER_S),
            ("queue", (served.scheduled_ns - request.arrival_ns) / NS_PER_S),
            ("prefill", (served.first_token_ns - served.scheduled_ns) / NS_PER_S),
            ("decode", decode_s),
            ("inference", (served.finished_ns - served.scheduled_ns) / NS_PER_S),
            ("tpot", decode_s / max(1, request.output_tokens - 1)),
            ("prompt_tokens", request.prompt_tokens),
            ("generation_tokens", request.output_tokens),
        ):
            self.histograms[name].observe(value)
