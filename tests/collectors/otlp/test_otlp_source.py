"""Real exporters, and whatever else may connect."""

import gzip
import http.client
import json
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from otlp_messages import TRACE, VLLM, Collected, message, span

from latencyprism.collectors.otlp import http as otlp_http
from latencyprism.collectors.otlp.config import OtlpConfig
from latencyprism.collectors.otlp.grpc import SERVICE
from latencyprism.collectors.otlp.source import OtlpSource
from latencyprism.collectors.source import Counting, UnavailableError
from latencyprism.schemas.codec import Codec, Pack
from latencyprism.schemas.topics import TELEMETRY_REQUESTS

DATA = Path(__file__).parent / "data"
ENGINE = "127.0.0.1:8000"
KB = 1024
SECRET = "why is the sky blue"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(condition: Callable[[], bool], what: str) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail(f"waited in vain for {what}")


@dataclass(frozen=True)
class Running:
    source: OtlpSource
    collected: Collected
    grpc: str
    http: int

    def post(
        self,
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        path: str = "/v1/traces",
        method: str = "POST",
    ) -> tuple[int, str | None, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.http, timeout=10)) as connection:
            connection.request(
                method, path, body, {"Content-Type": "application/x-protobuf"} | (headers or {})
            )
            answer = connection.getresponse()
            return answer.status, answer.headers.get("Content-Type"), answer.read()


@contextmanager
def receiving(*engines: str, **settings: Any) -> Iterator[Running]:
    ports = free_port(), free_port()
    config = OtlpConfig(grpc=f"127.0.0.1:{ports[0]}", http=f"127.0.0.1:{ports[1]}", **settings)
    source = OtlpSource([f"http://{engine}" for engine in engines or (ENGINE,)], config)
    collected, stop, crashes = Collected(), threading.Event(), list[Exception]()

    def run() -> None:
        try:
            source.run(collected, stop)
        except Exception as crash:  # noqa: BLE001 - for the test to show
            crashes.append(crash)

    thread = threading.Thread(target=run, name="otlp")
    thread.start()
    wait_for(lambda: not thread.is_alive() or _answers(ports[1]), "the receiver")
    yield Running(source, collected, config.grpc, ports[1])
    began = time.monotonic()
    stop.set()
    thread.join(2)
    assert (crashes, thread.is_alive()) == ([], False)
    assert time.monotonic() - began < 0.6
    assert not _answers(ports[0])
    assert not _answers(ports[1])


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def running() -> Iterator[Running]:
    with receiving() as running:
        yield running


@pytest.mark.parametrize("name", ["vllm-0.32-requests-1.bin", "vllm-0.32-requests-2.bin"])
@pytest.mark.parametrize("way", ["grpc", "http"])
def test_what_vllm_sends(running: Running, name: str, way: str) -> None:
    body = (DATA / name).read_bytes()
    if way == "grpc":
        with grpc.insecure_channel(running.grpc) as channel:
            assert channel.unary_unary(f"/{SERVICE}/Export")(body) == b""
    else:
        assert running.post(body) == (200, "application/x-protobuf", b"")

    assert len(running.collected.requests) == 2
    for request in running.collected.requests:
        assert request.end_ns is not None
        assert request.first_token_ns is not None
        assert request.queue_us is not None
        assert request.prefill_us is not None
        assert request.decode_us is not None
        assert (request.instance, request.prompt_tokens) == (ENGINE, 161)
        assert request.completion_tokens == request.max_tokens
        # The engine's stages fill the time that the server saw, but for passing things on.
        stages_us = request.queue_us + request.prefill_us + request.decode_us
        assert 0 < (request.end_ns - request.arrival_ns) / 1000 - stages_us < 40_000
        first_us = request.queue_us + request.prefill_us
        assert 0 < (request.first_token_ns - request.arrival_ns) / 1000 - first_us < 40_000
    traces = [request.trace_id for request in running.collected.requests]
    assert (TRACE in traces) == name.endswith("2.bin")


def test_spans_of_vllms_start_are_accepted_and_counted(running: Running) -> None:
    assert running.post((DATA / "vllm-0.32-startup.bin").read_bytes())[0] == 200
    assert running.collected.requests == []
    assert running.source.counts["other spans"] == 1


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_real_exporter(running: Running, protocol: str, compression: str) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as ByGrpc
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as ByHttp
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind

    exporter = (
        ByGrpc(
            endpoint=running.grpc,
            insecure=True,
            compression=grpc.Compression.Gzip
            if compression == "gzip"
            else grpc.Compression.NoCompression,
        )
        if protocol == "grpc"
        else ByHttp(
            endpoint=f"http://127.0.0.1:{running.http}/v1/traces",
            compression=Compression(compression),
        )
    )
    provider = TracerProvider(resource=Resource.create({"service.instance.id": ENGINE}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("engine")
    began_ns = time.time_ns()
    for _ in range(3):
        made = tracer.start_span("llm_request", kind=SpanKind.SERVER, attributes=dict(VLLM))
        made.set_attribute("gen_ai.prompt", SECRET)
        made.end()
    assert provider.force_flush()
    provider.shutdown()

    assert len(running.collected.requests) == 3
    assert len({request.request_id for request in running.collected.requests}) == 3
    for request in running.collected.requests:
        assert began_ns <= request.arrival_ns <= time.time_ns()
        assert request.prefill_us == 401_417


def test_json(running: Running) -> None:
    attributes = [
        {"key": "gen_ai.latency.e2e", "value": {"doubleValue": 0.5}},
        {"key": "gen_ai.latency.time_to_first_token", "value": {"doubleValue": 0.25}},
        {"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": "7"}},
    ]
    told = {
        "traceId": TRACE,
        "spanId": "00f067aa0ba902b7",
        "name": "llm_request",
        "kind": 2,
        "startTimeUnixNano": "1796061087435045376",
        "endTimeUnixNano": "1796061088276728177",
        "attributes": attributes,
    }
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [told]}]}]}).encode()

    answer = running.post(body, {"Content-Type": "application/json; charset=utf-8"})
    assert answer == (200, "application/json", b"{}")
    (request,) = running.collected.requests
    assert (request.trace_id, request.prompt_tokens) == (TRACE, 7)


def test_refused_spans_are_told_as_partial_success() -> None:
    body = message(span(), span(start_time_unix_nano=1), span({}), resource={"service.name": "x"})
    with receiving(ENGINE, "127.0.0.1:8001", max_requests=1) as running:
        with grpc.insecure_channel(running.grpc) as channel:
            answer = channel.unary_unary(f"/{SERVICE}/Export")(body)
        json_answer = running.post(
            b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"startTimeUnixNano":"1796061087435045376",'
            b'"endTimeUnixNano":"1796061088276728177","attributes":[{"key":"gen_ai.latency.e2e",'
            b'"value":{"doubleValue":1}},{"key":"queue_time","value":{"stringValue":"1ms"}}]}]}]}]}',
            {"Content-Type": "application/json"},
        )

    partial = ExportTraceServiceResponse.FromString(answer).partial_success
    assert partial.rejected_spans == 2  # one without a server, one beyond the bound
    assert "collectors.otlp.services" in partial.error_message
    told = json.loads(json_answer[2])["partialSuccess"]
    assert told["rejectedSpans"] == "1"
    assert running.source.counts["spans without a server"] == 2
    assert running.source.counts["spans beyond the bound"] == 1


@pytest.mark.parametrize(
    ("headers", "body", "code", "kind"),
    [
        ({}, b"\x0a\x05abc", 400, "malformed messages"),
        ({"Content-Type": "application/json"}, b"{", 400, "malformed messages"),
        ({"Content-Encoding": "gzip"}, b"plain", 400, "malformed messages"),
        ({"Content-Encoding": "gzip"}, gzip.compress(b"")[:-3], 400, "malformed messages"),
        ({"Content-Encoding": "gzip"}, gzip.compress(b"") * 2, 400, "malformed messages"),
        ({"Content-Encoding": "gzip"}, gzip.compress(bytes(65 * KB)), 413, "oversized messages"),
        ({}, bytes(65 * KB), 413, "oversized messages"),
        ({"Content-Encoding": "zstd"}, b"", 415, "unknown encodings"),
        ({"Content-Type": "text/plain"}, b"", 415, "unknown encodings"),
    ],
    ids=range(9),
)
def test_what_cannot_be_taken_is_refused(
    headers: dict[str, str], body: bytes, code: int, kind: str
) -> None:
    with receiving(max_message_kb=64) as running:
        answered, _, told = running.post(body, headers)
        assert running.post(b"")[0] == 200

    assert answered == code
    assert told
    assert running.source.counts[kind] == 1


def test_only_one_path_is_served(running: Running) -> None:
    assert running.post(b"", path="/v1/metrics")[0] == 404
    assert running.post(b"", method="GET")[0] == 405
    assert running.post(b"", path="/v1/traces?x=1")[0] == 200


def test_a_body_in_pieces_of_unknown_length_is_bounded() -> None:
    with receiving(max_message_kb=64) as running:
        with socket.create_connection(("127.0.0.1", running.http)) as sender:
            sender.sendall(
                b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            answer = b""
            sender.settimeout(5)
            try:
                for _ in range(200):
                    sender.sendall(b"1000\r\n" + b"\x12\x00" * 2048 + b"\r\n")
                answer = sender.recv(4096)
            except ConnectionError:
                pass
        wait_for(lambda: running.source.counts.get("oversized messages") == 1, "the refusal")

    assert answer == b"" or b"413" in answer


def test_grpc_refuses_what_is_malformed_or_too_large() -> None:
    with (
        receiving(max_message_kb=64) as running,
        grpc.insecure_channel(running.grpc) as channel,
    ):
        export = channel.unary_unary(f"/{SERVICE}/Export")
        codes = []
        for body, compression in (
            (b"\x0a\x05abc", grpc.Compression.NoCompression),
            (bytes(65 * KB), grpc.Compression.NoCompression),
            (bytes(8 << 20), grpc.Compression.Gzip),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                export(body, compression=compression, timeout=5)
            codes.append(refused.value.code())
        assert export(b"", timeout=5) == b""

    assert codes == [
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ]
    assert running.source.counts["malformed messages"] == 1


def test_a_crowd_of_idle_connections_is_bounded() -> None:
    with receiving(max_connections=4) as running:
        crowd = [socket.create_connection(("127.0.0.1", running.http)) for _ in range(8)]
        assert running.post(b"")[0] == 503
        for idle in crowd:
            idle.close()
        wait_for(lambda: running.post(b"")[0] == 200, "an answer after the crowd")


def test_connections_that_send_no_request_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_http, "HEAD_S", 0.2)
    with receiving(max_connections=4) as running, ExitStack() as stack:
        crowd = [
            stack.enter_context(socket.create_connection(("127.0.0.1", running.http), timeout=5))
            for _ in range(80)
        ]
        for number, connection in enumerate(crowd):
            with suppress(OSError):
                connection.sendall(b"POST /v1/tr" if number % 2 else b"")
        for connection in crowd:
            with suppress(ConnectionError):
                assert connection.recv(1) == b""
        assert running.post(message(span(VLLM)))[0] == 200


def test_any_bytes_do_no_harm(running: Running) -> None:
    rng = random.Random(1)
    real = (DATA / "vllm-0.32-requests-1.bin").read_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(60):
        body = bytearray(real)
        for _ in range(5):
            body[rng.randrange(len(body))] = rng.randrange(256)
        assert running.post(bytes(body))[0] in (200, 400)
        with socket.create_connection(("127.0.0.1", running.http)) as sender:
            sender.sendall(rng.randbytes(50) + b"\r\n\r\n")
    assert running.post(real)[0] == 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_prompts_do_not_reach_kafkas_bytes(running: Running) -> None:
    texts = {"gen_ai.prompt": SECRET, "gen_ai.completion": SECRET, "gen_ai.request.id": SECRET}
    assert running.post(message(span({**texts, **VLLM, "gen_ai.request.id": SECRET})))[0] == 200

    (request,) = running.collected.requests
    packed = Codec().encode(
        TELEMETRY_REQUESTS,
        Pack(agent="a", boot_ns=1, sequence=0, watermark_ns=0, samples=(request,)),
    )
    assert b"llm_request" in packed
    assert SECRET.encode() not in packed


def test_an_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for way in ("grpc", "http"):
            config = replace(OtlpConfig(grpc="", http=""), **{way: address})  # type: ignore[arg-type]
            source = OtlpSource((), config)
            words = (
                rf"cannot listen on {address} .* in use.*\(`ss -ltnp` .* collectors\.otlp\.{way} "
            )
            with pytest.raises(OSError, match=words):
                source.run(Collected(), threading.Event())


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_one_server_alone(way: str) -> None:
    port = free_port()
    off = OtlpConfig(grpc="", http="")
    stop = threading.Event()
    source = OtlpSource((), replace(off, **{way: f"127.0.0.1:{port}"}))  # type: ignore[arg-type]
    thread = threading.Thread(target=source.run, args=(Collected(), stop))
    thread.start()
    wait_for(lambda: _answers(port), "the server")
    stop.set()
    thread.join(1)

    assert not thread.is_alive()


def test_both_servers_off_says_what_to_set() -> None:
    with pytest.raises(UnavailableError, match=r"collectors\.otlp\.grpc"):
        OtlpSource((), OtlpConfig(grpc="", http=""))


@pytest.mark.parametrize("wrong", ["4317", "localhost", "127.0.0.1:x", ":4317", "127.0.0.1:1/x"])
def test_addresses_that_are_none_are_named(wrong: str) -> None:
    with pytest.raises(ValueError, match="expected an address and a port"):
        OtlpSource((), OtlpConfig(grpc=wrong))


def test_the_source_counts() -> None:
    assert isinstance(OtlpSource((), OtlpConfig()), Counting)
