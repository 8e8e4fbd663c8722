"""Classic BPF: the kernel's own filter, so that packets of no interest cost nothing here.

Instructions are those of ``linux/filter.h``; the program sees a packet from its IP header on, as a
``SOCK_DGRAM`` packet socket gives it.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from latencyprism.collectors.network.frames import IPV6_EXTENSIONS

MAX_PORTS: Final = 64
"""Ports of one program; a conditional jump reaches 255 instructions."""

LD_B_ABS, LD_H_ABS, LD_B_IND, LD_H_IND, LD_MEM = 0x30, 0x28, 0x50, 0x48, 0x60
LD_W_ABS = 0x20
LDX_IMM, LDX_MSH, ST, TAX = 0x01, 0xB1, 0x02, 0x07
JA, JEQ, JGT, JSET = 0x05, 0x15, 0x25, 0x45
ADD_X, SUB_X, ADD_K, AND_K, RSH_K = 0x0C, 0x1C, 0x04, 0x54, 0x74
RET = 0x06

WHOLE_PACKET: Final = 0x40000
FIN_SYN_RST: Final = 0x07

# Loads beyond any packet give what the kernel knows beside it
PACKET_TYPE: Final = 0xFFFFF000 + 4
INTERFACE_INDEX: Final = 0xFFFFF000 + 8
PACKET_OUTGOING: Final = 4


class Instruction(NamedTuple):
    """``struct sock_filter``: a jump skips ``jt`` or ``jf`` instructions, JA skips ``k``."""

    code: int
    jt: int
    jf: int
    k: int


class _Assembler:
    """Instructions whose jumps name labels; a jump to None goes on."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, int, str | None, str | None]] = []
        self._labels: dict[str, int] = {}

    def label(self, name: str) -> None:
        self._labels[name] = len(self._lines)

    def add(self, code: int, k: int = 0) -> None:
        self._lines.append((code, k, None, None))

    def jump(self, code: int, k: int, yes: str | None, no: str | None) -> None:
        self._lines.append((code, k, yes, no))

    def assemble(self) -> tuple[Instruction, ...]:
        return tuple(
            Instruction(code, 0, 0, self._skip(at, yes))
            if code == JA
            else Instruction(code, self._skip(at, yes), self._skip(at, no), k)
            for at, (code, k, yes, no) in enumerate(self._lines)
        )

    def _skip(self, at: int, label: str | None) -> int:
        return 0 if label is None else self._labels[label] - at - 1


def server_filter(ports: Sequence[int], *, loopback: int | None = None) -> tuple[Instruction, ...]:
    """Program that keeps TCP from or to the ports when it has a payload or SYN, FIN or RST.

    Later fragments of TCP, and IPv6 with the extension headers that may stand before TCP, are rare
    and kept whatever they hold: it can't be told here. What is sent on the interface with the index
    ``loopback`` is dropped: it is seen again as received. Raises ValueError for no port, more than
    :data:`MAX_PORTS`, or a number that is no port.
    """
    wanted = sorted(set(ports))
    if not 1 <= len(wanted) <= MAX_PORTS:
        raise ValueError(f"a filter takes 1 to {MAX_PORTS} different ports, not {len(wanted)}")
    if not (wanted[0] > 0 and wanted[-1] < 1 << 16):
        raise ValueError(f"ports are 1 to 65535, not {wanted[0]} to {wanted[-1]}")
    a = _Assembler()
    if loopback is not None:
        a.add(LD_W_ABS, INTERFACE_INDEX)
        a.jump(JEQ, loopback, None, "once")
        a.add(LD_W_ABS, PACKET_TYPE)
        a.jump(JEQ, PACKET_OUTGOING, "drop", None)
    a.label("once")
    a.add(LD_B_ABS, 0)
    a.add(AND_K, 0xF0)
    a.jump(JEQ, 0x40, "ipv4", None)
    a.jump(JEQ, 0x60, "ipv6", "drop")

    a.label("ipv4")
    a.add(LD_B_ABS, 9)
    a.jump(JEQ, 6, None, "drop")
    a.add(LD_H_ABS, 6)
    a.jump(JSET, 0x1FFF, "keep", None)
    a.add(LDX_MSH, 0)  # X = length of the IP header
    a.add(LD_H_ABS, 2)
    a.add(ST, 0)  # M[0] = length of the packet
    a.jump(JA, 0, "ports", None)

    a.label("ipv6")
    a.add(LD_B_ABS, 6)
    for extension in sorted(IPV6_EXTENSIONS):
        a.jump(JEQ, extension, "keep", None)
    a.jump(JEQ, 6, None, "drop")
    a.add(LDX_IMM, 40)
    a.add(LD_H_ABS, 4)
    a.add(ADD_K, 40)
    a.add(ST, 0)

    a.label("ports")
    for offset in (2, 0):
        a.add(LD_H_IND, offset)
        for port in wanted:
            a.jump(JEQ, port, "flags", None)
    a.jump(JA, 0, "drop", None)

    a.label("flags")
    a.add(LD_B_IND, 13)
    a.jump(JSET, FIN_SYN_RST, "keep", None)
    a.add(LD_B_IND, 12)
    a.add(AND_K, 0xF0)
    a.add(RSH_K, 2)  # the upper half of the byte counts words of 4 bytes
    a.add(ADD_X)
    a.add(TAX)  # X = IP and TCP headers together
    a.add(LD_MEM, 0)
    a.add(SUB_X)
    a.jump(JGT, 0, "keep", "drop")

    a.label("keep")
    a.add(RET, WHOLE_PACKET)
    a.label("drop")
    a.add(RET, 0)
    return a.assemble()


def encode(program: Sequence[Instruction]) -> bytes:
    """The program as the kernel takes it: an array of ``struct sock_filter``."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
