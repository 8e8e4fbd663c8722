from hypothesis import given
from hypothesis import strategies as st

from latencyprism.collectors.network.tcp import Direction


def started(at: int = 100) -> Direction:
    direction = Direction()
    direction.start(at)
    return direction


def test_nothing_before_the_start() -> None:
    direction = Direction()

    assert direction.next is None
    assert direction.push(0, 100, b"abc") == ()
    direction.finish(103)
    assert not direction.ended


def test_in_order_and_repeated_and_overlapping() -> None:
    direction = started()

    assert list(direction.push(0, 100, b"abc")) == [b"abc"]
    assert list(direction.push(0, 100, b"abc")) == []
    assert list(direction.push(0, 101, b"bcde")) == [b"de"]
    assert direction.held == 0


def test_early_segments_wait() -> None:
    direction = started()

    assert list(direction.push(0, 106, b"g")) == []
    assert list(direction.push(0, 103, b"def")) == []
    assert direction.held > 4
    assert direction.incomplete
    assert list(direction.push(0, 100, b"abc")) == [b"abc", b"def", b"g"]
    assert direction.held == 0
    assert not direction.incomplete


def test_end_counts_when_everything_before_it_came() -> None:
    direction = started()

    direction.finish(103)
    assert direction.incomplete
    assert not direction.ended
    direction.push(0, 100, b"abc")
    assert direction.ended
    assert not direction.incomplete


def test_stop_forgets() -> None:
    direction = started()
    direction.push(0, 105, b"later")

    direction.stop()

    assert (direction.next, direction.held, direction.ended) == (None, 0, False)


def test_leaps_over_what_is_missing_and_tells_when_the_rest_came() -> None:
    direction = started()
    direction.push(7, 110, b"klm")
    direction.push(5, 113, b"n")
    direction.push(9, 103, b"def")
    direction.finish(120)

    assert direction.missing == 3
    assert list(direction.leap()) == [(9, b"def")]
    assert (direction.next, direction.missing) == (106, 4)
    assert list(direction.leap()) == [(7, b"klm"), (7, b"n")]
    assert (direction.missing, direction.held, direction.ended) == (6, 0, False)
    assert list(direction.leap()) == []
    assert direction.ended


@given(
    data=st.binary(min_size=1, max_size=300),
    start=st.integers(0, (1 << 32) - 1),
    pieces=st.lists(st.tuples(st.integers(0, 299), st.integers(1, 60)), max_size=60),
    shuffle=st.randoms(use_true_random=False),
)
def test_any_order_of_overlapping_segments_gives_the_bytes_once(
    data: bytes, start: int, pieces: list[tuple[int, int]], shuffle: object
) -> None:
    cover = [(at, 7) for at in range(0, len(data), 7)]
    segments = [(at, data[at : at + size]) for at, size in pieces + cover if at < len(data)]
    shuffle.shuffle(segments)  # type: ignore[attr-defined]
    direction = Direction()
    direction.start(start)

    out = [
        piece for at, part in segments for piece in direction.push(0, (start + at) % 2**32, part)
    ]

    assert b"".join(out) == data
    assert direction.held == 0
    assert all(out)
