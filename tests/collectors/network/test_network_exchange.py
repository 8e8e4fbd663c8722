from hypothesis import given
from hypothesis import strategies as st

from latencyprism.collectors.network.exchange import Exchange, Ledger, request_id

KEY = bytes(12)


def opened(ledger: Ledger, *, arrival_ns: int = 1000) -> Exchange:
    exchange = ledger.open(
        key=KEY,
        nth=0,
        instance="i:1",
        method=None,
        endpoint="/generate",
        arrival_ns=arrival_ns,
        trace_id=None,
    )
    assert exchange is not None
    return exchange


def test_ids_differ_by_connection_time_and_place() -> None:
    ids = {
        request_id(KEY, 1, 0),
        request_id(KEY, 1, 1),
        request_id(KEY, 2, 0),
        request_id(bytes(11) + b"\1", 1, 0),
    }

    assert len(ids) == 4
    assert request_id(KEY, 1, 0) in ids


def test_no_news_no_part() -> None:
    ledger = Ledger(10)
    exchange = opened(ledger)

    assert [part.part for part in ledger.flush(0)] == [0]
    assert ledger.flush(0) == []
    exchange.content(5000)
    exchange.content(6000)
    assert [part.part for part in ledger.flush(0)] == [1]


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=50))
def test_deltas_do_not_drift(gaps_ns: list[int]) -> None:
    ledger = Ledger(10)
    exchange = opened(ledger)
    at, times = 0, []
    for gap_ns in gaps_ns:
        at += gap_ns
        times.append(at)
        exchange.content(at)

    (part,) = ledger.flush(0)

    assert part.chunk_base_ns == times[0]
    rebuilt = part.chunk_base_ns
    for time_ns, delta_us in zip(times[1:], part.chunk_deltas_us, strict=True):
        rebuilt += delta_us * 1000
        assert abs(time_ns - rebuilt) < 1000


def test_the_bound_counts_open_ones_only() -> None:
    ledger = Ledger(1)
    exchange = opened(ledger)
    again = {"key": KEY, "nth": 0, "instance": "i:1", "method": None, "endpoint": "/"}
    again["trace_id"] = None

    assert ledger.open(arrival_ns=2, **again) is None  # type: ignore[arg-type]
    exchange.close("complete", 2000)
    ledger.flush(0)

    assert len(ledger) == 0
    assert ledger.open(arrival_ns=3, **again) is not None  # type: ignore[arg-type]
    assert ledger.counts == {"exchanges": 2, "too many exchanges": 1}


def test_what_is_held_is_told_when_it_is_revealed() -> None:
    ledger = Ledger(2)
    held = [
        ledger.open(
            key=KEY,
            nth=n,
            instance="i",
            method=None,
            endpoint="/",
            arrival_ns=n,
            trace_id=None,
            held=True,
        )
        for n in range(2)
    ]
    first, second = held
    assert first is not None
    assert second is not None
    first.content(5000)
    assert ledger.flush(0) == []
    assert len(ledger) == 2  # it takes a place meanwhile
    assert ledger.counts == {}

    first.reveal()
    first.reveal()
    ledger.drop(second)

    (part,) = ledger.flush(0)
    assert (part.part, part.arrival_ns, part.chunk_base_ns) == (0, 0, 5000)
    assert ledger.counts == {"exchanges": 1}
    assert len(ledger) == 1


def test_guesses_are_not_forgotten_at_the_end() -> None:
    ledger = Ledger(1)
    exchange = opened(ledger)
    exchange.estimated = ("endpoint", "state")

    exchange.close("aborted", 5, estimated=("state", "end_ns"))

    assert exchange.part().estimated == ("endpoint", "state", "end_ns")


def test_time_is_told_before_each_flush() -> None:
    class Ends:
        def __init__(self) -> None:
            self.told: list[int] = []

        def settle(self, now_ns: int) -> None:
            self.told.append(now_ns)
            exchange.close("complete", now_ns)
            del ledger.timed[self]

    ledger = Ledger(1)
    exchange = opened(ledger)
    ends = Ends()
    ledger.timed[ends] = None

    assert [part.state for part in ledger.flush(7)] == ["complete"]
    ledger.flush(8)
    assert ends.told == [7]
