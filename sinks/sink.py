"""The sink's loop: read, gather, insert, commit. Pure, its clock passed in.

An offset is committed only after every row before it is stored and every letter about a row
before it is on the dead-letter topic, so a kill at any moment repeats work and loses none; rows
of one key replace each other, so repeated work shows nowhere. While the store (or the dead-letter
topic, or the schema registry) is away the log is paused but still polled, what was read is kept,
and the same work is tried again after a growing pause.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from latencyprism.schemas.codec import Codec
from latencyprism.schemas.records import DeadLetter
from latencyprism.schemas.topics import DEADLETTER
from latencyprism.sinks.bisect import insert_but_refused
from latencyprism.sinks.buffer import Buffer
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.errors import RowsRefusedError, StoreError
from latencyprism.sinks.ports import LetterBox, LogAwayError, Message, MessageLog, RowStore
from latencyprism.sinks.tables import BY_TOPIC

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2


@dataclass(slots=True, kw_only=True)
class SinkCounts:
    """What a sink has done since it started."""

    messages: int = 0
    rows: int = 0
    letters: int = 0
    """Messages and rows that became dead letters."""
    dropped_letters: int = 0
    """Dead letters the store refused; they remain on their topic."""
    pauses: int = 0
    """Times the store, the dead-letter topic or the schema registry went away."""


class Sink:
    """Brings every topic that has a table into it."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        log: MessageLog,
        store: RowStore,
        letterbox: LetterBox,
        codec: Codec,
        clock_s: Callable[[], float],
        clock_ns: Callable[[], int],
    ) -> None:
        self.counts = SinkCounts()
        self._config = config
        self._log = log
        self._store = store
        self._letterbox = letterbox
        self._clock_s = clock_s
        self._clock_ns = clock_ns
        self._buffers = {name: Buffer(table, codec) for name, table in BY_TOPIC.items()}
        self._unread: deque[Message] = deque()
        """Messages that wait for the schema registry."""
        self._retry_at_s: float | None = None
        """When to try again; None while nothing is away."""
        self._backoff_s = FIRST_RETRY_S

    @property
    def away(self) -> bool:
        """Whether it waits for the store, the dead-letter topic or the schema registry."""
        return self._retry_at_s is not None

    @property
    def held_bytes(self) -> int:
        """Message bytes read and not yet inserted."""
        unread = sum(len(message.value) for message in self._unread)
        return unread + sum(buffer.size for buffer in self._buffers.values())

    def step(self, timeout_s: float) -> None:
        """Read what comes within ``timeout_s``, insert what is due; blocks while inserting."""
        messages = self._log.poll(timeout_s)
        for place in self._log.lost():
            for buffer in self._buffers.values():
                buffer.forget(place)
            self._unread = deque(m for m in self._unread if m.place != place)
            messages = [message for message in messages if message.place != place]
        self.counts.messages += len(messages)
        self._unread.extend(messages)
        if self._retry_at_s is None or self._clock_s() >= self._retry_at_s:
            self._work(everything=self.held_bytes >= self._config.buffer_mb << 20)

    def finish(self) -> bool:
        """Insert what was read, whether due or not; False when something is away and it stays."""
        self._work(everything=True)
        return not self.away

    def _work(self, *, everything: bool) -> None:
        try:
            self._gather()
            for buffer in self._buffers.values():
                if everything or self.away or self._due(buffer):
                    self._flush(buffer)
        except (StoreError, LogAwayError, OSError) as e:
            self._go_away(e)
        else:
            self._come_back()

    def _gather(self) -> None:
        while self._unread:
            message = self._unread[0]
            self._buffers[message.topic.name].add(
                message, now_s=self._clock_s(), now_ns=self._clock_ns()
            )
            self._unread.popleft()

    def _due(self, buffer: Buffer) -> bool:
        if buffer.since_s is None:
            return False
        age_ms = 1000 * (self._clock_s() - buffer.since_s)
        return buffer.rows >= self._config.batch_rows or age_ms >= self._config.flush_ms

    def _flush(self, buffer: Buffer) -> None:
        if buffer.since_s is None:
            return
        letters = list(buffer.letters())
        for first, block in buffer.blocks(self._config.batch_rows):
            refused = insert_but_refused(block, lambda rows: self._store.insert(buffer.table, rows))
            letters += [
                letter
                for index, error in refused
                for letter in self._refused(buffer, first + index, error)
            ]
        if letters:
            self._letterbox.send(letters)
        self._log.commit(buffer.offsets())
        self.counts.rows += buffer.rows
        self.counts.letters += len(letters)
        buffer.clear()

    def _refused(self, buffer: Buffer, row: int, error: RowsRefusedError) -> list[DeadLetter]:
        if buffer.table.topic is DEADLETTER:
            # A letter about a letter would be refused for the same reason, without end.
            logger.error("the store refuses a dead letter, which stays on its topic: %s", error)
            self.counts.dropped_letters += 1
            return []
        logger.warning("the store refuses a row of %s: %s", buffer.table.name, error)
        return [buffer.refusal(row, "refused_by_store", str(error), self._clock_ns())]

    def _go_away(self, error: Exception) -> None:
        if not self.away:
            self.counts.pauses += 1
            logger.warning("pausing, nothing is lost: %s", error)
        self._log.pause()
        self._retry_at_s = self._clock_s() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, self._config.retry_max_ms / 1000)

    def _come_back(self) -> None:
        if self.away:
            logger.warning("going on: everything that was held is stored")
        self._log.resume()
        self._retry_at_s = None
        self._backoff_s = FIRST_RETRY_S
