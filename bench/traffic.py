"""Steady streaming load on a server, what its clients saw, and a server that answers at a pace."""

import asyncio
import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from typing import Final

import numpy as np
import numpy.typing as npt

from latencyprism.collectors.address import endpoint, port_of
from latencyprism.simulator.config import Coefficients, EngineConfig, ServerConfig
from latencyprism.simulator.server import run_server

READ_BYTES: Final = 65_536
END: Final = b"\r\n0\r\n\r\n"
EVENT: Final = b"data: {"
WORDS: Final = 24
START_S: Final = 30.0
PAUSE_S: Final = 0.5
"""Before a client whose connection broke asks again."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Chunks that all clients together got."""

    at_s: Floats
    """When each came, seconds of the machine's monotonic clock."""
    waited_s: Floats
    """How long its client had waited for it: since the chunk before, or since the request."""
    failed: int
    """Requests without a whole answer."""

    def between(self, start_s: float, end_s: float) -> "Window":
        """What came in that time."""
        inside = (self.at_s >= start_s) & (self.at_s < end_s)
        waited_s = self.waited_s[inside]
        if not waited_s.size:
            raise ValueError("the server sent nothing while it was measured")
        return Window(
            chunks_s=float(waited_s.size / (end_s - start_s)),
            p99_ms=float(np.percentile(waited_s, 99) * 1000),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One measured stretch of time."""

    chunks_s: float
    """Chunks a second: the throughput."""
    p99_ms: float
    """99th percentile of the time that clients waited for a chunk."""


@dataclass(slots=True)
class _Log:
    at_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    failed: int = 0


class _LeftError(OSError):
    """The server closed a connection between two answers, as it may."""


async def _client(url: str, model: str, name: int, tokens: int, log: _Log) -> None:
    """Asks again and again; each request differs, so that no cache of prompts answers it."""
    host, turn = str(endpoint(url).hostname), 0
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port_of(url))
            try:
                while True:
                    await _ask(reader, writer, _request(url, model, f"{name} {turn}", tokens), log)
                    turn += 1
            finally:
                writer.close()
        except _LeftError:
            continue
        except OSError:
            log.failed += 1
            turn += 1
            await asyncio.sleep(PAUSE_S)


def _request(url: str, model: str, name: str, tokens: int) -> bytes:
    wish = {
        "model": model,
        "prompt": f"{name} " + "and so it goes on " * WORDS,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    body = json.dumps(wish).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {endpoint(url).netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, log: _Log
) -> None:
    """One answer. Raises OSError when it does not end as it should, _LeftError when there is none
    because the connection was closed.
    """
    writer.write(request)
    before_s = time.monotonic()
    tail = b""
    while True:
        data = await reader.read(READ_BYTES)
        now_s = time.monotonic()
        if not data and not tail:
            raise _LeftError
        if not data or (not tail and b" 200 " not in data[:16]):
            raise ConnectionError(f"the server answered {data[:40]!r}")
        text = tail + data
        events = text.count(EVENT) - tail.count(EVENT)
        log.at_s += [now_s] * events
        log.waited_s += [now_s - before_s, *[0.0] * (events - 1)] if events else []
        before_s = now_s if events else before_s
        if text.endswith(END):
            return
        tail = text[-max(len(END), len(EVENT)) + 1 :]


async def _load(pipe: Connection, url: str, model: str, streams: int, tokens: int) -> Seen:
    log = _Log()
    clients = [
        asyncio.create_task(_client(url, model, name, tokens, log)) for name in range(streams)
    ]
    await asyncio.to_thread(pipe.recv)
    for client in clients:
        client.cancel()
    for client in clients:
        with suppress(asyncio.CancelledError):
            await client
    return Seen(at_s=np.asarray(log.at_s), waited_s=np.asarray(log.waited_s), failed=log.failed)


def _run_load(pipe: Connection, url: str, model: str, streams: int, tokens: int) -> None:
    pipe.send(asyncio.run(_load(pipe, url, model, streams, tokens)))


class Load:
    """Clients in a process of their own."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def end(self) -> Seen:
        """Stop the clients; what they saw."""
        self._pipe.send("end")
        seen: Seen = self._pipe.recv()
        return seen


@contextmanager
def load(url: str, *, streams: int, tokens: int) -> Iterator[Load]:
    """``streams`` clients of a completions server, each asking for ``tokens`` again and again.

    Raises OSError when the server does not answer.
    """
    model = _model(url)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_run_load, args=(other, url, model, streams, tokens))
    process.start()
    try:
        yield Load(pipe)
    finally:
        process.terminate()
        process.join()


def _model(url: str) -> str:
    connection = HTTPConnection(str(endpoint(url).hostname), port_of(url), timeout=5)
    try:
        connection.request("GET", "/v1/models")
        answer: Mapping[str, list[Mapping[str, str]]] = json.load(connection.getresponse())
        return answer["data"][0]["id"]
    except (ValueError, KeyError, IndexError) as error:
        raise OSError(f"{url}/v1/models names no model: {error!r}") from error
    finally:
        connection.close()


def _run_paced(pipe: Connection, tokens_per_s: float, streams: int) -> None:
    coefficients = Coefficients(
        base_ms=1000 / tokens_per_s,
        per_sequence_ms=0.0,
        per_context_token_ms=0.0,
        per_prefill_token_ms=0.0,
        noise_sigma=0.0,
        spike_share=0.0,
    )
    engine = EngineConfig(coefficients=coefficients, max_num_seqs=streams)
    run_server(ServerConfig(port=0, engine=engine), ready=pipe.send)


@contextmanager
def paced_server(*, tokens_per_s: float, streams: int) -> Iterator[str]:
    """URL of a simulated server that gives each of its streams so many tokens a second."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_run_paced, args=(other, tokens_per_s, streams))
    process.start()
    try:
        if not pipe.poll(START_S):
            raise OSError("the simulated server did not start")
        yield pipe.recv()
    finally:
        process.terminate()
        process.join()
