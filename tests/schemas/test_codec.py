"""Bytes ↔ records in both framings, and every way of being wrong."""

import json
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fastavro.utils import generate_one
from hypothesis import given, settings
from hypothesis import strategies as st

from latencyprism.schemas import avro
from latencyprism.schemas.codec import Codec, DecodeError, Pack, SchemaRegistry
from latencyprism.schemas.records import Command, RequestTiming
from latencyprism.schemas.registry import ConfluentRegistry, MemoryRegistry
from latencyprism.schemas.topics import (
    CONTROL_COMMANDS,
    TELEMETRY_HOST,
    TELEMETRY_REQUESTS,
    TOPICS,
    Topic,
)

TIMING = RequestTiming(
    request_id="a1",
    part=0,
    state="open",
    instance="127.0.0.1:8000",
    source="network",
    observed_at_ns=1_700_000_000_000_000_000,
    endpoint="/v1/completions",
    model="small",
    arrival_ns=1_699_999_999_000_000_000,
    chunks_before=0,
    chunk_deltas_us=(9000, 9100),
)
PACK = Pack(agent="host-1", boot_ns=1, sequence=7, watermark_ns=2, samples=(TIMING, TIMING))
COMMAND = Command(
    command_id="c1",
    target="127.0.0.1:8000",
    service="small",
    epoch=3,
    issued_ns=5,
    lease_ms=5000,
    action="weight",
    value=0.25,
    reason="slower than its peers",
    dry_run=False,
)


def a_message(topic: Topic) -> Any:
    record = avro.from_dict(topic.record)(
        generate_one(avro.parse(avro.record_schema(topic.record)))
    )
    if not topic.packed:
        return record
    return Pack(agent="a", boot_ns=1, sequence=2, watermark_ns=3, samples=(record,))


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
@pytest.mark.parametrize("registry", [None, MemoryRegistry()], ids=["single-object", "confluent"])
def test_roundtrip(topic: Topic, registry: SchemaRegistry | None) -> None:
    codec, message = Codec(registry), a_message(topic)

    assert message == codec.decode(topic, codec.encode(topic, message))


def test_readers_take_both_framings() -> None:
    with_registry = Codec(MemoryRegistry())

    assert (
        with_registry.decode(TELEMETRY_REQUESTS, Codec().encode(TELEMETRY_REQUESTS, PACK)) == PACK
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"{}", "bad_magic"),
        (b"\xc3\x01" + b"12345678" + b"xyz", "unknown_schema"),
        (b"\x00\x00\x00\x00\x09abc", "unknown_schema"),
        (Codec().encode(CONTROL_COMMANDS, COMMAND), "wrong_record"),
        (Codec().encode(TELEMETRY_REQUESTS, PACK)[:-3], "malformed"),
        (Codec().encode(TELEMETRY_REQUESTS, PACK) + b"\x00", "malformed"),
    ],
)
def test_bad_bytes_have_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(DecodeError) as caught:
        Codec(MemoryRegistry()).decode(TELEMETRY_REQUESTS, data)

    assert reason == caught.value.reason


@settings(max_examples=300, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(10, 200), st.integers(0, 255)), max_size=8))
def test_damaged_bytes_never_raise_anything_else(flips: list[tuple[int, int]]) -> None:
    codec = Codec()
    data = bytearray(codec.encode(TELEMETRY_REQUESTS, PACK))
    for position, value in flips:
        data[position % len(data)] = value
    try:
        decoded = codec.decode(TELEMETRY_REQUESTS, bytes(data))
    except DecodeError:
        return
    assert isinstance(decoded, Pack)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        Codec().decode(TELEMETRY_HOST, data)


def test_a_wrong_value_names_topic_and_field() -> None:
    broken: Any = replace(TIMING, part="first")  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"telemetry\.requests: RequestTiming .* field part"):
        Codec().encode(TELEMETRY_REQUESTS, replace(PACK, samples=(broken,)))


class RegistryHandler(BaseHTTPRequestHandler):
    """The two calls of Confluent's REST protocol that the codec makes."""

    schemas: dict[int, str]

    def log_message(self, *_: object) -> None:
        """Keep test output clean."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.schemas[1] = body["schema"]
        self.answer(200, {"id": 1})

    def do_GET(self) -> None:
        schema_id = int(self.path.partition("?")[0].rpartition("/")[2])
        if schema_id in self.schemas:
            self.answer(200, {"schema": self.schemas[schema_id]})
        else:
            self.answer(404, {"error_code": 40403, "message": "Schema not found"})

    def answer(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def registry_url() -> Iterator[str]:
    handler = type("Handler", (RegistryHandler,), {"schemas": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_confluent_protocol(registry_url: str) -> None:
    writer, reader = (Codec(ConfluentRegistry(registry_url), prefix="prism") for _ in range(2))

    data = writer.encode(TELEMETRY_REQUESTS, PACK)

    assert struct.unpack_from(">BI", data) == (0, 1)
    assert reader.decode(TELEMETRY_REQUESTS, data) == PACK
    with pytest.raises(DecodeError, match="no schema 9"):
        reader.decode(TELEMETRY_REQUESTS, b"\x00\x00\x00\x00\x09abc")


def test_registry_away_says_so() -> None:
    registry = ConfluentRegistry("http://127.0.0.1:9")

    with pytest.raises(OSError, match=r"schema registry http://127\.0\.0\.1:9: cannot register"):
        registry.register("x-value", {"type": "string"})
