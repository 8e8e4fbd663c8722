"""One stage of one instance: expectation, calibrated surprise, sequential test, and trend."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from latencyprism.streams.detection.config import DetectionConfig
from latencyprism.streams.detection.mixture import ConditionalMixture
from latencyprism.streams.detection.reference import Reference
from latencyprism.streams.detection.threshold import SequentialTest, TailCalibrator
from latencyprism.streams.detection.workload import FEATURES, Rows

Floats = npt.NDArray[np.float64]

ROW_CORRELATION = 0.3
"""Of the normal scores of one window: many steps are not so many independent witnesses."""
SCORE_LIMIT = 5.0
SHORT_WINDOWS, DEMAND_WINDOWS, LONG_WINDOWS = 4, 12, 240
QUIET = 0.8
"""Surprise below which a window looks normal again."""
RECOVERY_NS = 1_500_000_000
IDLE_NS = 3_000_000_000
OVERWHELMING = 3.0
"""Support from which one window alone may be enough."""
MEMORY = 0.92
"""Share of a window's weight in the effect that is left a window later: half after two seconds."""
WANDER_WINDOWS, WANDER_REFRESH = 8, 32
PRIOR_WANDER = {"ingress": 0.35, "prefill": 0.35, "decode": 0.12, "egress": 0.15, "flow": 0.5}
SLOWER = 1.0
"""Surprise from which a window counts as slower than usual at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """How one stage of one window stands against its expectation; None is not known."""

    stage: str
    observations: int
    observed_ms: float
    expected_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    surprise: float | None = None
    score: float | None = None
    novel: str | None = None
    """Feature that was never seen like this, when that holds for most of the window."""
    statistics: tuple[float, float] | None = None
    """Shift and ratio, to be learned."""


def both(one: float, other: float) -> float:
    """Surprise of two independent surprises together, never less than the first (Fisher).

    The product of two uniform shares is as small as ``p`` with probability ``p (1 - ln p)``.
    """
    total = one + other
    return max(one, total - math.log10(1 + math.log(10) * total))


class Demand:
    """Short and long memory of what clients ask for, whatever becomes of it.

    Unlike batch or queue it doesn't grow because the engine slows.
    """

    def __init__(self) -> None:
        self._short = np.zeros(2)
        self._long = np.zeros(2)
        self._count = 0

    def follow(self, requests: int, prompt_tokens: float) -> None:
        """Take in the requests that came in a window, and the prompt tokens they brought."""
        here = np.array([requests, prompt_tokens])
        self._count += 1
        self._short += (here - self._short) / min(self._count, DEMAND_WINDOWS)
        self._long += (here - self._long) / min(self._count, LONG_WINDOWS)

    def growth(self) -> float:
        """How many times the usual demand the present one is; at least 1."""
        usual = np.maximum(self._long, 1e-9)
        return float(np.max(self._short / usual, initial=1.0)) if self._count else 1.0


class Trend:
    """Short and long memory of a stage's work and latency, in windows; logarithms."""

    def __init__(self, width: int) -> None:
        self._short = np.zeros(width)
        self._long = np.zeros(width)
        self._count = 0

    def follow(self, rows: Rows) -> None:
        """Take in the means of a window."""
        here = np.append(rows.features.sum(axis=0), rows.log_latency.sum()) / len(rows)
        self._count += 1
        self._short += (here - self._short) / min(self._count, SHORT_WINDOWS)
        self._long += (here - self._long) / min(self._count, LONG_WINDOWS)

    def usual_ms(self) -> float:
        """Usual latency, ms."""
        return math.exp(float(self._long[-1]))

    def growth(self) -> tuple[float, float, int]:
        """Growth of the latency, growth of the work that grew most, and its feature's index."""
        change = self._short - self._long
        most = int(np.argmax(change[:-1]))
        return float(change[-1]), float(change[most]), most


class StageJudge:
    """Expectation and sequential test of one stage."""

    def __init__(self, stage: str, config: DetectionConfig, generator: np.random.Generator) -> None:
        self.stage = stage
        self.model: ConditionalMixture | None = None
        self.reference = Reference(
            len(FEATURES[stage]) + 1,
            reservoir=config.reservoir_rows,
            recent=config.recent_rows,
            generator=generator,
        )
        size = config.history_windows
        self.shift = TailCalibrator(size, prior_spread=1.2, least_scale=0.1)
        self.ratio = TailCalibrator(size, prior_spread=0.5, least_scale=0.03)
        self.test = SequentialTest(3600 / config.window_seconds, config.false_alarms_per_hour)
        self._wander, self._wander_age = PRIOR_WANDER[stage], WANDER_REFRESH
        self.trend = Trend(len(FEATURES[stage]) + 1)
        self.suspect_since_ns: int | None = None
        """End of the first window of the run that the test is summing up; None without one."""
        self.run_began_ns = 0
        """When the oldest work of that first window began."""
        self.last: StageView | None = None
        """Newest view that had an expectation."""
        self._observed = self._expected = 0.0
        self._rows = 0.0
        self._seen_ns = self._loud_ns = 0

    @property
    def effect(self) -> float:
        """Relative slowdown over the last seconds of a run of suspicious windows; 0 without one."""
        return self._observed / self._expected - 1 if self._expected else 0.0

    @property
    def usual_wander(self) -> float:
        """Standard deviation of the logarithm of observed over expected, over two seconds."""
        if self._wander_age >= WANDER_REFRESH:
            self._wander = self.ratio.wander(block=WANDER_WINDOWS, prior=PRIOR_WANDER[self.stage])
            self._wander_age = 0
        return self._wander

    @property
    def excess_ms(self) -> float:
        """Mean time beyond the expected, the same way; ms an observation."""
        return (self._observed - self._expected) / max(1.0, self._rows)

    def view(self, rows: Rows, end_ns: int, support: float) -> StageView:
        """Compare a window's rows with the expectation and move the sequential test.

        ``support`` is the surprise of the evidence for a fault that can slow this stage.
        """
        self.trend.follow(rows)
        view = self._view(rows, support)
        self._seen_ns = end_ns
        if view.surprise is not None:
            self.last = view
            if view.surprise >= QUIET:
                self._loud_ns = end_ns
        if self.test.score == 0.0:
            self.calm()
        elif self.suspect_since_ns is None:
            self.suspect_since_ns = end_ns
            longest_ms = math.exp(float(rows.log_latency.max()))
            self.run_began_ns = end_ns - int(longest_ms * 1e6)
        return view

    def recovered(self, now_ns: int) -> bool:
        """Whether a stage that was judged faulty looks normal again, or sees no work."""
        if self.test.score < self.test.clear_threshold or now_ns - self._seen_ns > IDLE_NS:
            return True
        return self._seen_ns > self._loud_ns and now_ns - self._loud_ns >= RECOVERY_NS

    def _view(self, rows: Rows, support: float) -> StageView:
        observed_ms = math.exp(float(rows.log_latency.sum()) / len(rows))
        if self.model is None:
            return StageView(stage=self.stage, observations=len(rows), observed_ms=observed_ms)
        conditional = self.model.condition(rows.features)
        known = conditional.log_density >= self.model.density_floor
        if 2 * known.sum() < len(rows):
            strangest = int(np.argmin(conditional.log_density))
            feature = self.model.strangest(rows.features[strangest])
            return StageView(
                stage=self.stage,
                observations=len(rows),
                observed_ms=observed_ms,
                novel=FEATURES[self.stage][feature],
            )
        scores = conditional.normal_score(rows.log_latency)[known]
        count = len(scores)
        shift = float(np.minimum(np.maximum(scores, -SCORE_LIMIT), SCORE_LIMIT).sum()) / math.sqrt(
            count + count * (count - 1) * ROW_CORRELATION
        )
        observed = float(np.exp(rows.log_latency[known]).sum())
        expected = float(conditional.expected()[known].sum())
        ratio = math.log(observed / expected)
        either = max(self.shift.surprise(shift), self.ratio.surprise(ratio))
        surprise = max(0.0, either - math.log10(2))
        if surprise >= SLOWER and support > 0:
            limit = 1.2 if support >= OVERWHELMING else 0.7
            score = self.test.update(both(surprise, support), limit=limit)
        else:
            score = self.test.update(surprise)
        self._rows = MEMORY * self._rows + count
        self._observed = MEMORY * self._observed + observed
        self._expected = MEMORY * self._expected + expected * math.exp(self.ratio.center)
        low, middle, high = (
            math.exp(float(row.sum()) / len(rows)) for row in conditional.interval()
        )
        return StageView(
            stage=self.stage,
            observations=len(rows),
            observed_ms=observed_ms,
            expected_ms=middle,
            low_ms=low,
            high_ms=high,
            surprise=surprise,
            score=score,
            statistics=(shift, ratio),
        )

    def learn(self, rows: Rows, statistics: tuple[float, float] | None) -> None:
        """Learn from a window that was no fault."""
        self.reference.learn(np.column_stack((rows.features, rows.log_latency)))
        if statistics is not None:
            self._wander_age += 1
            self.shift.learn(statistics[0])
            self.ratio.learn(statistics[1])

    def calm(self) -> None:
        """Forget the run of suspicious windows: it is over, or was explained."""
        self.test.reset()
        self.suspect_since_ns = None
        self._observed = self._expected = 0.0
        self._rows = 0.0
