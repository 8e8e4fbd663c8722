import struct
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_wire import ip_packet

from latencyprism.collectors.network import bpf
from latencyprism.collectors.network.frames import ACK, FIN, RST, SYN, segment


def run(
    program: tuple[bpf.Instruction, ...], packet: bytes, beside: Mapping[int, int] | None = None
) -> int:
    """What the kernel would do, by the instructions' definition; a load past the end drops."""
    a = x = at = 0
    memory = [0] * 16
    while True:
        code, jt, jf, k = program[at]
        at += 1
        try:
            match code:
                case bpf.RET:
                    return k
                case bpf.LD_W_ABS:
                    a = (beside or {})[k]
                case bpf.LD_B_ABS:
                    a = packet[k]
                case bpf.LD_H_ABS:
                    (a,) = struct.unpack_from("!H", packet, k)
                case bpf.LD_B_IND:
                    a = packet[x + k]
                case bpf.LD_H_IND:
                    (a,) = struct.unpack_from("!H", packet, x + k)
                case bpf.LD_MEM:
                    a = memory[k]
                case bpf.ST:
                    memory[k] = a
                case bpf.LDX_IMM:
                    x = k
                case bpf.LDX_MSH:
                    x = (packet[k] & 0x0F) * 4
                case bpf.TAX:
                    x = a
                case bpf.ADD_X:
                    a = (a + x) % (1 << 32)
                case bpf.SUB_X:
                    a = (a - x) % (1 << 32)
                case bpf.ADD_K:
                    a = (a + k) % (1 << 32)
                case bpf.AND_K:
                    a &= k
                case bpf.RSH_K:
                    a >>= k
                case bpf.JA:
                    at += k
                case bpf.JEQ:
                    at += jt if a == k else jf
                case bpf.JGT:
                    at += jt if a > k else jf
                case bpf.JSET:
                    at += jt if a & k else jf
                case _:
                    raise AssertionError(f"unknown instruction {code:#x}")
        except (IndexError, struct.error):
            return 0


def kept(ports: list[int], packet: bytes) -> bool:
    return run(bpf.server_filter(ports), packet) > 0


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1"])
def test_keeps_payloads_from_and_to_the_ports(address: str) -> None:
    client, server = (address, 40000), (address, 8000)

    assert kept([8000], ip_packet(client, server, payload=b"x"))
    assert kept([8000], ip_packet(server, client, payload=b"x"))
    assert kept([1, 8000, 9000], ip_packet(client, server, payload=b"x"))
    assert not kept([8001], ip_packet(client, server, payload=b"x"))


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1"])
@pytest.mark.parametrize("options", [b"", bytes(12)])
def test_drops_pure_acknowledgements_only(address: str, options: bytes) -> None:
    ends = (address, 40000), (address, 8000)

    assert not kept([8000], ip_packet(*ends, options=options))
    assert not kept([8000], ip_packet(*ends, options=options) + bytes(6))  # padded by the link
    assert kept([8000], ip_packet(*ends, options=options, payload=b"x"))
    for flag in (SYN, FIN, RST):
        assert kept([8000], ip_packet(*ends, options=options, flags=ACK | flag))


def test_keeps_what_may_hold_tcp_of_any_port() -> None:
    fragment = bytearray(ip_packet(("10.0.0.1", 40000), ("10.0.0.2", 1), payload=b"x"))
    extended = bytearray(ip_packet(("fd00::1", 40000), ("fd00::2", 1), payload=b"x"))
    fragment[7] = 1
    assert kept([8000], bytes(fragment))
    for extension in (0, 43, 44, 60):
        extended[6] = extension
        assert kept([8000], bytes(extended))
    extended[6] = 58  # ICMPv6
    assert not kept([8000], bytes(extended))


def test_drops_what_is_no_tcp_to_follow() -> None:
    packet = bytearray(ip_packet(("10.0.0.1", 40000), ("10.0.0.2", 8000), payload=b"x"))
    udp = bytearray(packet)
    udp[9] = 17

    assert kept([8000], bytes(packet))
    assert not kept([8000], bytes(udp))
    assert not kept([8000], b"\x00" * 60)


def test_follows_ip_options() -> None:
    packet = ip_packet(("10.0.0.1", 40000), ("10.0.0.2", 8000), payload=b"x")
    options = bytes([0x46, 0, 0, len(packet) + 4]) + packet[4:20] + bytes(4)

    assert kept([8000], options + packet[20:])
    assert not kept([8000], options[:3] + bytes([len(packet) + 3]) + options[4:] + packet[20:])


@pytest.mark.parametrize("ports", [[], [0], [65536], list(range(1, bpf.MAX_PORTS + 2))])
def test_refuses_ports_it_cannot_filter(ports: list[int]) -> None:
    with pytest.raises(ValueError, match="port"):
        bpf.server_filter(ports)


def test_the_largest_program_reaches_all_its_labels() -> None:
    ports = list(range(8000, 8000 + bpf.MAX_PORTS))
    client = ("10.0.0.1", 40000)

    for port in ports:
        assert kept(ports, ip_packet(client, ("10.0.0.2", port), payload=b"x"))
    assert not kept(ports, ip_packet(client, ("10.0.0.2", 7999), payload=b"x"))
    assert len(bpf.encode(bpf.server_filter(ports))) == 8 * len(bpf.server_filter(ports))


@pytest.mark.parametrize(
    ("interface", "packet_type", "expected"),
    [(1, 0, True), (1, bpf.PACKET_OUTGOING, False), (2, bpf.PACKET_OUTGOING, True)],
)
def test_the_loopback_shows_each_packet_once(
    interface: int, packet_type: int, *, expected: bool
) -> None:
    program = bpf.server_filter([8000], loopback=1)
    packet = ip_packet(("127.0.0.1", 40000), ("127.0.0.1", 8000), payload=b"x")
    beside = {bpf.INTERFACE_INDEX: interface, bpf.PACKET_TYPE: packet_type}

    assert (run(program, packet, beside) > 0) == expected


@given(
    address=st.sampled_from(["10.0.0.1", "fd00::1"]),
    ports=st.tuples(st.sampled_from([7999, 8000]), st.sampled_from([7999, 8000])),
    flags=st.integers(0, 255),
    payload=st.binary(max_size=5),
    options=st.sampled_from([b"", bytes(8), bytes(40)]),
)
def test_agrees_with_the_decoder(
    address: str, ports: tuple[int, int], flags: int, payload: bytes, options: bytes
) -> None:
    ends = (address, ports[0]), (address, ports[1])
    packet = ip_packet(*ends, flags=flags, payload=payload, options=options)

    found = segment(packet, 0, len(packet))

    assert found is not None
    wanted = found[3] < found[4] or flags & (SYN | FIN | RST)
    assert kept([8000], packet) == (8000 in ports and bool(wanted))


@given(st.binary(max_size=120))
def test_garbage_ends(packet: bytes) -> None:
    assert run(bpf.server_filter([8000]), packet) in (0, bpf.WHOLE_PACKET)
