"""HTTP/2 and TLS of real servers and clients, through the kernel's ring."""

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from network_server import token_server
from network_tls import Certificate
from test_network_capture import may_capture, times, wait_for, watching

from latencyprism.collectors.network.tls import ENDPOINT

httpx = pytest.importorskip("httpx")

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not may_capture(), reason="this process has no CAP_NET_RAW"),
]

nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs the program nginx")
curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs the program curl")
openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def proxy(folder: Path, upstream: int, listen: str, *more: str) -> Iterator[int]:
    """nginx in front of a server, on a port of its own."""
    port = free_port()
    (folder / "nginx.conf").write_text(
        f"""
        daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
        events {{ }}
        http {{
            access_log off; keepalive_requests 1000;
            client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
            fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
            server {{
                listen 127.0.0.1:{port} {listen}; {" ".join(f"{line};" for line in more)}
                location / {{
                    proxy_pass http://127.0.0.1:{upstream};
                    proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
                }}
            }}
        }}"""
    )
    process = subprocess.Popen(
        ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error")],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: _accepts(port) or process.poll() is not None)
        assert process.poll() is None
        yield port
    finally:
        process.kill()
        process.wait()


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def stream(client: Any, url: str, wish: dict[str, Any]) -> None:
    """Ask, and read the answer to its end."""
    async with client.stream("POST", url, json=wish) as answer:
        async for _ in answer.aiter_raw():
            pass


def near(seen: list[int], sent: list[tuple[int, int]], slack_ms: int) -> bool:
    """Whether each event was seen when the server wrote it, or so much later."""
    return len(seen) == len(sent) and all(
        before - 1_000_000 < at_ns < after + slack_ms * 1_000_000
        for at_ns, (before, after) in zip(seen, sent, strict=True)
    )


@nginx
async def test_concurrent_streams_over_one_connection_through_nginx(tmp_path: Path) -> None:
    pytest.importorskip("h2")
    async with token_server("127.0.0.1") as (server, upstream):
        with proxy(tmp_path, upstream, "http2") as port, watching(port) as (heard, source):
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            async with httpx.AsyncClient(http1=False, http2=True) as client:
                await asyncio.gather(
                    *(
                        stream(client, url, {"tokens": 10 + n, "gap_ms": 10, "model": f"m{n}"})
                        for n in range(6)
                    )
                )

    exchanges = {parts[-1].model: parts for parts in heard.exchanges()}
    assert sorted(map(str, exchanges)) == [f"m{n}" for n in range(6)]
    by_tokens = {len(truth.sent_ns): i for i, truth in enumerate(server.truths)}
    for n in range(6):
        parts = exchanges[f"m{n}"]
        last = parts[-1]
        assert (last.state, last.status, last.streaming) == ("complete", 200, True)
        assert (last.prompt_tokens, last.completion_tokens) == (3, 10 + n)
        assert (last.endpoint, last.method, last.estimated) == ("/v1/chat/completions", "POST", ())
        assert near(times(parts), server.truths[by_tokens[10 + n]].sent_ns, 100)
    assert source.counts == {"exchanges": 6}


@nginx
@curl
async def test_streams_of_curl_through_nginx(tmp_path: Path) -> None:
    async with token_server("127.0.0.1") as (_, upstream):
        with proxy(tmp_path, upstream, "http2") as port, watching(port) as (heard, source):
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            ask = ["--http2-prior-knowledge", "-d", '{"tokens":8,"gap_ms":5,"model":"m"}']
            for _ in range(2):
                command = ["curl", "-sS", *ask, "-o", "/dev/null", url]
                process = await asyncio.create_subprocess_exec(*command)
                assert await process.wait() == 0

    exchanges = heard.exchanges()
    assert [(parts[-1].state, len(times(parts))) for parts in exchanges] == [
        ("complete", 8),
        ("complete", 8),
    ]
    assert source.counts["exchanges"] == 2


async def test_a_simulated_engine_tells_the_same_over_both_protocols() -> None:
    pytest.importorskip("h2")
    pytest.importorskip("hypercorn")
    from latencyprism.simulator.config import ServerConfig
    from latencyprism.simulator.server import SimulatedServer

    simulated = SimulatedServer(ServerConfig(model="small"))
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": "a prompt of some words"}],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with hypercorn(simulated.app) as port:
        with watching(port) as (heard, source):
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            async with (
                httpx.AsyncClient() as old,
                httpx.AsyncClient(http1=False, http2=True) as new,
            ):
                for client in (old, new):
                    await stream(client, url, body)
                    await stream(client, url, {**body, "stream": False, "stream_options": None})

    streams = [parts for parts in heard.exchanges() if parts[-1].streaming]
    wholes = [parts[-1] for parts in heard.exchanges() if not parts[-1].streaming]
    assert len(streams) == len(wholes) == 2
    for parts in streams:
        assert len(times(parts)) == 12
    names = ["state", "status", "streaming", "model", "method", "max_tokens", "endpoint"]
    names += ["prompt_tokens", "completion_tokens", "request_bytes", "response_bytes", "estimated"]
    first, second = (parts[-1] for parts in streams)
    for name in names:
        if name != "response_bytes":  # ids of requests differ in length
            assert getattr(first, name) == getattr(second, name)
            assert getattr(wholes[0], name) == getattr(wholes[1], name)
    assert first.completion_tokens == 12
    assert source.counts == {"exchanges": 4}


@asynccontextmanager
async def hypercorn(app: Any) -> AsyncIterator[int]:
    """The application behind hypercorn, which speaks HTTP/1.1 and HTTP/2 on one port."""
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    port = free_port()
    config.bind = [f"127.0.0.1:{port}"]
    config.loglevel = "ERROR"
    stop = asyncio.Event()
    task = asyncio.create_task(serve(app, config, shutdown_trigger=stop.wait))
    try:
        await asyncio.to_thread(wait_for, lambda: _accepts(port))
        yield port
    finally:
        stop.set()
        await task


@openssl
@pytest.mark.parametrize("front", ["python", pytest.param("nginx", marks=nginx)])
async def test_streams_inside_tls(tmp_path: Path, front: str) -> None:
    certificate = Certificate.make(tmp_path)
    wish = {"tokens": 25, "gap_ms": 12, "early_role": False}
    keys = (f"ssl_certificate {certificate.path}", f"ssl_certificate_key {certificate.key}")
    async with token_server("127.0.0.1", certificate.server() if front == "python" else None) as (
        server,
        port,
    ):
        with (
            proxy(tmp_path, port, "ssl", *keys) if front == "nginx" else as_it_is(port) as watched,
            watching(watched) as (heard, source),
        ):
            url = f"https://127.0.0.1:{watched}/v1/chat/completions"
            async with httpx.AsyncClient(verify=certificate.client()) as client:
                for _ in range(2):
                    await stream(client, url, wish)
                    await client.post(url, json={"stream": False})

    exchanges = heard.exchanges()
    assert len(exchanges) == 2
    server.truths = [truth for truth in server.truths if truth.sent_ns]
    for index, parts in enumerate(exchanges):
        last, truth = parts[-1], server.truths[index]
        seen = times(parts)
        if front == "python":
            assert near(seen, truth.sent_ns, 30)
        else:  # a proxy that is busy writes what has come meanwhile in one record
            assert wish["tokens"] - 5 <= len(seen) <= wish["tokens"]
            assert truth.sent_ns[0][0] < seen[0] < truth.sent_ns[1][1]
            assert truth.sent_ns[-2][0] < seen[-1] < truth.sent_ns[-1][1] + 100_000_000
        assert (last.state, last.endpoint, last.streaming) == ("complete", ENDPOINT, True)
        assert last.arrival_ns <= truth.received_ns
        assert last.first_token_ns == seen[0]
        assert {"first_token_ns", "chunk_deltas_us", "state"} <= set(last.estimated)
    assert source.counts["TLS connections"] == 1
    assert source.counts["exchanges"] == 2


@contextmanager
def as_it_is(port: int) -> Iterator[int]:
    yield port
