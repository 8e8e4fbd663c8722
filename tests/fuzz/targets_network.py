"""HTTP/1.1, packets and capture files as the network source reads them, from any bytes."""

from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from latencyprism.collectors.network.capture_file import read
from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.conversation import Link, RefusedError
from latencyprism.collectors.network.exchange import Ledger
from latencyprism.collectors.network.frames import LINK_TYPES, network_offset, refusal, segment
from latencyprism.collectors.network.http import Http1
from latencyprism.collectors.network.pcap import AnyServer
from latencyprism.collectors.network.sse import EventSplitter, LineSplitter
from latencyprism.collectors.network.tap import Tap

_REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def target_http(data: bytes) -> None:
    """Pieces for both sides: the lowest bit of the first byte says whose, the next whether it is
    lost; the second byte says how long the piece is.
    """
    config = NetworkConfig(max_event_bytes=256)
    ledger = Ledger(16, every_path=True)
    http = Http1(Link(key=bytes(12), instance="i:1", ledger=ledger, config=config))
    at_ns = 1
    with suppress(RefusedError):
        if data[:1] < b"\x80":
            http.client(at_ns, _REQUEST)
            http.server(at_ns, _HEAD)
        while len(data) > 2:
            how, size, data = data[0], data[1], data[2:]
            piece, data = data[: size + 1], data[size + 1 :]
            at_ns += 1000
            if how & 2:
                if not http.skip(at_ns, len(piece), from_client=bool(how & 1)):
                    break
            elif how & 1:
                http.client(at_ns, piece)
            else:
                http.server(at_ns, piece)
    http.close(at_ns, "lost")
    ledger.flush(at_ns)
    assert len(ledger) == 0
    assert not http.waiting


def target_packets(data: bytes) -> None:
    """Frames of every link; each is long as its first byte says."""
    tap = Tap(AnyServer(), NetworkConfig(max_connections=4, max_gaps=2), every_path=True)
    at_ns = 1
    while data:
        size, data = data[0], data[1:]
        frame, data = data[: size + 1], data[size + 1 :]
        for link_type in LINK_TYPES:
            network_offset(link_type, frame, 0, len(frame))
        if segment(frame, 0, len(frame)) is None:
            refusal(frame, 0, len(frame))
        tap.packet(at_ns, frame, 0, len(frame))
        at_ns += 200_000_000
        tap.flush(at_ns)
        assert len(tap) <= 4


def target_capture(data: bytes) -> None:
    """A file; its kind is what its first bytes say, else pcapng."""
    with NamedTemporaryFile() as file:
        path = Path(file.name)
        path.write_bytes(data)
        with suppress(ValueError):
            assert sum(1 for _ in read(path)) <= len(data) // 12


def target_events(data: bytes) -> None:
    """A stream in pieces of 7 bytes gives the events of the whole."""
    for kind in (EventSplitter, LineSplitter):
        whole, pieces = kind(64), kind(64)
        got = [e for at in range(0, len(data), 7) for e in pieces.feed(data[at : at + 7])]
        assert got == list(whole.feed(data))
        assert all(len(event) <= 64 for event in got)
