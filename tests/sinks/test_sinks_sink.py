"""The sink's loop on Kafka and a store in memory: what is stored, what is committed, when."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sinks_support import KEYS, T0, Clock, S, memory_sink, pack

from latencyprism.schemas import topics
from latencyprism.schemas.codec import Codec, Pack
from latencyprism.schemas.records import Ack, DeadLetter, StepBatch
from latencyprism.schemas.registry import MemoryRegistry
from latencyprism.sinks.bisect import insert_but_refused
from latencyprism.sinks.buffer import PAYLOAD_BYTES
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.errors import RowsRefusedError, StoreAwayError
from latencyprism.sinks.memory import MemoryBroker, MemoryLetterBox, MemoryLog, MemoryStore
from latencyprism.sinks.sink import Sink
from latencyprism.sinks.tables import Row, Table

CODEC = Codec()
STEPS = topics.TELEMETRY_STEPS.name, 0


def steps(number: int) -> StepBatch:
    """A record that is told from others by its time."""
    return StepBatch(instance="a:1", source="log", observed_at_ns=T0 + number)


def ack(number: int) -> Ack:
    """A record of a topic that is not packed."""
    return Ack(
        ack_id=f"k{number}",
        command_id=f"c{number}",
        target="a:1",
        epoch=number,
        router="r",
        effect="applied",
        dry_run=False,
        at_ns=T0 + number * S,
    )


def send_steps(broker: MemoryBroker, *numbers: int) -> None:
    """A pack of step records."""
    message = CODEC.encode(topics.TELEMETRY_STEPS, pack(*map(steps, numbers)))
    broker.append(topics.TELEMETRY_STEPS, message, key=b"a:1")


def stored_steps(store: MemoryStore) -> list[int]:
    """Numbers of the step records in the store."""
    return sorted(key[1] - T0 for key in store.rows.get("step_batches", {}))


def letters(broker: MemoryBroker) -> list[DeadLetter]:
    """What is on the dead-letter topic."""
    log = broker.messages.get((topics.DEADLETTER.name, 0), [])
    return [CODEC.decode(topics.DEADLETTER, message.value) for message in log]


def refusing(*numbers: int) -> Callable[[Table, Row], str | None]:
    """A store's opinion that refuses the step records with these numbers."""

    def refuses(table: Table, row: Row) -> str | None:
        if table.name != "step_batches":
            return None
        observed_at = row[[column.name for column in table.columns].index("observed_at")]
        return f"number {observed_at - T0}" if observed_at - T0 in numbers else None

    return refuses


@pytest.fixture
def broker() -> MemoryBroker:
    """An empty broker."""
    return MemoryBroker()


@pytest.fixture
def rows() -> MemoryStore:
    """An empty store."""
    return MemoryStore(KEYS)


@pytest.fixture
def clock() -> Clock:
    """A clock that stands."""
    return Clock()


def test_rows_wait_for_company_but_not_longer_than_told(
    broker: MemoryBroker, rows: MemoryStore, clock: Clock
) -> None:
    sink, _ = memory_sink(broker, rows, clock, flush_ms=1000)
    send_steps(broker, 1, 2)
    sink.step(0)
    clock.now_s += 0.9
    send_steps(broker, 3)
    sink.step(0)
    assert (rows.inserts, broker.committed) == (0, {})
    clock.now_s += 0.1
    sink.step(0)
    assert (rows.inserts, stored_steps(rows)) == (1, [1, 2, 3])
    assert broker.committed == {STEPS: 2}


def test_a_full_block_goes_at_once_and_blocks_are_bounded(
    broker: MemoryBroker, rows: MemoryStore, clock: Clock
) -> None:
    sink, _ = memory_sink(broker, rows, clock, batch_rows=4)
    send_steps(broker, *range(10))
    sink.step(0)
    assert stored_steps(rows) == list(range(10))
    assert rows.inserts == 3


def test_an_empty_pack_moves_the_offset_and_inserts_nothing(
    broker: MemoryBroker, rows: MemoryStore, clock: Clock
) -> None:
    sink, _ = memory_sink(broker, rows, clock)
    send_steps(broker)
    sink.step(0)
    assert sink.finish()
    assert (rows.inserts, broker.committed) == (0, {STEPS: 1})


def test_bad_bytes_cost_one_letter_and_the_stream_goes_on(
    broker: MemoryBroker, rows: MemoryStore, clock: Clock
) -> None:
    sink, _ = memory_sink(broker, rows, clock)
    send_steps(broker, 1)
    broker.append(topics.TELEMETRY_STEPS, b"\xff" * (PAYLOAD_BYTES + 9), key=b"k")
    send_steps(broker, 2)
    sink.step(0)
    assert sink.finish()
    assert stored_steps(rows) == [1, 2]
    assert broker.committed[STEPS] == 3
    (letter,) = letters(broker)
    assert (letter.topic, letter.partition, letter.offset) == (*STEPS, 1)
    assert (letter.component, letter.reason, letter.key) == ("sinks", "bad_magic", b"k")
    assert letter.payload == b"\xff" * PAYLOAD_BYTES
    assert letter.at_ns == clock.ns()


def test_letters_are_stored_as_rows_too(
    broker: MemoryBroker, rows: MemoryStore, clock: Clock
) -> None:
    sink, _ = memory_sink(broker, rows, clock)
    broker.append(topics.TELEMETRY_STEPS, b"")
    sink.step(0)
    sink.finish()
    sink.step(0)
    sink.finish()
    assert len(rows.rows["dead_letters_raw"]) == 1


def test_one_refused_row_costs_one_letter_that_holds_it_alone(
    broker: MemoryBroker, rows: MemoryStore, clock: Clock
) -> None:
    sink, _ = memory_sink(broker, rows, clock)
    rows.refuses = refusing(5)
    send_steps(broker, 1, 2, 3)
    send_steps(broker, 4, 5, 6)
    sink.step(0)
    assert sink.finish()
    assert stored_steps(rows) == [1, 2, 3, 4, 6]
    (letter,) = letters(broker)
    assert (letter.offset, letter.reason) == (1, "refused_by_store")
    assert letter.detail == "record 1 of 3: number 5"
    again: Pack[StepBatch] = CODEC.decode(topics.TELEMETRY_STEPS, letter.payload)
    assert again.samples == (steps(5),)
    assert again.agent == "agent-1"


def test_a_refused_record_of_a_topic_without_packs_is_a_letter_as_it_came(
    broker: MemoryBroker, rows: MemoryStore, clock: Clock
) -> None:
    sink, _ = memory_sink(broker, rows, clock)
    rows.refuses = lambda _table, row: "no" if row[0] == "k2" else None
    for number in (1, 2, 3):
        broker.append(topics.CONTROL_ACKS, CODEC.encode(topics.CONTROL_ACKS, ack(number)))
    sink.step(0)
    assert sink.finish()
    (letter,) = letters(broker)
    assert CODEC.decode(topics.CONTROL_ACKS, letter.payload) == ack(2)
    assert len(rows.rows["acks_raw"]) == 2


def test_a_refused_letter_does_not_breed(
    broker: MemoryBroker, rows: MemoryStore, clock: Clock
) -> None:
    sink, _ = memory_sink(broker, rows, clock)
    rows.refuses = lambda table, _row: "no" if table.name == "dead_letters_raw" else None
    broker.append(topics.TELEMETRY_STEPS, b"")
    for _ in range(4):
        sink.step(0)
        assert sink.finish()
    assert len(letters(broker)) == 1
    assert sink.counts.dropped_letters == 1
    assert broker.committed[(topics.DEADLETTER.name, 0)] == 1


def test_while_the_store_is_away_nothing_is_fetched_committed_or_lost(
    broker: MemoryBroker, rows: MemoryStore, clock: Clock
) -> None:
    sink, log = memory_sink(broker, rows, clock, retry_max_ms=1000)
    send_steps(broker, 1)
    rows.away = True
    sink.step(0)
    assert not sink.finish()
    assert (sink.away, log.paused, broker.committed) == (True, True, {})
    held = sink.held_bytes
    polls = log.polls
    send_steps(broker, 2)
    for _ in range(20):
        clock.now_s += 0.5
        sink.step(0)
    assert log.polls == polls + 20, "a member that does not poll is put out of its group"
    assert sink.held_bytes == held
    rows.away = False
    clock.now_s += 1.0
    sink.step(0)
    assert (sink.away, log.paused, stored_steps(rows)) == (False, False, [1])
    sink.step(0)
    assert sink.finish()
    assert stored_steps(rows) == [1, 2]
    assert (broker.committed, sink.counts.pauses) == ({STEPS: 2}, 1)


def test_attempts_come_at_growing_distances_up_to_the_longest(
    broker: MemoryBroker, rows: MemoryStore, clock: Clock
) -> None:
    sink, _ = memory_sink(broker, rows, clock, retry_max_ms=1600)
    send_steps(broker, 1)
    rows.away = True
    sink.step(0)
    sink.finish()
    times = []
    for _ in range(200):
        clock.now_s += 0.05
        before = rows.inserts
        sink.step(0)
        if rows.inserts > before:
            times.append(clock.now_s)
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps[:5] == pytest.approx([0.4, 0.8, 1.6, 1.6, 1.6], abs=0.06)


def test_a_dead_letter_topic_that_is_away_holds_the_commit_back(
    broker: MemoryBroker, rows: MemoryStore, clock: Clock
) -> None:
    sink, _ = memory_sink(broker, rows, clock)
    broker.append(topics.TELEMETRY_STEPS, b"")
    broker.away = True
    sink.step(0)
    assert not sink.finish()
    assert broker.committed == {}
    broker.away = False
    assert sink.finish()
    assert (len(letters(broker)), broker.committed) == (1, {STEPS: 1})


def test_buffered_bytes_are_bounded(broker: MemoryBroker, rows: MemoryStore, clock: Clock) -> None:
    sink, _ = memory_sink(broker, rows, clock, buffer_mb=1, batch_rows=100_000, flush_ms=60_000)
    big = StepBatch(instance="a:1", source="log", observed_at_ns=T0, start_ns=(T0,) * 20_000)
    message = CODEC.encode(topics.TELEMETRY_STEPS, pack(big))
    for _ in range(12):
        broker.append(topics.TELEMETRY_STEPS, message)
        sink.step(0)
        assert sink.held_bytes < (1 << 20) + len(message)
    assert rows.inserts >= 1


class _AwayRegistry(MemoryRegistry):
    away = False

    def schema(self, schema_id: int) -> dict[str, Any] | None:
        if self.away:
            raise OSError("registry away")
        return super().schema(schema_id)


def test_a_schema_registry_that_is_away_pauses_and_loses_nothing(
    broker: MemoryBroker, rows: MemoryStore, clock: Clock
) -> None:
    registry = _AwayRegistry()
    writer = Codec(registry)
    broker.append(topics.TELEMETRY_STEPS, writer.encode(topics.TELEMETRY_STEPS, pack(steps(1))))
    registry.away = True
    log = MemoryLog(broker)
    reader = Codec(registry)
    sink = Sink(
        StoreConfig(),
        log=log,
        store=rows,
        letterbox=MemoryLetterBox(broker, reader),
        codec=reader,
        clock_s=clock.s,
        clock_ns=clock.ns,
    )
    sink.step(0)
    assert (sink.away, log.paused, letters(broker)) == (True, True, [])
    registry.away = False
    assert sink.finish()
    assert (stored_steps(rows), broker.committed) == ([1], {STEPS: 1})


def test_a_lost_partition_is_left_to_its_new_owner(
    broker: MemoryBroker, rows: MemoryStore, clock: Clock
) -> None:
    sink, log = memory_sink(broker, rows, clock)
    send_steps(broker, 1)
    broker.append(topics.CONTROL_ACKS, CODEC.encode(topics.CONTROL_ACKS, ack(1)))
    sink.step(0)
    log.lose(STEPS)
    log.pause()
    sink.step(0)
    assert sink.finish()
    assert stored_steps(rows) == []
    assert broker.committed == {(topics.CONTROL_ACKS.name, 0): 1}
    sink.step(0)
    assert sink.finish()
    assert stored_steps(rows) == [1]


@given(
    packs=st.lists(st.lists(st.integers(0, 40), max_size=5), max_size=12),
    bad=st.sets(st.integers(0, 40), max_size=4),
    crashes=st.lists(st.integers(1, 6), max_size=4),
)
def test_a_crash_at_any_insert_loses_and_doubles_nothing(
    packs: list[list[int]], bad: set[int], crashes: list[int]
) -> None:
    broker, rows, clock = MemoryBroker(), MemoryStore(KEYS), Clock()
    rows.refuses = refusing(*bad)
    for numbers in packs:
        send_steps(broker, *numbers)
    for survive in [*crashes, 10**9]:
        _live(broker, _Dying(rows, survive), clock)
    wanted = {number for numbers in packs for number in numbers}
    assert stored_steps(rows) == sorted(wanted - bad)
    told = {letter.payload for letter in letters(broker)}
    assert len(told) == len(wanted & bad)
    if packs:
        assert broker.committed[STEPS] == len(packs)


class _Dying:
    """A store in whose ``survive``-th insert the process dies, after the rows were taken."""

    def __init__(self, rows: MemoryStore, survive: int) -> None:
        self.rows = rows
        self.left = survive

    def insert(self, table: Table, rows: Any) -> None:
        self.rows.insert(table, rows)
        self.left -= 1
        if self.left <= 0:
            raise KeyboardInterrupt


def _live(broker: MemoryBroker, store: _Dying, clock: Clock) -> None:
    sink, _ = memory_sink(broker, store, clock, batch_rows=3)
    try:
        for _ in range(4):
            sink.step(0)
            sink.finish()
    except KeyboardInterrupt:
        return


@given(st.integers(0, 300), st.sets(st.integers(0, 299), max_size=6))
def test_bisection_finds_the_refused_rows_and_inserts_the_others_once(
    count: int, bad: set[int]
) -> None:
    taken: list[int] = []
    calls = 0

    def insert(rows: Any) -> None:
        nonlocal calls
        calls += 1
        if any(row[0] in bad for row in rows):
            raise RowsRefusedError("bad")
        taken.extend(row[0] for row in rows)

    refused = insert_but_refused([(number,) for number in range(count)], insert)
    expected = sorted(bad & set(range(count)))
    assert [index for index, _ in refused] == expected
    assert taken == [number for number in range(count) if number not in bad]
    assert calls <= (1 if count else 0) + 2 * 9 * len(expected)


def test_bisection_lets_a_store_that_is_away_through() -> None:
    def insert(_rows: Any) -> None:
        raise StoreAwayError("away")

    with pytest.raises(StoreAwayError):
        insert_but_refused([(1,)], insert)
