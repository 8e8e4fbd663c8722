"""OTLP over HTTP: ``POST /v1/traces`` on one event loop, in the thread that calls :func:`serve`."""

import asyncio
import logging
import socket
import threading
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from latencyprism.collectors.otlp.answers import accepted, status
from latencyprism.collectors.otlp.receiver import Encoding, Receiver, ip_address
from latencyprism.collectors.otlp.spans import MalformedError

PATH: Final = "/v1/traces"
ENCODINGS: Final[dict[bytes, Encoding]] = {
    b"application/x-protobuf": "protobuf",
    b"application/json": "json",
}
MAX_BODIES: Final = 4
"""Bodies that are read at once; further ones wait in the kernel."""
BODY_S: Final = 10.0
"""Longest time that one body may take to come."""
MORE: Final = 64
"""Connections too many that are still answered; more are ended at once."""
HEAD_S: Final = 10.0
"""How often it is looked whether a connection has sent the head of a request since."""
LOOK_S: Final = 0.05
END_S: Final = 0.3
GZIP: Final = 16 + zlib.MAX_WBITS

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class RefusedError(Exception):
    """A request that is answered with an error; ``kind`` is what it counts as."""

    def __init__(self, code: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.kind = kind


class App:
    """The ASGI application. Holds at most ``MAX_BODIES`` bodies, and one that is decompressed."""

    def __init__(self, receiver: Receiver, max_bytes: int) -> None:
        self._receiver = receiver
        self._max_bytes = max_bytes
        self._bodies = asyncio.Semaphore(MAX_BODIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        encoding: Encoding = "json"
        try:
            headers = dict(scope["headers"])
            encoding = _encoding(scope, headers)
            async with self._bodies:
                body = await self._body(headers, receive)
                peer = ip_address(scope["client"][0]) if scope["client"] else None
                answer = accepted(self._receiver.take(body, encoding, peer), encoding)
            code = 200
        except RefusedError as refused:
            self._receiver.refuse(refused.kind)
            code, answer = refused.code, status(str(refused), encoding)
        except MalformedError as malformed:
            code, answer = 400, status(str(malformed), encoding)
        kind = next(name for name, known in ENCODINGS.items() if known == encoding)
        head = [(b"content-type", kind), (b"content-length", str(len(answer)).encode())]
        if code in (408, 413):  # the rest of the body is not wanted
            head.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": code, "headers": head})
        await send({"type": "http.response.body", "body": answer})

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        if int(headers.get(b"content-length", b"0")) > self._max_bytes:
            raise _too_large(self._max_bytes)
        try:
            async with asyncio.timeout(BODY_S):
                body = await self._read(receive)
        except TimeoutError:
            raise RefusedError(408, "messages that did not end", "the body did not come") from None
        compression = headers.get(b"content-encoding", b"identity").lower()
        if compression == b"gzip":
            return _unzipped(body, self._max_bytes)
        if compression != b"identity":
            raise RefusedError(415, "unknown encodings", "send it plain or as gzip")
        return body

    async def _read(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RefusedError(400, "messages that did not end", "the client went away")
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                raise _too_large(self._max_bytes)
            if not message.get("more_body"):
                return bytes(body)


def _encoding(scope: Scope, headers: dict[bytes, bytes]) -> Encoding:
    if scope["path"] != PATH:
        raise RefusedError(404, "other paths", f"only {PATH} is served")
    if scope["method"] != "POST":
        raise RefusedError(405, "other methods", f"{PATH} takes POST")
    media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media not in ENCODINGS:
        raise RefusedError(415, "unknown encodings", "send application/x-protobuf or JSON")
    return ENCODINGS[media]


def _unzipped(body: bytes, max_bytes: int) -> bytes:
    unzip = zlib.decompressobj(GZIP)
    try:
        plain = unzip.decompress(body, max_bytes + 1)
    except zlib.error:
        raise RefusedError(400, "malformed messages", "the body is no gzip") from None
    if len(plain) > max_bytes:
        raise _too_large(max_bytes)
    if not unzip.eof or unzip.unused_data:
        raise RefusedError(400, "malformed messages", "the body is not one whole gzip")
    return plain


def _too_large(max_bytes: int) -> RefusedError:
    return RefusedError(413, "oversized messages", f"more than {max_bytes} bytes")


class _Connection(H11Protocol):
    """One connection, which is not kept for one that sends nothing, or its heads by the byte.

    uvicorn answers the ones too many, but keeps them; :data:`MORE` are enough for that.
    """

    _looking: asyncio.TimerHandle | None = None
    _seen: Any = None
    """The request at the last look."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection, or end it."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        assert self.limit_concurrency is not None
        if len(self.connections) > self.limit_concurrency + MORE:
            transport.abort()
        else:
            self._looking = self.loop.call_later(HEAD_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        if self.conn.their_state is h11.IDLE and self.cycle is self._seen:
            self.transport.abort()
            return
        self._seen = self.cycle
        self._looking = self.loop.call_later(HEAD_S, self._look)


def serve(
    receiver: Receiver,
    listening: socket.socket,
    stop: threading.Event,
    *,
    max_bytes: int,
    max_connections: int,
) -> None:
    """Answer on a listening socket until ``stop``, and close it; returns within 400 ms of it."""
    asyncio.run(_serve(App(receiver, max_bytes), listening, stop, max_connections=max_connections))


async def _serve(
    app: App, listening: socket.socket, stop: threading.Event, *, max_connections: int
) -> None:
    config = uvicorn.Config(
        app,
        http=_Connection,  # h11 bounds the size of headers
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        limit_concurrency=max_connections,
    )
    # Each answer to one too many would be a line.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not stop.is_set() and not serving.done():  # noqa: ASYNC110 - no event of asyncio
        await asyncio.sleep(LOOK_S)
    server.should_exit = True
    await asyncio.wait([serving], timeout=END_S / 2)
    server.force_exit = True
    await asyncio.wait([serving], timeout=END_S / 2)
    listening.close()
