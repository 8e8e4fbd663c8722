"""The writer on real Kafka and the real store: kills, absences, bad bytes, a full disk."""

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from kafka_io import KafkaIO
from sinks_support import MS, T0, pack

from latencyprism.schemas import topics
from latencyprism.schemas.codec import Pack
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.records import BatchProfile, RequestTiming, StepBatch
from latencyprism.sinks.client import connect
from latencyprism.sinks.config import StoreConfig
from latencyprism.sinks.process import SinkProcess, StoreProcess

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

pytest_plugins = ("sinks_fixtures",)
PASSED_ON = ("content-type", "content-encoding", "authorization")
PASSED_BACK = ("x-clickhouse",)
pytestmark = pytest.mark.clickhouse


def eventually(check: Callable[[], bool], what: str, *, timeout_s: float = 60.0) -> None:
    """Wait until something of another process is so."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def part(number: int, part: int, *, last: bool) -> RequestTiming:
    """Part of an exchange that arrived ``number`` ms after T0, with one chunk a part."""
    arrival = T0 + number * MS
    return RequestTiming(
        request_id=f"r{number}",
        part=part,
        state="complete" if last else "open",
        instance=f"host:{number % 3}",
        source="network",
        observed_at_ns=arrival + (part + 1) * MS,
        endpoint="/v1/completions",
        arrival_ns=arrival,
        first_token_ns=arrival + MS if part == 0 else None,
        end_ns=arrival + (part + 1) * MS if last else None,
        chunks_before=part,
        chunk_base_ns=arrival + (part + 1) * MS,
    )


def window(number: int) -> BatchProfile:
    """A judged window."""
    start = T0 + 250 * MS * number
    return BatchProfile(
        batch_id=f"b{number}",
        instance=f"host:{number % 3}",
        service="model",
        window_start_ns=start,
        window_end_ns=start + 250 * MS,
        closed_at_ns=start + 300 * MS,
        requests_started=1,
        requests_finished=1,
        requests_failed=0,
        requests_open=0,
        chunks=3,
        steps=3,
        late_samples=0,
        verdict="normal",
        reason="as expected",
        model_version="v",
    )


def send_exchanges(kafka_io: KafkaIO, start: int, count: int) -> None:
    """Exchanges of three parts each, ten to a pack, and a window for each."""
    codec = kafka_io.codec
    for first in range(start, start + count, 10):
        numbers = range(first, min(first + 10, start + count))
        for index in range(3):
            samples = tuple(part(n, index, last=index == 2) for n in numbers)
            for instance in range(3):
                mine = tuple(s for s in samples if s.instance == f"host:{instance}")
                message = codec.encode(topics.TELEMETRY_REQUESTS, pack(*mine, sequence=first))
                kafka_io.send_bytes(topics.TELEMETRY_REQUESTS, [(f"host:{instance}", message)])
        batches = codec.encode(topics.LATENCY_BATCHES, pack(*map(window, numbers)))
        kafka_io.send_bytes(topics.LATENCY_BATCHES, [("model", batches)])


def count_requests(client: "Client") -> tuple[int, int, int]:
    """Exchanges, different ones, and those with all of their three parts."""
    (row,) = client.query(
        "SELECT count(), uniqExact(request_id), countIf(parts = 3 AND state = 'complete')"
        " FROM requests"
    ).result_rows
    return tuple(row)


@pytest.mark.slow
def test_kill_9_in_the_middle_and_redelivery_lose_and_double_nothing(
    fresh: StoreConfig, kafka: KafkaConfig, kafka_io: KafkaIO, tmp_path: Path
) -> None:
    sink = SinkProcess(replace(fresh, flush_ms=50, batch_rows=100), kafka, tmp_path)
    total = 0
    with sink:
        client = connect(fresh)
        for wait_s in (0.0, 0.15, 0.4):
            send_exchanges(kafka_io, total, 300)
            total += 300
            time.sleep(wait_s)
            sink.kill()
            sink.start()
        send_exchanges(kafka_io, 0, 60)  # the agents deliver some again, at new offsets
        send_exchanges(kafka_io, total, 100)
        total += 100
        whole = (total, total, total)
        eventually(lambda: count_requests(client) == whole, f"{whole} exchanges", timeout_s=90)
        windows = "SELECT count(), uniqExact(batch_id) FROM batches"
        eventually(
            lambda: client.query(windows).result_rows == [(total, total)], f"{total} windows"
        )
        client.command("SYSTEM REFRESH VIEW requests_per_minute_refresh")
        client.command("SYSTEM WAIT VIEW requests_per_minute_refresh")
        assert client.command("SELECT sum(requests) FROM requests_per_minute") == total
        stored = client.command("SELECT count() FROM request_parts")
        assert isinstance(stored, int)
        assert stored >= 3 * total
    assert sink.stop() == 0


def test_bad_bytes_become_letters_and_rows_go_on(
    fresh: StoreConfig, kafka: KafkaConfig, kafka_io: KafkaIO, tmp_path: Path
) -> None:
    good = kafka_io.codec.encode(topics.TELEMETRY_STEPS, pack(_step(1)))
    bad_time = pack(_step(2), _step(3, observed_at_ns=5), _step(4))
    kafka_io.send_bytes(
        topics.TELEMETRY_STEPS,
        [
            ("a:1", good),
            ("a:1", b"rubbish"),
            ("a:1", good[:-3]),
            ("a:1", kafka_io.codec.encode(topics.TELEMETRY_STEPS, bad_time)),
        ],
    )
    with SinkProcess(replace(fresh, flush_ms=100), kafka, tmp_path):
        client = connect(fresh)
        sql = "SELECT reason, component, topic FROM dead_letters ORDER BY reason"
        eventually(lambda: len(client.query(sql).result_rows) == 3, "three letters")
        assert client.query(sql).result_rows == [
            ("bad_magic", "sinks", "telemetry.steps"),
            ("malformed", "sinks", "telemetry.steps"),
            ("refused_by_store", "sinks", "telemetry.steps"),
        ]
        assert client.command("SELECT count() FROM step_batches FINAL") == 3
    letters = kafka_io.read_messages(topics.DEADLETTER, 3)
    payloads = [kafka_io.codec.decode(topics.DEADLETTER, m.value() or b"").payload for m in letters]
    assert b"rubbish" in payloads
    alone: list[Pack[StepBatch]] = [
        kafka_io.codec.decode(topics.TELEMETRY_STEPS, payload)
        for payload in payloads
        if payload not in (b"rubbish", good[:-3])
    ]
    assert [step.observed_at_ns for message in alone for step in message.samples] == [5]


@pytest.mark.slow
def test_a_store_that_goes_and_comes_back_elsewhere_costs_nothing(
    kafka: KafkaConfig, kafka_io: KafkaIO, tmp_path: Path
) -> None:
    store = StoreProcess(tmp_path / "store")
    config = StoreConfig(directory=str(store.directory), flush_ms=50, retry_max_ms=500)
    with store, SinkProcess(config, kafka, tmp_path) as sink:
        send_exchanges(kafka_io, 0, 100)
        first = connect(config)
        eventually(lambda: count_requests(first) == (100, 100, 100), "the first hundred")
        store.kill()
        send_exchanges(kafka_io, 100, 100)
        eventually(lambda: "pausing, nothing is lost" in sink.log.read_text(), "a pause")
        assert sink.running
        store.start()
        second = connect(config)
        eventually(lambda: count_requests(second) == (200, 200, 200), "all two hundred")
        assert "going on" in sink.log.read_text()


def test_a_sink_waits_for_a_store_that_is_not_there_yet(
    kafka: KafkaConfig, kafka_io: KafkaIO, tmp_path: Path
) -> None:
    store = StoreProcess(tmp_path / "store")
    config = StoreConfig(directory=str(store.directory), flush_ms=50, retry_max_ms=500)
    sink = SinkProcess(config, kafka, tmp_path)
    kafka_io.send(topics.TELEMETRY_STEPS, pack(_step(1)), key="a:1")
    starter = threading.Timer(1.0, store.start)
    starter.start()
    with sink:
        client = connect(config)
        eventually(
            lambda: client.command("SELECT count() FROM step_batches") == 1, "the waiting row"
        )
    assert "waiting for the store" in sink.log.read_text()
    store.stop()


def test_a_full_disk_pauses_until_there_is_room(
    fresh: StoreConfig, kafka: KafkaConfig, kafka_io: KafkaIO, tmp_path: Path
) -> None:
    with _full_at_will(fresh.url) as (url, full):
        config = replace(fresh, url=url, flush_ms=50, retry_max_ms=300)
        with SinkProcess(config, kafka, tmp_path) as sink:
            full.set()
            kafka_io.send(topics.TELEMETRY_STEPS, pack(_step(1), _step(2)), key="a:1")
            eventually(lambda: "NOT_ENOUGH_SPACE" in sink.log.read_text(), "a pause")
            client = connect(fresh)
            assert client.command("SELECT count() FROM step_batches") == 0
            full.clear()
            eventually(
                lambda: client.command("SELECT count() FROM step_batches FINAL") == 2, "both rows"
            )
            assert client.command("SELECT count() FROM dead_letters") == 0


@contextmanager
def _full_at_will(store: str) -> Iterator[tuple[str, threading.Event]]:
    """A way to the store on which inserts fail for want of space while the event is set."""
    full = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if full.is_set() and "query=INSERT" in self.path:
                text = b"Code: 243. DB::Exception: Cannot reserve 1.00 MiB. (NOT_ENOUGH_SPACE)"
                self._send(500, text, {"X-ClickHouse-Exception-Code": "243"})
                return
            behind = http.client.HTTPConnection(urlsplit(store).netloc)
            behind.request("POST", self.path, body, _kept(self.headers, PASSED_ON))
            answer = behind.getresponse()
            self._send(answer.status, answer.read(), _kept(answer.headers, PASSED_BACK))
            behind.close()

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 of the base class
            """Keep test output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", full
        finally:
            server.shutdown()
            thread.join()


def _kept(headers: Message, names: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower().startswith(names)}


def _step(number: int, **values: Any) -> StepBatch:
    defaults: dict[str, Any] = {"instance": "a:1", "source": "log", "observed_at_ns": T0 + number}
    return StepBatch(**(defaults | values))
