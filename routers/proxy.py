"""A small reference proxy in front of inference servers that obeys commands.

An ASGI app: chunks are forwarded as they come, a command never cuts a stream. Beside the proxied
paths it answers ``/health`` and ``/metrics`` itself.
"""

import asyncio
import contextlib
import json
import logging
import math
import signal
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import aiohttp
import uvicorn
from multidict import CIMultiDict
from yarl import URL

from latencyprism.routers.balancer import Balancer, Target
from latencyprism.routers.config import ProxyConfig, RouterConfig
from latencyprism.routers.consumer import ControlConsumer
from latencyprism.routers.controller import Controller
from latencyprism.routers.lease import Lease, LeaseBook
from latencyprism.routers.pool import BusyError, Pool, PoolAdapter
from latencyprism.routers.timings import EVERY_S, Emit, Exchange, GatewayTimings
from latencyprism.schemas.codec import registry_for
from latencyprism.schemas.connection import KafkaConfig

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

KEEP_ALIVE_S = 2.0
"""Idle connections to targets are closed well before the 5 s after which uvicorn closes them."""
CLIENT_KEEP_ALIVE_S = 30
SERVED_BY = b"x-served-by"
_UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

# RFC 9110 7.6.1; the length is that of the body we read.
_HOP_BY_HOP = frozenset(
    (b"connection", b"host", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
     b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length",
     b"expect")
)  # fmt: skip


class _TooLargeError(Exception):
    """The body of a request is longer than is taken."""


class _GoneError(Exception):
    """The client left before its request was whole."""


class Proxy:
    """The ASGI app; lives in one event loop, within an open ``session``."""

    def __init__(
        self,
        pool: Pool,
        session: aiohttp.ClientSession,
        config: ProxyConfig,
        *,
        timings: GatewayTimings | None = None,
        leases: Callable[[], Iterable[Lease]] = tuple,
    ) -> None:
        self._pool = pool
        self._session = session
        self._config = config
        self._timings = timings
        self._leases = leases
        self._requests: Counter[tuple[str, int]] = Counter()
        """Answers by target and status; both have few values."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http"
        match scope["path"]:
            case "/health":
                await _json(send, 200, self._health())
            case "/metrics":
                await _answer(send, 200, self.metrics().encode(), b"text/plain; version=0.0.4")
            case _:
                await self._proxy(scope, receive, send)

    async def _proxy(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._body(receive)
        except _GoneError:
            return
        except _TooLargeError:
            limit = self._config.max_body_bytes
            await _error(send, 413, f"the body is longer than {limit} bytes")
            return
        # The client may leave at any time; then nobody needs the answer.
        forward = asyncio.create_task(self._forward(scope, body, send))
        gone = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait((forward, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not forward.done():
                forward.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await forward

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        """Find a target that can be reached, each tried once at most, and pass its answer on."""
        failures: list[str] = []
        while len(failures) < len(self._pool.balancer.targets):
            try:
                target = await self._pool.acquire()
            except BusyError as busy:
                self._requests["", busy.status] += 1
                await _error(send, busy.status, str(busy), retry_after_s=busy.retry_after_s)
                return
            try:
                await self._exchange(target, scope, body, send)
                return
            except _UNREACHABLE as error:
                self._pool.mark_down(target, self._config.retry_down_s)
                failures.append(f"{target.name}: {error}")
                logger.warning("%s cannot be reached: %s", target.name, error)
            finally:
                self._pool.release(target)
        self._requests["", 502] += 1
        await _error(send, 502, f"no server can be reached: {'; '.join(failures)}")

    async def _exchange(self, target: Target, scope: Scope, body: bytes, send: Send) -> None:
        """Pass one request to a target; raises one of _UNREACHABLE before anything was sent."""
        headers = _request_headers(scope)
        query = scope["query_string"].decode("latin-1")
        path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        url = URL(f"http://{target.address}{path}{'?' if query else ''}{query}", encoded=True)
        exchange = self._begin(target, scope, body, headers)
        begun = complete = False
        try:
            async with self._session.request(
                scope["method"], url, data=body or None, headers=headers, allow_redirects=False
            ) as response:
                if exchange is not None:
                    streaming = response.content_type == "text/event-stream"
                    exchange.answered(response.status, streaming=streaming)
                self._requests[target.name, response.status] += 1
                begun = True
                await send(_response_start(response, target))
                async for chunk in response.content.iter_any():
                    if exchange is not None:
                        exchange.data(chunk)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                complete = True
                await send({"type": "http.response.body", "body": b""})
        except _UNREACHABLE:
            raise
        except (aiohttp.ClientError, OSError) as error:
            # Once begun, an answer without its end is all that tells the client.
            logger.warning("%s broke off: %s", target.name, error)
            self._requests[target.name, 502] += 1
            if not begun:
                await _error(send, 502, f"{target.name} broke off: {error!r}")
        finally:
            if exchange is not None:
                exchange.ended(complete=complete)

    def _begin(
        self, target: Target, scope: Scope, body: bytes, headers: CIMultiDict[str]
    ) -> Exchange | None:
        if self._timings is None or scope["method"] != "POST":
            return None
        return self._timings.begin(
            instance=target.name,
            endpoint=scope["path"],
            body=body,
            traceparent=headers.get("traceparent"),
        )

    async def _body(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _GoneError
            body += message.get("body", b"")
            if len(body) > self._config.max_body_bytes:
                raise _TooLargeError
            if not message.get("more_body", False):
                return bytes(body)

    def _health(self) -> dict[str, Any]:
        return {
            "status": "ok",
            "waiting": self._pool.waiting,
            "targets": {
                target.name: {"state": str(target.state), "in_flight": target.in_flight}
                for target in self._pool.balancer.targets.values()
            },
        }

    def metrics(self) -> str:
        """The metrics page in Prometheus' text format."""
        targets = list(self._pool.balancer.targets.values())
        lines: list[str] = []

        def family(name: str, kind: str, words: str, values: Iterable[tuple[str, float]]) -> None:
            lines.append(f"# HELP latencyprism_proxy_{name} {words}")
            lines.append(f"# TYPE latencyprism_proxy_{name} {kind}")
            lines.extend(f"latencyprism_proxy_{name}{label} {value}" for label, value in values)

        def per_target(value: Callable[[Target], float]) -> list[tuple[str, float]]:
            return [(f'{{target="{target.name}"}}', value(target)) for target in targets]

        family("requests_total", "counter", "Answers by target and status; no target: refused.",
               [(f'{{target="{name}",status="{status}"}}', count)
                for (name, status), count in sorted(self._requests.items())])  # fmt: skip
        family("waiting", "gauge", "Requests that wait for a target.", [("", self._pool.waiting)])
        family("in_flight", "gauge", "Requests under way.", per_target(lambda t: t.in_flight))
        family("weight", "gauge", "Share of its normal traffic, 0 when drained.",
               per_target(lambda t: 0.0 if t.state.ejected else t.state.weight))  # fmt: skip
        family("concurrency_limit", "gauge", "Requests at once, +Inf without a limit.",
               per_target(lambda t: _or_inf(t.state.concurrency_limit)))  # fmt: skip
        family("rate_limit_rps", "gauge", "Requests a second, +Inf without a limit.",
               per_target(lambda t: _or_inf(t.state.rate_limit_rps)))  # fmt: skip
        actions = Counter(lease.command.action for lease in self._leases())
        family("leases", "gauge", "Leases in force by action.",
               [(f'{{action="{action}"}}', count) for action, count in sorted(actions.items())]
               or [("", 0)])  # fmt: skip
        return "\n".join((*lines, ""))


def run_proxy(
    config: RouterConfig,
    kafka: KafkaConfig,
    *,
    emit: Emit | None = None,
    ready: Callable[[str], object] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT, obeying commands from Kafka. Blocks; main thread only.

    Without ``kafka.bootstrap`` nothing is obeyed. With ``emit`` request timings are reported.
    ``ready`` is called with the address once it listens. Raises ValueError when there is no
    target, OSError when the port is taken.
    """
    if not config.targets:
        raise ValueError("the proxy has no targets: give router.targets as {instance: address}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)  # uvicorn ends its own way and then raises the signal again
    proxy = config.proxy
    family = socket.AF_INET6 if ":" in proxy.host else socket.AF_INET
    with socket.create_server((proxy.host, proxy.port), family=family, backlog=1024) as listener:
        # Connections inherit it; asyncio sets it only on sockets that name TCP as their protocol,
        # and without it small chunks wait for the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asyncio.run(_serve(config, kafka, listener, emit=emit, ready=ready))


async def _serve(
    config: RouterConfig,
    kafka: KafkaConfig,
    listener: socket.socket,
    *,
    emit: Emit | None,
    ready: Callable[[str], object],
) -> None:
    pool = Pool(
        Balancer(config.targets),
        queue_limit=config.proxy.queue_limit,
        queue_timeout_s=config.proxy.queue_timeout_s,
    )
    adapter = PoolAdapter(pool, asyncio.get_running_loop())
    controller = Controller(LeaseBook(config.targets, config.rules), adapter, router=config.router)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session(config.proxy))
        timings = None
        if emit is not None:
            timings = GatewayTimings(emit, tuple(config.targets), gateway=config.router)
            await stack.enter_async_context(_ticking(timings))
        if kafka.bootstrap:
            consumer = ControlConsumer(controller, config, kafka, registry=registry_for(kafka))
            await stack.enter_async_context(_obeying(consumer))
        app = Proxy(pool, session, config.proxy, timings=timings, leases=lambda: controller.leases)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                access_log=False,
                date_header=False,
                lifespan="off",
                log_config=None,
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=math.ceil(config.proxy.drain_timeout_s),
                timeout_keep_alive=CLIENT_KEEP_ALIVE_S,
            )
        )
        ready(f"http://{config.proxy.host}:{listener.getsockname()[1]}")
        await server.serve([listener])


def open_session(config: ProxyConfig) -> aiohttp.ClientSession:
    """A client without limits of its own, except for the connection; to be closed."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


@contextlib.asynccontextmanager
async def _ticking(timings: GatewayTimings) -> AsyncIterator[None]:
    async def tick() -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            timings.tick()

    task = asyncio.create_task(tick())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    timings.tick()


@contextlib.asynccontextmanager
async def _obeying(consumer: ControlConsumer) -> AsyncIterator[None]:
    """Run the consumer in a thread; the event loop goes on so that it can still be commanded."""
    stop = threading.Event()
    thread = threading.Thread(target=consumer.run, args=(stop,), name="control")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        await asyncio.to_thread(thread.join)


def _leave(*_: object) -> None:
    raise SystemExit(0)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _request_headers(scope: Scope) -> CIMultiDict[str]:
    return CIMultiDict(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name not in _HOP_BY_HOP
    )


def _response_start(response: aiohttp.ClientResponse, target: Target) -> dict[str, Any]:
    headers = [
        (name.lower(), value)
        for name, value in response.raw_headers
        if name.lower() not in _HOP_BY_HOP
    ]
    if response.content_length is not None:
        headers.append((b"content-length", b"%d" % response.content_length))
    headers.append((SERVED_BY, target.name.encode()))
    return {"type": "http.response.start", "status": response.status, "headers": headers}


async def _answer(
    send: Send, status: int, body: bytes, content_type: bytes, *more: tuple[bytes, bytes]
) -> None:
    headers = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(body)),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _json(send: Send, status: int, value: Any, *more: tuple[bytes, bytes]) -> None:
    await _answer(send, status, json.dumps(value).encode(), b"application/json", *more)


async def _error(send: Send, status: int, message: str, *, retry_after_s: int = 0) -> None:
    value = {"error": {"message": message, "type": "proxy_error", "code": status}}
    more = [(b"retry-after", b"%d" % retry_after_s)] if retry_after_s else []
    await _json(send, status, value, *more)


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else value
