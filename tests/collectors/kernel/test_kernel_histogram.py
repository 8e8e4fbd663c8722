import struct
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from latencyprism.collectors.kernel.histogram import (
    BOUNDS_S,
    BUCKETS,
    VALUE_BYTES,
    WORDS,
    Tally,
    bucket_of,
    delta,
    totals,
)


@given(st.integers(0, 1 << 63))
def test_a_time_is_below_the_bound_of_its_bucket_and_not_below_the_one_before(
    nanoseconds: int,
) -> None:
    bucket = bucket_of(nanoseconds)

    assert bucket == BUCKETS - 1 or nanoseconds / 1e9 < BOUNDS_S[bucket]
    assert bucket == 0 or nanoseconds / 1e9 >= BOUNDS_S[bucket - 1]


def test_bounds_double_from_a_microsecond_to_seventeen_seconds() -> None:
    assert BOUNDS_S[0] == 1.024e-6
    assert 17 < BOUNDS_S[-1] < 18
    assert all(after == 2 * before for before, after in pairwise(BOUNDS_S))


@given(st.lists(st.lists(st.integers(0, 1 << 40), min_size=WORDS, max_size=WORDS), max_size=5))
def test_totals_add_the_copies_of_all_cpus(copies: list[list[int]]) -> None:
    data = b"".join(struct.pack(f"={WORDS}Q", *copy) for copy in copies)

    assert totals(data + b"tail") == tuple(sum(column) for column in zip(*copies, strict=True)) or (
        not copies and totals(data) == (0,) * WORDS
    )


def test_growth_is_told_in_seconds() -> None:
    before = [0] * WORDS
    before[3], before[BUCKETS] = 2, 1000
    now = list(before)
    now[3], now[25], now[BUCKETS] = 3, 1, 2_000_001_000

    growth = delta("run_queue", tuple(before), tuple(now))

    assert growth is not None
    assert (growth.stage, growth.count, growth.sum) == ("run_queue", 2.0, 2.0)
    assert growth.bounds == BOUNDS_S
    assert len(growth.counts) == len(growth.bounds) + 1
    assert (growth.counts[3], growth.counts[25]) == (1.0, 1.0)


def test_without_growth_nothing_is_told() -> None:
    assert delta("x", (5,) * WORDS, (5,) * WORDS) is None


def test_a_tally_starts_anew_when_it_is_taken() -> None:
    tally = Tally("engine_queue")
    tally.add(1500)
    tally.add(1_000_000)

    taken = tally.take()

    assert taken is not None
    assert (taken.count, taken.sum) == (2.0, 0.0010015)
    assert tally.take() is None


def test_a_value_holds_the_buckets_and_the_sum() -> None:
    assert VALUE_BYTES == 8 * (BUCKETS + 1)
