from itertools import accumulate, pairwise
from pathlib import Path

from network_captures import pcap, saved
from network_wire import (
    MS,
    START_NS,
    STREAM_END,
    STREAM_HEAD,
    Wire,
    chunk,
    delta,
    make_tap,
    request,
)

from latencyprism.collectors.network.pcap import AnyServer, replay

RECORDED = Path(__file__).with_name("data") / "vllm_stream.pcap"


def write(path: Path, packets: list[bytes]) -> Path:
    """A capture file with packets 30 ms apart."""
    return saved(path, pcap([(START_NS + 30 * MS * n, p) for n, p in enumerate(packets)]))


def stream() -> list[bytes]:
    wire = Wire()
    return [
        *wire.syn(),
        wire.client(request({"model": "m"})),
        wire.server(STREAM_HEAD),
        *(wire.server(chunk(delta(content="x"))) for _ in range(12)),
        wire.server(STREAM_END),
    ]


def test_a_real_answer_of_vllm() -> None:
    tap = make_tap()

    parts = list(replay(RECORDED, tap))

    last = parts[-1]
    events = RECORDED.read_bytes().count(b'"delta":{"content":"')
    assert sum(part.chunk_base_ns is not None for part in parts) == len(parts)
    assert last.chunks_before + 1 + len(last.chunk_deltas_us) == events == 97
    assert (last.model, last.status, last.streaming) == ("Qwen3.6-0.8B", 200, True)
    assert (last.state, last.request_bytes) == ("open", 175)
    # what the capture's own tools show of it
    assert last.arrival_ns == 1_779_161_650_521_428_000
    assert last.first_byte_ns == 1_779_161_650_526_098_000
    assert last.first_token_ns == 1_779_161_650_552_617_000
    assert tap.counts == {"exchanges": 1}


def test_parts_come_on_the_clock_of_the_packets(tmp_path: Path) -> None:
    parts = list(replay(write(tmp_path / "a.pcap", stream()), make_tap()))

    assert [part.part for part in parts] == list(range(len(parts)))
    assert [part.state for part in parts[-2:]] == ["open", "complete"]
    gaps = [b.observed_at_ns - a.observed_at_ns for a, b in pairwise(parts)]
    assert all(gap <= 130 * MS for gap in gaps)
    chunks = [len(part.chunk_deltas_us) + (part.chunk_base_ns is not None) for part in parts]
    assert [part.chunks_before for part in parts] == [0, *accumulate(chunks)][:-1]
    assert sum(chunks) == 12


def test_a_capture_without_packets(tmp_path: Path) -> None:
    assert list(replay(write(tmp_path / "a.pcap", []), make_tap())) == []


def test_a_server_is_whoever_is_sent_a_request() -> None:
    any_port, one_port = AnyServer(), AnyServer([8000])

    assert any_port.find(bytes([10, 0, 0, 1]), 80) == "10.0.0.1:80"
    assert any_port.find(bytes(15) + b"\1", 80) == "[::1]:80"
    assert one_port.find(bytes(4), 80) is None
    assert one_port.find(bytes(4), 8000) == "0.0.0.0:8000"
