import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.collectors.kernel.assembler import (
    MAX_INSTRUCTIONS,
    Alu,
    Assembler,
    Cond,
    Helper,
    Reg,
    Size,
)


def instructions(code: bytes) -> list[tuple[int, int, int, int]]:
    """Code, registers, offset, value of each."""
    return list(struct.iter_unpack("<BBhi", code))


@pytest.mark.parametrize(
    ("lay", "expected"),
    [
        # From the tables of RFC 9669
        (lambda a: a.move(Reg.R1, Reg.R2), (0xBF, 0x21, 0, 0)),
        (lambda a: a.move(Reg.R0, 7), (0xB7, 0x00, 0, 7)),
        (lambda a: a.truncate(Reg.R2, Reg.R3), (0xBC, 0x32, 0, 0)),
        (lambda a: a.alu(Alu.ADD, Reg.R2, -8), (0x07, 0x02, 0, -8)),
        (lambda a: a.alu(Alu.SUB, Reg.R7, Reg.R6), (0x1F, 0x67, 0, 0)),
        (lambda a: a.alu(Alu.RSH, Reg.R0, 32), (0x77, 0x00, 0, 32)),
        (lambda a: a.load(Size.U64, Reg.R6, Reg.R1, 16), (0x79, 0x16, 16, 0)),
        (lambda a: a.load(Size.U32, Reg.R6, Reg.FP, -4), (0x61, 0xA6, -4, 0)),
        (lambda a: a.load(Size.U8, Reg.R0, Reg.R1, 0), (0x71, 0x10, 0, 0)),
        (lambda a: a.store(Size.U64, Reg.FP, -8, Reg.R0), (0x7B, 0x0A, -8, 0)),
        (lambda a: a.store(Size.U32, Reg.FP, -4, 0), (0x62, 0x0A, -4, 0)),
        (lambda a: a.store(Size.U16, Reg.FP, -4, Reg.R1), (0x6B, 0x1A, -4, 0)),
        (lambda a: a.atomic_add(Reg.R0, 208, Reg.R1), (0xDB, 0x10, 208, 0)),
        (lambda a: a.call(Helper.KTIME_GET_NS), (0x85, 0, 0, 5)),
    ],
)
def test_instructions(
    lay: Callable[[Assembler], None], expected: tuple[int, int, int, int]
) -> None:
    assembler = Assembler()
    lay(assembler)

    assert instructions(assembler.assemble()) == [expected]


def test_wide_loads_take_two_instructions() -> None:
    assembler = Assembler()
    assembler.load_map(Reg.R1, 42)
    assembler.load_wide(Reg.R3, 0xFFFFFFFE_00000001)

    assert instructions(assembler.assemble()) == [
        (0x18, 0x11, 0, 42),
        (0, 0, 0, 0),
        (0x18, 0x03, 0, 1),
        (0, 0, 0, -2),
    ]


def test_jumps_go_forward_and_back_over_wide_instructions() -> None:
    assembler = Assembler()
    assembler.label("again")
    assembler.jump_if(Reg.R1, Cond.EQ, 0, "end")
    assembler.load_map(Reg.R2, 3)
    assembler.jump_if(Reg.R1, Cond.SGT, Reg.R2, "again")
    assembler.jump("end")
    assembler.label("end")
    assembler.exit()

    code = instructions(assembler.assemble())

    assert code[0] == (0x15, 0x01, 4, 0)
    assert code[3] == (0x6D, 0x21, -4, 0)
    assert code[4] == (0x05, 0, 0, 0)
    assert code[5:] == [(0xB7, 0, 0, 0), (0x95, 0, 0, 0)]


def test_unique_labels_differ_wherever_they_are_laid() -> None:
    assembler = Assembler()
    names = []
    for _ in range(3):
        names.append(assembler.unique("done"))
        assembler.label(names[-1])
        assembler.exit()

    assert len(set(names)) == 3


def test_a_label_twice_is_refused() -> None:
    assembler = Assembler()
    assembler.label("here")

    with pytest.raises(ValueError, match="'here' is there already"):
        assembler.label("here")


def test_a_jump_to_nowhere_is_refused() -> None:
    assembler = Assembler()
    assembler.jump("nowhere")

    with pytest.raises(ValueError, match="no label 'nowhere', which instruction 0 jumps to"):
        assembler.assemble()


def test_a_program_that_no_kernel_takes_is_refused() -> None:
    assembler = Assembler()
    for _ in range(MAX_INSTRUCTIONS + 1):
        assembler.move(Reg.R0, 0)

    with pytest.raises(ValueError, match="4097 instructions"):
        assembler.assemble()


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1])
def test_numbers_of_more_than_32_bits_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="32 signed bits"):
        Assembler().move(Reg.R0, value)


def test_wide_numbers_are_unsigned() -> None:
    with pytest.raises(ValueError, match="64 unsigned bits"):
        Assembler().load_wide(Reg.R0, -1)


@pytest.mark.parametrize("offset", [1 << 15, -(1 << 15) - 1])
def test_far_memory_is_refused(offset: int) -> None:
    with pytest.raises(ValueError, match="16 signed bits"):
        Assembler().load(Size.U8, Reg.R0, Reg.R1, offset)


@given(st.integers(0, (1 << 64) - 1))
def test_wide_numbers_come_out_as_they_went_in(value: int) -> None:
    assembler = Assembler()
    assembler.load_wide(Reg.R1, value)

    (_, _, _, low), (_, _, _, high) = instructions(assembler.assemble())

    assert struct.unpack("<Q", struct.pack("<ii", low, high)) == (value,)
