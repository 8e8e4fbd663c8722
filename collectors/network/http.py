"""HTTP/1.1 on one connection: requests are paired with answers, and answers timed."""

import logging
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import httptools

from latencyprism.collectors.network.answer import AnswerBody, splitter_of
from latencyprism.collectors.network.body import RequestScan, token_counts
from latencyprism.collectors.network.conversation import Ending, Feed, Link, RefusedError
from latencyprism.collectors.network.endpoints import CHAT, Dialect, dialect_of
from latencyprism.collectors.network.exchange import Exchange
from latencyprism.collectors.network.framing import CHUNKED, UNTIL_CLOSE, Hole, Messages

log = logging.getLogger(__name__)

MAX_PATH: Final = 256
"""Longest part of a path that is looked at, in bytes."""

USUAL_SEGMENT: Final = 4096
"""Segments up to this size, in bytes, may take the short way; see :meth:`_Answers.feed`."""

_METHOD = re.compile(rb"[A-Z]{3,16} (?:[/*]|https?://)")
_LONGEST_METHOD: Final = 16 + len(" https://")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_ORIGIN = re.compile(rb"\Ahttps?://[^/]*")
_ANSWER: Final = b"HTTP/1."
_EVENT_END: Final = b"\n\n\r\n"
"""End of a chunk that ends with an event."""


def starts_request(data: bytes) -> bool:
    """Whether a segment of a client looks like the start of a request."""
    return _METHOD.match(data) is not None


def starts_answer(data: bytes) -> bool:
    """Whether a segment of a server looks like the start of an answer."""
    return data.startswith(_ANSWER)


def trace_id(headers: Mapping[bytes, bytes]) -> str | None:
    """The W3C trace id in the headers of a request, by their names in lower case."""
    found = _TRACEPARENT.fullmatch(headers.get(b"traceparent", b""))
    return found[1].decode() if found else None


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request that waits for its answer; ``exchange`` is None when it is not reported."""

    exchange: Exchange | None
    dialect: Dialect
    head: bool


class Http1:
    """Both directions of one connection, each given in order.

    Holds at most ``max_pipelined`` unanswered requests, and no text beyond a head or the current
    event.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.pending: deque[_Pending] = deque()
        self._requests = _Requests(self)
        self._answers = _Answers(self)
        self.client: Feed = self._requests.feed
        """Takes the next bytes of the client and their time; raises :class:`RefusedError`."""
        self.server: Feed = self._answers.feed
        """Takes the next bytes of the server and their time; raises :class:`RefusedError`."""

    @property
    def waiting(self) -> bool:
        """Whether a request was seen whose answer has not ended."""
        return bool(self.pending)

    def joins(self, head: bytes, *, from_client: bool) -> bool:
        """Whether the segment starts a message; an answer counts when one is waited for."""
        return starts_request(head) if from_client else self.waiting and starts_answer(head)

    def skip(self, at_ns: int, count: int, *, from_client: bool) -> bool:
        """A hole in a body is survived: its end stays known, or is found again."""
        side = self._requests if from_client else self._answers
        return side.skip(at_ns, count)

    def close(self, at_ns: int, ending: Ending) -> None:
        """Close what is open.

        An answer is complete when it said so before, or when only the end of the connection can
        end it; otherwise it is aborted. When track was lost, state and end are marked as estimates.
        """
        complete = ending == "server" and self._answers.until_close
        lost = ending == "lost" or self._answers.adrift
        for pending in self.pending:
            if pending.exchange is not None:
                if lost:
                    lose(pending.exchange)
                elif complete or pending.exchange.done:
                    pending.exchange.close("complete", at_ns)
                else:
                    pending.exchange.close("aborted", at_ns)
            complete = False
        self.pending.clear()


def lose(exchange: Exchange) -> None:
    """Close an exchange whose end nobody saw."""
    if exchange.done:
        exchange.close("complete", exchange.observed_ns, estimated=("end_ns",))
    else:
        exchange.close("aborted", exchange.observed_ns, estimated=("state", "end_ns"))


class _Head:
    """What httptools finds in the head of a message; also its callbacks."""

    def __init__(self) -> None:
        self.path = b""
        self.headers: dict[bytes, bytes] = {}
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.path += url[: MAX_PATH - len(self.path)]

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value.strip()

    def on_headers_complete(self) -> None:
        self.complete = True

    def parse(
        self, parser: "httptools.HttpRequestParser | httptools.HttpResponseParser", data: bytes
    ) -> None:
        """Parse a whole head; raises RefusedError for what is none."""
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # servers are free to ignore what a request asks for
        except httptools.HttpParserError:
            raise RefusedError("not HTTP/1.1") from None
        if not self.complete:
            raise RefusedError("not HTTP/1.1")

    @property
    def length(self) -> int | None:
        """How long the body is; None when no header tells."""
        if self.headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked"):
            return CHUNKED
        length = self.headers.get(b"content-length")
        return None if length is None else int(length)


class _Requests(Messages):
    """What the client sends."""

    __slots__ = (
        "_began_ns",
        "_connection",
        "_exchange",
        "_last_arrival_ns",
        "_nth",
        "_scan",
    )

    def __init__(self, connection: Http1) -> None:
        super().__init__()
        self._connection = connection
        self._exchange: Exchange | None = None
        self._scan: RequestScan | None = None
        self._began_ns = 0
        self._last_arrival_ns = 0
        self._nth = 0

    def plausible(self, head: bytes) -> bool:
        return len(head) < _LONGEST_METHOD or starts_request(head)

    def on_start(self) -> None:
        self._began_ns = self.now_ns

    def on_head(self, head: bytes) -> int:
        found = _Head()
        parser = httptools.HttpRequestParser(found)
        found.parse(parser, head)
        connection = self._connection
        if len(connection.pending) >= connection.link.config.max_pipelined:
            raise RefusedError("too many pipelined requests")
        method = parser.get_method()
        self._exchange, dialect = self._open(method.decode(), found)
        self._scan = RequestScan()
        connection.pending.append(_Pending(self._exchange, dialect, method == b"HEAD"))
        return found.length or 0

    def _open(self, method: str, head: _Head) -> tuple[Exchange | None, Dialect]:
        """The exchange that a request begins, if it is one to report, and what it speaks."""
        link = self._connection.link
        # To a proxy the whole URL is sent, which may hold credentials.
        path = _ORIGIN.sub(b"", head.path.partition(b"?")[0], count=1).decode("ascii", "replace")
        dialect = dialect_of(path) if method == "POST" else None
        if dialect is None and not link.ledger.every_path:
            link.ledger.counts["other requests"] += 1
            return None, CHAT
        self._nth = self._nth + 1 if self._began_ns == self._last_arrival_ns else 0
        self._last_arrival_ns = self._began_ns
        exchange = link.ledger.open(
            key=link.key,
            nth=self._nth,
            instance=link.instance,
            method=method,
            endpoint=path,
            arrival_ns=self._began_ns,
            trace_id=trace_id(head.headers),
        )
        return exchange, dialect or CHAT

    def on_body(self, data: bytes) -> None:
        exchange, scan = self._exchange, self._scan
        if exchange is None:
            return
        exchange.request_bytes += len(data)
        if scan is not None:
            scan.feed(data)
            exchange.model = scan.model
            exchange.max_tokens = scan.max_tokens
            exchange.prompt_tokens = scan.prompt_tokens

    def searchable(self) -> bool:
        return False

    def on_hole(self, count: int, hole: Hole) -> None:
        self._scan = None
        if self._exchange is not None:
            self._exchange.request_bytes += count
            if hole == "ends":
                self._exchange.estimate("request_end_ns")

    def on_end(self) -> None:
        if self._exchange is not None:
            self._exchange.request_ended(self.now_ns)
            self._exchange = None


class _Answers(Messages):
    """What the server sends."""

    __slots__ = (
        "_after",
        "_before",
        "_began_ns",
        "_body",
        "_connection",
        "_resynced",
        "_short",
        "_status",
        "_steady",
    )

    def __init__(self, connection: Http1) -> None:
        super().__init__()
        self._connection = connection
        self._body: AnswerBody | None = None
        self._status = 0
        self._began_ns = 0
        self._steady: Exchange | None = None
        """The exchange whose stream may take the short way now."""
        self._before = self._after = b""
        """What stood around the text of its newest content event."""
        self._short = min(USUAL_SEGMENT, connection.link.config.max_event_bytes)
        self._resynced = False

    def feed(self, at_ns: int, data: bytes) -> None:
        """Take the next bytes. Raises RefusedError for what is no HTTP/1.1.

        Nearly every segment of a server that streams is one chunk that holds one event, and the
        events of one stream differ in their text alone. The short way takes a segment only if it
        is the last content event with another text that needs no escapes: then the long way would
        find the same, an event with content and no token counts, and leave everything as it was.
        """
        exchange = self._steady
        if exchange is not None:
            size = len(data)
            head = _CHUNK_HEADS[size] if size < self._short else _NO_CHUNK
            text = len(head) + len(self._before)
            if (
                data.startswith(head)
                and data.startswith(self._before, len(head))
                and data.endswith(self._after)
                and text < size - len(self._after) == data.find(b'"', text)
                and data.find(b"\n", text) == size - len(_EVENT_END)
            ):
                exchange.more_content(at_ns, size - len(head) - 2)
                return
        super().feed(at_ns, data)
        self._steady = self._steady_exchange(data)

    def _steady_exchange(self, data: bytes) -> Exchange | None:
        """The exchange whose next segment may take the short way, after this one took the long."""
        body = self._body
        if body is None or body.events is None or body.exchange.first_token_ns is None:
            return None
        if not (body.events.between and self.between_chunks):
            return None
        if around := _around_text(data, body.dialect.usual):
            self._before, self._after = around
        return body.exchange if self._before else None

    def skip(self, at_ns: int, count: int) -> bool:
        self._steady = None
        return super().skip(at_ns, count)

    def plausible(self, head: bytes) -> bool:
        return head.startswith(_ANSWER[: len(head)])

    def on_start(self) -> None:
        self._began_ns = self.now_ns

    def on_head(self, head: bytes) -> int:
        found = _Head()
        parser = httptools.HttpResponseParser(found)
        found.parse(parser, head)
        self._status = parser.get_status_code()
        if self._status == 101:
            raise RefusedError("upgraded connections")
        if self._status < 200:
            return 0
        if not self._connection.pending:
            raise RefusedError("answers without a request")
        pending = self._connection.pending[0]
        if pending.exchange is not None:
            self._body = self._answered(pending.exchange, pending.dialect, found)
        if pending.head or self._status in (204, 304):
            return 0
        return UNTIL_CLOSE if found.length is None else found.length

    def _answered(self, exchange: Exchange, dialect: Dialect, head: _Head) -> AnswerBody:
        link = self._connection.link
        splitter = splitter_of(head.headers.get(b"content-type", b""), link.config.max_event_bytes)
        exchange.answered(
            self._began_ns, self.now_ns, status=self._status, streaming=splitter is not None
        )
        return AnswerBody(
            exchange,
            link.ledger.counts,
            dialect,
            splitter,
            encoded=head.headers.get(b"content-encoding", b"identity").lower() != b"identity",
        )

    def on_body(self, data: bytes) -> None:
        if self._body is not None:
            self._body.feed(self.now_ns, data)

    def searchable(self) -> bool:
        return self._body is not None and self._body.events is not None

    def on_hole(self, count: int, hole: Hole) -> None:
        if self._body is None:
            return
        self._body.lost(count, hole)
        if not self.adrift and not self._resynced:
            self._resynced = True
            self._connection.link.ledger.counts["resynced exchanges"] += 1

    def on_end(self) -> None:
        if self._status >= 200 and (exchange := self._finish()) is not None:
            exchange.close("complete", self.now_ns)

    def on_lost_end(self) -> None:
        if (exchange := self._finish()) is not None:
            lose(exchange)

    def _finish(self) -> Exchange | None:
        """Forget the answer; its exchange, if it is reported."""
        self._connection.pending.popleft()
        body, self._body = self._body, None
        self._resynced, self._before = False, b""
        if body is None:
            return None
        body.end()
        return body.exchange


def _around_text(data: bytes, key: bytes) -> tuple[bytes, bytes] | None:
    """What stands before and behind the text of a segment that is one chunk with one event with
    content and without token counts; None for any other segment.

    No text without quotes between the two makes it another kind of segment.
    """
    head = _CHUNK_HEADS[len(data)] if len(data) < USUAL_SEGMENT else _NO_CHUNK
    text = data.find(key) + len(key)
    quote = data.find(b'"', text)
    before, after = data[len(head) : text], data[quote:]
    usual = (
        data.startswith(head)
        and before.find(b"data:") >= 0
        and before.endswith(key)
        and text < quote
        and data.find(b"\n", text) == len(data) - len(_EVENT_END)
        and after.endswith(_EVENT_END)
        and after[1:2] in (b",", b"}", b"]")
        and before.find(b"\n\n") < 0
        and before.find(b"\r") < 0
        and not token_counts(before + after)
    )
    return (before, after) if usual else None


def _chunk_head(size: int) -> bytes:
    """How a segment of ``size`` bytes begins that is one whole chunk."""
    for digits in range(1, 4):
        length = b"%x" % max(0, size - digits - 4)
        if len(length) == digits:
            return length + b"\r\n"
    return _NO_CHUNK


_NO_CHUNK: Final = b"\0"
"""No chunk begins like this."""
_CHUNK_HEADS: Final = tuple(map(_chunk_head, range(USUAL_SEGMENT)))
"""By the size of the segment."""
