import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from network_captures import (
    ETHERNET_HEADER,
    block,
    enhanced,
    interface,
    old,
    option,
    pcap,
    saved,
    section,
    simple,
)
from network_wire import MS, START_NS, ip_packet

from latencyprism.collectors.network import frames
from latencyprism.collectors.network.capture_file import read

IP = [ip_packet(("10.0.0.1", 4000 + n), ("10.0.0.2", 8000), payload=b"x" * n) for n in range(5)] + [
    ip_packet(("fd00::1", 40000), ("fd00::2", 8000), payload=b"hello")
]
TIMED = [(START_NS + 30 * MS * n, packet) for n, packet in enumerate(IP)]
V6 = b"\x86\xdd"


def found(path: Path) -> list[tuple[int, bytes]]:
    return [(at_ns, bytes(buffer[at:end])) for at_ns, buffer, at, end in read(path)]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("nanoseconds", [True, False])
def test_reads_pcap(tmp_path: Path, order: str, nanoseconds: bool) -> None:
    data = pcap(TIMED, order=order, nanoseconds=nanoseconds)

    assert found(saved(tmp_path / "a", data)) == TIMED


def kind_of(packet: bytes) -> bytes:
    return V6 if packet[0] >> 4 == 6 else b"\x08\x00"


@pytest.mark.parametrize(
    ("link_type", "head"),
    [
        (frames.ETHERNET, lambda kind: bytes(12) + kind),
        (frames.ETHERNET, lambda kind: bytes(12) + b"\x81\x00\x00\x05" + kind),
        (frames.ETHERNET, lambda kind: bytes(12) + b"\x88\xa8\x00\x05\x81\x00\x00\x06" + kind),
        (frames.LINUX_SLL, lambda kind: bytes(14) + kind),
        (frames.LINUX_SLL2, lambda kind: kind + bytes(18)),
        (frames.NULL, lambda _: bytes(4)),
        (frames.LOOP, lambda _: bytes(4)),
        (frames.RAW_IP, lambda _: b""),
    ],
    ids=["ethernet", "vlan", "qinq", "sll", "sll2", "null", "loop", "raw"],
)
def test_reads_every_link(tmp_path: Path, link_type: int, head: object) -> None:
    arp = b"" if link_type in (frames.RAW_IP, frames.NULL, frames.LOOP) else b"\x08\x06"
    packets = [(t, head(kind_of(p)) + p) for t, p in TIMED]  # type: ignore[operator]
    if arp:
        packets.insert(1, (START_NS, head(arp) + bytes(40)))  # type: ignore[operator]

    assert found(saved(tmp_path / "a", pcap(packets, link_type=link_type))) == TIMED


@pytest.mark.parametrize("order", ["<", ">"])
def test_reads_pcapng(tmp_path: Path, order: str) -> None:
    data = b"".join(
        [
            section(order),
            interface(frames.RAW_IP, option(9, b"\x09", order), order=order),
            block(4, b"names, which nobody needs", order),
            interface(frames.ETHERNET, option(2, b"eth0", order), order=order),
            enhanced(IP[0], TIMED[0][0], order=order),
            enhanced(ETHERNET_HEADER + IP[1], TIMED[1][0] // 1000, number=1, order=order),
            old(IP[2], TIMED[2][0], order=order),
            simple(IP[3], order),
        ]
    )

    expected = [*TIMED[:3], (TIMED[2][0], IP[3])]  # a simple block has no time of its own
    assert found(saved(tmp_path / "a", data)) == expected


def test_clocks_of_interfaces_and_sections(tmp_path: Path) -> None:
    offset = option(14, (1_700_000_000).to_bytes(8, "little"))
    data = b"".join(
        [
            section(),
            interface(frames.RAW_IP, option(9, b"\x8a"), offset),
            enhanced(IP[0], 512),
            section(">"),
            interface(frames.RAW_IP, option(9, b"\x03", ">"), order=">"),
            enhanced(IP[1], 1_700_000_001_500, order=">"),
        ]
    )

    assert [at_ns for at_ns, _ in found(saved(tmp_path / "a", data))] == [
        1_700_000_000_500_000_000,
        1_700_000_001_500_000_000,
    ]


PCAPNG = section() + interface(frames.RAW_IP) + enhanced(IP[0], 1) + enhanced(IP[1], 2)


@pytest.mark.parametrize("data", [pcap(TIMED[:2]), PCAPNG], ids=["pcap", "pcapng"])
@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_file_that_was_cut_short_ends_there(
    tmp_path: Path, data: bytes, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path / "a", data[:-cut])

    assert [packet for _, packet in found(path)] == IP[:1]
    assert "cut short" in caplog.text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no capture file: byte 0"),
        (b"GET / HTTP/1.1\r\n", "no capture file: byte 0"),
        (b"\x1f\x8b\x08" + bytes(20), "compressed: unpack it first .gzip -d"),
        (pcap([], link_type=105), "link type 105 at byte 20"),
        (section() + interface(105), "link type 105 at byte 36"),
        (section() + interface(1) + enhanced(IP[0], 1, number=3), "byte 56: .* interface 3"),
        (section()[:8] + bytes(20), "byte 8: a section without byte order"),
        (section() + b"\x06\0\0\0\x07\0\0\0" + bytes(8), "byte 32: a block of 7 bytes"),
        (section() + interface(1) + block(6, bytes(8)), "byte 56: a block too short"),
        (section() + block(1, b"\x01"), "byte 36: a block too short"),
        (pcap([(0, b"")])[:-8] + b"\xff\xff\xff\x7f" + bytes(4), "byte 24: a packet of"),
    ],
)
def test_errors_name_the_file_and_the_byte(tmp_path: Path, data: bytes, message: str) -> None:
    path = saved(tmp_path / "a", data)

    with pytest.raises(ValueError, match=message) as raised:
        found(path)

    assert str(path) in str(raised.value)


@pytest.mark.parametrize("seconds", [-(1 << 62), -2_000_000_000, 5_000_000_000, 1 << 62])
def test_times_that_no_clock_has_are_refused(tmp_path: Path, seconds: int) -> None:
    clock = option(14, struct.pack("<q", seconds))
    data = section() + interface(frames.RAW_IP, clock) + enhanced(IP[0], START_NS // 1000)

    with pytest.raises(ValueError, match="damaged at byte 68: a time that is none"):
        found(saved(tmp_path / "a", data))


def test_a_capture_without_packets(tmp_path: Path) -> None:
    assert found(saved(tmp_path / "a", pcap([]))) == []
    assert found(saved(tmp_path / "b", section())) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([pcap(TIMED), PCAPNG]),
    st.lists(st.tuples(st.integers(4, 400), st.integers(0, 255)), max_size=6),
)
def test_damaged_bytes_are_read_or_refused(
    tmp_path: Path, data: bytes, damage: list[tuple[int, int]]
) -> None:
    damaged = bytearray(data)
    for at, value in damage:
        damaged[at % len(damaged)] = value
    path = saved(tmp_path / "a", bytes(damaged))

    with suppress(ValueError):
        assert len(found(path)) <= len(data) // 12
