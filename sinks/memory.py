"""Kafka and the store in memory, with the faults that the real ones have."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from latencyprism.schemas.codec import Codec
from latencyprism.schemas.records import DeadLetter
from latencyprism.schemas.topics import DEADLETTER, Topic
from latencyprism.sinks.errors import RowsRefusedError, StoreAwayError
from latencyprism.sinks.ports import LogAwayError, Message, Place
from latencyprism.sinks.tables import Row, Table


class MemoryBroker:
    """Topics of one partition each and the committed offsets of one group."""

    def __init__(self) -> None:
        self.messages: dict[Place, list[Message]] = {}
        self.committed: dict[Place, int] = {}
        self.away = False

    def append(self, topic: Topic, value: bytes, *, key: bytes | None = None) -> Message:
        """Put a message at the end of the topic."""
        log = self.messages.setdefault((topic.name, 0), [])
        message = Message(topic=topic, partition=0, offset=len(log), key=key, value=value)
        log.append(message)
        return message


class MemoryLog:
    """One member's life on a :class:`MemoryBroker`; a new one starts at the committed offsets."""

    def __init__(self, broker: MemoryBroker, *, at_once: int = 500) -> None:
        self._broker = broker
        self._at_once = at_once
        self._position = dict(broker.committed)
        self._lost: list[Place] = []
        self.paused = False
        self.polls = 0

    def poll(self, timeout_s: float) -> Sequence[Message]:  # noqa: ARG002 it never waits
        """The next messages, none while paused."""
        self.polls += 1
        if self.paused:
            return ()
        found: list[Message] = []
        for place, log in self._broker.messages.items():
            start = self._position.get(place, 0)
            batch = log[start : start + self._at_once - len(found)]
            self._position[place] = start + len(batch)
            found += batch
        return found

    def lose(self, place: Place) -> None:
        """Let another member have the partition; it comes back later at the committed offset."""
        self._lost.append(place)
        self._position[place] = self._broker.committed.get(place, 0)

    def lost(self) -> Sequence[Place]:
        """Partitions lost since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def pause(self) -> None:
        """Give nothing."""
        self.paused = True

    def resume(self) -> None:
        """Give again."""
        self.paused = False

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Remember the offsets."""
        self._broker.committed.update(offsets)


class MemoryLetterBox:
    """Puts letters on the broker's dead-letter topic."""

    def __init__(self, broker: MemoryBroker, codec: Codec) -> None:
        self._broker = broker
        self._codec = codec

    def send(self, letters: Sequence[DeadLetter]) -> None:
        """Append the letters."""
        if self._broker.away:
            raise LogAwayError("the broker is away")
        for letter in letters:
            self._broker.append(DEADLETTER, self._codec.encode(DEADLETTER, letter))


class MemoryStore:
    """Rows by table; ``keys`` names the columns by which rows replace each other."""

    def __init__(self, keys: Mapping[str, Sequence[str]]) -> None:
        self._keys = keys
        self.rows: dict[str, dict[tuple[Any, ...], Row]] = {}
        self.inserts = 0
        self.away = False
        self.refuses: Callable[[Table, Row], str | None] = lambda _table, _row: None

    def insert(self, table: Table, rows: Sequence[Row]) -> None:
        """Store all rows or none."""
        self.inserts += 1
        if self.away:
            raise StoreAwayError("the store is away")
        table.arrow(rows)
        for row in rows:
            if why := self.refuses(table, row):
                raise RowsRefusedError(why)
        names = [column.name for column in table.columns]
        key = [names.index(name) for name in self._keys[table.name]]
        stored = self.rows.setdefault(table.name, {})
        stored.update({tuple(row[index] for index in key): row for row in rows})
