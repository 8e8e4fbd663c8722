"""HTTP/2 on one connection without TLS: concurrent streams, each a request and its answer."""

import re
from collections.abc import Mapping
from typing import Final

from latencyprism.collectors.network import http2_frames as h2
from latencyprism.collectors.network.answer import AnswerBody, splitter_of
from latencyprism.collectors.network.body import RequestScan
from latencyprism.collectors.network.conversation import Ending, Feed, Link, RefusedError
from latencyprism.collectors.network.endpoints import CHAT, Dialect, dialect_of
from latencyprism.collectors.network.exchange import Exchange
from latencyprism.collectors.network.http import MAX_PATH, lose, trace_id
from latencyprism.collectors.network.sse import EventSplitter

UNKNOWN_ENDPOINT: Final = "(h2)"
"""Endpoint of a request whose headers could not be read."""

_EVENT_STREAM = re.compile(rb"\s*(?:data|event|id|retry)?:")


class _Stream:
    """One request and its answer; its exchange is held while nobody knows what was asked for."""

    __slots__ = ("answered", "body", "dialect", "exchange", "scan")

    def __init__(self, exchange: Exchange, dialect: Dialect) -> None:
        self.exchange = exchange
        self.dialect = dialect
        self.scan: RequestScan | None = RequestScan()
        """None behind a hole."""
        self.answered = False
        self.body: AnswerBody | None = None


class _Half:
    """One direction; without its headers when it was joined in the middle."""

    __slots__ = ("frames", "headers")

    def __init__(self, *, whole: bool) -> None:
        self.frames = h2.FrameReader()
        self.headers = h2.HeaderReader(whole=whole)


class Http2:
    """Both directions of one connection, each given in order; a whole one from its first byte on.

    What a stream is for is told by its headers. Where they cannot be read (the connection was
    joined in the middle, or the library ``hpack`` is missing), the answer's content decides: one
    that is no answer of an inference server is not reported, and of those that are, the times are
    as exact as ever and ``estimated`` names what was guessed.

    Holds at most ``max_streams`` streams, and for each no text beyond the current event.
    """

    def __init__(self, link: Link, *, client_whole: bool, server_whole: bool) -> None:
        self._link = link
        self._streams: dict[int, _Stream] = {}
        self._newest = 0
        """Highest number of a stream so far; they do not come twice."""
        self._preface = h2.PREFACE if client_whole else b""
        """What of it is still to come."""
        self._requests = _Half(whole=client_whole)
        self._answers = _Half(whole=server_whole)
        self._now_ns = 0
        self.client: Feed = self._feed_client
        """Takes the next bytes of the client and their time; raises :class:`RefusedError`."""
        self.server: Feed = self._feed_server
        """Takes the next bytes of the server and their time; raises :class:`RefusedError`."""

    @property
    def waiting(self) -> bool:
        """Whether a request was seen whose answer has not ended."""
        return bool(self._streams)

    def joins(self, head: bytes, *, from_client: bool) -> bool:  # noqa: ARG002
        """Whether the segment starts a frame."""
        return h2.starts_frame(head)

    def skip(self, at_ns: int, count: int, *, from_client: bool) -> bool:  # noqa: ARG002
        """A hole inside a frame of data is survived: the next frame is known to follow it."""
        frames = (self._requests if from_client else self._answers).frames
        if not frames.skip(count):
            return False
        stream = self._streams.get(frames.stream)
        if stream is not None and from_client:
            stream.scan = None
            stream.exchange.request_bytes += count
        elif stream is not None and stream.body is not None:
            stream.body.lost(count, "inside")
        return True

    def close(self, at_ns: int, ending: Ending) -> None:
        """Close what is open: as complete where the answer said that it is over, else as aborted.
        When track was lost, state and end are marked as estimates.
        """
        for number in tuple(self._streams):
            self._abort(number, at_ns, lost=ending == "lost")

    def _feed_client(self, at_ns: int, data: bytes) -> None:
        if self._preface:
            size = len(data)
            if not self._preface.startswith(data[: len(self._preface)]):
                raise RefusedError("not HTTP/2")
            self._preface, data = self._preface[size:], data[len(self._preface) :]
        self._now_ns = at_ns
        for frame in self._requests.frames.feed(at_ns, data):
            if frame.kind == h2.DATA:
                self._request_body(frame)
            elif (block := self._block(self._requests, frame, self._answers)) is not None:
                self._request(block)

    def _feed_server(self, at_ns: int, data: bytes) -> None:
        self._now_ns = at_ns
        frames, headers = self._answers.frames, self._answers.headers
        usual = self._streams.get(frames.only_data(data))
        if usual is not None and usual.body is not None and not headers.incomplete:
            self._read(usual, usual.body, data[h2.HEAD_BYTES :])
            return
        for frame in frames.feed(at_ns, data):
            if frame.kind == h2.DATA:
                self._answer_body(frame)
            elif frame.kind == h2.GOAWAY:
                self._go_away(frame.payload)
            elif (block := self._block(self._answers, frame, self._requests)) is not None:
                self._answer(block)

    def _block(self, half: _Half, frame: h2.Frame, other: _Half) -> h2.Block | None:
        """What frames that both sides may send come to."""
        if frame.kind in (h2.HEADERS, h2.CONTINUATION, h2.PUSH_PROMISE):
            readable = half.headers.readable
            block = half.headers.take(frame)
            if readable and not half.headers.readable:
                self._link.ledger.counts["unreadable HTTP/2 headers"] += 1
            return block
        if half.headers.incomplete:
            raise RefusedError("not HTTP/2")
        if frame.kind == h2.RST_STREAM and frame.stream in self._streams:
            self._abort(frame.stream, self._now_ns)
        elif frame.kind == h2.SETTINGS and not frame.flags & h2.ACK:
            size = h2.table_size(frame.payload)
            if size is not None:
                other.headers.allow_table(size)
        return None

    def _request(self, block: h2.Block) -> None:
        if block.stream <= self._newest or not block.stream & 1:
            self._request_ended(block.stream, ended=block.ends_stream)  # trailers
            return
        self._newest = block.stream
        ledger, fields = self._link.ledger, block.fields
        readable = fields is not None
        if len(self._streams) >= self._link.config.max_streams:
            ledger.counts["too many HTTP/2 streams"] += 1
            return
        fields = fields or {}
        method = fields.get(b":method", b"").decode("ascii", "replace")
        path = fields.get(b":path", b"")[:MAX_PATH].partition(b"?")[0].decode("ascii", "replace")
        dialect = dialect_of(path) if method == "POST" else None
        if readable and dialect is None and not ledger.every_path:
            ledger.counts["other requests"] += 1
            return
        exchange = ledger.open(
            key=self._link.key,
            nth=block.stream,
            instance=self._link.instance,
            method=method or None,
            endpoint=path or UNKNOWN_ENDPOINT,
            arrival_ns=block.began_ns,
            trace_id=trace_id(fields),
            held=not readable,
        )
        if exchange is None:
            return
        if not readable:
            exchange.estimate("endpoint")
        self._streams[block.stream] = _Stream(exchange, dialect or CHAT)
        self._request_ended(block.stream, ended=block.ends_stream)

    def _request_body(self, frame: h2.Frame) -> None:
        stream = self._streams.get(frame.stream)
        if stream is not None:
            exchange, scan = stream.exchange, stream.scan
            exchange.request_bytes += len(frame.payload)
            if scan is not None:
                scan.feed(frame.payload)
                exchange.model = scan.model
                exchange.max_tokens = scan.max_tokens
                exchange.prompt_tokens = scan.prompt_tokens
            self._request_ended(frame.stream, ended=bool(frame.flags & h2.END_STREAM))

    def _request_ended(self, number: int, *, ended: bool) -> None:
        stream = self._streams.get(number)
        if ended and stream is not None:
            stream.exchange.request_ended(self._now_ns)

    def _answer(self, block: h2.Block) -> None:
        stream = self._streams.get(block.stream)
        if stream is None:
            return
        if not stream.answered:
            fields = block.fields
            status = None if fields is None else _status(fields)
            if status is not None and status < 200:
                return
            stream.answered = True
            streaming = None if fields is None else self._expect(stream, fields)
            stream.exchange.answered(
                block.began_ns, self._now_ns, status=status, streaming=streaming
            )
        if block.ends_stream:
            self._complete(block.stream)

    def _expect(self, stream: _Stream, fields: Mapping[bytes, bytes]) -> bool:
        """Read the body as its headers say; whether it is a stream."""
        limit = self._link.config.max_event_bytes
        splitter = splitter_of(fields.get(b"content-type", b""), limit)
        encoding = fields.get(b"content-encoding", b"identity").strip().lower()
        stream.body = AnswerBody(
            stream.exchange,
            self._link.ledger.counts,
            stream.dialect,
            splitter,
            encoded=encoding != b"identity",
        )
        return splitter is not None

    def _guess(self, stream: _Stream, body: bytes) -> AnswerBody:
        """Read the body as its first bytes suggest."""
        exchange = stream.exchange
        exchange.streaming = _EVENT_STREAM.match(body) is not None
        exchange.estimate("streaming")
        splitter = EventSplitter(self._link.config.max_event_bytes) if exchange.streaming else None
        return AnswerBody(
            exchange, self._link.ledger.counts, stream.dialect, splitter, encoded=False
        )

    def _answer_body(self, frame: h2.Frame) -> None:
        stream = self._streams.get(frame.stream)
        if stream is None:
            return
        if frame.payload:
            if stream.body is None:
                stream.body = self._guess(stream, frame.payload)
            self._read(stream, stream.body, frame.payload)
        if frame.flags & h2.END_STREAM:
            self._complete(frame.stream)

    def _read(self, stream: _Stream, body: AnswerBody, data: bytes) -> None:
        body.feed(self._now_ns, data)
        if stream.exchange.first_token_ns is not None:
            stream.exchange.reveal()

    def _complete(self, number: int) -> None:
        stream = self._streams.pop(number)
        exchange, ledger = stream.exchange, self._link.ledger
        if stream.body is not None:
            stream.body.end()
        if exchange.completion_tokens is not None:
            exchange.reveal()
        if exchange.held:
            ledger.counts["other requests"] += 1
            ledger.drop(exchange)
        else:
            exchange.close("complete", self._now_ns)

    def _abort(self, number: int, at_ns: int, *, lost: bool = False) -> None:
        stream = self._streams.pop(number)
        exchange = stream.exchange
        if exchange.held:
            self._link.ledger.drop(exchange)
        elif lost:
            lose(exchange)
        elif exchange.done:
            exchange.close("complete", at_ns)
        else:
            exchange.close("aborted", at_ns)

    def _go_away(self, payload: bytes) -> None:
        """The server takes up no stream beyond the one it names."""
        last = int.from_bytes(payload[:4], "big") & 0x7FFFFFFF
        for number in tuple(self._streams):
            if number > last:
                self._abort(number, self._now_ns)


def _status(fields: Mapping[bytes, bytes]) -> int | None:
    status = fields.get(b":status", b"")
    return int(status) if status.isdigit() and len(status) == 3 else None
