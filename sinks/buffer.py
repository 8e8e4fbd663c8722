"""Messages of one topic that wait to be inserted together. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from latencyprism.schemas.codec import Codec, DecodeError
from latencyprism.schemas.records import DeadLetter
from latencyprism.sinks.ports import Message, Place
from latencyprism.sinks.tables import Row, Table

COMPONENT = "sinks"
PAYLOAD_BYTES = 900_000
"""Most bytes of a message that a dead letter keeps, so that it fits Kafka's default limit."""
KEY_BYTES = 50_000
DETAIL_CHARS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoded:
    message: Message
    value: Any
    records: int


class Buffer:
    """Decoded messages of one topic, and letters about those that could not be decoded.

    Unbounded by itself: whoever fills it looks at ``size`` and stops reading.
    """

    def __init__(self, table: Table, codec: Codec) -> None:
        self.table = table
        self._codec = codec
        self._decoded: list[_Decoded] = []
        self._letters: list[DeadLetter] = []
        self._next: dict[Place, int] = {}
        self.rows = 0
        self.size = 0
        self.since_s: float | None = None
        """Time of the oldest message in it; None when empty."""

    def add(self, message: Message, *, now_s: float, now_ns: int) -> None:
        """Take a message of the topic.

        What cannot be decoded becomes a letter. Raises OSError, and takes nothing, when the
        schema registry has to be asked and is away.
        """
        try:
            value = self._codec.decode(self.table.topic, message.value)
        except DecodeError as e:
            self._letters.append(_letter(message, e.reason, str(e), message.value, now_ns))
        else:
            records = len(self.table.records(value))
            if records:
                self._decoded.append(_Decoded(message=message, value=value, records=records))
                self.rows += records
        self.size += len(message.value)
        self._next[message.place] = message.offset + 1
        if self.since_s is None:
            self.since_s = now_s

    def blocks(self, rows: int) -> Iterator[tuple[int, list[Row]]]:
        """Index of the first row, and at most ``rows`` rows, until all were given."""
        block: list[Row] = []
        first = 0
        for decoded in self._decoded:
            block += self.table.rows(decoded.value)
            while len(block) >= rows:
                yield first, block[:rows]
                first += rows
                block = block[rows:]
        if block:
            yield first, block

    def letters(self) -> Sequence[DeadLetter]:
        """Letters about the messages that could not be decoded."""
        return self._letters

    def refusal(self, row: int, reason: str, detail: str, now_ns: int) -> DeadLetter:
        """Letter about one row, holding a message of its topic with that record alone."""
        for decoded in self._decoded:
            if row < decoded.records:
                break
            row -= decoded.records
        else:
            raise IndexError(f"no row {row} in the buffer of {self.table.name}")
        value = decoded.value
        if self.table.topic.packed:
            value = replace(value, samples=(value.samples[row],))
        payload = self._codec.encode(self.table.topic, value)
        place = f"record {row} of {decoded.records}: {detail}"
        return _letter(decoded.message, reason, place, payload, now_ns)

    def offsets(self) -> dict[Place, int]:
        """Where reading goes on once the buffer is done with."""
        return dict(self._next)

    def forget(self, place: Place) -> None:
        """Drop the messages of a partition that is another member's now."""
        if self._next.pop(place, None) is None:
            return
        self._decoded = [d for d in self._decoded if d.message.place != place]
        self._letters = [
            letter for letter in self._letters if (letter.topic, letter.partition) != place
        ]
        self.rows = sum(d.records for d in self._decoded)
        self.size = sum(len(d.message.value) for d in self._decoded)
        if not self._next:
            self.since_s = None

    def clear(self) -> None:
        """Empty it."""
        self._decoded.clear()
        self._letters.clear()
        self._next.clear()
        self.rows = self.size = 0
        self.since_s = None


def _letter(message: Message, reason: str, detail: str, payload: bytes, now_ns: int) -> DeadLetter:
    return DeadLetter(
        topic=message.topic.name,
        partition=message.partition,
        offset=message.offset,
        at_ns=now_ns,
        component=COMPONENT,
        reason=reason,
        detail=detail[:DETAIL_CHARS],
        key=message.key if message.key is None else message.key[:KEY_BYTES],
        payload=payload[:PAYLOAD_BYTES],
    )
