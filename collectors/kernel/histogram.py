"""Histograms that programs keep: powers of two from a microsecond to seventeen seconds. Pure."""

import struct
from typing import Final

from latencyprism.schemas.records import HistogramDelta

BUCKETS: Final = 26
FIRST_BITS: Final = 10
"""The first bucket holds times below 2^10 ns, each further one those below twice as much."""
BOUNDS_S: Final = tuple((1 << (FIRST_BITS + k)) / 1e9 for k in range(BUCKETS - 1))
"""Upper bounds of all buckets but the last, seconds: 1.024 us to 17.2 s."""
WORDS: Final = BUCKETS + 1
"""64-bit numbers of one histogram: the buckets, then the sum in nanoseconds."""
VALUE_BYTES: Final = 8 * WORDS


def bucket_of(nanoseconds: int) -> int:
    """Bucket of a time, as the programs choose it."""
    return min((nanoseconds >> FIRST_BITS).bit_length(), BUCKETS - 1)


def totals(copies: bytes) -> tuple[int, ...]:
    """Sum over the CPUs of a histogram's copies; bytes behind the last whole one do not count."""
    whole = len(copies) // VALUE_BYTES * WORDS
    numbers = struct.unpack_from(f"={whole}Q", copies)
    return tuple(sum(numbers[word::WORDS]) for word in range(WORDS))


def delta(stage: str, before: tuple[int, ...], now: tuple[int, ...]) -> HistogramDelta | None:
    """Growth between two readings; None when nothing was observed.

    A reading is not atomic: a sum may lack, or hold too much, the times booked meanwhile.
    """
    growth = [max(late - early, 0) for early, late in zip(before, now, strict=True)]
    count = sum(growth[:BUCKETS])
    if not count:
        return None
    return HistogramDelta(
        stage=stage,
        count=float(count),
        sum=growth[BUCKETS] / 1e9,
        bounds=BOUNDS_S,
        counts=tuple(float(number) for number in growth[:BUCKETS]),
    )


class Tally:
    """A histogram that is kept in this process, in the same buckets."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._numbers = [0] * WORDS

    def add(self, nanoseconds: int) -> None:
        """Book one time."""
        self._numbers[bucket_of(nanoseconds)] += 1
        self._numbers[BUCKETS] += nanoseconds

    def take(self) -> HistogramDelta | None:
        """What was booked since the last call; None when there was nothing."""
        now, self._numbers = tuple(self._numbers), [0] * WORDS
        return delta(self._stage, (0,) * WORDS, now)
