"""The reader of BTF, on types of the test's own making and on the running kernel's."""

import platform
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_support import this_btf

from latencyprism.collectors.kernel import btf
from latencyprism.collectors.kernel.arch import AARCH64, ARCHES, X86_64
from latencyprism.collectors.kernel.btf import Btf, BtfError
from latencyprism.collectors.kernel.programs import CallLayout, SwitchLayout

INT, PTR, ARRAY, STRUCT, UNION, TYPEDEF, CONST, PROTO = 1, 2, 3, 4, 5, 8, 10, 13


class Types:
    """Writes BTF."""

    def __init__(self) -> None:
        self.strings = b"\0"
        self.types = b""
        self.count = 0

    def name(self, text: str) -> int:
        if not text:
            return 0
        at = len(self.strings)
        self.strings += text.encode() + b"\0"
        return at

    def add(
        self, kind: int, name: str, size_or_type: int, *body: bytes, packed: bool = False
    ) -> int:
        many = len(body) if kind in (STRUCT, UNION, PROTO) else 0
        info = kind << 24 | many | packed << 31
        self.types += struct.pack("<III", self.name(name), info, size_or_type) + b"".join(body)
        self.count += 1
        return self.count

    def integer(self) -> int:
        return self.add(INT, "int", 4, struct.pack("<I", 32))

    def member(self, name: str, kind: int, bits: int) -> bytes:
        return struct.pack("<III", self.name(name), kind, bits)

    def parameter(self, kind: int) -> bytes:
        return struct.pack("<II", 0, kind)

    def data(self) -> bytes:
        header = struct.pack(
            "<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(self.types), len(self.types), len(self.strings)
        )
        return header + self.types + self.strings


def kernel(types: Types) -> Types:
    """A kernel with a task, registers and two tracepoints."""
    number = types.integer()
    inner = types.add(UNION, "", 8, types.member("pid", number, 0))
    types.add(
        STRUCT, "task_struct", 64,
        types.member("state", number, 64),
        types.member("", inner, 128),
        types.member("tgid", number, 192),
    )  # fmt: skip
    return types


def test_members_are_found_by_name_and_through_unnamed_ones() -> None:
    found = Btf(kernel(Types()).data())

    assert found.offset("task_struct", "state") == 8
    assert found.offset("task_struct", "pid") == 16
    assert found.offset("task_struct", "tgid") == 24


def test_a_member_that_was_renamed_is_found_by_its_old_name() -> None:
    assert Btf(kernel(Types()).data()).offset("task_struct", "__state", "state") == 8


def test_elements_of_arrays_are_found_through_typedefs() -> None:
    types = Types()
    long = types.add(INT, "long", 8, struct.pack("<I", 64))
    u64 = types.add(TYPEDEF, "u64", long)
    array = types.add(ARRAY, "", 0, struct.pack("<III", u64, long, 31))
    types.add(STRUCT, "pt_regs", 256, types.member("regs", array, 64))

    assert Btf(types.data()).offset("pt_regs", "regs", index=1) == 16


def test_bit_fields_hold_their_offset_beside_their_size() -> None:
    types = Types()
    number = types.integer()
    types.add(
        STRUCT, "s", 8,
        types.member("plain", number, 32), types.member("bits", number, 3 << 24 | 5),
        packed=True,
    )  # fmt: skip
    found = Btf(types.data())

    assert found.offset("s", "plain") == 4
    with pytest.raises(BtfError, match="bit field"):
        found.offset("s", "bits")


def test_a_tracepoint_tells_its_arguments_by_what_they_point_to() -> None:
    types = kernel(Types())
    task = 3
    constant = types.add(CONST, "", task)
    pointer, other = types.add(PTR, "", constant), types.add(PTR, "", 0)
    number = 1
    prototype = types.add(
        PROTO, "", 0,
        *(types.parameter(kind) for kind in (other, number, pointer, pointer, number)),
    )  # fmt: skip
    function = types.add(PTR, "", prototype)
    traced = types.add(TYPEDEF, "btf_trace_sched_switch", function)

    found = Btf(types.data()).tracepoint("sched_switch")

    assert found.number == traced
    assert found.structs == (None, "task_struct", "task_struct", None)
    assert (found.argument("task_struct"), found.argument("task_struct", 1)) == (1, 2)
    with pytest.raises(BtfError, match="no argument 2"):
        found.argument("task_struct", 2)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda found: found.offset("missing", "pid"), "no type missing"),
        (lambda found: found.offset("task_struct", "a", "b"), "no member a or b"),
        (lambda found: found.offset("task_struct", "pid", index=1), "taken for an array"),
        (lambda found: found.tracepoint("none"), "no type btf_trace_none"),
    ],
)
def test_what_is_not_there_is_named(ask: object, message: str) -> None:
    assert callable(ask)
    with pytest.raises(BtfError, match=message):
        ask(Btf(kernel(Types()).data()))


@pytest.mark.parametrize("cut", [0, 10, 24, 60, -1])
def test_what_is_cut_off_is_refused(cut: int) -> None:
    with pytest.raises(BtfError):
        Btf(kernel(Types()).data()[:cut])


def test_other_bytes_are_refused() -> None:
    with pytest.raises(BtfError, match="magic"):
        Btf(bytes(200))


def test_unknown_kinds_are_refused_because_their_size_is_not_known() -> None:
    types = Types()
    types.add(25, "future", 4)

    with pytest.raises(BtfError, match="unknown kind 25"):
        Btf(types.data())


def test_a_circle_of_types_ends() -> None:
    types = Types()
    types.add(TYPEDEF, "btf_trace_x", 1)

    with pytest.raises(BtfError, match="circle"):
        Btf(types.data()).tracepoint("x")


@given(st.data())
def test_damage_is_refused_or_gives_numbers(data: st.DataObject) -> None:
    damaged = bytearray(kernel(Types()).data())
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))

    try:
        found = Btf(bytes(damaged))
        assert found.offset("task_struct", "pid") >= 0
    except BtfError:
        return


def test_the_running_kernel_s_layout_is_found() -> None:
    try:
        types = this_btf()
    except OSError:
        pytest.skip("this kernel does not describe its types")
    switch = SwitchLayout.of(types)
    arch = ARCHES.get(platform.machine())
    if arch is None:
        pytest.skip("an architecture that is not known")
    call = CallLayout.of(types, arch)

    assert 0 < switch.pid < 1 << 15
    assert switch.tgid - switch.pid == 4  # neighbours in every kernel so far
    assert (switch.previous, switch.following, switch.woken) == (1, 2, 0)
    if arch is X86_64:
        assert (call.number, call.first, call.second) == (120, 112, 104)  # struct pt_regs is ABI


def test_a_kernel_of_another_architecture_is_read_by_its_own_names() -> None:
    types = Types()
    long = types.add(INT, "long", 8, struct.pack("<I", 64))
    array = types.add(ARRAY, "", 0, struct.pack("<III", long, long, 31))
    inner = types.add(STRUCT, "", 272, types.member("regs", array, 0))
    either = types.add(UNION, "", 272, types.member("", inner, 0))
    registers = types.add(
        STRUCT, "pt_regs", 336,
        types.member("", either, 0),
        types.member("orig_x0", long, 272 * 8),
        types.member("syscallno", long, 280 * 8),
    )  # fmt: skip
    pointer, other = types.add(PTR, "", registers), types.add(PTR, "", 0)
    prototype = types.add(PROTO, "", 0, *(types.parameter(kind) for kind in (other, pointer, long)))
    types.add(TYPEDEF, "btf_trace_sys_exit", types.add(PTR, "", prototype))

    call = CallLayout.of(Btf(types.data()), AARCH64)

    assert (call.number, call.first, call.second) == (280, 272, 8)
    assert (call.registers, call.result) == (0, 1)


def test_where_the_kernel_keeps_its_types_is_below_sys() -> None:
    assert not btf.VMLINUX.startswith("/")
