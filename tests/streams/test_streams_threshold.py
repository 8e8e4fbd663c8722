"""Tail calibration and the sequential test against known distributions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.streams.detection.threshold import (
    PRIOR_WEIGHT,
    TRUSTED_DECADES,
    SequentialTest,
    TailCalibrator,
    pareto_tail,
)


def calibrator(size: int = 2_000) -> TailCalibrator:
    return TailCalibrator(size, prior_spread=1.0, least_scale=0.01)


@pytest.mark.parametrize("shape", [0.0, 0.1, 0.2])
def test_moments_recover_a_generalised_pareto_tail(shape: float) -> None:
    uniform = (np.arange(20_000) + 0.5) / 20_000
    excess = 3.0 * (-np.log(1 - uniform) if shape == 0 else ((1 - uniform) ** -shape - 1) / shape)
    found_scale, found_shape = pareto_tail(excess)
    assert found_shape == pytest.approx(shape, abs=0.02)
    assert found_scale == pytest.approx(3.0, rel=0.05)


def test_few_excesses_are_exponential_and_none_are_nothing() -> None:
    assert pareto_tail(np.array([1.0, 3.0])) == (2.0, 0.0)
    assert pareto_tail(np.empty(0)) == (0.0, 0.0)


def test_surprise_is_calibrated_far_into_the_tail() -> None:
    rng = np.random.default_rng(5)
    subject = calibrator()
    for value in rng.normal(10, 2, 2_000):
        subject.learn(value)
    fresh = rng.normal(10, 2, 20_000)
    surprise = np.array([subject.surprise(value) for value in fresh])
    for decades in (0.5, 1.0, 2.0):
        assert np.mean(surprise >= decades) == pytest.approx(10**-decades, rel=0.35)
    assert 4 < subject.surprise(10 + 5 * 2) < 6


def test_surprise_grows_with_the_value_and_ends_somewhere() -> None:
    subject = calibrator()
    for value in np.random.default_rng(6).normal(0, 1, 500):
        subject.learn(value)
    found = [subject.surprise(value) for value in np.linspace(-3, 60, 200)]
    assert found == sorted(found)
    limit = math.log10(500 + PRIOR_WEIGHT) + TRUSTED_DECADES
    assert subject.surprise(1e9) == pytest.approx(limit)


def test_without_history_the_prior_speaks() -> None:
    subject = calibrator()
    assert subject.surprise(0.0) == pytest.approx(math.log10(2))
    assert subject.surprise(3.0) == pytest.approx(-math.log10(0.00135), abs=0.01)


def test_a_history_without_spread_does_not_make_a_trifle_a_surprise() -> None:
    subject = TailCalibrator(100, prior_spread=1.0, least_scale=0.5)
    for _ in range(100):
        subject.learn(7.0)
    assert subject.center == 7.0
    assert subject.surprise(7.2) < 1.5
    assert subject.surprise(12.0) > 3


def test_the_oldest_values_make_room() -> None:
    subject = calibrator(size=50)
    for value in range(120):
        subject.learn(float(value))
    assert len(subject) == 50
    np.testing.assert_array_equal(subject.values(), np.arange(70.0, 120.0))


@given(st.lists(st.floats(-5, 5), max_size=120))
def test_a_restored_history_judges_the_same(values: list[float]) -> None:
    first, second = calibrator(size=64), calibrator(size=64)
    for value in values:
        first.learn(value)
    second.restore(first.values())
    assert len(second) == len(first)
    for value in (-1.0, 0.5, 9.0):
        assert second.surprise(value) == pytest.approx(first.surprise(value), abs=0.6)


def alarms(test: SequentialTest, surprise: np.ndarray) -> int:
    count = 0
    for value in surprise:
        if test.update(float(value)) >= test.threshold:
            count += 1
            test.reset()
    return count


def test_chance_gives_no_more_alarms_than_asked_for() -> None:
    surprise = -np.log10(np.random.default_rng(7).random(200_000))
    asked_per_hour = 10.0
    test = SequentialTest(3_600, asked_per_hour)
    assert alarms(test, surprise) <= 1.2 * asked_per_hour * len(surprise) / 3_600


def test_fewer_false_alarms_ask_for_a_higher_threshold() -> None:
    often, rarely = SequentialTest(14_400, 1.0), SequentialTest(14_400, 0.01)
    assert rarely.threshold > often.threshold > rarely.clear_threshold


def test_a_small_lasting_shift_and_a_large_brief_one_are_both_found() -> None:
    test = SequentialTest(14_400, 0.02)
    small = next(n for n in range(1, 100) if test.update(2.0) >= test.threshold)
    assert small <= 10
    test.reset()
    test.update(30.0)
    assert test.score < test.threshold
    assert test.update(30.0) >= test.threshold


def test_usual_windows_let_the_score_fall_to_zero() -> None:
    test = SequentialTest(14_400, 0.02)
    for _ in range(50):
        test.update(30.0)
    for _ in range(30):
        test.update(0.3)
    assert test.score == 0.0


def test_one_window_may_be_enough_where_the_caller_says_so() -> None:
    test = SequentialTest(14_400, 0.02)
    assert test.update(30.0, limit=1.2) >= test.threshold


def test_wander_is_that_of_means_and_forgives_one_stretch_of_trouble() -> None:
    rng = np.random.default_rng(8)
    subject = calibrator()
    for value in rng.normal(5, 0.4, 1_600):
        subject.learn(value)
    steady = subject.wander(block=16, prior=0.1)
    assert steady == pytest.approx(0.1, rel=0.25)
    for value in rng.normal(8, 0.4, 80):
        subject.learn(value)
    assert subject.wander(block=16, prior=0.1) == pytest.approx(steady, rel=0.35)
    assert calibrator().wander(block=16, prior=0.3) == pytest.approx(0.3)
