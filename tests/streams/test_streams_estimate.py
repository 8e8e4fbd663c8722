"""A line learned point by point."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.streams.estimate import Line


def learned(points: list[tuple[float, float]], *, memory: float = 256.0) -> Line:
    line = Line(memory)
    for x, y in points:
        line.learn(x, y)
    return line


def test_a_clean_line_is_found() -> None:
    line = learned([(x, 5 + 0.25 * x) for x in range(0, 2_000, 40)])
    assert line.predict(1_234) == pytest.approx(5 + 0.25 * 1_234, rel=0.01)
    assert line.slope == pytest.approx(0.25, rel=0.01)


def test_the_error_covers_nine_in_ten() -> None:
    noise = random.Random(1)
    points = [(x := noise.uniform(0, 100), 20 + x + noise.gauss(0, 3)) for _ in range(2_000)]
    line = learned(points[:1_000])
    inside = sum(abs(y - line.predict(x)) <= line.half_width for x, y in points[1_000:])
    assert 860 <= inside <= 940


def test_a_change_is_followed() -> None:
    line = learned([(x % 50, 1.0 * (x % 50)) for x in range(300)], memory=64)
    for x in range(600):
        line.learn(x % 50, 1.3 * (x % 50))
    assert line.predict(40) == pytest.approx(52, rel=0.03)


def test_an_outlier_pulls_little() -> None:
    line = learned([(x % 50, 10.0 + x % 50) for x in range(300)])
    before = line.predict(25)
    line.learn(25, 100_000)
    assert line.predict(25) == pytest.approx(before, rel=0.02)


def test_nothing_is_told_of_few_points() -> None:
    assert not learned([(1, 1)] * 7).ready
    assert learned([(1, 1)] * 9).ready


def test_equal_causes_give_the_mean() -> None:
    line = learned([(10, y) for y in (4.0, 6.0) * 20])
    assert line.slope == 0
    assert line.predict(99) == pytest.approx(5, abs=0.2)


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=40), st.floats(-1e6, 1e6))
def test_no_input_makes_it_fail(points: list[tuple[float, float]], x: float) -> None:
    bounded = [(a, b) for a, b in points if not abs(a) > 1e9 and not abs(b) > 1e9]
    line = learned(bounded)
    assert line.predict(x) >= 0
    assert math.isfinite(line.half_width)
    assert Line.restored(line.state()) == line


@pytest.mark.parametrize("state", [[], [1.0] * 5, [1.0] * 5 + [math.nan]])
def test_a_damaged_state_is_refused(state: list[float]) -> None:
    with pytest.raises(ValueError, match="six finite numbers"):
        Line.restored(state)
