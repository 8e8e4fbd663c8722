"""From a statistic to an alarm: the tail of its own history, then a sequential test.

The tail above a high quantile ``u`` is a generalised Pareto distribution whatever the statistic
(Pickands; Balkema and de Haan), fitted by probability weighted moments (Hosking and Wallis 1987):
with ``a0`` the mean excess and ``a1`` the mean of excess times the share above it,
``shape = 2 - a0 / (a0 - 2 a1)`` and ``scale = 2 a0 a1 / (a0 - 2 a1)``.
"""

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

TAIL_SHARE = 0.08
SHAPE_RANGE = (0.0, 0.25)
PRIOR_WEIGHT = 40
PRIOR_BLOCKS = 5
NORMAL_90 = 1.645
"""Within so many standard deviations lie 90 % of a normal distribution."""
REFRESH = 16
TRUSTED_DECADES = 2.5


class TailCalibrator:
    """Surprise of a statistic: -log10 of the share of its history that is as large.

    Remembers ``size`` values. With a short history the answer leans on a normal distribution of
    standard deviation ``prior_spread`` around their median. ``least_scale`` is the least excess
    that matters, in units of the statistic: a history without any spread doesn't make a trifle a
    surprise.
    """

    def __init__(self, size: int, *, prior_spread: float, least_scale: float) -> None:
        self._ring = np.zeros(size)
        self._count = 0
        self._prior_spread = prior_spread
        self._least_scale = least_scale
        self._stale = REFRESH
        self._sorted: Floats = np.empty(0)
        self._knee, self._scale, self._shape = 0.0, prior_spread, 0.0

    def __len__(self) -> int:
        return min(self._count, len(self._ring))

    @property
    def center(self) -> float:
        """Median of the history; 0 without one."""
        self._refresh()
        return float(self._sorted[len(self._sorted) // 2]) if len(self._sorted) else 0.0

    def learn(self, value: float) -> None:
        """Add one value of a window that was not a fault."""
        self._ring[self._count % len(self._ring)] = value
        self._count += 1
        self._stale += 1

    def exceeds(self, value: float) -> bool:
        """Whether the value is in the tail of the history, the rarest 8 %; quick."""
        self._refresh()
        return value > self._knee

    def surprise(self, value: float) -> float:
        """-log10 of the tail probability of ``value``, at least 0.

        No more than 2.5 beyond what the history itself could have shown: a tail that is fitted to
        few values knows little about far ones.
        """
        self._refresh()
        held = len(self._sorted)
        center = self._sorted[held // 2] if held else 0.0
        prior = 0.5 * math.erfc((value - center) / self._prior_spread / math.sqrt(2))
        tail = (held * self._tail(value) + PRIOR_WEIGHT * prior) / (held + PRIOR_WEIGHT)
        limit = math.log10(held + PRIOR_WEIGHT) + TRUSTED_DECADES
        return min(limit, -math.log10(max(tail, 1e-30)))

    def wander(self, *, block: int, prior: float) -> float:
        """Standard deviation of the means of ``block`` values in a row around the median.

        That is what a process that isn't quite steady does by itself; ``prior`` stands for it
        while the history is short. From the quantile that nine of ten stay within, so that one
        stretch of trouble doesn't count.
        """
        values = self.values()
        whole = len(values) // block
        spread = 0.0
        if whole:
            means = values[: whole * block].reshape(whole, block).mean(axis=1) - self.center
            spread = float(np.quantile(np.abs(means), 0.9)) / NORMAL_90
        return math.sqrt((whole * spread**2 + PRIOR_BLOCKS * prior**2) / (whole + PRIOR_BLOCKS))

    def values(self) -> Floats:
        """History, oldest first."""
        if self._count <= len(self._ring):
            return self._ring[: self._count].copy()
        return np.roll(self._ring, -(self._count % len(self._ring)))

    def restore(self, values: Floats) -> None:
        """Take up the history of :meth:`values`; the newest count where they are too many."""
        kept = values[-len(self._ring) :]
        self._ring[: len(kept)] = kept
        self._count = len(kept)
        self._stale = REFRESH

    def _tail(self, value: float) -> float:
        held = len(self._sorted)
        if held == 0:
            return 0.0
        if value <= self._knee:
            return 1.0 - float(np.searchsorted(self._sorted, value)) / held
        excess = (value - self._knee) / self._scale
        if self._shape < 1e-6:
            return TAIL_SHARE * math.exp(-min(excess, 600.0))
        return TAIL_SHARE * float((1.0 + self._shape * excess) ** (-1.0 / self._shape))

    def _refresh(self) -> None:
        if self._stale < REFRESH and len(self._sorted):
            return
        self._stale = 0
        self._sorted = np.sort(self._ring[: len(self)])
        if not len(self._sorted):
            return
        split = math.floor(len(self._sorted) * (1 - TAIL_SHARE))
        self._knee = float(self._sorted[split])
        self._scale, self._shape = pareto_tail(self._sorted[split + 1 :] - self._knee)
        self._scale = max(self._scale, self._least_scale)


def pareto_tail(excess: Floats) -> tuple[float, float]:
    """Scale and shape of the generalised Pareto distribution of sorted excesses (n,), n >= 0.

    The shape is kept within [0, 0.25]; fewer than ten excesses are taken as exponential, none as
    of scale 0.
    """
    count = len(excess)
    if count == 0:
        return 0.0, 0.0
    first = float(excess.mean())
    if count < 10:
        return first, 0.0
    above = (count - 0.65 - np.arange(count)) / count
    second = float((excess * above).mean())
    spread = first - 2 * second
    if spread <= 0 or first <= 0:
        return first, 0.0
    shape = float(np.clip(2 - first / spread, *SHAPE_RANGE))
    return first * (1 - shape), shape


class SequentialTest:
    """Cumulative sum of surprise beyond what chance brings (Page 1954).

    Chance gives a calibrated surprise ``s`` (in decades) that is exponential of mean
    ``1 / ln 10``. The sum ``S = max(0, S + s - DRIFT)`` then crosses ``h`` about
    ``10 ** (-root * h)`` times a window, where ``root`` solves
    ``10 ** (-root * DRIFT) = 1 - root``; so ``h`` follows from the rate of false alarms. One
    window alone counts for at most ``limit`` times ``h``.
    """

    DRIFT = 1.0

    def __init__(self, windows_per_hour: float, false_alarms_per_hour: float) -> None:
        root = 0.9
        for _ in range(50):
            root = 1.0 - 10.0 ** (-root * self.DRIFT)
        self.threshold = math.log10(windows_per_hour / false_alarms_per_hour) / root
        self.clear_threshold = self.threshold / 3
        self.score = 0.0

    def update(self, surprise: float, *, limit: float = 0.7) -> float:
        """Add one window's surprise; returns the score."""
        step = min(surprise, limit * self.threshold) - self.DRIFT
        self.score = min(max(0.0, self.score + step), 1.4 * self.threshold)
        return self.score

    def reset(self) -> None:
        """Begin anew."""
        self.score = 0.0
