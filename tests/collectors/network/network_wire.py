"""Builds the IP packets of a TCP conversation, and the HTTP that the tests send over it."""

import ipaddress
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.frames import ACK, FIN, RST, SYN
from latencyprism.collectors.network.tap import Tap
from latencyprism.collectors.network.targets import Targets, Watch
from latencyprism.schemas.records import RequestTiming

INSTANCE = "127.0.0.1:8000"
MS = 1_000_000
START_NS = 1_700_000_000_000_000_000


def ip_packet(
    source: tuple[str, int],
    destination: tuple[str, int],
    *,
    sequence: int = 0,
    flags: int = ACK,
    payload: bytes = b"",
    options: bytes = b"",
) -> bytes:
    """A TCP segment in an IPv4 or IPv6 packet; checksums are left 0, as nobody here reads them."""
    tcp = struct.pack(
        "!HHIIBBHHH",
        source[1],
        destination[1],
        sequence % (1 << 32),
        0,
        (20 + len(options)) // 4 << 4,
        flags,
        65535,
        0,
        0,
    )
    segment = tcp + options + payload
    ends = [ipaddress.ip_address(address).packed for address, _ in (source, destination)]
    if len(ends[0]) == 4:
        header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(segment), 0, 0, 64, 6, 0)
    else:
        header = struct.pack("!IHBB", 6 << 28, len(segment), 6, 64)
    return header + b"".join(ends) + segment


@dataclass(slots=True)
class Wire:
    """Both ends of a connection; each method gives one packet and moves the sequence numbers on."""

    client_end: tuple[str, int] = ("127.0.0.1", 40000)
    server_end: tuple[str, int] = ("127.0.0.1", 8000)
    next: dict[str, int] = field(default_factory=lambda: {"client": 1000, "server": 4_294_967_000})
    """Next sequence number of each side; the server's wraps around soon."""

    def packet(self, side: str, payload: bytes = b"", flags: int = ACK) -> bytes:
        ends = (self.client_end, self.server_end)
        source, destination = ends if side == "client" else reversed(ends)
        packet = ip_packet(
            source, destination, sequence=self.next[side], flags=flags, payload=payload
        )
        self.next[side] += len(payload) + bool(flags & (SYN | FIN))
        return packet

    def client(self, payload: bytes) -> bytes:
        return self.packet("client", payload)

    def server(self, payload: bytes) -> bytes:
        return self.packet("server", payload)

    def syn(self) -> list[bytes]:
        return [self.packet("client", flags=SYN), self.packet("server", flags=SYN | ACK)]

    def fin(self, side: str) -> bytes:
        return self.packet(side, flags=FIN | ACK)

    def reset(self, side: str) -> bytes:
        return self.packet(side, flags=RST)


def make_tap(*instances: str, **config: Any) -> Tap:
    """A tap on the instances; every address is taken for this host's."""
    watches = [Watch.of(f"http://{instance}") for instance in instances or (INSTANCE,)]
    return Tap(Targets(watches, local=lambda _: True), NetworkConfig(**config))


def play(tap: Tap, packets: Sequence[bytes], *, start_ns: int = START_NS) -> list[RequestTiming]:
    """Feed packets one millisecond apart and flush once at the end."""
    for index, packet in enumerate(packets):
        tap.packet(start_ns + index * MS, packet, 0, len(packet))
    return tap.flush(start_ns + len(packets) * MS)


def request(
    body: dict[str, Any] | None = None,
    *,
    path: str = "/v1/chat/completions",
    headers: Sequence[str] = (),
    method: str = "POST",
) -> bytes:
    """A request as a client sends it."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: engine", *headers, f"Content-Length: {len(data)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def answer(body: bytes, *, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    """An answer with a length."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
STREAM_END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    """A server-sent event as vLLM writes it."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    """An event of a chat completion."""
    return event({"model": "m", "choices": [{"index": 0, "delta": fields}]})


ROLE = delta(role="assistant", content="")


def usage(prompt: int, completion: int, cached: int) -> bytes:
    """The event that only tells token counts."""
    return event(
        {
            "choices": [],
            "usage": {
                "prompt_tokens": prompt,
                "total_tokens": prompt + completion,
                "completion_tokens": completion,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }
    )
