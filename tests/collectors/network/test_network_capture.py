"""Real packets of a real server on the loopback, through the kernel's ring."""

import asyncio
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from network_server import TokenServer, connection, token_server
from network_wire import STREAM_END, request

from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.ring import Ring
from latencyprism.collectors.network.source import NetworkSource
from latencyprism.schemas.records import RequestTiming
from latencyprism.schemas.topics import TELEMETRY_REQUESTS, Topic


def may_capture() -> bool:
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0).close()
    except PermissionError:
        return False
    return True


pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not may_capture(), reason="this process has no CAP_NET_RAW"),
]


@dataclass(slots=True)
class Heard:
    """An emit for one writing thread and one reading."""

    samples: list[RequestTiming] = field(default_factory=list)
    watermarks: dict[str, int] = field(default_factory=dict)
    late: int = 0

    def sample(self, topic: Topic, sample: Any) -> None:
        assert topic is TELEMETRY_REQUESTS
        self.samples.append(sample)
        news = sample.arrival_ns if sample.part == 0 else sample.chunk_base_ns
        promised = self.watermarks.get(sample.instance, 0)
        self.late += min(news or sample.observed_at_ns, sample.observed_at_ns) < promised

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:
        assert topic is TELEMETRY_REQUESTS
        self.watermarks[instance] = watermark_ns

    def exchanges(self) -> list[list[RequestTiming]]:
        """Parts by exchange, in the order of their arrival."""
        found: defaultdict[str, list[RequestTiming]] = defaultdict(list)
        for sample in self.samples:
            found[sample.request_id].append(sample)
        return sorted(found.values(), key=lambda parts: parts[0].arrival_ns)


@contextmanager
def watching(
    *ports: int, address: str = "127.0.0.1", interface: str = ""
) -> Iterator[tuple[Heard, NetworkSource]]:
    """A source in its thread, capturing when the block begins, drained when it ends."""
    host = f"[{address}]" if ":" in address else address
    urls = [f"http://{host}:{port}" for port in ports]
    source = NetworkSource(urls, NetworkConfig(interface=interface))
    heard, stop = Heard(), threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            source.run(heard, stop)
        except BaseException as e:
            failed.append(e)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(lambda: len(heard.watermarks) == len(ports) or bool(failed))
        yield heard, source
        now_ns = time.time_ns()
        wait_for(lambda: min(heard.watermarks.values()) > now_ns or bool(failed))
    finally:
        stop.set()
        started = time.monotonic()
        thread.join(5)
    assert not failed
    assert time.monotonic() - started < 0.5


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def ask(port: int, *wishes: dict[str, Any], address: str = "127.0.0.1") -> None:
    """Send all requests at once on one connection, and read until the last answer has ended."""
    async with connection(port, address) as (reader, writer):
        writer.write(b"".join(request(wish) for wish in wishes))
        for _ in wishes:
            await reader.readuntil(b"\r\n" + STREAM_END)


def times(parts: list[RequestTiming]) -> list[int]:
    found = []
    for part in parts:
        if part.chunk_base_ns is not None:
            found.append(part.chunk_base_ns)
            for delta_us in part.chunk_deltas_us:
                found.append(found[-1] + delta_us * 1000)
    return found


def check_stream(parts: list[RequestTiming], server: TokenServer, index: int) -> None:
    """The exchange agrees with what the server noted."""
    truth, last = server.truths[index], parts[-1]
    assert [part.part for part in parts] == list(range(len(parts)))
    assert last.state == "complete"
    assert (last.prompt_tokens, last.completion_tokens) == (3, len(truth.sent_ns))
    assert len(times(parts)) == len(truth.sent_ns)
    for seen, (before, after) in zip(times(parts), truth.sent_ns, strict=True):
        assert before - 1_000_000 < seen < after + 1_000_000
    assert last.first_token_ns == times(parts)[0]
    assert last.arrival_ns <= truth.received_ns
    assert last.first_byte_ns is not None
    assert last.first_byte_ns < last.first_token_ns


@pytest.mark.parametrize(("address", "interface"), [("127.0.0.1", ""), ("::1", "lo")])
async def test_concurrent_streams(address: str, interface: str) -> None:
    async with token_server(address) as (server, port):
        with watching(port, address=address, interface=interface) as (heard, source):
            wish = {"tokens": 20, "gap_ms": 15}
            await asyncio.gather(*(ask(port, wish, address=address) for _ in range(5)))

    exchanges = heard.exchanges()
    assert len(exchanges) == 5
    assert source.counts == {"exchanges": 5}
    server.truths.sort(key=lambda truth: truth.received_ns)
    assert all(parts[-1].state == "complete" for parts in exchanges)
    for index, parts in enumerate(exchanges):
        assert len(parts) >= 3  # news came while the stream was open
        check_stream(parts, server, index)
    assert heard.late == 0


async def test_keep_alive_and_pipelining() -> None:
    async with token_server("127.0.0.1") as (server, port):
        with watching(port) as (heard, _):
            await ask(port, *({"tokens": 3, "gap_ms": 2} for _ in range(4)))

    exchanges = heard.exchanges()
    assert len(exchanges) == 4
    exchanges.sort(key=lambda parts: parts[-1].observed_at_ns)
    for index, parts in enumerate(exchanges):
        check_stream(parts, server, index)


async def test_a_stream_that_the_server_breaks_off() -> None:
    async with token_server("127.0.0.1") as (_, port):
        with watching(port) as (heard, _source), pytest.raises((OSError, EOFError)):
            await ask(port, {"tokens": 9, "gap_ms": 2, "die_after": 4})

    (parts,) = heard.exchanges()
    assert parts[-1].state == "aborted"
    assert len(times(parts)) == 4


async def test_a_stream_that_the_client_leaves() -> None:
    async with token_server("127.0.0.1") as (_, port):
        with watching(port) as (heard, _source):
            async with connection(port) as (reader, writer):
                writer.write(request({"tokens": 1000, "gap_ms": 2}))
                await reader.readuntil(b"secret5")

    (parts,) = heard.exchanges()
    assert parts[-1].state == "aborted"
    assert 6 <= len(times(parts)) < 100


async def test_a_stall_is_seen_while_the_stream_is_open() -> None:
    async with token_server("127.0.0.1") as (_, port):
        with watching(port) as (heard, _source):
            task = asyncio.create_task(ask(port, {"tokens": 2, "gap_ms": 400}))
            await asyncio.sleep(0.6)
            waiting_ns = time.time_ns() - 300_000_000
            states = [sample.state for sample in heard.samples]
            assert set(states) == {"open"}
            assert heard.watermarks[f"127.0.0.1:{port}"] > waiting_ns
            await task

    assert heard.exchanges()[0][-1].state == "complete"


async def test_joining_a_connection_in_the_middle() -> None:
    async with (
        token_server("127.0.0.1") as (server, port),
        connection(port) as (reader, writer),
    ):
        writer.write(request({"tokens": 50, "gap_ms": 10}))
        await reader.readuntil(b"secret5")
        with watching(port) as (heard, _):
            await reader.readuntil(b"\r\n" + STREAM_END)
            writer.write(request({"tokens": 5, "gap_ms": 2}))
            await reader.readuntil(b"\r\n" + STREAM_END)

    (parts,) = heard.exchanges()
    check_stream(parts, server, 1)


async def test_two_instances_and_other_paths() -> None:
    async with token_server("127.0.0.1") as (_, one), token_server("127.0.0.1") as (_, two):
        with watching(one, two) as (heard, source):
            await ask(one, {"tokens": 1, "gap_ms": 1})
            await ask(two, {"tokens": 1, "gap_ms": 1})
            async with connection(one) as (reader, writer):
                writer.write(request(path="/metrics", method="GET"))
                await reader.readuntil(b"ok")

    instances = [parts[0].instance for parts in heard.exchanges()]
    assert instances == [f"127.0.0.1:{one}", f"127.0.0.1:{two}"]
    assert source.counts["other requests"] == 1


def test_an_overrun_ring_says_how_much_it_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ring = Ring("lo", [port], ring_mib=1, block_timeout_ms=5)
        assert not ring.filling()
        with socket.create_connection(("127.0.0.1", port)) as client:
            server, _ = listener.accept()
            for _ in range(100):
                client.sendall(bytes(60_000))
                read = 0
                while read < 60_000:
                    read += len(server.recv(1 << 16))
            server.close()
    sizes: list[int] = []

    assert ring.filling()
    ring.drain(lambda _ns, _buffer, at, end: sizes.append(end - at))

    assert sum(sizes) < 2 << 20
    assert ring.lost() > 0
    assert ring.lost() == 0
    ring.close()


def test_an_interface_that_does_not_exist_is_named() -> None:
    with pytest.raises(OSError, match="nosuch0"):
        Ring("nosuch0", [1], ring_mib=1, block_timeout_ms=5)
    source = NetworkSource(["http://127.0.0.1:1"], NetworkConfig(interface="nosuch0"))
    with pytest.raises(OSError, match="nosuch0"):
        source.run(Heard(), threading.Event())


@pytest.mark.parametrize("interface", ["", "lo"])
def test_each_packet_is_taken_once(interface: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ring = Ring(interface, [listener.getsockname()[1]], ring_mib=1, block_timeout_ms=5)
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(b"once")
            server, _ = listener.accept()
            assert server.recv(10) == b"once"
            server.close()
    found: list[bytes] = []
    wait_for(lambda: ring.drain(lambda _, b, at, end: found.append(b[at:end])) and len(found) > 2)
    ring.close()

    assert sum(packet.endswith(b"once") for packet in found) == 1
