"""What a stage remembers: all of a short past, a fair sample of a long one, and the newest."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.streams.detection.reference import Reference


def reference(reservoir: int = 200, recent: int = 50, width: int = 2) -> Reference:
    generator = np.random.default_rng(9)
    return Reference(width, reservoir=reservoir, recent=recent, generator=generator)


def numbered(start: int, count: int) -> np.ndarray:
    return np.column_stack((np.arange(start, start + count), np.zeros(count)))


@given(st.lists(st.integers(0, 40), max_size=20))
def test_memory_is_bounded_and_holds_only_what_was_learned(sizes: list[int]) -> None:
    subject, seen = reference(reservoir=60, recent=20), 0
    for size in sizes:
        subject.learn(numbered(seen, size))
        seen += size
    slow, fast = subject.arrays()
    assert (subject.seen, len(subject)) == (seen, min(seen, 60))
    assert len(slow) == min(seen, 60)
    assert set(slow[:, 0]) <= set(range(seen))
    assert set(fast[:, 0]) == set(range(max(0, seen - 20), seen))


def test_a_long_past_is_sampled_evenly() -> None:
    subject = reference(reservoir=2_000)
    for start in range(0, 40_000, 500):
        subject.learn(numbered(start, 500))
    slow, _ = subject.arrays()
    counts, _ = np.histogram(slow[:, 0], bins=4, range=(0, 40_000))
    assert counts.sum() == 2_000
    assert counts.min() > 430


def test_half_of_what_is_drawn_may_be_the_newest() -> None:
    subject = reference()
    subject.learn(numbered(0, 1_000))
    drawn = subject.draw(80)
    assert drawn.shape == (80, 2)
    assert (drawn[:, 0] >= 950).sum() >= 40
    assert reference().draw(80).shape == (0, 2)


def test_a_restored_memory_draws_from_the_same_rows() -> None:
    first, second = reference(), reference()
    first.learn(numbered(0, 700))
    second.restore(*first.arrays(), first.seen)
    assert second.seen == 700
    for one, other in zip(first.arrays(), second.arrays(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_rows_of_another_width_are_refused() -> None:
    slow, fast = reference(width=3).arrays()
    with pytest.raises(ValueError, match="columns"):
        reference().restore(slow, fast, 0)
