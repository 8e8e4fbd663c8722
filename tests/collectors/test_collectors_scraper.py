import gzip
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from latencyprism.collectors.engine import client
from latencyprism.collectors.engine.client import Client, ScrapeError, checked_page
from latencyprism.collectors.engine.config import EngineConfig
from latencyprism.collectors.engine.scraper import EngineSource, next_due
from latencyprism.collectors.publisher import MemoryPublisher
from latencyprism.schemas.records import EngineSample
from latencyprism.schemas.topics import TELEMETRY_ENGINE, Topic

DATA = Path(__file__).parent / "data"
PAGES = [(DATA / f"vllm-0.32-{n}.prom").read_bytes() for n in (1, 2)]
GZIP = {"Content-Encoding": "gzip"}
FAST = EngineConfig(interval_s=0.05, timeout_s=0.3)
"""Faster than the bounds allow, which only settings check."""

Respond = Callable[[BaseHTTPRequestHandler], None]


def page(
    body: bytes,
    content_type: str = "text/plain; version=0.0.4",
    headers: Mapping[str, str] | None = None,
) -> Respond:
    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", content_type)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return respond


class Engine:
    """A real HTTP server whose answers a test changes while it runs."""

    def __init__(
        self, port: int = 0, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> None:
        self.answers: dict[str, Respond] = {}
        self.connections = 0
        self.requests: list[float] = []
        self.asked: list[tuple[str, str | None]] = []
        """Paths, with the authorization that came along."""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                engine.connections += 1

            def do_GET(self) -> None:
                engine.asked.append((self.path, self.headers["Authorization"]))
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
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def handle_error(self, *_: Any) -> None:
                """A client that went away is part of the test."""

        self._server = Server((host, port), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with serving() as running:
        running.answers["/metrics"] = page(PAGES[0])
        yield running


@contextmanager
def serving(**options: Any) -> Iterator[Engine]:
    running = Engine(**options)
    try:
        yield running
    finally:
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
        self.source = EngineSource(url, config)
        self.thread = threading.Thread(target=self.source.run, args=(self.recorder, self.stop))
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
        (page(b"a 1\n", "application/openmetrics-text"), "no # EOF after 4 bytes"),
        (page(b'[{"iter":1}]', "application/json"), "JSON, not metrics; TensorRT-LLM has them at"),
        (page(b"hello world\n"), "not a metrics page: line 1"),
        (page(gzip.compress(PAGES[0])), "compressed, but does not say so"),
        (page(b"a 1\n", headers={"Content-Encoding": "br"}), "encoded as 'br', unasked"),
        (page(b"a 1\n", headers={"Content-Encoding": "gzip"}), "the page is no gzip"),
        (page(gzip.compress(PAGES[0])[:900], headers=GZIP), "truncated: gzip ends after"),
        (page(gzip.compress(b"#" * 20_000_000), headers=GZIP), "page of more than 8000000 bytes"),
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


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
def test_slow_drip_is_cut_at_the_total_deadline_while_watermarks_go_on(
    engine: Engine, watch: Watch, connection: str
) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Connection", connection)
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

    # One request and one failure about every 0.4 s, no retry of an aborted request; where the
    # worker is slow to end, a failure without a request.
    assert 1 <= requests <= 3
    assert len(failed) <= requests + 3


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


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate"])
def test_compressed_page_is_read_though_it_was_not_asked_for(
    engine: Engine, watch: Watch, encoding: str
) -> None:
    packed = zlib.compress(PAGES[0]) if encoding == "deflate" else gzip.compress(PAGES[0])
    engine.answers["/metrics"] = page(packed, headers={"Content-Encoding": encoding})

    assert watch(engine.url).wait_for(lambda _: True).running == 1.0


def test_chunked_page_is_read(engine: Engine, watch: Watch) -> None:
    def chunked(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for at in range(0, len(PAGES[0]), 7000):
            part = PAGES[0][at : at + 7000]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        handler.wfile.write(b"0\r\n\r\n")

    engine.answers |= {"/metrics": chunked, "/version": page(b"{}")}
    running = watch(engine.url)
    running.wait_for(lambda _: len(running.recorder.samples) >= 3)

    assert {sample.freshness for sample in running.recorder.samples} == {"fresh"}
    assert engine.connections == 1


def redirect(location: str, code: int = 307) -> Respond:
    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        handler.send_header("Location", location)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return respond


@pytest.mark.parametrize("location", ["/metrics/", "metrics/", "{url}/metrics/"])
def test_redirect_on_the_same_server_is_followed(
    engine: Engine, watch: Watch, location: str
) -> None:
    engine.answers["/metrics"] = redirect(location.format(url=engine.url))
    engine.answers["/metrics/"] = page(PAGES[0])

    assert watch(engine.url).wait_for(lambda _: True).running == 1.0
    assert engine.connections == 1


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("http://127.0.0.1:1/metrics", "redirected to 'http://127.0.0.1:1/metrics'; set it"),
        ("https://[bad", "redirected to 'https://[bad'"),
        ("", "redirected to ''"),
        ("/metrics", "redirected more than 3 times"),
    ],
)
def test_other_redirects_are_refused_and_the_token_stays_here(
    engine: Engine, watch: Watch, location: str, reason: str
) -> None:
    engine.answers["/metrics"] = redirect(location)
    failed = watch(engine.url).wait_for(is_failed)

    assert reason in str(failed.error)


def test_page_on_another_port_is_read_there_and_the_version_at_the_engine(
    engine: Engine, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGE_TOKEN", "s3cret")
    engine.answers = {"/version": page(b'{"version":"0.32.0"}', "application/json")}
    with serving() as other:
        other.answers["/custom?raw=1"] = page(PAGES[0])
        config = replace(
            FAST, pages={f"{engine.url}/": f"{other.url}/custom?raw=1"}, token_env="PAGE_TOKEN"
        )
        running = watch(engine.url, config)
        sample = running.wait_for(lambda s: s.version is not None)
        running.end()

    assert (sample.version, sample.running) == ("0.32.0", 1.0)
    assert sample.instance == f"127.0.0.1:{engine.port}"
    assert set(other.asked) == {("/custom?raw=1", "Bearer s3cret")}
    assert engine.asked == [("/version", None)]


def test_token_is_read_anew_and_never_told(
    engine: Engine, watch: Watch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")

    def guarded(handler: BaseHTTPRequestHandler) -> None:
        if handler.headers["Authorization"] == "Bearer second":
            page(PAGES[0])(handler)
        else:
            handler.send_error(401)

    engine.answers["/metrics"] = guarded
    with caplog.at_level(logging.DEBUG):
        running = watch(engine.url, replace(FAST, token_file=str(file)))
        failed = running.wait_for(is_failed)
        file.write_text("second\n")
        running.wait_for(is_fresh)
        file.unlink()
        missing = running.wait_for(lambda s: "No such" in str(s.error))
        running.end()

    assert failed.error == "HTTP 401: the page wants a token; set token_env or token_file"
    assert str(missing.error).startswith(f"token_file {file}: ")
    told = caplog.text + repr(running.recorder.samples) + repr(running.source.counts)
    assert "second" not in told.replace("_seconds", "")


@pytest.mark.parametrize("token", ["", "two\nlines", "\x00", "é"])
def test_token_that_is_none_is_refused_in_words(
    engine: Engine, watch: Watch, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setattr(os, "environ", {"PAGE_TOKEN": token})
    failed = watch(engine.url, replace(FAST, token_env="PAGE_TOKEN")).wait_for(is_failed)

    assert failed.error == "environment PAGE_TOKEN holds no token"
    assert engine.asked == []


def test_ipv6(watch: Watch) -> None:
    try:
        with serving(host="::1") as engine:
            engine.answers["/metrics"] = page(PAGES[0])
            running = watch(engine.url)
            sample = running.wait_for(is_fresh)
            running.end()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")

    assert sample.instance == f"[::1]:{engine.port}"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificate and key for 127.0.0.1, signed by itself, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate")
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    key = file.with_name("key.pem")
    wish = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=engine"
    names = "-addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [openssl, *wish.split(), *names.split(), "-out", file, "-keyout", key],
        check=True,
        capture_output=True,
    )
    file.write_bytes(file.read_bytes() + key.read_bytes())
    return file


def test_https_with_an_authority_of_ones_own(watch: Watch, certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serving(tls=context) as engine:
        engine.answers["/metrics"] = page(PAGES[0])
        untrusted = watch(engine.url)
        failed = untrusted.wait_for(is_failed)
        untrusted.end()
        trusted = watch(engine.url, replace(FAST, ssl_ca=str(certificate)))
        trusted.wait_for(is_fresh)
        trusted.end()

    assert "CERTIFICATE_VERIFY_FAILED" in str(failed.error)


def test_wrong_settings_are_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ssl_ca"):
        EngineSource("https://127.0.0.1:1", replace(FAST, ssl_ca=str(tmp_path / "none.pem")))
    with pytest.raises(ValueError, match="expected http"):
        EngineSource("http://h:1", replace(FAST, pages={"http://h:1": "h:8002"}))


def test_tensorrt_llm_is_found_where_it_has_its_page(engine: Engine, watch: Watch) -> None:
    engine.answers = {
        "/metrics": page(b'[{"iter": 5, "numActiveRequests": 1}]', "application/json"),
        "/prometheus/metrics": page((DATA / "tensorrt-llm-1.3.prom").read_bytes()),
        "/version": page(b'{"version":"1.3.0"}', "application/json"),
    }
    running = watch(engine.url)
    found = running.wait_for(lambda s: s.version == "1.3.0")
    running.end()

    assert (found.engine, found.running, found.freshness) == ("tensorrt_llm", 0.25, "fresh")
    # Reading that JSON takes it away from others, so it is asked for once.
    assert [path for path, _ in engine.asked].count("/metrics") == 1


def ollama(*names: str) -> Respond:
    models = [{"name": name, "size": 5, "size_vram": 5} for name in names]
    return page(json.dumps({"models": models}).encode(), "application/json")


def test_ollama_is_known_by_the_models_it_has_loaded(engine: Engine, watch: Watch) -> None:
    engine.answers = {
        "/api/ps": ollama("qwen3:8b", "gemma3:4b"),
        "/api/version": page(b'{"version":"0.12.3"}', "application/json"),
    }
    running = watch(engine.url)
    sample = running.wait_for(lambda s: s.version is not None)
    engine.answers["/api/ps"] = ollama()
    idle = running.wait_for(lambda s: is_fresh(s) and s.model is None)
    engine.answers = {"/metrics": page(PAGES[0])}
    replaced = running.wait_for(lambda s: s.engine == "vllm")

    assert (sample.engine, sample.version, sample.model) == (
        "ollama",
        "0.12.3",
        "gemma3:4b,qwen3:8b",
    )
    assert (sample.running, sample.kv_usage, sample.generation_tokens) == (None, None, None)
    assert (idle.engine, idle.freshness) == ("ollama", "fresh")
    assert replaced.running == 1.0


@pytest.mark.parametrize("answer", [b"{}", b"[]", b'{"models": 3}', b"[" * 100_000, b"null"])
def test_json_that_names_no_models_is_no_engine(
    engine: Engine, watch: Watch, answer: bytes
) -> None:
    engine.answers = {"/api/ps": page(answer, "application/json")}
    running = watch(engine.url)
    running.wait_for(lambda _: len(running.recorder.samples) >= 7)
    running.end()

    # The error is that of the first place looked at; one place is asked a time.
    assert {sample.error for sample in running.recorder.samples} == {
        "HTTP 404: no metrics there; SGLang needs --enable-metrics"
    }
    assert len(engine.asked) == len(running.recorder.samples)
    assert {path for path, _ in engine.asked} == {"/metrics", "/prometheus/metrics", "/api/ps"}


def test_a_path_that_was_set_is_the_only_one_asked_for(engine: Engine, watch: Watch) -> None:
    engine.answers = {"/api/ps": ollama("m")}
    running = watch(engine.url, replace(FAST, path="/stats"))
    running.wait_for(lambda _: len(running.recorder.samples) >= 4)
    running.end()

    assert {path for path, _ in engine.asked} == {"/stats"}


@pytest.mark.parametrize("version", [b'{"version": {"a": 1}}', b"[1]", b"no json", b'{"v": "1"}'])
def test_a_version_that_is_none_is_asked_for_once(
    engine: Engine, watch: Watch, version: bytes
) -> None:
    engine.answers["/version"] = page(version, "application/json")
    running = watch(engine.url)
    running.wait_for(lambda _: len(running.recorder.samples) >= 4)
    running.end()

    assert {sample.version for sample in running.recorder.samples} == {None}
    assert [path for path, _ in engine.asked].count("/version") == 1


def test_what_came_of_the_scrapes_is_counted(engine: Engine, watch: Watch) -> None:
    running = watch(engine.url, replace(FAST, max_series=20))
    running.wait_for(is_fresh)
    engine.answers["/metrics"] = status(500)
    running.wait_for(is_failed)
    engine.answers["/metrics"] = page(b"hello world\n")
    running.wait_for(lambda s: "hello" in str(s.error))
    running.end()
    counts = running.source.counts
    samples = running.recorder.samples

    assert counts["fresh"] == sum(map(is_fresh, samples)) > 0
    assert counts["http_status"] + counts["not_metrics"] == sum(map(is_failed, samples))
    assert counts["http_status"] > 0
    assert counts["not_metrics"] > 0
    assert counts["crowded_names"] > 5
    assert counts["stale"] == counts["timeout"] == counts["oversized"] == 0


def test_scrapes_keep_their_beat_but_never_follow_much_too_soon() -> None:
    assert next_due(10.0, 10.05, 1.0) == 11.0
    assert next_due(10.0, 10.5, 1.0) == 11.5
    assert next_due(10.0, 17.2, 1.0) == 18.2
