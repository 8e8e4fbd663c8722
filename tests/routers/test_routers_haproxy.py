"""A real HAProxy in front of two real servers does what the commands say, and only so long."""

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from kafka_io import KafkaIO

from latencyprism.routers.adapter import AdapterError
from latencyprism.routers.config import HAProxyConfig, LeaseRules
from latencyprism.routers.controller import Controller
from latencyprism.routers.haproxy import HAProxyAdapter, Server
from latencyprism.routers.lease import NORMAL, Instant, LeaseBook, TargetState
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import Action, Command
from latencyprism.schemas.topics import CONTROL_ACKS, CONTROL_COMMANDS

HAPROXY = shutil.which("haproxy") or "/usr/sbin/haproxy"
TARGETS = {"one:80": "one", "two:80": "two"}


class Origin:
    """A small server that says its name and counts how many requests it has at once."""

    def __init__(self, name: str) -> None:
        self.hold = threading.Event()
        self.hold.set()
        self.in_flight = self.most = 0
        lock = threading.Lock()
        origin = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with lock:
                    origin.in_flight += 1
                    origin.most = max(origin.most, origin.in_flight)
                origin.hold.wait(10)
                self.send_response(200)
                self.send_header("Content-Length", str(len(name)))
                self.end_headers()
                self.wfile.write(name.encode())
                with lock:
                    origin.in_flight -= 1

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 its name there
                """Keep the test's output clean."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def close(self) -> None:
        self.hold.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class HAProxy:
    """A running HAProxy."""

    def __init__(self, folder: Path, ports: dict[str, int]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.socket = folder / "haproxy.sock"
        self.config = folder / "haproxy.cfg"
        servers = "\n".join(
            f"    server {name} 127.0.0.1:{port} weight 100" for name, port in ports.items()
        )
        self.config.write_text(
            f"""
global
    stats socket {self.socket} mode 600 level admin
defaults
    mode http
    timeout connect 1s
    timeout client 10s
    timeout server 10s
    timeout queue 10s
frontend front
    bind 127.0.0.1:{self.port}
    default_backend llm
backend llm
    balance roundrobin
    option http-server-close
{servers}
    server coarse 127.0.0.1:9 weight 1 disabled
"""
        )
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [HAPROXY, "-f", str(self.config), "-db", "-q"], stderr=subprocess.PIPE
        )
        for _ in range(200):
            try:
                HAProxyAdapter(HAProxyConfig(socket=str(self.socket)), {}).read()
                break
            except AdapterError:
                time.sleep(0.02)
        else:
            pytest.fail("HAProxy does not answer on its socket")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=10)

    def get(self) -> str:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/")
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def split(self, requests: int = 60) -> Counter[str]:
        return Counter(self.get() for _ in range(requests))


@pytest.fixture
def origins() -> Iterator[dict[str, Origin]]:
    origins = {name: Origin(name) for name in ("one", "two")}
    yield origins
    for origin in origins.values():
        origin.close()


@pytest.fixture
def haproxy(tmp_path: Path, origins: dict[str, Origin]) -> Iterator[HAProxy]:
    haproxy = HAProxy(tmp_path, {name: origin.port for name, origin in origins.items()})
    yield haproxy
    haproxy.stop()


@pytest.fixture
def adapter(haproxy: HAProxy) -> HAProxyAdapter:
    return HAProxyAdapter(HAProxyConfig(socket=str(haproxy.socket)), TARGETS)


@pytest.fixture
def controller(adapter: HAProxyAdapter) -> Controller:
    controller = Controller(LeaseBook(TARGETS, LeaseRules()), adapter, router="haproxy")
    controller.verify()
    return controller


def command(
    action: Action, value: float | None = None, *, target: str = "one:80", epoch: int = 1
) -> Command:
    return Command(
        command_id=f"c{epoch}",
        target=target,
        service="small",
        epoch=epoch,
        issued_ns=time.time_ns(),
        lease_ms=60_000,
        action=action,
        value=value,
        reason="test",
        dry_run=False,
    )


def later(seconds: float) -> Instant:
    now = Instant.now()
    ahead_ns = round(seconds * 1e9)
    return Instant(wall_ns=now.wall_ns + ahead_ns, monotonic_ns=now.monotonic_ns + ahead_ns)


pytestmark = [
    pytest.mark.haproxy,
    pytest.mark.skipif(not Path(HAPROXY).exists(), reason="the haproxy program is not installed"),
]


def test_weight_moves_traffic_and_the_end_of_the_lease_brings_it_back(
    controller: Controller, haproxy: HAProxy
) -> None:
    assert haproxy.split() == {"one": 30, "two": 30}
    answer = controller.handle(command("weight", 0.25), Instant.now())
    assert answer is not None
    assert answer.effect == "applied"
    assert answer.detail == "weight 0.25: HAProxy llm/one: weight 25 of 100, no maxconn"
    split = haproxy.split(100)
    assert 15 <= split["one"] <= 25  # a fifth: 25 of 125
    (expired,) = controller.tick(later(61))
    assert expired.effect == "expired"
    assert haproxy.split() == {"one": 30, "two": 30}


def test_drain_takes_no_new_request_and_kills_none_under_way(
    controller: Controller, haproxy: HAProxy, origins: dict[str, Origin]
) -> None:
    origins["one"].hold.clear()
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(haproxy.get())) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: origins["one"].in_flight == 1)
    controller.handle(command("drain"), Instant.now())
    assert haproxy.split(20) == {"two": 20}
    origins["one"].hold.set()
    for thread in threads:
        thread.join()
    assert Counter(answers) == {"one": 1, "two": 1}
    controller.handle(command("restore", epoch=2), Instant.now())
    assert haproxy.split(20) == {"one": 10, "two": 10}


def test_concurrency_limit_bounds_the_requests_in_flight(
    controller: Controller, haproxy: HAProxy, origins: dict[str, Origin]
) -> None:
    controller.handle(command("drain", target="two:80"), Instant.now())
    controller.handle(command("concurrency_limit", 2), Instant.now())
    origins["one"].hold.clear()

    async def burst() -> list[str]:
        calls = [asyncio.to_thread(haproxy.get) for _ in range(4)]
        gathered = asyncio.gather(*calls)
        while origins["one"].in_flight < 2:  # noqa: ASYNC110 a thread counts, no event to await
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        origins["one"].hold.set()
        return await gathered

    assert asyncio.run(burst()) == ["one"] * 4
    assert origins["one"].most == 2


def test_restarted_haproxy_is_brought_back_to_what_is_in_force(
    controller: Controller, adapter: HAProxyAdapter, haproxy: HAProxy
) -> None:
    controller.handle(command("concurrency_limit", 3), Instant.now())
    haproxy.stop()
    controller.verify()
    haproxy.start()
    assert adapter.read()["one"].maxconn == 0
    controller.verify()
    assert adapter.read()["one"].maxconn == 3


def test_haproxy_that_is_away_refuses_in_words_and_nothing_is_in_force(
    controller: Controller, adapter: HAProxyAdapter, haproxy: HAProxy
) -> None:
    haproxy.stop()
    answer = controller.handle(command("drain"), Instant.now())
    assert answer is not None
    assert answer.effect == "refused"
    assert "no answer on HAProxy's socket" in (answer.detail or "")
    assert controller.leases == ()
    haproxy.start()
    controller.verify()
    assert not adapter.read()["one"].drained


def test_maintenance_by_an_operator_is_left_alone(
    controller: Controller, adapter: HAProxyAdapter
) -> None:
    adapter._ask("set server llm/one state maint")
    controller.handle(command("weight", 0.5), Instant.now())
    controller.release()
    assert adapter.read()["one"] == Server(
        weight=100, initial_weight=100, drained=False, maintenance=True, maxconn=0
    )


def test_server_that_is_missing_keeps_no_other_from_being_restored(haproxy: HAProxy) -> None:
    config = HAProxyConfig(socket=str(haproxy.socket))
    targets = {"missing:80": "missing", **TARGETS}
    adapter = HAProxyAdapter(config, targets)
    adapter.apply("one:80", TargetState(drained=True))
    Controller(LeaseBook(targets, LeaseRules()), adapter, router="haproxy").verify()
    assert not adapter.read()["one"].drained
    assert adapter.drifted(dict.fromkeys(targets, NORMAL)) == ("missing:80",)


def test_errors_name_what_to_do(haproxy: HAProxy) -> None:
    config = HAProxyConfig(socket=str(haproxy.socket))
    adapter = HAProxyAdapter(config, {"one:80": "one", "x:80": "x", "coarse:80": "coarse"})
    with pytest.raises(AdapterError, match="has no server x; it has one, two, coarse"):
        adapter.apply("x:80", NORMAL)
    with pytest.raises(AdapterError, match="give every server weight 100"):
        adapter.apply("coarse:80", TargetState(weight=0.5))
    with pytest.raises(AdapterError, match="cannot limit the rate"):
        adapter.apply("one:80", TargetState(rate_limit_rps=5))
    other = HAProxyAdapter(HAProxyConfig(socket=config.socket, backend="other"), {})
    with pytest.raises(AdapterError, match="no backend other"):
        other.read()
    with pytest.raises(ValueError, match="is no name"):
        HAProxyAdapter(config, {"a:1": "one; shutdown"})


RUN = """
import sys
from latencyprism.routers.config import HAProxyConfig, RouterConfig
from latencyprism.routers.consumer import run_router
from latencyprism.schemas.connection import KafkaConfig
socket, bootstrap, prefix = sys.argv[1:]
config = RouterConfig(
    targets={"one:80": "one", "two:80": "two"}, haproxy=HAProxyConfig(socket=socket)
)
kafka = KafkaConfig(bootstrap=bootstrap, prefix=prefix)
run_router(config, kafka, ready=lambda: print("ready", flush=True))
"""


def test_program_drives_haproxy_from_kafka_and_restores_it_at_the_end(
    haproxy: HAProxy, adapter: HAProxyAdapter, kafka: KafkaConfig, kafka_io: KafkaIO
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(haproxy.socket), kafka.bootstrap, kafka.prefix],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        kafka_io.send(CONTROL_COMMANDS, command("drain"), key="one:80")
        wait_until(lambda: adapter.read()["one"].drained)
        (ack,) = kafka_io.read(CONTROL_ACKS, 1)
        assert ack.effect == "applied"
        assert haproxy.split(10) == {"two": 10}
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 0
    assert haproxy.split(10) == {"one": 5, "two": 5}


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("waited 5 s in vain")
