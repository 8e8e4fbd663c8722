"""TLS on one connection, without keys: streams of tokens by the sizes and times of records."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from latencyprism.collectors.network.conversation import Ending, Feed, Link
from latencyprism.collectors.network.exchange import Exchange
from latencyprism.collectors.network.tls_records import (
    APPLICATION,
    HANDSHAKE,
    OVERHEAD_13,
    Record,
    RecordReader,
    offers_http2,
    server_hello,
    starts_record,
)
from latencyprism.schemas.records import RequestState

ENDPOINT: Final = "(tls)"
"""Endpoint of every exchange seen through TLS."""

ESTIMATED: Final = (
    "endpoint",
    "streaming",
    "state",
    "request_end_ns",
    "first_byte_ns",
    "first_token_ns",
    "end_ns",
    "chunks_before",
    "chunk_base_ns",
    "chunk_deltas_us",
    "request_bytes",
    "response_bytes",
)

TOGETHER_NS: Final = 1_000_000
"""Records that follow each other faster than this were written together: one content event."""
LONGEST_HEADERS: Final = 512
"""A single record of up to this size that begins an answer is taken for its headers alone."""
SMALLEST_EVENT: Final = 25
"""``data: [DONE]`` in a chunk, and the last chunk, take 24 bytes; no event with content is smaller.
"""
LARGEST_EVENT: Final = 4096
EVENTS_OF_A_STREAM: Final = 3
"""So many small events, apart from each other, make an answer a stream."""

_LAST_CHUNK: Final = (5, 24)
"""Size of the chunk that ends an answer of HTTP/1.1, alone and behind ``data: [DONE]``."""
_LAST_FRAME: Final = 9
"""Size of the empty frame that ends an answer of HTTP/2."""
_ALERT: Final = 2
_KEY_UPDATE: Final = 5
_FINISHED: Final = (36, 52)
"""Size of the message that ends a client's handshake in TLS 1.3, by hash function."""
_MAX_FLIGHT: Final = 8
"""Records of a client's handshake in TLS 1.3 (a certificate may be among them)."""
_CONTROL_HTTP2: Final = 64
"""A record up to this size holds frames of HTTP/2 that control, or headers seen before."""
_REQUEST_NS: Final = 5_000_000
"""What a client sends on HTTP/2 so long after the start of a request belongs to another."""


@dataclass(slots=True)
class _Answer:
    """What came for the request so far, in groups of records that were written together."""

    exchange: Exchange
    asked_ns: int
    """When the client last sent something for it."""
    began_ns: int = 0
    last_ns: int = 0
    groups: int = 0
    group_records: int = 0
    group_bytes: int = 0
    events: int = 0
    """Small groups behind the first, as far as they are complete."""


class Tls:
    """Both directions of one connection, each given in order; ``whole`` from its first byte on.

    A request is what the client sends before the server answers; an answer is reported once it has
    shown to be a stream: :data:`EVENTS_OF_A_STREAM` small events behind its beginning. Everything
    else (polls, pages, answers as a whole) is counted, because it cannot be told from a request
    for tokens. All that is reported is marked as estimated, but for the arrival.

    Where HTTP/2 may be spoken, streams that overlap cannot be told apart: they are given up and
    counted until the connection has been silent for ``tls_quiet_ms``.
    """

    def __init__(self, link: Link, *, whole: bool) -> None:
        self._link = link
        self._requests = RecordReader(whole=whole)
        self._answers = RecordReader(whole=whole)
        self._tls13 = not whole
        self._overhead: int | None = OVERHEAD_13
        self._http2 = not whole
        """Whether HTTP/2 may be spoken; nobody knows behind a join."""
        self._flight = 0 if whole else _MAX_FLIGHT
        """Records of the client's handshake so far."""
        self._awaits_tickets = whole
        """Whether nothing that the server sent after a request was seen yet."""
        self._answer: _Answer | None = None
        self._mixed_ns: int | None = None
        """When the server last wrote since streams overlapped; None when they did not."""
        self._nth = 0
        self._arrival_ns = 0
        link.ledger.counts["TLS connections"] += 1
        self.client: Feed = self._feed_client
        """Takes the next bytes of the client and their time; raises :class:`RefusedError`."""
        self.server: Feed = self._feed_server
        """Takes the next bytes of the server and their time; raises :class:`RefusedError`."""

    @property
    def waiting(self) -> bool:
        """Whether a stream is open."""
        return self._answer is not None and not self._answer.exchange.held

    def joins(self, head: bytes, *, from_client: bool) -> bool:  # noqa: ARG002
        """Whether the segment starts a record."""
        return starts_record(head)

    def skip(self, at_ns: int, count: int, *, from_client: bool) -> bool:  # noqa: ARG002
        """A hole inside a record is survived."""
        return (self._requests if from_client else self._answers).skip(count)

    def close(self, at_ns: int, ending: Ending) -> None:
        """Close what is open: as aborted when the server is known to say that it is over, and did
        not. Else nobody knows.
        """
        left = ending in ("client", "server") and not self._marks_ends
        self._end("complete" if left else "aborted", at_ns)

    def settle(self, now_ns: int) -> None:
        """A stream that is silent has ended, unless its server is known to say so."""
        answer = self._answer
        assert answer is not None
        if not self._marks_ends and self._quiet(answer.last_ns, now_ns):
            self._end("complete", now_ns)

    def _feed_client(self, at_ns: int, data: bytes) -> None:
        for record in self._requests.feed(data):
            if record.kind == HANDSHAKE and offers_http2(record.hello):
                self._http2 = True
            elif record.kind == APPLICATION:
                size = self._size(record)
                if self._tls13 and self._flight < _MAX_FLIGHT:
                    self._flight = _MAX_FLIGHT if size in _FINISHED else self._flight + 1
                elif size not in (_ALERT, _KEY_UPDATE):
                    self._request(at_ns, size)

    def _feed_server(self, at_ns: int, data: bytes) -> None:
        records = []
        for record in self._answers.feed(data):
            if record.kind == APPLICATION:
                records.append(record)
            elif record.kind == HANDSHAKE and (hello := server_hello(record.hello)) is not None:
                self._tls13, self._overhead = hello.tls13, hello.overhead
                if hello.http2 is not None:
                    self._http2 = hello.http2
                if self._http2:
                    self._link.ledger.counts["TLS connections with HTTP/2"] += 1
        for record in self._without_tickets(records):
            if self._mixed_ns is not None:
                self._mixed_ns = at_ns
            elif self._answer is not None:
                self._respond(self._answer, at_ns, self._size(record))

    def _without_tickets(self, records: Sequence[Record]) -> Sequence[Record]:
        """What a segment holds beside tickets for later connections, which TLS 1.3 sends after the
        handshake, together and all of one size.
        """
        if not (self._awaits_tickets and records and self._answer is not None):
            return records
        self._awaits_tickets = False
        size = records[0].length
        tickets = next((n for n, r in enumerate(records) if r.length != size), len(records))
        return records[tickets:] if tickets > 1 else records

    @property
    def _marks_ends(self) -> bool:
        """Whether the server says when a stream is over."""
        return self._link.ledger.marks_ends.get(self._link.instance, False)

    def _size(self, record: Record) -> int:
        """Bytes of text in a record."""
        return max(0, record.length - (self._overhead or 0))

    def _quiet(self, since_ns: int, at_ns: int) -> bool:
        return at_ns - since_ns > self._link.config.tls_quiet_ms * 1_000_000

    def _request(self, at_ns: int, size: int) -> None:
        """The client sent something that is no control message of TLS."""
        if self._http2 and (size <= _CONTROL_HTTP2 or self._overlaps(at_ns)):
            return
        answer = self._answer
        if answer is not None and answer.groups:
            if not answer.exchange.held:  # it was over, and its server did not say so
                self._link.ledger.marks_ends[self._link.instance] = False
            self._end("complete", at_ns)
            answer = None
        if answer is None:
            answer = self._open(at_ns)
        if answer is not None:
            answer.asked_ns = at_ns
            answer.exchange.request_bytes += size
            answer.exchange.request_ended(at_ns)

    def _overlaps(self, at_ns: int) -> bool:
        """Whether a request on HTTP/2 comes before the answer to another has surely ended."""
        answer = self._answer
        if self._mixed_ns is not None:
            if not self._quiet(self._mixed_ns, at_ns):
                return True
            self._mixed_ns = None
        elif answer is not None:
            if answer.groups:
                apart = self._quiet(answer.last_ns, at_ns)
            else:
                apart = at_ns - answer.asked_ns < _REQUEST_NS
            if not apart:
                self._link.ledger.counts["TLS streams that overlap"] += 1
                self._end("aborted", at_ns)
                self._mixed_ns = at_ns
                return True
        return False

    def _open(self, at_ns: int) -> _Answer | None:
        self._nth = self._nth + 1 if at_ns == self._arrival_ns else 0
        self._arrival_ns = at_ns
        exchange = self._link.ledger.open(
            key=self._link.key,
            nth=self._nth,
            instance=self._link.instance,
            method=None,
            endpoint=ENDPOINT,
            arrival_ns=at_ns,
            trace_id=None,
            held=True,
        )
        if exchange is None:
            return None
        exchange.estimate(*ESTIMATED)
        if self._http2:
            exchange.estimate("arrival_ns")
        self._answer = _Answer(exchange, at_ns)
        return self._answer

    def _respond(self, answer: _Answer, at_ns: int, size: int) -> None:
        """A record of the answer."""
        answer.exchange.response_bytes += size
        smallest = _CONTROL_HTTP2 + 1 if self._http2 else SMALLEST_EVENT
        if size >= smallest:
            if at_ns - answer.last_ns >= TOGETHER_NS and not self._next_group(answer, at_ns):
                return
            answer.group_records += 1
            answer.group_bytes += size
        if answer.groups:
            answer.last_ns = at_ns
            if self._overhead is not None and self._ends(size):
                if not answer.exchange.held:
                    self._link.ledger.marks_ends.setdefault(self._link.instance, True)
                self._end("complete", at_ns)

    def _ends(self, size: int) -> bool:
        """Whether a record of this size ends an answer."""
        return size in _LAST_CHUNK or (self._http2 and size == _LAST_FRAME)

    def _next_group(self, answer: _Answer, at_ns: int) -> bool:
        """Judge the group that is complete, and begin another; False when it is no stream."""
        exchange = answer.exchange
        if not answer.groups:
            answer.began_ns = at_ns
            exchange.answered(at_ns, at_ns, status=None, streaming=True)
        else:
            if answer.groups == 1:
                alone = answer.group_records == 1 and answer.group_bytes <= LONGEST_HEADERS
                if not alone:
                    exchange.content(answer.began_ns)
            elif answer.group_bytes <= LARGEST_EVENT:
                answer.events += 1
            elif exchange.held:
                self._end("complete", at_ns)
                return False
            exchange.content(at_ns)
            if exchange.held and answer.events == EVENTS_OF_A_STREAM:
                exchange.reveal()
                self._link.ledger.timed[self] = None
        answer.groups += 1
        answer.group_records = answer.group_bytes = 0
        return True

    def _end(self, state: RequestState, at_ns: int) -> None:
        """The answer is over, or nobody knows; it ended with its last record."""
        answer, self._answer = self._answer, None
        if answer is None:
            return
        exchange, ledger = answer.exchange, self._link.ledger
        if exchange.held:
            ledger.counts["TLS exchanges that are no stream"] += 1
            ledger.drop(exchange)
            return
        del ledger.timed[self]
        exchange.close(state, answer.last_ns)
        exchange.observed_ns = max(at_ns, answer.last_ns)
