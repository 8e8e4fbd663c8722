"""An assembler of eBPF, the kernel's own virtual machine: instructions by name, jumps to labels.

Encoding as in the kernel's document "BPF Instruction Set Architecture" (RFC 9669). Pure.
"""

import struct
from enum import IntEnum
from typing import Final

_INSTRUCTION: Final = struct.Struct("<BBhi")
MAX_INSTRUCTIONS: Final = 4096
"""What every kernel takes from a privileged loader."""


class Reg(IntEnum):
    """Registers: R0 holds results, R1 to R5 arguments, R6 to R9 outlast calls, FP is the frame."""

    R0 = 0
    R1 = 1
    R2 = 2
    R3 = 3
    R4 = 4
    R5 = 5
    R6 = 6
    R7 = 7
    R8 = 8
    R9 = 9
    FP = 10


class Size(IntEnum):
    """Width of a load or store in bytes; the value is that of the instruction set."""

    U32 = 0x00
    U16 = 0x08
    U8 = 0x10
    U64 = 0x18


class Helper(IntEnum):
    """Functions of the kernel that programs call, from ``linux/bpf.h``."""

    MAP_LOOKUP = 1
    MAP_UPDATE = 2
    MAP_DELETE = 3
    KTIME_GET_NS = 5
    GET_CURRENT_PID_TGID = 14
    PROBE_READ_USER = 112
    RINGBUF_OUTPUT = 130


class Alu(IntEnum):
    """Arithmetic on 64 bits."""

    ADD = 0x07
    SUB = 0x17
    OR = 0x47
    AND = 0x57
    LSH = 0x67
    RSH = 0x77
    MOV = 0xB7


class Cond(IntEnum):
    """Conditions of jumps; S means that both sides are taken as signed."""

    EQ = 0x15
    GT = 0x25
    GE = 0x35
    NE = 0x55
    SGT = 0x65
    LT = 0xA5
    LE = 0xB5
    SLE = 0xD5


_FROM_REGISTER: Final = 0x08
_LOAD, _STORE, _STORE_VALUE, _ATOMIC = 0x61, 0x63, 0x62, 0xC3
_WIDE, _MAP_FD = 0x18, 1
_JUMP, _CALL, _EXIT = 0x05, 0x85, 0x95
_MOV32: Final = 0xBC


class Assembler:
    """Collects instructions; :meth:`assemble` gives the program's bytes.

    An operand is a register or a signed 32-bit number. Errors of use raise ValueError.
    """

    def __init__(self) -> None:
        self._code: list[tuple[int, int, int, int]] = []
        self._targets: dict[int, str] = {}
        self._labels: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._code)

    def label(self, name: str) -> None:
        """The next instruction is where jumps to ``name`` go."""
        if name in self._labels:
            raise ValueError(f"label {name!r} is there already")
        self._labels[name] = len(self._code)

    def unique(self, stem: str) -> str:
        """A name for a label that no other has, for code that is laid down several times."""
        return f"{stem}@{len(self._code)}"

    def alu(self, operation: Alu, register: Reg, operand: Reg | int) -> None:
        """``register = register operation operand``; MOV only takes the operand."""
        if isinstance(operand, Reg):
            self._add(operation | _FROM_REGISTER, register, operand)
        else:
            self._add(operation, register, value=operand)

    def move(self, register: Reg, operand: Reg | int) -> None:
        """Copy a register, or set it to a number."""
        self.alu(Alu.MOV, register, operand)

    def truncate(self, register: Reg, source: Reg) -> None:
        """Copy the lower 32 bits; the upper ones become zero."""
        self._add(_MOV32, register, source)

    def load(self, size: Size, register: Reg, base: Reg, offset: int) -> None:
        """``register = memory[base + offset]``, extended with zeros."""
        self._add(_LOAD | size, register, base, offset)

    def store(self, size: Size, base: Reg, offset: int, operand: Reg | int) -> None:
        """``memory[base + offset] = operand``."""
        if isinstance(operand, Reg):
            self._add(_STORE | size, base, operand, offset)
        else:
            self._add(_STORE_VALUE | size, base, offset=offset, value=operand)

    def atomic_add(self, base: Reg, offset: int, register: Reg) -> None:
        """``memory[base + offset] += register``, 64 bits, whatever else happens meanwhile."""
        self._add(_ATOMIC | Size.U64, base, register, offset)

    def load_map(self, register: Reg, descriptor: int) -> None:
        """The map of a file descriptor, as helpers want it."""
        self._add(_WIDE, register, Reg(_MAP_FD), value=descriptor)
        self._add(0)

    def load_wide(self, register: Reg, value: int) -> None:
        """Set a register to an unsigned 64-bit number."""
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{value} has no 64 unsigned bits")
        low, high = struct.unpack("<ii", struct.pack("<Q", value))
        self._add(_WIDE, register, value=low)
        self._add(0, value=high)

    def call(self, helper: Helper) -> None:
        """Call a helper with R1 to R5; its result is in R0, and R1 to R5 are lost."""
        self._add(_CALL, value=helper)

    def jump(self, label: str) -> None:
        """Go on at the label."""
        self._targets[len(self._code)] = label
        self._add(_JUMP)

    def jump_if(self, register: Reg, condition: Cond, operand: Reg | int, label: str) -> None:
        """Go on at the label when the condition holds."""
        self._targets[len(self._code)] = label
        if isinstance(operand, Reg):
            self._add(condition | _FROM_REGISTER, register, operand)
        else:
            self._add(condition, register, value=operand)

    def exit(self) -> None:
        """End the program with the result 0."""
        self.move(Reg.R0, 0)
        self._add(_EXIT)

    def assemble(self) -> bytes:
        """The program.

        Raises ValueError for a label that is nowhere, a jump that is too far, or too long a
        program.
        """
        if len(self._code) > MAX_INSTRUCTIONS:
            raise ValueError(f"{len(self._code)} instructions are more than {MAX_INSTRUCTIONS}")
        return b"".join(
            _INSTRUCTION.pack(code, registers, self._skip(at) if at in self._targets else off, val)
            for at, (code, registers, off, val) in enumerate(self._code)
        )

    def _skip(self, at: int) -> int:
        label = self._targets[at]
        if label not in self._labels:
            raise ValueError(f"no label {label!r}, which instruction {at} jumps to")
        skip = self._labels[label] - at - 1
        if not -(1 << 15) <= skip < 1 << 15:
            raise ValueError(f"label {label!r} is too far from instruction {at}")
        return skip

    def _add(
        self,
        code: int,
        register: Reg = Reg.R0,
        source: Reg = Reg.R0,
        offset: int = 0,
        value: int = 0,
    ) -> None:
        if not -(1 << 31) <= value < 1 << 31:
            raise ValueError(f"{value} has no 32 signed bits")
        if not -(1 << 15) <= offset < 1 << 15:
            raise ValueError(f"offset {offset} has no 16 signed bits")
        self._code.append((code, register | source << 4, offset, value))
