"""The source as the agent runs it, on servers that the tests start."""

import errno
import http.server
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kernel_support import (
    Heard,
    by_stage,
    child,
    free_port,
    make_setup,
    skip_unless_permitted,
)

from latencyprism.collectors.kernel import source
from latencyprism.collectors.kernel.config import KernelConfig
from latencyprism.collectors.kernel.functions import Gpu
from latencyprism.collectors.kernel.source import KernelSource, open_tiers
from latencyprism.collectors.kernel.tier import Setup, Tier
from latencyprism.collectors.kernel.versions import Versions, ask_version
from latencyprism.collectors.source import Counting, UnavailableError
from latencyprism.schemas import codec
from latencyprism.schemas.records import KernelSample
from latencyprism.schemas.topics import TELEMETRY_KERNEL, TELEMETRY_STEPS

# Answers each connection's requests 10 ms after they came
SERVER = """
    import socket, sys, threading, time
    listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    print("ready", flush=True)
    while True:
        client = listening.accept()[0]
        while data := client.recv(1000):
            time.sleep(0.01)
            client.sendall(b"head")
            client.sendall(b"body")
"""


def ask(port: int, times: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        for _ in range(times):
            client.sendall(b"request")
            received = b""
            while len(received) < 8:
                received += client.recv(100)


@contextmanager
def running(kernel: KernelSource) -> Iterator[Heard]:
    heard, stop = Heard(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            kernel.run(heard, stop)
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield heard
    finally:
        stop.set()
        began = time.monotonic()
        thread.join(10)
        assert not errors
        assert time.monotonic() - began < 0.5


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def replies(heard: Heard) -> float:
    samples: list[KernelSample] = heard.samples.get(TELEMETRY_KERNEL.name, [])
    stages = [by_stage(sample.histograms) for sample in samples]
    return sum(stage["server_reply"].count for stage in stages if "server_reply" in stage)


@pytest.mark.root
def test_a_server_is_found_timed_and_found_again_after_a_restart() -> None:
    skip_unless_permitted("run_queue", "sockets")
    port = free_port()
    kernel = KernelSource(
        [f"http://127.0.0.1:{port}"],
        KernelConfig(
            tiers=("run_queue", "sockets", "frames"),
            interval_ms=100,
            discover_s=0.2,
            measure=True,
            vllm_version="0.32.0",
        ),
        host="box",
    )
    assert isinstance(kernel, Counting)
    with running(kernel) as heard:
        with child(SERVER, str(port)) as first:
            wait_for(lambda: bool(heard.samples), "the first sample")
            time.sleep(0.3)  # a look for servers
            ask(port, 5)
            wait_for(lambda: replies(heard) == 5, "the replies")
            assert first.process.poll() is None
        with child(SERVER, str(port)):
            time.sleep(0.5)
            ask(port, 3)
            wait_for(lambda: replies(heard) == 8, "the replies of the server's next life")

    samples: list[KernelSample] = heard.samples[TELEMETRY_KERNEL.name]
    instance = f"127.0.0.1:{port}"
    assert {(s.instance, s.source, s.host, s.lost) for s in samples} == {
        (instance, "kernel", "box", 0)
    }
    assert any("run_queue" in by_stage(sample.histograms) for sample in samples)
    for topic in (TELEMETRY_KERNEL, TELEMETRY_STEPS):
        marks = heard.watermarks[topic.name, instance]
        assert marks == sorted(marks)
        assert max(late - early for early, late in pairwise(marks)) < 1e9
    assert kernel.counts["sockets ran"] > 0
    encoded = codec.Codec().encode(
        TELEMETRY_KERNEL,
        codec.Pack(
            agent="a", boot_ns=1, sequence=0, watermark_ns=marks[-1], samples=tuple(samples[:3])
        ),
    )
    assert len(encoded) > 100


# Gives up all that the agent does not keep for this source, and watches as nobody
CAPPED = """
    import sys, threading
    from latencyprism.collectors.config import CollectorConfig
    from latencyprism.collectors.kernel.config import KernelConfig
    from latencyprism.collectors.kernel.source import KernelSource
    from latencyprism.collectors.privileges import drop, needed
    from kernel_support import Heard
    drop("65534", keep=needed(CollectorConfig(engines=(sys.argv[1],), sources=("kernel",))))
    tiers = ("run_queue", "sockets", "frames", "tls", "gpu")
    source = KernelSource([sys.argv[1]], KernelConfig(
        tiers=tiers, measure=True, interval_ms=100, discover_s=0.2, vllm_version="0.32.0"))
    class Told(Heard):
        def sample(self, topic, sample):
            stages = ",".join(histogram.stage for histogram in sample.histograms)
            print(stages, *(f"{name}={count}" for name, count in source.counts.items()), flush=True)
    source.run(Told(), threading.Event())
"""


@pytest.mark.root
def test_the_capabilities_that_the_agent_keeps_are_enough() -> None:
    skip_unless_permitted("run_queue", "sockets", "frames", "tls", "gpu")
    if os.geteuid() != 0:
        pytest.skip("needs root, to give it up")
    port = free_port()
    paths = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    with (
        child(SERVER, str(port)),
        child(CAPPED, f"http://127.0.0.1:{port}", env={**os.environ, "PYTHONPATH": paths}) as agent,
    ):
        heard = agent.first
        deadline = time.monotonic() + 20
        while "server_reply" not in heard:
            assert time.monotonic() < deadline, heard
            ask(port, 1)
            heard = agent.hear()

    assert "measure refused=1" in heard
    assert "run_queue refused" not in heard
    assert "tls refused" not in heard
    assert "gpu refused" not in heard


def test_without_a_server_that_resolves_it_waits() -> None:
    with running(KernelSource(["http://no-such-host.invalid:1"], KernelConfig())) as heard:
        pass

    assert not heard.samples


def test_a_machine_that_lacks_everything_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "permitted", set)

    reason = source.unavailable(KernelConfig())

    assert reason is not None
    assert "CAP_BPF" in reason
    with pytest.raises(UnavailableError, match="CAP_PERFMON"):
        KernelSource(["http://127.0.0.1:1"], KernelConfig()).run(Heard(), threading.Event())


def refuse(setup: Setup) -> Tier:
    raise PermissionError(errno.EPERM, "map times: Operation not permitted")


def test_tiers_that_the_kernel_refuses_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_permitted("gpu")
    monkeypatch.setattr(source, "TIERS", {"run_queue": refuse, "gpu": Gpu})
    setup = make_setup(KernelConfig(tiers=("run_queue", "gpu")))

    (opened,) = open_tiers(setup)
    opened.close()

    assert opened.name == "gpu"
    assert setup.counts == {"run_queue refused": 1}


def test_when_the_kernel_refuses_all_the_source_can_t_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "TIERS", {"run_queue": refuse})
    setup = make_setup(KernelConfig(tiers=("run_queue",)))

    with pytest.raises(UnavailableError, match=r"run_queue: .*give CAP_BPF and CAP_PERFMON"):
        open_tiers(setup)


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/version" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - its name

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "version"),
    [
        (200, b'{"version": "0.32.0"}', "0.32.0"),
        (200, b'{"version": 7}', None),
        (200, b"[]", None),
        (200, b"<html>", None),
        (200, b"[" * 10_000, None),
        (404, b'{"version": "0.32.0"}', None),
    ],
)
def test_an_engine_is_asked_for_its_version(status: int, body: bytes, version: str | None) -> None:
    with answering(status, body) as url:
        assert ask_version(urlsplit(url)) == version


def test_an_engine_that_is_not_there_has_no_version() -> None:
    assert ask_version(urlsplit(f"http://127.0.0.1:{free_port()}")) is None


def test_versions_that_are_set_are_not_asked_for() -> None:
    versions = Versions(["http://a:1", "http://b:2"], "0.32.0", threading.Event())

    assert versions.answers() == [("a:1", "0.32.0"), ("b:2", "0.32.0")]
    assert versions.answers() == []


def test_versions_are_told_once_they_are_known() -> None:
    stop = threading.Event()
    with answering(200, b'{"version": "0.32.0"}') as url:
        versions = Versions([url], "", stop)
        found: list[tuple[str, str]] = []

        def known() -> bool:
            found.extend(versions.answers())
            return bool(found)

        wait_for(known, "a version")
        stop.set()

    assert found == [(url.removeprefix("http://"), "0.32.0")]
