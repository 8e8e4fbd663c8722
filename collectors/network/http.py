"""HTTP/1.1 on one connection: requests are paired with answers, and answers timed."""

import logging
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import httptools

from latencyprism.collectors.network.body import AnswerScan, RequestScan, model_name, token_counts
from latencyprism.collectors.network.conversation import Ending, Feed, Link, RefusedError
from latencyprism.collectors.network.exchange import Exchange
from latencyprism.collectors.network.sse import EventSplitter, has_content, is_done

log = logging.getLogger(__name__)

INFERENCE: Final = (
    b"/chat/completions",  # OpenAI
    b"/completions",
    b"/completion",  # llama.cpp
    b"/generate_stream",  # TGI
    b"/generate",  # SGLang
)
"""Ends of the paths whose exchanges are reported; all others are counted."""

MAX_PATH: Final = 256
"""Longest part of a path that is looked at, in bytes."""

_METHOD = re.compile(rb"(?:POST|GET|PUT|HEAD|DELETE|OPTIONS|PATCH) [/*h]")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_UUID = re.compile(rb"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}")


def starts_request(data: bytes) -> bool:
    """Whether a segment of a client looks like the start of a request."""
    return _METHOD.match(data) is not None


def starts_answer(data: bytes) -> bool:
    """Whether a segment of a server looks like the start of an answer."""
    return data.startswith(b"HTTP/1.")


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request that waits for its answer; ``exchange`` is None when it is not reported."""

    exchange: Exchange | None
    head: bool


class Http1:
    """Both directions of one connection, each given in order.

    Holds at most ``max_pipelined`` unanswered requests, and no text beyond the current event.
    """

    def __init__(self, link: Link) -> None:
        self.key = link.key
        self.instance = link.instance
        self.ledger = link.ledger
        self.now_ns = 0
        self.pending: deque[_Pending] = deque()
        self.max_pipelined = link.config.max_pipelined
        self.max_event_bytes = link.config.max_event_bytes
        self._answers = _Answers(self)
        self.client: Feed = _Requests(self).feed
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

    def skip(self, at_ns: int, count: int, *, from_client: bool) -> bool:  # noqa: ARG002
        """Nothing can be told of what follows a hole."""
        return False

    def close(self, at_ns: int, ending: Ending) -> None:
        """Close what is open.

        An answer is complete when it said so before, or when only the end of the connection can
        end it; otherwise it is aborted. When track was lost, state and end are marked as estimates.
        """
        complete = ending == "server" and self._answers.until_close
        for pending in self.pending:
            if pending.exchange is not None:
                if complete or pending.exchange.done:
                    pending.exchange.close("complete", at_ns)
                elif ending == "lost":
                    pending.exchange.close(
                        "aborted", pending.exchange.observed_ns, estimated=("state", "end_ns")
                    )
                else:
                    pending.exchange.close("aborted", at_ns)
            complete = False
        self.pending.clear()


def _refused(error: httptools.HttpParserError) -> RefusedError:
    """What to raise for what a parser or a callback of ours raised."""
    if not isinstance(error, httptools.HttpParserCallbackError):
        return RefusedError("not HTTP/1.1")
    if isinstance(error.__context__, RefusedError):
        return error.__context__
    log.error("a bug in the reading of HTTP, the connection is given up", exc_info=error)
    return RefusedError("internal errors")


@dataclass(slots=True)
class _Request:
    """The request that the client is sending."""

    began_ns: int = 0
    path: bytes = b""
    length: int = 0
    trace_id: str | None = None
    exchange: Exchange | None = None
    scan: RequestScan = field(default_factory=RequestScan)


class _Requests:
    """Callbacks of the request parser."""

    def __init__(self, connection: Http1) -> None:
        self._connection = connection
        self._parser = httptools.HttpRequestParser(self)
        self._request = _Request()
        self._last_arrival_ns = 0
        self._nth = 0
        self._unparsed = 0
        """Bytes of the current body that the parser won't take: see :meth:`feed`."""

    def feed(self, at_ns: int, data: bytes) -> None:
        """Parse; a request that asks for an upgrade, which servers are free to ignore and inference
        servers do, has its body behind what the parser takes for the whole message.
        """
        self._connection.now_ns = at_ns
        while data:
            if self._unparsed:
                body, data = data[: self._unparsed], data[self._unparsed :]
                self._unparsed -= len(body)
                self.on_body(body)
                if not self._unparsed:
                    self._end()
                continue
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as e:
                data = data[int(e.args[0]) :]
                self._parser = httptools.HttpRequestParser(self)
                self._unparsed = self._request.length
                if not self._unparsed:
                    self._end()
            except httptools.HttpParserError as e:
                raise _refused(e) from None

    def on_message_begin(self) -> None:
        self._request = _Request(began_ns=self._connection.now_ns)

    def on_url(self, url: bytes) -> None:
        self._request.path += url[: MAX_PATH - len(self._request.path)]

    def on_header(self, name: bytes, value: bytes) -> None:
        request, name = self._request, name.lower()
        if name == b"traceparent":
            if found := _TRACEPARENT.fullmatch(value.strip()):
                request.trace_id = found[1].decode()
        elif name == b"x-request-id":
            value = value.strip().lower()
            if request.trace_id is None and _UUID.fullmatch(value):
                request.trace_id = value.replace(b"-", b"").decode()
        elif name == b"content-length":
            request.length = int(value)

    def on_headers_complete(self) -> None:
        connection, request = self._connection, self._request
        if len(connection.pending) >= connection.max_pipelined:
            raise RefusedError("too many pipelined requests")
        method = self._parser.get_method()
        path = request.path.partition(b"?")[0]
        if method == b"POST" and path.endswith(INFERENCE):
            self._nth = self._nth + 1 if request.began_ns == self._last_arrival_ns else 0
            self._last_arrival_ns = request.began_ns
            request.exchange = connection.ledger.open(
                key=connection.key,
                nth=self._nth,
                instance=connection.instance,
                endpoint=path.decode("ascii", "replace"),
                arrival_ns=request.began_ns,
                trace_id=request.trace_id,
            )
        else:
            connection.ledger.counts["other requests"] += 1
        connection.pending.append(_Pending(request.exchange, method == b"HEAD"))

    def on_body(self, body: bytes) -> None:
        exchange, scan = self._request.exchange, self._request.scan
        if exchange is not None:
            scan.feed(body)
            exchange.request_bytes += len(body)
            exchange.model = scan.model
            exchange.prompt_tokens = scan.prompt_tokens

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():
            self._end()

    def _end(self) -> None:
        if self._request.exchange is not None:
            self._request.exchange.request_ended(self._connection.now_ns)
            self._request.exchange = None


@dataclass(slots=True)
class _Answer:
    """The answer that the server is sending; ``exchange`` is None when it is not reported."""

    began_ns: int = 0
    status: int = 0
    stream: bool = False
    encoded: bool = False
    framed: bool = False
    """Whether its headers tell where it ends."""
    exchange: Exchange | None = None
    events: EventSplitter | None = None
    scan: AnswerScan | None = None


class _Answers:
    """Callbacks of the answer parser."""

    def __init__(self, connection: Http1) -> None:
        self._connection = connection
        self._parser = httptools.HttpResponseParser(self)
        self._answer = _Answer()
        self._bodiless = False

    def feed(self, at_ns: int, data: bytes) -> None:
        """Parse; an answer to HEAD announces a body that never comes, so it ends with its piece."""
        self._connection.now_ns = at_ns
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise RefusedError("upgraded connections") from None
        except httptools.HttpParserError as e:
            raise _refused(e) from None
        if self._bodiless:
            self.on_message_complete()
            self._parser = httptools.HttpResponseParser(self)

    @property
    def until_close(self) -> bool:
        """Whether the current answer ends with its connection."""
        return self._answer.exchange is not None and not self._answer.framed

    def on_message_begin(self) -> None:
        self._answer = _Answer(began_ns=self._connection.now_ns)

    def on_header(self, name: bytes, value: bytes) -> None:
        answer, name = self._answer, name.lower()
        if name == b"content-type":
            answer.stream = b"event-stream" in value.lower()
        elif name == b"content-encoding":
            answer.encoded = value.strip().lower() != b"identity"
        elif name in (b"content-length", b"transfer-encoding"):
            answer.framed = True

    def on_headers_complete(self) -> None:
        connection, answer = self._connection, self._answer
        answer.status = self._parser.get_status_code()
        if answer.status < 200:
            return
        if not connection.pending:
            raise RefusedError("answers without a request")
        self._bodiless = connection.pending[0].head
        answer.exchange = connection.pending[0].exchange
        if answer.exchange is None:
            return
        answer.exchange.answered(
            answer.began_ns, connection.now_ns, status=answer.status, streaming=answer.stream
        )
        if answer.encoded:
            connection.ledger.counts["compressed answers"] += 1
        elif answer.stream:
            answer.events = EventSplitter(connection.max_event_bytes)
        else:
            answer.scan = AnswerScan()

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        exchange = answer.exchange
        if exchange is None:
            return
        exchange.response_bytes += len(body)
        if answer.events is not None:
            for event in answer.events.feed(body):
                if has_content(event):
                    if exchange.first_token_ns is None and exchange.model is None:
                        exchange.model = model_name(event)
                    exchange.content(self._connection.now_ns)
                elif is_done(event):
                    exchange.done = True
                if event.find(b"tokens") >= 0:
                    exchange.count_tokens(token_counts(event))
        elif answer.scan is not None:
            answer.scan.feed(body)

    def on_message_complete(self) -> None:
        answer, self._bodiless = self._answer, False
        if answer.status < 200:
            return
        self._connection.pending.popleft()
        exchange, answer.exchange = answer.exchange, None
        if exchange is None:
            return
        if answer.scan is not None:
            exchange.model = exchange.model or answer.scan.model
            exchange.count_tokens(answer.scan.counts)
        if answer.events is not None and answer.events.oversized:
            self._connection.ledger.counts["oversized events"] += answer.events.oversized
        exchange.close("complete", self._connection.now_ns)
