"""The conditional mixture against closed forms, its own samples, and what must not change it."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.streams.detection.mixture import (
    MINIMUM_SPREAD,
    ConditionalMixture,
    fit_mixture,
)

Floats = npt.NDArray[np.float64]

MEAN = np.array([1.0, -2.0, 3.0])
COVARIANCE = np.array([[2.0, 0.3, 0.8], [0.3, 1.0, -0.4], [0.8, -0.4, 1.5]])


def one_gaussian(floor: float = -np.inf) -> ConditionalMixture:
    return ConditionalMixture(np.ones(1), MEAN[None], COVARIANCE[None], floor)


def two_modes() -> ConditionalMixture:
    """Latency e^1 or e^3, whatever the feature, with equal odds."""
    means = np.array([[0.0, 1.0], [0.0, 3.0]])
    return ConditionalMixture(np.array([0.5, 0.5]), means, np.array([np.eye(2) * 0.01] * 2), -9.0)


def closed_form(features: Floats) -> tuple[Floats, float]:
    slope = np.linalg.solve(COVARIANCE[:2, :2], COVARIANCE[:2, 2])
    variance = COVARIANCE[2, 2] - COVARIANCE[2, :2] @ slope
    return MEAN[2] + (features - MEAN[:2]) @ slope, float(np.sqrt(variance))


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=2))
def test_conditional_of_one_gaussian_is_the_closed_form(workload: list[float]) -> None:
    features = np.array([workload])
    conditional = one_gaussian().condition(features)
    mean, spread = closed_form(features)
    np.testing.assert_allclose(conditional.mean(), mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(conditional.spreads, [spread])
    np.testing.assert_allclose(conditional.quantile(0.5), mean, atol=1e-5)
    np.testing.assert_allclose(conditional.quantile(0.9), mean + 1.2815515655 * spread, atol=1e-5)
    np.testing.assert_allclose(conditional.expected(), np.exp(mean + spread**2 / 2))
    low, middle, high = conditional.interval(0.8)
    np.testing.assert_allclose(middle, mean, atol=1e-9)
    np.testing.assert_allclose(low, conditional.quantile(0.1), atol=1e-5)
    np.testing.assert_allclose(high, conditional.quantile(0.9), atol=1e-5)


def test_density_of_the_workload_is_the_marginal_one() -> None:
    offset = np.array([0.5, 1.0]) - MEAN[:2]
    within = COVARIANCE[:2, :2]
    expected = -0.5 * (
        offset @ np.linalg.solve(within, offset)
        + np.log(np.linalg.det(within))
        + 2 * np.log(2 * np.pi)
    )
    found = one_gaussian().condition(np.array([[0.5, 1.0]])).log_density
    np.testing.assert_allclose(found, [expected])


def test_two_modes_are_both_natural_and_what_lies_between_and_beyond_is_told() -> None:
    conditional = two_modes().condition(np.zeros((4, 1)))
    latency = np.array([1.0, 2.0, 3.0, 5.0])
    np.testing.assert_allclose(conditional.tail(latency), [0.75, 0.5, 0.25, 0.0], atol=1e-12)
    np.testing.assert_allclose(conditional.mean(), [2.0] * 4)
    scores = conditional.normal_score(latency)
    assert scores[0] == pytest.approx(-scores[2])
    assert scores[1] == pytest.approx(0.0, abs=1e-12)
    assert scores[3] == 8.0
    assert conditional.log_tail(latency)[3] < -190


def test_log_tail_agrees_with_the_tail_where_that_is_not_yet_zero() -> None:
    conditional = one_gaussian().condition(np.tile(MEAN[:2], (5, 1)))
    latency = MEAN[2] + np.array([-3.0, 0.0, 1.0, 4.0, 7.0])
    np.testing.assert_allclose(
        np.exp(conditional.log_tail(latency)), conditional.tail(latency), rtol=1e-9
    )


@given(st.floats(0.02, 0.98))
def test_quantile_and_tail_are_inverse(probability: float) -> None:
    conditional = two_modes().condition(np.array([[0.0], [0.3]]))
    there = conditional.quantile(probability)
    np.testing.assert_allclose(conditional.tail(there), 1 - probability, atol=1e-3)


def test_order_of_components_does_not_matter() -> None:
    rng = np.random.default_rng(1)
    means = rng.normal(size=(3, 3))
    roots = rng.normal(size=(3, 3, 3))
    covariances = roots @ roots.transpose(0, 2, 1) + np.eye(3)
    weights = np.array([0.2, 0.3, 0.5])
    features, latency = rng.normal(size=(20, 2)), rng.normal(size=20)
    turned = [2, 0, 1]
    there = ConditionalMixture(weights, means, covariances, 0.0).condition(features)
    here = ConditionalMixture(weights[turned], means[turned], covariances[turned], 0.0).condition(
        features
    )
    np.testing.assert_allclose(here.tail(latency), there.tail(latency))
    np.testing.assert_allclose(here.log_density, there.log_density)


def test_rows_are_judged_each_by_itself() -> None:
    features = np.random.default_rng(2).normal(size=(7, 2))
    together = one_gaussian().condition(features).mean()
    alone = [one_gaussian().condition(row[None]).mean()[0] for row in features]
    np.testing.assert_allclose(together, alone)


def test_a_component_without_spread_keeps_the_least_one() -> None:
    covariance = np.array([[[1.0, 1.0], [1.0, 1.0]]])
    mixture = ConditionalMixture(np.ones(1), np.zeros((1, 2)), covariance, 0.0)
    assert mixture.condition(np.zeros((1, 1))).spreads[0] == MINIMUM_SPREAD


@pytest.mark.parametrize(
    ("weights", "means", "covariances"),
    [
        (np.ones(2), np.zeros((1, 2)), np.eye(2)[None]),
        (np.ones(1), np.zeros((1, 2)), np.eye(3)[None]),
        (np.ones(1), np.zeros((1, 1)), np.eye(1)[None]),
        (np.ones(1), np.zeros((1, 2)), -np.eye(2)[None]),
    ],
)
def test_arrays_that_make_no_mixture_are_refused(
    weights: Floats, means: Floats, covariances: Floats
) -> None:
    with pytest.raises(ValueError, match="mixture"):
        ConditionalMixture(weights, means, covariances, 0.0)


def engine_rows(count: int, seed: int = 3) -> tuple[Floats, Floats]:
    """Steps of 5 ms and 0.4 ms a sequence, of which one in five also takes in 200 tokens."""
    rng = np.random.default_rng(seed)
    batch = rng.integers(1, 16, count)
    joins = rng.random(count) < 0.2
    latency = (5 + 0.4 * batch + np.where(joins, 30, 0)) * np.exp(rng.normal(0, 0.05, count))
    features = np.column_stack((np.log1p(batch), np.where(joins, np.log1p(200), 0.0)))
    return features, np.log(latency)


def test_a_fit_predicts_an_engine_and_its_quantiles_are_calibrated() -> None:
    mixture = fit_mixture(*engine_rows(1_500))
    features, latency = engine_rows(4_000, seed=4)
    conditional = mixture.condition(features)
    assert np.median(np.abs(conditional.mean() - latency)) < 0.06
    tail = conditional.tail(latency)
    for share in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert np.mean(tail < share) == pytest.approx(share, abs=0.08)
    assert abs(np.mean(conditional.normal_score(latency))) < 0.15


def test_scaling_all_latencies_shifts_the_expectation_and_nothing_else() -> None:
    features, latency = engine_rows(600)
    plain = fit_mixture(features, latency, components=3).condition(features[:50])
    tenfold = fit_mixture(features, latency + np.log(10), components=3).condition(features[:50])
    np.testing.assert_allclose(tenfold.mean() - plain.mean(), np.log(10), atol=1e-6)
    np.testing.assert_allclose(tenfold.spreads, plain.spreads, atol=1e-6)


def test_trimming_keeps_a_past_fault_from_widening_the_expectation() -> None:
    features, latency = engine_rows(1_000)
    poisoned = latency.copy()
    poisoned[::60] += 3.0
    trimmed = fit_mixture(features, poisoned, components=3)
    fault = trimmed.condition(features).tail(latency + 0.6)
    assert np.median(fault) < 1e-3


def test_a_workload_that_was_never_seen_is_below_the_floor_and_is_named() -> None:
    mixture = fit_mixture(*engine_rows(1_500))
    seen, new = np.log1p([[8, 0], [3, 200]]), np.log1p([[8, 20_000]])
    assert (mixture.condition(seen).log_density > mixture.density_floor).all()
    assert mixture.condition(new).log_density[0] < mixture.density_floor
    assert mixture.strangest(new[0]) == 1


def test_too_few_rows_are_refused_with_the_number_wanted() -> None:
    features, latency = engine_rows(11)
    with pytest.raises(ValueError, match="want 12 or more"):
        fit_mixture(features, latency)
