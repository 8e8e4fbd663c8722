"""The reference proxy over real HTTP: what goes through, how faithfully, and what commands do."""

import asyncio
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
import uvicorn
from kafka_io import KafkaIO
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from yarl import URL

from latencyprism.routers.balancer import Balancer
from latencyprism.routers.config import LeaseRules, ProxyConfig
from latencyprism.routers.controller import Controller
from latencyprism.routers.lease import Instant, LeaseBook, TargetState
from latencyprism.routers.pool import Pool, PoolAdapter
from latencyprism.routers.proxy import Proxy, open_session
from latencyprism.routers.timings import GatewayTimings
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import Action, Command, RequestTiming
from latencyprism.schemas.topics import CONTROL_ACKS, CONTROL_COMMANDS, Topic


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """An ASGI app on a free port; yields host:port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = uvicorn.Server(
            uvicorn.Config(app, lifespan="off", log_config=None, log_level="critical",
                           timeout_graceful_shutdown=1)
        )  # fmt: skip
        task = asyncio.create_task(server.serve([listener]))
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await task


@dataclass
class Origin:
    """An inference server under the test's control."""

    in_flight: int = 0
    most: int = 0
    seen: list[Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/echo", self.echo, methods=["GET", "POST"]),
                Route("/held", self.held),
                Route("/stream", self.stream, methods=["POST"]),
                Route("/cut", self.cut),
            ]
        )

    async def echo(self, request: Request) -> Response:
        self.seen.append(request)
        self.bodies.append(await request.body())
        return JSONResponse({"ok": True}, status_code=418, headers={"x-own": "yes"})

    async def held(self, _: Request) -> Response:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await self.gate.wait()
        self.in_flight -= 1
        return Response("held")

    async def stream(self, _: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            try:
                yield b'data: {"choices":[{"text":"one"}]}\n\n'
                await self.gate.wait()
                yield b'data: {"choices":[{"text":"two"}]}\n\n'
                yield b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
                yield b"data: [DONE]\n\n"
            except asyncio.CancelledError:
                self.left.set()
                raise

        return StreamingResponse(events(), media_type="text/event-stream")

    async def cut(self, _: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b"data: one\n\n"
            raise ConnectionResetError

        return StreamingResponse(events(), media_type="text/event-stream")


@dataclass
class Emitted:
    """Where the gateway's timings go."""

    samples: list[RequestTiming] = field(default_factory=list)

    def sample(self, topic: Topic, sample: Any) -> None:
        assert topic.record is RequestTiming
        self.samples.append(sample)

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:
        raise AssertionError(f"nobody ticks here: {topic.name} {instance} {watermark_ns}")


@dataclass
class Bench:
    """A proxy in front of two origins."""

    url: str
    client: aiohttp.ClientSession
    pool: Pool
    controller: Controller
    names: tuple[str, str]
    origins: dict[str, Origin]
    emitted: Emitted

    async def get(self, path: str) -> tuple[int, str]:
        """Status, and who served it or why nobody did."""
        async with self.client.get(self.url + path) as response:
            body = await response.text()
            return response.status, response.headers.get("x-served-by", body)

    async def split(self, requests: int = 40) -> Counter[str]:
        return Counter([(await self.get("/echo"))[1] for _ in range(requests)])

    async def command(self, action: Action, value: float | None = None, *, epoch: int = 1) -> str:
        """Command the first origin as a consumer does, from a thread; the ack's detail."""
        now = Instant.now()
        sent = Command(
            command_id=f"c{epoch}", target=self.names[0], service="small", epoch=epoch,
            issued_ns=now.wall_ns, lease_ms=60_000, action=action, value=value, reason="test",
            dry_run=False,
        )  # fmt: skip
        ack = await asyncio.to_thread(self.controller.handle, sent, now)
        assert ack is not None
        assert ack.effect == "applied"
        return ack.detail or ""


Make = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def bench() -> AsyncIterator[Make]:
    """Makes a bench; keywords go to the proxy's configuration."""
    async with AsyncExitStack() as stack:

        async def make(*, away: int = 0, **config: Any) -> Bench:
            origins: dict[str, Origin] = {}
            for _ in range(2 - away):
                origin = Origin()
                origins[await stack.enter_async_context(serving(origin.app()))] = origin
            for _ in range(away):
                with socket.create_server(("127.0.0.1", 0)) as closed:
                    origins[f"127.0.0.1:{closed.getsockname()[1]}"] = Origin()
            targets = {name: name for name in origins}
            settings = ProxyConfig(**config)
            pool = Pool(Balancer(targets), queue_limit=settings.queue_limit,
                        queue_timeout_s=settings.queue_timeout_s)  # fmt: skip
            book = LeaseBook(targets, LeaseRules())
            adapter = PoolAdapter(pool, asyncio.get_running_loop())
            controller = Controller(book, adapter, router="proxy")
            emitted = Emitted()
            proxy = Proxy(
                pool,
                await stack.enter_async_context(open_session(settings)),
                settings,
                timings=GatewayTimings(emitted, tuple(targets), gateway="proxy"),
                leases=lambda: controller.leases,
            )
            address = await stack.enter_async_context(serving(proxy))
            client = await stack.enter_async_context(aiohttp.ClientSession())
            first, second = targets
            return Bench(f"http://{address}", client, pool, controller, (first, second), origins,
                         emitted)  # fmt: skip

        yield make


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 what is awaited has no event
            await asyncio.sleep(0.005)


async def test_request_and_answer_go_through_unchanged(bench: Make) -> None:
    to = await bench()
    async with to.client.post(
        URL(f"{to.url}/echo?a=1%2F2&b", encoded=True),
        data=b"body",
        headers={"X-Mine": "1", "Authorization": "Bearer k"},
    ) as response:
        assert (response.status, response.headers["x-own"]) == (418, "yes")
        assert await response.json() == {"ok": True}
        origin = to.origins[response.headers["x-served-by"]]
    (seen,) = origin.seen
    assert seen.url.query == "a=1%2F2&b"
    assert (seen.headers["x-mine"], seen.headers["authorization"]) == ("1", "Bearer k")
    assert origin.bodies == [b"body"]


async def test_chunks_are_forwarded_as_they_come(bench: Make) -> None:
    to = await bench()
    async with to.client.post(f"{to.url}/stream", json={"model": "small"}) as response:
        assert response.content_type == "text/event-stream"
        assert b"one" in await response.content.readany()
        for origin in to.origins.values():
            origin.gate.set()
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
    last = to.emitted.samples[-1]
    assert (last.state, last.status, last.model) == ("complete", 200, "small")
    assert (last.prompt_tokens, last.completion_tokens) == (3, 2)
    assert last.instance == response.headers["x-served-by"]


async def test_weight_moves_traffic_and_the_end_of_the_lease_brings_it_back(bench: Make) -> None:
    to = await bench()
    assert set((await to.split()).values()) == {20}
    assert await to.command("weight", 0.25) == "weight 0.25: proxy: weight 0.25"
    assert (await to.split())[to.names[0]] == 8
    later = Instant.now()
    later = replace(later, monotonic_ns=later.monotonic_ns + 61 * 10**9)
    (expired,) = await asyncio.to_thread(to.controller.tick, later)
    assert expired.effect == "expired"
    assert set((await to.split()).values()) == {20}


async def test_drain_sends_nothing_new_and_cuts_no_stream(bench: Make) -> None:
    to = await bench()
    async with to.client.post(f"{to.url}/stream") as response:
        first = response.headers["x-served-by"]
        await response.content.readany()
        to.names = (first, to.names[first == to.names[0]])
        await to.command("drain")
        assert await to.split(10) == {to.names[1]: 10}
        to.origins[first].gate.set()
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_concurrency_limit_bounds_the_target_and_queues_the_rest(bench: Make) -> None:
    to = await bench(queue_limit=3)
    first, second = to.names
    to.pool.set_state(second, TargetState(drained=True))
    await to.command("concurrency_limit", 2)
    calls = [asyncio.create_task(to.get("/held")) for _ in range(5)]
    await until(lambda: to.pool.waiting == 3 and to.origins[first].in_flight == 2)
    async with to.client.get(f"{to.url}/held") as refused:
        assert refused.status == 429
        assert refused.headers["retry-after"] == "1"
        message = (await refused.json())["error"]["message"]
    assert "queue is full: 3 requests wait" in message
    assert f"{first} is at most 2 requests in flight" in message
    to.origins[first].gate.set()
    assert await asyncio.gather(*calls) == [(200, first)] * 5
    assert to.origins[first].most == 2


async def test_wait_for_a_target_is_bounded(bench: Make) -> None:
    to = await bench(queue_timeout_s=0.05)
    for name in to.names:
        to.pool.set_state(name, TargetState(drained=True))
    status, message = await to.get("/echo")
    assert status == 503
    assert "no server became free within 0.05 s" in message


async def test_target_that_is_away_costs_no_request(bench: Make) -> None:
    to = await bench(away=1)
    assert await to.split(10) == {to.names[0]: 10}


async def test_all_targets_away_is_said_in_words(bench: Make) -> None:
    to = await bench(away=2, retry_down_s=0.01)
    status, message = await to.get("/echo")
    assert status == 502
    assert "no server can be reached" in message
    assert all(name in message for name in to.names)
    assert all(target.in_flight == 0 for target in to.pool.balancer.targets.values())


async def test_client_that_leaves_ends_the_request_at_the_target(bench: Make) -> None:
    to = await bench()
    response = await to.client.post(f"{to.url}/stream")
    await response.content.readany()
    response.close()
    async with asyncio.timeout(5):
        await to.origins[response.headers["x-served-by"]].left.wait()
    await until(lambda: all(t.in_flight == 0 for t in to.pool.balancer.targets.values()))
    assert to.emitted.samples[-1].state == "aborted"


async def test_client_that_leaves_the_queue_is_forgotten(bench: Make) -> None:
    to = await bench()
    for name in to.names:
        to.pool.set_state(name, TargetState(drained=True))
    call = asyncio.create_task(to.get("/echo"))
    await until(lambda: to.pool.waiting == 1)
    call.cancel()
    await until(lambda: to.pool.waiting == 0)


async def test_answer_that_breaks_off_is_not_passed_off_as_whole(bench: Make) -> None:
    to = await bench()
    async with to.client.get(f"{to.url}/cut") as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
    assert all(target.in_flight == 0 for target in to.pool.balancer.targets.values())


async def test_body_that_is_too_long_is_refused(bench: Make) -> None:
    to = await bench(max_body_bytes=10)
    async with to.client.post(f"{to.url}/echo", data=b"x" * 11) as response:
        assert response.status == 413
        assert "longer than 10 bytes" in await response.text()


async def test_health_and_metrics_tell_what_is_in_force(bench: Make) -> None:
    to = await bench()
    await to.split(2)
    await to.command("concurrency_limit", 3)
    health = await (await to.client.get(f"{to.url}/health")).json()
    assert health["targets"][to.names[0]]["state"] == "at most 3 requests in flight"
    page = await (await to.client.get(f"{to.url}/metrics")).text()
    values = {
        (sample.name.removeprefix("latencyprism_proxy_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert values["requests_total", to.names[0], "418"] == 1
    assert values["concurrency_limit", to.names[0]] == 3
    assert values["concurrency_limit", to.names[1]] == float("inf")
    assert values["weight", to.names[0]] == 1
    assert values["leases", "concurrency_limit"] == 1
    assert values["in_flight", to.names[0]] == values[("waiting",)] == 0


async def milliseconds(client: aiohttp.ClientSession, url: str) -> float:
    begun = asyncio.get_running_loop().time()
    async with client.get(url) as response:
        await response.read()
    return (asyncio.get_running_loop().time() - begun) * 1e3


RUN = """
import sys
from latencyprism.routers.config import ProxyConfig, RouterConfig
from latencyprism.routers.proxy import run_proxy
from latencyprism.schemas.connection import KafkaConfig
target, bootstrap, prefix = sys.argv[1:]
config = RouterConfig(targets=dict([target.split("=")]), proxy=ProxyConfig(port=0))
kafka = KafkaConfig(bootstrap=bootstrap, prefix=prefix)
run_proxy(config, kafka, ready=lambda url: print(url, flush=True))
"""


@asynccontextmanager
async def program(address: str, bootstrap: str, prefix: str) -> AsyncIterator[str]:
    """The proxy as a program in front of one target; yields its url, and ends it by SIGTERM."""
    process = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-c", RUN, f"named:1={address}", bootstrap, prefix],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield (await asyncio.to_thread(process.stdout.readline)).strip()
    process.send_signal(signal.SIGTERM)
    _, errors = await asyncio.to_thread(process.communicate, timeout=30)
    assert process.returncode == 0, errors


@pytest.mark.parametrize("bootstrap", ["", "127.0.0.1:1"])
async def test_program_serves_and_ends_cleanly_with_and_without_a_broker(bootstrap: str) -> None:
    async with (
        serving(Origin().app()) as address,
        aiohttp.ClientSession() as client,
        program(address, bootstrap, "none") as url,
    ):
        async with client.post(f"{url}/echo", data=json.dumps({"model": "m"})) as response:
            assert (response.status, response.headers["x-served-by"]) == (418, "named:1")
        # Small chunks that waited for a delayed acknowledgement would take 40 ms.
        took_ms = [await milliseconds(client, f"{url}/health") for _ in range(9)]
    assert statistics.median(took_ms) < 30


async def test_program_obeys_commands_from_kafka_and_answers(
    kafka: KafkaConfig, kafka_io: KafkaIO
) -> None:
    command = Command(
        command_id="c1", target="named:1", service="small", epoch=1, issued_ns=time.time_ns(),
        lease_ms=60_000, action="concurrency_limit", value=3, reason="test", dry_run=False,
    )  # fmt: skip
    async with (
        serving(Origin().app()) as address,
        aiohttp.ClientSession() as client,
        program(address, kafka.bootstrap, kafka.prefix) as url,
    ):
        await asyncio.to_thread(kafka_io.send, CONTROL_COMMANDS, command, key="named:1")
        (ack,) = await asyncio.to_thread(kafka_io.read, CONTROL_ACKS, 1)
        health = await (await client.get(f"{url}/health")).json()
    assert (ack.effect, ack.router) == ("applied", "router")
    assert health["targets"]["named:1"]["state"] == "at most 3 requests in flight"
