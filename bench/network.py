"""What the network source costs and how well it sees, against a server that notes the truth."""

import asyncio
import json
import multiprocessing
import struct
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.frames import ACK, ETHERNET, IPV4_TYPE, SYN
from latencyprism.collectors.network.pcap import AnyServer, replay
from latencyprism.collectors.network.source import NetworkSource
from latencyprism.collectors.network.tap import Tap
from latencyprism.schemas.records import RequestTiming
from latencyprism.schemas.topics import Topic

Times = dict[str, list[int]]
"""Times of the content events, ns since the epoch, by the request's model name."""

SURE_NS: Final = 200_000
"""A write that took longer was interrupted, and says little about when the packet left."""

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(model: str, content: str) -> bytes:
    value = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": model,
        "choices": [
            {"index": 0, "delta": {"content": content}, "logprobs": None, "finish_reason": None}
        ],
    }
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class _TruthServer:
    """Streams as many tokens as it is asked for, in step, and notes when each was written."""

    def __init__(self, gap_s: float) -> None:
        self.before: Times = {}
        self.after: Times = {}
        self._gap_s = gap_s

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
        wish = json.loads(body)
        before = self.before.setdefault(wish["model"], [])
        after = self.after.setdefault(wish["model"], [])
        writer.write(_HEAD + _chunk(_event(wish["model"], "")))
        loop = asyncio.get_running_loop()
        due = loop.time()
        for number in range(wish["max_tokens"]):
            due += self._gap_s
            await asyncio.sleep(due - loop.time())
            data = _chunk(_event(wish["model"], f" token{number}"))
            before.append(time.time_ns())
            writer.write(data)
            after.append(time.time_ns())
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def _client(port: int, name: str, tokens: int, until: float) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    turn = 0
    while time.monotonic() < until:
        wish = {"model": f"{name}-{turn}", "max_tokens": tokens, "messages": []}
        body = json.dumps(wish).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await reader.readuntil(b"\r\n0\r\n\r\n")
        turn += 1
    writer.close()


async def _traffic(
    pipe: Connection, streams: int, tokens_per_s: float, seconds: float
) -> tuple[Times, Times]:
    served = _TruthServer(1 / tokens_per_s)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pipe.send(port)
    await asyncio.to_thread(pipe.recv)
    until = time.monotonic() + seconds
    tokens = int(tokens_per_s * 2)
    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(_client(port, f"s{number}", tokens, until))
    server.close()
    return served.before, served.after


def _run_traffic(pipe: Connection, streams: int, tokens_per_s: float, seconds: float) -> None:
    pipe.send(asyncio.run(_traffic(pipe, streams, tokens_per_s, seconds)))


@dataclass(slots=True)
class _Heard:
    """An emit that keeps what it is given."""

    samples: list[RequestTiming] = field(default_factory=list)
    watermark_ns: int = 0

    def sample(self, topic: Topic, sample: Any) -> None:  # noqa: ARG002 one topic only
        self.samples.append(sample)

    def watermark(self, topic: Topic, instance: str, watermark_ns: int) -> None:  # noqa: ARG002
        self.watermark_ns = watermark_ns

    def seen(self) -> Times:
        """What the parts tell."""
        times: defaultdict[str, list[int]] = defaultdict(list)
        for part in self.samples:
            if part.chunk_base_ns is not None and part.model is not None:
                deltas = accumulate(part.chunk_deltas_us, initial=0)
                times[part.model] += [part.chunk_base_ns + delta * 1000 for delta in deltas]
        return times


PORT: Final = 8000
OFFLINE_REPORT_MS: Final = 10_000
"""How often ``latencyprism pcap`` takes in news, on the clock of the packets."""


@dataclass(slots=True)
class _Side:
    """One side of a connection, which writes its packets."""

    source: int
    destination: int
    sequence: int = 0

    def packet(self, payload: bytes, flags: int = ACK) -> bytes:
        """An Ethernet frame with IPv4; checksums are 0, as nobody here reads them."""
        tcp = struct.pack(
            "!HHIIBBHHH", self.source, self.destination, self.sequence, 0, 0x50, flags, 512, 0, 0
        )
        size = 20 + len(tcp) + len(payload)
        ip = struct.pack("!BBHIBBHII", 0x45, 0, size, 0, 64, 6, 0, 0x7F000001, 0x7F000001)
        self.sequence += len(payload) + (1 if flags & SYN else 0)
        return bytes(12) + IPV4_TYPE + ip + tcp + payload


def capture_of(streams: int, events: int) -> Iterator[bytes]:
    """Frames of so many streams side by side, each of so many content events, as a server that
    writes each event at once sends them.
    """
    body = b'{"model":"m","stream":true,"messages":[]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    servers = []
    for number in range(streams):
        client = _Side(40_000 + number, PORT)
        server = _Side(PORT, 40_000 + number)
        servers.append(server)
        yield client.packet(b"", SYN)
        yield server.packet(b"", SYN | ACK)
        yield client.packet(head % len(body) + body)
        yield server.packet(_HEAD + _chunk(_event("m", "")))
    for number in range(events):
        data = _chunk(_event("m", f" word{number}"))
        for server in servers:
            yield server.packet(data)
    for server in servers:
        yield server.packet(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def write_capture(path: Path, packets: Iterator[bytes], *, gap_us: int) -> int:
    """Write a capture file with packets so far apart; how many there are."""
    count = 0
    with path.open("wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 1 << 16, ETHERNET))
        for packet in packets:
            seconds, fraction = divmod(count * gap_us, 1_000_000)
            file.write(struct.pack("<4I", 1_700_000_000 + seconds, fraction, *[len(packet)] * 2))
            file.write(packet)
            count += 1
    return count


def measure_offline(*, streams: int = 32, events: int = 1000) -> float:
    """Packets a second that one core reads out of a capture file and makes exchanges of, by CPU
    time. Raises RuntimeError when an event was not seen.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "streams.pcap"
        packets = write_capture(path, capture_of(streams, events), gap_us=20_000 // streams)
        tap = Tap(AnyServer(), NetworkConfig())
        began = time.process_time()
        parts = list(replay(path, tap, interval_ms=OFFLINE_REPORT_MS))
        took_s = time.process_time() - began
    seen = sum(len(p.chunk_deltas_us) + (p.chunk_base_ns is not None) for p in parts)
    if seen != streams * events:
        raise RuntimeError(f"{seen} of {streams * events} events were seen in the capture file")
    return packets / took_s


def measure_network(
    *, streams: int = 32, tokens_per_s: float = 50, seconds: float = 10
) -> Mapping[str, float]:
    """Figures of the network source under so many streams on the loopback.

    ``network.cpu_pct`` of a core that the source's process takes while it watches,
    ``network.events_lost``, and ``network.token_time_error_p50_us`` and ``_p99_us``: how far the
    time seen is from when the server's write had returned, without the share
    ``network.truth_unsure_pct`` of writes that were interrupted. Blocks for ``seconds`` and a
    little; needs CAP_NET_RAW. Raises RuntimeError when the source ended before its time.
    """
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    traffic = context.Process(target=_run_traffic, args=(other, streams, tokens_per_s, seconds))
    traffic.start()
    other.close()  # so that its end is heard if it fails
    heard, stop = _Heard(), threading.Event()
    source = NetworkSource([f"http://127.0.0.1:{pipe.recv()}"], NetworkConfig())
    thread = threading.Thread(target=source.run, args=(heard, stop))
    thread.start()
    try:
        while not heard.watermark_ns and thread.is_alive():
            time.sleep(0.01)
        pipe.send("start")
        wall, cpu = time.monotonic(), time.process_time()
        pipe.poll(None)
        cpu_pct = 100 * (time.process_time() - cpu) / (time.monotonic() - wall)
        before, after = pipe.recv()
        end_ns = time.time_ns()
        while heard.watermark_ns < end_ns and thread.is_alive():
            time.sleep(0.01)
        if not thread.is_alive():
            raise RuntimeError("the network source ended before its time, see its traceback")
    finally:
        stop.set()
        thread.join()
        traffic.join()
    seen = heard.seen()
    lost = sum(abs(len(times) - len(seen.get(name, ()))) for name, times in after.items())
    whole = [name for name, times in after.items() if len(times) == len(seen.get(name, ()))]
    began, ended, at = (
        np.concatenate([np.asarray(times[name], np.int64) for name in whole])
        for times in (before, after, seen)
    )
    sure = ended - began <= SURE_NS
    errors_us = np.abs(at - ended)[sure] / 1000
    return {
        "network.cpu_pct": cpu_pct,
        "network.events": float(sum(map(len, after.values()))),
        "network.events_lost": float(lost + source.counts.get("lost packets", 0)),
        "network.token_time_error_p50_us": float(np.percentile(errors_us, 50)),
        "network.token_time_error_p99_us": float(np.percentile(errors_us, 99)),
        "network.truth_unsure_pct": float(100 * np.mean(~sure)),
    }
