"""The body of an answer: read into its exchange whatever protocol carried it."""

from collections import Counter

from latencyprism.collectors.network.body import AnswerScan, model_name, token_counts
from latencyprism.collectors.network.endpoints import Dialect
from latencyprism.collectors.network.exchange import Exchange
from latencyprism.collectors.network.framing import Hole
from latencyprism.collectors.network.sse import EventSplitter, LineSplitter, is_done

LINES = (b"ndjson", b"jsonl", b"json-lines", b"stream+json")


def splitter_of(content_type: bytes, max_bytes: int) -> EventSplitter | None:
    """What cuts an answer of this type into events; None for one that is no stream."""
    kind = content_type.lower()
    if b"event-stream" in kind:
        return EventSplitter(max_bytes)
    return LineSplitter(max_bytes) if any(name in kind for name in LINES) else None


class AnswerBody:
    """Takes the pieces of a body, and tells the exchange what they brought.

    ``splitter`` is that of a stream, None for an answer that comes as a whole. Of one that is
    ``encoded`` (gzip, br, zstd) nothing but its size and its times is read.
    """

    __slots__ = ("_counts", "_lines", "_scan", "dialect", "events", "exchange")

    def __init__(
        self,
        exchange: Exchange,
        counts: Counter[str],
        dialect: Dialect,
        splitter: EventSplitter | None,
        *,
        encoded: bool,
    ) -> None:
        self.exchange = exchange
        self.events = None if encoded else splitter
        self._counts = counts
        self.dialect = dialect
        self._lines = isinstance(splitter, LineSplitter)
        self._scan = AnswerScan() if splitter is None and not encoded else None
        if encoded:
            counts["compressed answers"] += 1

    def feed(self, at_ns: int, data: bytes) -> None:
        """Take the next piece, which came at ``at_ns``."""
        exchange = self.exchange
        exchange.response_bytes += len(data)
        if self.events is not None:
            for event in self.events.feed(data):
                self._event(at_ns, event)
        elif self._scan is not None:
            self._scan.feed(data)

    def _event(self, at_ns: int, event: bytes) -> None:
        exchange = self.exchange
        if not self._lines and event.find(b"data:") < 0:
            return  # a comment
        if self.dialect.has_content(event):
            if exchange.model is None and exchange.first_token_ns is None:
                exchange.model = model_name(event)
            exchange.content(at_ns)
        elif is_done(event):
            exchange.done = True
        if event.find(b"tokens") >= 0 or event.find(b"_count") >= 0:
            exchange.count_tokens(token_counts(event))

    def lost(self, count: int, hole: Hole) -> None:
        """So many bytes are missing: the events from here on are fewer than were sent, and the
        first with content may have been among the lost.
        """
        exchange = self.exchange
        exchange.response_bytes += count
        if hole == "ends":
            exchange.estimate("end_ns")
        if self.events is None:
            return
        if hole == "starts":
            self.events.restart()
        else:
            self.events.tear()
        exchange.estimate("response_bytes", "chunks_before", "chunk_deltas_us")
        if exchange.first_token_ns is None:
            exchange.estimate("first_token_ns")

    def end(self) -> None:
        """The body has ended: tell what is known only then."""
        exchange = self.exchange
        if self._scan is not None:
            exchange.model = exchange.model or self._scan.model
            exchange.count_tokens(self._scan.counts)
        if self.events is not None and self.events.oversized:
            self._counts["oversized events"] += self.events.oversized
