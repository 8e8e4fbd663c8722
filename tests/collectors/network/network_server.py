"""A tiny OpenAI-compatible HTTP/1.1 server that notes when it really sent each token."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from network_wire import DONE, ROLE, STREAM_END, STREAM_HEAD, answer, chunk, delta, usage


@dataclass(slots=True)
class Truth:
    """What one exchange was; times are ns since the epoch, of the server's own clock."""

    received_ns: int
    sent_ns: list[tuple[int, int]] = field(default_factory=list)
    """Before and after each write of a content event."""


class TokenServer:
    """Serves one connection after the other, with keep-alive and pipelining, in order.

    A request body is ``{"tokens": n, "gap_ms": g, "stream": bool, "die_after": k, "early_role":
    bool}``: with ``die_after`` the connection is reset after so many tokens, without ``early_role``
    no chunk comes before the first token. Any other method answers 200.
    """

    def __init__(self) -> None:
        self.truths: list[Truth] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self._exchange(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has left, or the test wanted the connection broken
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        body = await reader.readexactly(length)
        if not head.startswith(b"POST"):
            writer.write(answer(b"ok"))
            return
        wish = json.loads(body)
        truth = Truth(time.time_ns())
        self.truths.append(truth)
        if not wish.get("stream", True):
            writer.write(answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}'))
            return
        writer.write(STREAM_HEAD)
        if wish.get("early_role", True):
            await asyncio.sleep(0.005)
            writer.write(chunk(ROLE))
        for number in range(wish["tokens"]):
            await asyncio.sleep(wish["gap_ms"] / 1000)
            if number == wish.get("die_after"):
                writer.transport.abort()
                raise ConnectionError
            before = time.time_ns()
            writer.write(chunk(delta(content=f" secret{number}")))
            truth.sent_ns.append((before, time.time_ns()))
        writer.write(chunk(usage(3, wish["tokens"], 1)) + chunk(DONE) + STREAM_END)
        await writer.drain()


@asynccontextmanager
async def token_server(
    address: str, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[TokenServer, int]]:
    """A server on a free port of the address."""
    served = TokenServer()
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(served.serve(reader, writer)))

    server = await asyncio.start_server(accept, address, 0, ssl=tls)
    try:
        yield served, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def connection(
    port: int, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is closed when the block ends."""
    reader, writer = await asyncio.open_connection(address, port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
