"""Gaussian mixture over (workload, log latency), conditioned on the workload in closed form.

For a joint Gaussian over ``(x, y)`` the conditional density of ``y`` is Gaussian with mean
``m + S_yx S_xx^-1 (x - m_x)`` and variance ``s_yy - S_yx S_xx^-1 S_xy``; a mixture conditions to
a mixture of these, weighted by how likely each component is to have made ``x`` (Bishop, Pattern
Recognition and Machine Learning, eqs. 2.81, 2.82 and 9.8).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

Floats = npt.NDArray[np.float64]


def _row_sums(table: Floats) -> Floats:
    return np.asarray(table.sum(axis=1), np.float64)


LOG_2PI = float(np.log(2 * np.pi))
TRIM_ROUNDS = 2
MANY_ROWS = 1_000
MINIMUM_SPREAD = 0.02
"""Least standard deviation of a component's conditional log latency: 2 %."""
RIDGE = 1e-2
"""Added to the standardised covariances: counts are discrete, and would make them singular."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditional:
    """Density of the log latency for each of ``n`` workloads: mixtures of ``k`` normals."""

    weights: Floats
    """(n, k), rows sum to 1."""
    means: Floats
    """(n, k)."""
    spreads: Floats
    """(k,), standard deviations."""
    log_density: Floats
    """(n,), log density of the workload itself."""

    def mean(self) -> Floats:
        """Expected log latency, (n,)."""
        return _row_sums(self.weights * self.means)

    def expected(self) -> Floats:
        """Expected latency, (n,): mean of the log-normal mixture, unit of the latency."""
        return _row_sums(self.weights * np.exp(self.means + self.spreads**2 / 2))

    def tail(self, log_latency: Floats) -> Floats:
        """Probability of a latency at least as long, (n,)."""
        z = (log_latency[:, None] - self.means) / self.spreads
        return _row_sums(self.weights * special.ndtr(-z))

    def log_tail(self, log_latency: Floats) -> Floats:
        """Natural logarithm of :meth:`tail`, exact where the tail itself underflows."""
        z = (log_latency[:, None] - self.means) / self.spreads
        with np.errstate(divide="ignore"):
            parts: Floats = np.log(self.weights) + special.log_ndtr(-z)
        return np.asarray(np.logaddexp.reduce(parts, axis=1), np.float64)

    def normal_score(self, log_latency: Floats) -> Floats:
        """Standard normal value with the same tail probability, (n,), within ±8.

        Standard normal when latencies follow the mixture; positive is slower.
        """
        upper = self.tail(log_latency)
        z = (log_latency[:, None] - self.means) / self.spreads
        lower = _row_sums(self.weights * special.ndtr(z))
        score = np.where(upper < lower, -special.ndtri(upper), special.ndtri(lower))
        return np.asarray(np.clip(score, -8.0, 8.0), np.float64)

    def quantile(self, probability: float) -> Floats:
        """Log latency that ``probability`` of the density lies below, (n,), to 1e-6."""
        reach = special.ndtri(probability) * self.spreads
        low = (self.means + reach).min(axis=1)
        high = (self.means + reach).max(axis=1)
        while np.max(high - low, initial=0.0) > 1e-6:
            middle = (low + high) / 2
            below = 1.0 - self.tail(middle) < probability
            low = np.where(below, middle, low)
            high = np.where(below, high, middle)
        return np.asarray((low + high) / 2, np.float64)

    def interval(self, probability: float = 0.9) -> tuple[Floats, Floats, Floats]:
        """Low end, mean and high end of log latency from mean and variance, each (n,).

        Quicker than two quantiles, and near them unless components are far apart.
        """
        center = self.mean()
        square = _row_sums(self.weights * (self.means**2 + self.spreads**2))
        reach = special.ndtri((1 + probability) / 2) * np.sqrt(square - center**2)
        return center - reach, center, center + reach


class ConditionalMixture:
    """A fitted mixture of ``k`` components over ``d`` features and one log latency, which is last.

    Immutable. ``weights`` (k,), ``means`` (k, d + 1), ``covariances`` (k, d + 1, d + 1);
    ``density_floor`` is the log density below which a workload counts as never seen.
    """

    def __init__(
        self, weights: Floats, means: Floats, covariances: Floats, density_floor: float
    ) -> None:
        count, width = means.shape
        if weights.shape != (count,) or covariances.shape != (count, width, width) or width < 2:
            raise ValueError(
                f"mixture of weights {weights.shape}, means {means.shape}, covariances "
                f"{covariances.shape}: want (k,), (k, d + 1), (k, d + 1, d + 1) with d >= 1"
            )
        self.weights = weights
        self.means = means
        self.covariances = covariances
        self.density_floor = density_floor
        within = covariances[:, :-1, :-1]
        cross = covariances[:, :-1, -1]
        try:
            factor = np.linalg.cholesky(within)
        except np.linalg.LinAlgError as error:
            raise ValueError("mixture with a covariance that is not positive definite") from error
        self._whiten = np.linalg.inv(factor)
        self._slopes = np.linalg.solve(within, cross[:, :, None])[:, :, 0]
        variance = covariances[:, -1, -1] - np.einsum("kd,kd->k", cross, self._slopes)
        self._spreads = np.sqrt(np.maximum(variance, MINIMUM_SPREAD**2))
        log_determinant = np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(axis=1)
        with np.errstate(divide="ignore"):
            self._log_scale = np.log(weights) - log_determinant - (width - 1) * LOG_2PI / 2

    @property
    def features(self) -> int:
        """Number of features."""
        return int(self.means.shape[1]) - 1

    def condition(self, features: Floats) -> Conditional:
        """Condition on workloads (n, d)."""
        offset = features[:, None, :] - self.means[None, :, :-1]
        white = np.matmul(self._whiten, offset[..., None])[..., 0]
        log_parts = self._log_scale - (white * white).sum(axis=2) / 2
        log_density = np.asarray(np.logaddexp.reduce(log_parts, axis=1), np.float64)
        return Conditional(
            weights=np.exp(log_parts - log_density[:, None]),
            means=self.means[:, -1] + (offset * self._slopes).sum(axis=2),
            spreads=self._spreads,
            log_density=log_density,
        )

    def strangest(self, workload: Floats) -> int:
        """Index of the feature of one workload (d,) that is farthest from all components."""
        deviation = np.sqrt(np.diagonal(self.covariances, axis1=1, axis2=2)[:, :-1])
        return int(np.argmin(-np.min(np.abs(workload - self.means[:, :-1]) / deviation, axis=0)))


def fit_mixture(
    features: Floats,
    log_latency: Floats,
    *,
    components: int = 6,
    trim: float = 0.02,
    density_quantile: float = 0.002,
    seed: int = 0,
) -> ConditionalMixture:
    """Fit a full-covariance mixture to workloads (n, d) and log latencies (n,).

    The number of components, at most ``components``, is the one of lowest BIC. After each of two
    rounds the share ``trim`` with the least likely latencies given their workload is left out of
    the next, so that the natural tail and a past fault don't widen the expectation. Takes
    seconds of CPU; never call it on an event loop. Raises ValueError when there are too few rows.
    """
    count, width = features.shape
    least = 4 * (width + 1)
    if count < least:
        raise ValueError(f"{count} rows are too few to fit {width} features: want {least} or more")
    kept = np.ones(count, bool)
    mixture = _fit_round(features, log_latency, components=components, seed=seed)
    for _ in range(TRIM_ROUNDS):
        tail = mixture.condition(features).log_tail(log_latency)
        kept = tail >= np.quantile(tail, trim)
        best = len(mixture.weights)
        mixture = _fit_round(
            features[kept], log_latency[kept], components=best, seed=seed, search=False
        )
    density = mixture.condition(features[kept]).log_density
    rarest = float(np.quantile(density, density_quantile))
    # Many rows tell how far the density of the same work may fall, few don't.
    margin = (float(np.median(density)) - rarest) * min(1.0, count / MANY_ROWS)
    floor = rarest - margin
    return ConditionalMixture(mixture.weights, mixture.means, mixture.covariances, floor)


def _fit_round(
    features: Floats, log_latency: Floats, *, components: int, seed: int, search: bool = True
) -> ConditionalMixture:
    """One fit; ``search`` tries fewer components too, until BIC has risen twice."""
    from sklearn.mixture import GaussianMixture
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    joint = np.column_stack((features, log_latency))
    center = joint.mean(axis=0)
    scale = np.maximum(joint.std(axis=0), 1e-3)
    standard = (joint - center) / scale
    best, best_bic, rises = None, np.inf, 0
    for count in range(1 if search else components, components + 1):
        # From k-means++ seeds: a whole k-means warns of duplicate rows, which are natural here.
        model = GaussianMixture(
            count,
            reg_covar=RIDGE,
            init_params="k-means++",
            random_state=seed,
            max_iter=500,
            tol=1e-2,
        )
        with threadpool_limits(1):
            model.fit(standard)
        bic = model.bic(standard)
        if bic < best_bic:
            best, best_bic, rises = model, bic, 0
        else:
            rises += 1
            if rises == 2:
                break
    assert best is not None
    covariances = best.covariances_.copy()
    # The ridge is for the features' sake; on the latency it would only widen the expectation.
    covariances[:, -1, -1] -= RIDGE
    return ConditionalMixture(
        best.weights_,
        best.means_ * scale + center,
        covariances * np.outer(scale, scale),
        -np.inf,
    )
