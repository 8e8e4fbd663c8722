"""What the sink needs of Kafka and of the store; twins in memory are in :mod:`.memory`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from latencyprism.schemas.records import DeadLetter
from latencyprism.schemas.topics import Topic
from latencyprism.sinks.tables import Row, Table

Place = tuple[str, int]
"""A topic's name as declared (without prefix) and a partition of it."""


class LogAwayError(RuntimeError):
    """Kafka did not take what was sent; the same may be sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message as it came."""

    topic: Topic
    partition: int
    offset: int
    key: bytes | None
    value: bytes

    @property
    def place(self) -> Place:
        """The partition it came from."""
        return self.topic.name, self.partition


class MessageLog(Protocol):
    """A consumer of all topics, a member of the sinks' group."""

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """The next messages, none after ``timeout_s``; keeps the membership alive.

        A paused log gives none. Raises nothing that passes by itself.
        """

    def lost(self) -> Sequence[Place]:
        """Partitions that went to another member since the last call."""

    def pause(self) -> None:
        """Fetch no further messages, also of partitions that come to be ours; idempotent."""

    def resume(self) -> None:
        """Fetch again; idempotent."""

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Remember for the group that all before these offsets is done; blocks.

        Never raises: what is not committed is delivered again.
        """


class LetterBox(Protocol):
    """Where dead letters go."""

    def send(self, letters: Sequence[DeadLetter]) -> None:
        """Return when all are on the topic. Raises :class:`LogAwayError`."""


class RowStore(Protocol):
    """Where rows go."""

    def insert(self, table: Table, rows: Sequence[Row]) -> None:
        """Return when all rows are stored; rows of one key replace each other.

        Raises :class:`~.errors.RowsRefusedError` when at least one is never going to be taken,
        in which case none was, or any other :class:`~.errors.StoreError` when it is unknown
        which were and the same rows may be inserted again.
        """
