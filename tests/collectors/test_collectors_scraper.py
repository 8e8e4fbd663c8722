import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from latencyprism.collectors.engine import client
from latencyprism.collectors.engine.client import Client, ScrapeError, checked_page
from latencyprism.collectors.engine.config import EngineConfig
from latencyprism.collectors.engine.scraper import EngineSource
from latencyprism.collectors.publisher import MemoryPublisher
from latencyprism.schemas.records import EngineSample
from latencyprism.schemas.topics import TELEMETRY_ENGINE, Topic

DATA = Path(__file__).parent / "data"
PAGES = [(DATA / f"vllm-0.32-{n}.prom").read_bytes() for n in (1, 2)]
FAST = EngineConfig(interval_s=0.05, timeout_s=0.3)
"""Faster than the bounds allow, which only settings check."""

Respond = Callable[[BaseHTTPRequestHandler], None]


def page(body: bytes, content_type: str = "text/plain; version=0.0.4") -> Respond:
    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return respond


class Engine:
    """A real HTTP server whose answers a test changes while it runs."""

    def __init__(self, port: int = 0) -> None:
        self.answers: dict[str, Respond] = {}
        self.connections = 0
        self.requests: list[float] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                engine.connections += 1

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    engine.requests.append(time.monotonic())
                if answer := engine.answers.get(self.path):
                    answer(self)
                else:
                    self.send_error(404)

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, *_: Any) -> None:
                """A client that went away is part of the test."""

        self._server = Server(("127.0.0.1", port), Handler)
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    running = Engine()
    running.answers["/metrics"] = page(PAGES[0])
    yield running
    running.stop()


class Recorder(MemoryPublisher):
    """Remembers samples and watermarks in the order they came."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[EngineSample] = []
        self.marks: list[tuple[int, float]] = []

    def sample(self, topic: Topic, sample: Any) -> None:
        assert topic is TELEMETRY_ENGINE
        if self.marks:
            assert sample.observed_at_ns >= self.marks[-1][0], "older than the watermark"
        self.samples.append(sample)

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:
        assert (topic, instance) == (
            TELEMETRY_ENGINE,
            self.samples[0].instance if self.samples else instance,
        )
        self.marks.append((watermark_ns, time.monotonic()))


class Running:
    """A source in its thread."""

    def __init__(self, url: str, config: EngineConfig = FAST) -> None:
        self.recorder = Recorder()
        self.stop = threading.Event()
        source = EngineSource(url, config)
        self.thread = threading.Thread(target=source.run, args=(self.recorder, self.stop))
        self.thread.start()

    def wait_for(self, condition: Callable[[EngineSample], bool]) -> EngineSample:
        deadline = time.monotonic() + 10
        seen = 0
        while time.monotonic() < deadline:
            samples = self.recorder.samples
            while seen < len(samples):
                if condition(samples[seen]):
                    return samples[seen]
                seen += 1
            time.sleep(0.005)
        raise AssertionError(f"not seen among {samples[-3:]}")

    def end(self) -> float:
        began = time.monotonic()
        self.stop.set()
        self.thread.join(5)
        assert not self.thread.is_alive()
        return time.monotonic() - began


@pytest.fixture
def watch() -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def begin(url: str, config: EngineConfig = FAST) -> Running:
        started.append(Running(url, config))
        return started[-1]

    yield begin
    for running in started:
        running.end()


Watch = Callable[..., Running]


def is_fresh(sample: EngineSample) -> bool:
    return sample.freshness == "fresh"


def is_failed(sample: EngineSample) -> bool:
    return sample.freshness == "failed"


def test_watches_a_live_engine_over_one_connection(engine: Engine, watch: Watch) -> None:
    engine.answers["/version"] = page(b'{"version":"0.32.0"}', "application/json")
    running = watch(engine.url)
    running.wait_for(is_fresh)
    engine.answers["/metrics"] = page(PAGES[1])

    grown = running.wait_for(lambda s: bool(s.generation_tokens))

    assert grown.generation_tokens == 115
    assert grown.instance == f"127.0.0.1:{engine.port}"
    assert grown.scrape_ms > 0
    assert running.wait_for(lambda s: s.version is not None).version == "0.32.0"
    assert engine.connections == 1
    assert running.end() < 0.5


def test_engine_down_at_start_fails_in_words_and_is_found_later(watch: Watch) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    running = watch(f"http://127.0.0.1:{port}")
    failed = running.wait_for(is_failed)
    engine = Engine(port)
    engine.answers["/metrics"] = page(PAGES[0])
    running.wait_for(is_fresh)
    running.end()
    engine.stop()

    assert "refused" in str(failed.error)
    assert (failed.running, failed.generation_tokens, failed.engine) == (None, None, None)


def test_engine_dying_mid_run_is_failed_not_zero(engine: Engine, watch: Watch) -> None:
    running = watch(engine.url)
    running.wait_for(is_fresh)

    def die(handler: BaseHTTPRequestHandler) -> None:
        handler.connection.close()

    engine.answers["/metrics"] = die
    failed = running.wait_for(is_failed)

    assert failed.error
    assert failed.engine == "vllm"
    assert (failed.running, failed.waiting, failed.kv_usage, failed.histograms) == (
        None,
        None,
        None,
        (),
    )


def truncated(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(PAGES[0])))
    handler.end_headers()
    handler.wfile.write(PAGES[0][:5000])
    handler.close_connection = True


def chunked_truncated(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"1000\r\n" + PAGES[0][:1000])
    handler.close_connection = True


def ended_without_length(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(PAGES[0][:5003])
    handler.close_connection = True


def status(code: int) -> Respond:
    return lambda handler: handler.send_error(code)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (page(b"<!doctype html><p>hello", "text/html"), "HTML"),
        (page(b"  <html>"), "HTML"),
        (page(b""), "empty"),
        (page(b"a 1\nb{ 2\n"), "line 2"),
        (truncated, "truncated after 5000 bytes"),
        (chunked_truncated, "truncated"),
        (ended_without_length, "truncated: no line end after 5003 bytes"),
        (status(501), "HTTP 501: metrics are off; llama.cpp needs --metrics"),
        (status(404), "HTTP 404"),
        (status(500), "HTTP 500: Internal Server Error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_page_is_failed_with_the_reason_and_the_next_good_one_is_read(
    engine: Engine, watch: Watch, answer: Respond, reason: str
) -> None:
    engine.answers["/metrics"] = answer
    running = watch(engine.url)
    failed = running.wait_for(is_failed)
    engine.answers["/metrics"] = page(PAGES[0])
    running.wait_for(is_fresh)

    assert reason in str(failed.error)
    assert failed.running is None


def test_slow_drip_is_cut_at_the_total_deadline_while_watermarks_go_on(
    engine: Engine, watch: Watch
) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(1000):
            handler.wfile.write(b"#")
            handler.wfile.flush()
            time.sleep(0.02)

    engine.answers["/metrics"] = drip
    running = watch(engine.url)
    began = time.monotonic()
    failed = running.wait_for(is_failed)

    assert time.monotonic() - began < 1
    assert failed.error == "no whole answer within 0.3 s"
    engine.answers["/metrics"] = page(PAGES[0])
    running.wait_for(is_fresh)
    times = [at for _, at in running.recorder.marks]
    assert max(b - a for a, b in pairwise(times)) < 0.25


def test_engine_that_hangs_after_good_pages_fails_once_a_deadline(
    engine: Engine, watch: Watch
) -> None:
    leave = threading.Event()
    running = watch(engine.url, EngineConfig(interval_s=0.1, timeout_s=0.3))
    running.wait_for(is_fresh)

    def hang(handler: BaseHTTPRequestHandler) -> None:
        leave.wait(5)
        handler.close_connection = True

    engine.answers["/metrics"] = hang
    running.wait_for(is_failed)
    before = len(engine.requests)
    time.sleep(1)
    failed = [s for s in running.recorder.samples if is_failed(s)]
    requests = len(engine.requests) - before
    leave.set()

    # One request and one failure about every 0.4 s, no retry of an aborted request.
    assert 2 <= requests <= 3
    assert len(failed) <= requests + 1


def test_oversized_answer_is_refused(
    engine: Engine, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_BYTES", 1000)
    running = watch(engine.url)

    assert running.wait_for(is_failed).error == "answer of more than 1000 bytes"


def test_idle_connection_closed_by_the_server_is_opened_again(engine: Engine, watch: Watch) -> None:
    def close_afterwards(handler: BaseHTTPRequestHandler) -> None:
        page(b"vllm:num_requests_running 0\n")(handler)
        handler.close_connection = True

    engine.answers["/metrics"] = close_afterwards
    running = watch(engine.url)
    running.wait_for(lambda _: len(running.recorder.samples) >= 4)

    assert {sample.error for sample in running.recorder.samples} == {None}
    assert engine.connections >= 4


def test_scrapes_are_no_closer_than_the_interval(engine: Engine, watch: Watch) -> None:
    running = watch(engine.url, EngineConfig(interval_s=0.15, timeout_s=1))
    running.wait_for(lambda _: len(running.recorder.samples) >= 4)
    running.end()

    gaps = [b - a for a, b in pairwise(engine.requests)]
    assert min(gaps) > 0.14


def test_stop_during_a_hanging_scrape_is_prompt(engine: Engine, watch: Watch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hang(handler: BaseHTTPRequestHandler) -> None:
        entered.set()
        leave.wait(5)
        handler.close_connection = True

    engine.answers["/metrics"] = hang
    running = watch(engine.url, EngineConfig(timeout_s=5))
    assert entered.wait(5)
    took = running.end()
    leave.set()

    assert took < 0.5


def test_host_that_cannot_be_resolved_fails_in_words() -> None:
    unknown = Client("http://no-such-host.invalid:1", 1)

    with pytest.raises(ScrapeError, match=r"\w+"):
        unknown.get("/metrics")


def test_base_path_is_kept(engine: Engine) -> None:
    engine.answers["/v1/metrics"] = page(b"a 1\n")
    below = Client(engine.url + "/v1/", 1)
    content_type, body = below.get("/metrics")
    below.close()

    assert checked_page(content_type, body) == b"a 1\n"
