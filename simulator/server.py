"""A simulated OpenAI-compatible server in real time, with the metrics page of vLLM.

``python -m latencyprism.simulator.server --port 8000 --model small`` runs it until SIGTERM. Its
first line on standard output says where it listens. Beside the OpenAI paths it has
``POST /simulator/fault {"kind", "value", "duration_s", "every_ms"}`` and
``DELETE /simulator/fault``.
"""

import argparse
import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from latencyprism.simulator.config import PROFILES, ServerConfig
from latencyprism.simulator.engine import Engine, Request, TooLongError, rng
from latencyprism.simulator.exposition import render
from latencyprism.simulator.faults import FAULT_KINDS, Fault
from latencyprism.simulator.openai import (
    Answer,
    BadRequestError,
    Endpoint,
    generation,
    json_object,
)
from latencyprism.simulator.realtime import RealTimeEngine

logger = logging.getLogger(__name__)

MAX_FAULT_S = 86_400.0
SHUTDOWN_S = 2


class SimulatedServer:
    """The HTTP side of one simulated engine."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        engine = Engine(config=config.engine, rng=rng(config.seed))
        self.realtime = RealTimeEngine(engine=engine)
        self._numbers = itertools.count(1)
        self._started_s = int(time.time())
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
                Route("/simulator/fault", self._add_fault, methods=["POST"]),
                Route("/simulator/fault", self._clear_faults, methods=["DELETE"]),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        steps = asyncio.create_task(self.realtime.run())
        yield
        steps.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await steps

    async def _completions(self, request: HttpRequest) -> Response:
        return await self._generate(request, "completions")

    async def _chat(self, request: HttpRequest) -> Response:
        return await self._generate(request, "chat.completions")

    async def _generate(self, http: HttpRequest, endpoint: Endpoint) -> Response:
        arrival_ns = time.monotonic_ns()
        number = next(self._numbers)
        request_id = http.headers.get("x-request-id") or f"{number}"
        try:
            body = json_object(await http.body())
            request = generation(
                body,
                endpoint,
                model=self.config.model,
                request_id=f"{request_id}-{number}",
                arrival_ns=arrival_ns,
                block_tokens=self.config.engine.block_tokens,
            )
            self.realtime.submit(request)
        except (BadRequestError, TooLongError) as error:
            status = error.status if isinstance(error, BadRequestError) else 400
            return JSONResponse(
                {"error": {"message": str(error), "type": "BadRequestError", "code": status}},
                status_code=status,
            )
        answer = Answer(endpoint, request_id, self.config.model)
        if body.get("stream"):
            usage = (body.get("stream_options") or {}).get("include_usage", False)
            return StreamingResponse(
                self._events(request, answer, with_usage=bool(usage)),
                media_type="text/event-stream",
            )
        served = None
        async with contextlib.aclosing(self.realtime.stream(request)) as deliveries:
            async for delivery in deliveries:
                served = delivery.served
        assert served is not None
        return JSONResponse(answer.whole(request, served))

    async def _events(
        self, request: Request, answer: Answer, *, with_usage: bool
    ) -> AsyncIterator[bytes]:
        async with contextlib.aclosing(self.realtime.stream(request)) as deliveries:
            async for delivery in deliveries:
                if delivery.token.index == 0 and answer.opening is not None:
                    yield answer.opening
                yield answer.chunk(delivery.token.index, last=delivery.token.last)
                if delivery.served is not None and with_usage:
                    yield answer.usage(request, delivery.served)
        yield b"data: [DONE]\n\n"

    async def _models(self, _: HttpRequest) -> Response:
        model = {"id": self.config.model, "object": "model", "created": self._started_s,
                 "owned_by": "simulator",
                 "max_model_len": self.config.engine.max_model_len}  # fmt: skip
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, _: HttpRequest) -> Response:
        return Response()

    async def _metrics(self, _: HttpRequest) -> Response:
        engine = self.realtime.engine
        return PlainTextResponse(
            render(
                model=self.config.model,
                config=self.config.engine,
                gauges=engine.gauges(time.monotonic_ns()),
                totals=engine.totals,
                stats=self.realtime.stats,
            ),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def _reset_prefix_cache(self, _: HttpRequest) -> Response:
        self.realtime.engine.reset_prefix_cache()
        return Response()

    async def _add_fault(self, http: HttpRequest) -> Response:
        try:
            fault = _fault(json_object(await http.body()), time.monotonic_ns())
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        self.realtime.engine.faults.append(fault)
        logger.info("fault: %s %g", fault.kind, fault.value)
        return self._faults()

    async def _clear_faults(self, _: HttpRequest) -> Response:
        self.realtime.engine.faults.clear()
        self.realtime.wake()
        return self._faults()

    def _faults(self) -> Response:
        now_ns = time.monotonic_ns()
        return JSONResponse(
            [
                {"kind": fault.kind, "value": fault.value, "every_ms": fault.every_ms,
                 "left_s": (fault.until_ns - now_ns) / 1e9}
                for fault in self.realtime.engine.active_faults(now_ns)
            ]
        )  # fmt: skip


def _fault(body: dict[str, Any], now_ns: int) -> Fault:
    unknown = set(body) - {"kind", "value", "duration_s", "every_ms"}
    if unknown:
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}; known: kind, value, duration_s, "
                         "every_ms")  # fmt: skip
    if body.get("kind") not in FAULT_KINDS:
        raise ValueError(f"kind must be one of {', '.join(FAULT_KINDS)}")
    numbers = {"value": 0.0, "duration_s": 10.0, "every_ms": 2000.0}
    for name, default in numbers.items():
        number = body.get(name, default)
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise ValueError(f"{name} must be a number, not {number!r}")  # noqa: TRY004 of a client
        numbers[name] = float(number)
    if not 0 < numbers["duration_s"] <= MAX_FAULT_S:
        raise ValueError(f"duration_s must be above 0 and at most {MAX_FAULT_S:g}")
    return Fault(
        kind=body["kind"],
        value=numbers["value"],
        from_ns=now_ns,
        until_ns=now_ns + round(numbers["duration_s"] * 1e9),
        every_ms=numbers["every_ms"],
    )


def run_server(config: ServerConfig, *, ready: Callable[[str], object] = lambda _: None) -> None:
    """Serve until SIGTERM or SIGINT. Blocks; to be called from the main thread.

    ``ready`` is called with the address once it listens. Raises OSError when the port is taken.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)  # uvicorn ends its own way and then raises the signal again
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.create_server((config.host, config.port), family=family, backlog=1024) as listener:
        # Connections inherit it; asyncio sets it only on sockets that name TCP as their protocol,
        # and without it small chunks wait for the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = uvicorn.Server(
            uvicorn.Config(
                SimulatedServer(config).app,
                access_log=False,
                log_config=None,
                log_level="warning",
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )
        ready(f"http://{config.host}:{listener.getsockname()[1]}")
        server.run([listener])


def _leave(*_: object) -> None:
    raise SystemExit(0)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m latencyprism.simulator.server",
        description="A simulated OpenAI-compatible server.",
    )
    default = ServerConfig()
    parser.add_argument("--host", default=default.host)
    parser.add_argument("--port", type=int, default=default.port, help="0 takes a free one")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--model", default=default.model)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="laptop")
    parser.add_argument("--max-num-seqs", type=int, default=default.engine.max_num_seqs)
    parser.add_argument("--kv-tokens", type=int, default=default.engine.kv_tokens)
    parser.add_argument("--max-model-len", type=int, default=default.engine.max_model_len)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    engine = replace(
        default.engine,
        coefficients=PROFILES[given.profile],
        max_num_seqs=given.max_num_seqs,
        kv_tokens=given.kv_tokens,
        max_model_len=given.max_model_len,
    )
    config = ServerConfig(
        host=given.host, port=given.port, seed=given.seed, model=given.model, engine=engine
    )

    def ready(address: str) -> None:
        sys.stdout.write(f"listening on {address}\n")
        sys.stdout.flush()

    run_server(config, ready=ready)


if __name__ == "__main__":
    main()
