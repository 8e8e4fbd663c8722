import struct
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
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

from latencyprism.collectors.network import frames
from latencyprism.collectors.network.config import NetworkConfig
from latencyprism.collectors.network.pcap import read, replay

RECORDED = Path(__file__).with_name("data") / "vllm_stream.pcap"
CONFIG = NetworkConfig()


def write(
    path: Path, packets: list[bytes], *, link_type: int = frames.RAW_IP, order: str = "<"
) -> Path:
    """A capture file with a nanosecond clock and packets 30 ms apart."""
    header = struct.pack(order + "IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 65535, link_type)
    records = []
    for number, packet in enumerate(packets):
        seconds, fraction = divmod(START_NS + 30 * MS * number, 10**9)
        size = len(packet)
        records.append(struct.pack(order + "4I", seconds, fraction, size, size) + packet)
    path.write_bytes(header + b"".join(records))
    return path


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

    parts = list(replay(RECORDED, tap, CONFIG))

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


@pytest.mark.parametrize("order", ["<", ">"])
def test_reads_what_was_written(tmp_path: Path, order: str) -> None:
    packets = stream()

    found = [
        (at_ns, buffer[at:end])
        for at_ns, buffer, at, end in read(write(tmp_path / "a.pcap", packets, order=order))
    ]

    assert found == [(START_NS + 30 * MS * n, packet) for n, packet in enumerate(packets)]


def test_parts_come_on_the_clock_of_the_packets(tmp_path: Path) -> None:
    parts = list(replay(write(tmp_path / "a.pcap", stream()), make_tap(), CONFIG))

    assert [part.part for part in parts] == list(range(len(parts)))
    assert [part.state for part in parts[-2:]] == ["open", "complete"]
    gaps = [b.observed_at_ns - a.observed_at_ns for a, b in pairwise(parts)]
    assert all(gap <= 130 * MS for gap in gaps)
    chunks = [len(part.chunk_deltas_us) + (part.chunk_base_ns is not None) for part in parts]
    assert [part.chunks_before for part in parts] == [0, *accumulate(chunks)][:-1]
    assert sum(chunks) == 12


def test_frames_that_hold_no_ip_are_left_out(tmp_path: Path) -> None:
    ethernet = bytes(12) + b"\x08\x00"
    arp = bytes(12) + b"\x08\x06" + bytes(28)
    packets = [arp, *(ethernet + packet for packet in stream())]

    path = write(tmp_path / "a.pcap", packets, link_type=frames.ETHERNET)

    assert len(list(read(path))) == len(stream())


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_file_that_was_cut_short_ends_there(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.pcap", stream())
    path.write_bytes(path.read_bytes()[:-cut])

    assert len(list(read(path))) == len(stream()) - 1
    assert "cut short" in caplog.text


@pytest.mark.parametrize("data", [b"", b"\x0a\x0d\x0d\x0a" + bytes(40), b"\xd4\xc3\xb2\xa1"])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(data)

    with pytest.raises(ValueError, match="no capture file"):
        list(read(path))


def test_an_unknown_link_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="link type 105"):
        list(read(write(tmp_path / "a.pcap", [], link_type=105)))


def test_a_capture_without_packets(tmp_path: Path) -> None:
    assert list(replay(write(tmp_path / "a.pcap", []), make_tap(), CONFIG)) == []
