import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_wire import ip_packet

from latencyprism.collectors.network import frames

CLIENT = ("10.0.0.1", 40000)
SERVER = ("10.0.0.2", 8000)


@pytest.mark.parametrize(
    ("client", "server"), [(CLIENT, SERVER), (("fd00::1", 40000), ("fd00::2", 8000))]
)
def test_finds_the_payload(client: tuple[str, int], server: tuple[str, int]) -> None:
    packet = ip_packet(client, server, sequence=7, payload=b"hello", options=bytes(12))
    buffer = b"before" + packet + bytes(4)  # padding of the link layer

    found = frames.segment(buffer, 6, len(buffer))

    assert found is not None
    key, sequence, flags, start, stop = found
    assert (sequence, flags) == (7, frames.ACK)
    assert buffer[start:stop] == b"hello"
    answer = ip_packet(server, client)
    back = frames.segment(answer, 0, len(answer))
    assert back is not None
    assert back[0] == frames.reverse(key)
    assert frames.ends(key).source_port == client[1]
    assert frames.ends(key).destination_port == server[1]


def test_a_packet_captured_in_part_ends_with_what_was_captured() -> None:
    packet = ip_packet(CLIENT, SERVER, payload=b"hello")

    found = frames.segment(packet, 0, len(packet) - 2)

    assert found is not None
    assert packet[found[3] : found[4]] == b"hel"


def test_a_packet_too_large_for_a_length_field_ends_with_what_was_captured() -> None:
    packet = bytearray(ip_packet(CLIENT, SERVER, payload=b"hello"))
    packet[2:4] = b"\0\0"

    found = frames.segment(bytes(packet), 0, len(packet))

    assert found is not None
    assert packet[found[3] : found[4]] == b"hello"


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 0x55), (0, 0x44), (6, 0x1F), (7, 1), (9, 17), (32, 0x10), (32, 0xF0), (3, 20)],
    ids=["version", "short", "fragment", "offset", "udp", "tcp short", "tcp long", "no tcp"],
)
def test_everything_else_is_refused(at: int, value: int) -> None:
    packet = bytearray(ip_packet(CLIENT, SERVER, payload=b"hello"))
    packet[at] = value

    assert frames.segment(bytes(packet), 0, len(packet)) is None


def test_ipv6_without_tcp_is_refused() -> None:
    packet = bytearray(ip_packet(("fd00::1", 1), ("fd00::2", 2), payload=b"hello"))
    packet[6] = 17

    assert frames.segment(bytes(packet), 0, len(packet)) is None


@given(st.binary(max_size=200), st.integers(0, 60), st.integers(0, 200))
def test_garbage_never_raises(buffer: bytes, at: int, end: int) -> None:
    found = frames.segment(buffer, at, min(end, len(buffer)))

    if found is not None:
        assert at < found[3] <= found[4] <= end


def test_link_layers() -> None:
    packet = ip_packet(CLIENT, SERVER, payload=b"hello")
    macs = bytes(12)
    cases = {
        (frames.RAW_IP, b""): 0,
        (frames.NULL, b"\2\0\0\0"): 4,
        (frames.ETHERNET, macs + b"\x08\x00"): 14,
        (frames.ETHERNET, macs + b"\x81\x00\x00\x05\x08\x00"): 18,
        (frames.ETHERNET, macs + b"\x88\xa8\x00\x05\x81\x00\x00\x05\x86\xdd"): 22,
        (frames.LINUX_SLL, bytes(14) + b"\x08\x00"): 16,
    }

    for (link_type, header), expected in cases.items():
        frame = b"xx" + header + packet
        assert frames.network_offset(link_type, frame, 2, len(frame)) == expected + 2


def test_frames_without_ip_are_refused() -> None:
    arp = bytes(12) + struct.pack("!H", 0x0806) + bytes(28)

    assert frames.network_offset(frames.ETHERNET, arp, 0, len(arp)) is None
    assert frames.network_offset(frames.ETHERNET, bytes(12), 0, 12) is None


def extended(*headers: tuple[int, bytes]) -> bytes:
    """An IPv6 packet with these extension headers (kind, content behind the first byte)."""
    packet = ip_packet(("fd00::1", 40000), ("fd00::2", 8000), sequence=7, payload=b"hello")
    kinds = [kind for kind, _ in headers] + [6]
    chain = b"".join(
        bytes([after]) + content for (_, content), after in zip(headers, kinds[1:], strict=True)
    )
    size = (len(packet) - 40 + len(chain)).to_bytes(2, "big")
    return packet[:4] + size + bytes([kinds[0]]) + packet[7:40] + chain + packet[40:]


HOP_BY_HOP = (0, b"\0" + bytes(6))
ROUTING = (43, b"\1" + bytes(14))
DESTINATION = (60, b"\0" + bytes(6))
FIRST_FRAGMENT = (44, b"\0\0\1" + bytes(4))
LATER_FRAGMENT = (44, b"\0\1\0" + bytes(4))


@pytest.mark.parametrize(
    "headers",
    [(HOP_BY_HOP,), (HOP_BY_HOP, ROUTING, DESTINATION), (FIRST_FRAGMENT,), (ROUTING,)],
)
def test_finds_tcp_behind_extension_headers(headers: tuple[tuple[int, bytes], ...]) -> None:
    packet = extended(*headers)

    found = frames.segment(packet, 0, len(packet))

    assert found is not None
    key, sequence, _, start, stop = found
    assert (sequence, packet[start:stop]) == (7, b"hello")
    assert frames.ends(key).destination_port == 8000


def test_what_is_no_segment_is_told_by_kind() -> None:
    later = extended(HOP_BY_HOP, LATER_FRAGMENT)
    fragment = bytearray(ip_packet(CLIENT, SERVER, payload=b"hello"))
    fragment[7] = 1
    udp = bytearray(ip_packet(CLIENT, SERVER, payload=b"hello"))
    udp[9] = 17

    for packet, kind in (
        (later, "IP fragments"),
        (bytes(fragment), "IP fragments"),
        (bytes(udp), "other packets"),
        (b"E", "other packets"),
        (extended(HOP_BY_HOP)[:44], "other packets"),
    ):
        assert frames.segment(packet, 0, len(packet)) is None
        assert frames.refusal(packet, 0, len(packet)) == kind
