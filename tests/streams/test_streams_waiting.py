"""Samples that wait for their window."""

from emulated_engine import INSTANCE, MS, T0

from latencyprism.schemas.records import HostSample
from latencyprism.streams.waiting import Samples


def sample(at_ms: int, host: str = "h") -> HostSample:
    return HostSample(
        instance=INSTANCE,
        source="host",
        observed_at_ns=T0 + at_ms * MS,
        host=host,
        interval_ns=100 * MS,
    )


def test_they_leave_in_order_of_time() -> None:
    samples: Samples[HostSample] = Samples(bound=10)
    for at in (30, 10, 20, 40):
        assert samples.add(sample(at))
    assert samples.oldest_ns() == T0 + 10 * MS
    assert [s.observed_at_ns - T0 for s in samples.take(T0 + 40 * MS)] == [
        10 * MS,
        20 * MS,
        30 * MS,
    ]
    assert len(samples) == 1


def test_one_that_waits_is_not_taken_again() -> None:
    samples: Samples[HostSample] = Samples(bound=10)
    assert samples.add(sample(10))
    assert not samples.add(sample(10))
    assert samples.add(sample(10, host="another"))


def test_there_is_room_for_so_many() -> None:
    samples: Samples[HostSample] = Samples(bound=2)
    assert [samples.add(sample(at)) for at in (1, 2, 3)] == [True, True, False]
    assert samples.dropped == 1


def test_forgetting_empties() -> None:
    samples: Samples[HostSample] = Samples(bound=2)
    samples.add(sample(1))
    samples.forget()
    assert (len(samples), samples.oldest_ns()) == (0, None)
