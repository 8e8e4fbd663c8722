"""Reads BTF, in which a kernel describes its own types: where fields lie, what tracepoints give.

Layout as in the kernel's document "BPF Type Format". Pure; bounded by the size of what is read.
"""

import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

VMLINUX: Final = "kernel/btf/vmlinux"
"""Where the running kernel's BTF is, below the root of the sys file system."""
MAX_DEPTH: Final = 32
"""Typedefs, qualifiers and anonymous members followed from one type; a loop ends there."""

_MAGIC: Final = 0xEB9F
_HEADER: Final = struct.Struct("<HBBIIIII")
_TYPE: Final = struct.Struct("<III")
_MEMBER: Final = struct.Struct("<III")
_ARRAY: Final = struct.Struct("<III")
_PARAMETER: Final = struct.Struct("<II")

_INT, _PTR, _ARR, _STRUCT, _UNION = 1, 2, 3, 4, 5
_TYPEDEF, _VOLATILE, _CONST, _RESTRICT, _FUNC_PROTO, _TYPE_TAG = 8, 9, 10, 11, 13, 18
_TRANSPARENT: Final = frozenset((_TYPEDEF, _VOLATILE, _CONST, _RESTRICT, _TYPE_TAG))
_FOLLOWS: Final = {
    # kind: bytes after the type, and bytes for each of its elements
    _INT: (4, 0),
    _PTR: (0, 0),
    _ARR: (12, 0),
    _STRUCT: (0, 12),
    _UNION: (0, 12),
    6: (0, 8),  # enum
    7: (0, 0),  # forward declaration
    _TYPEDEF: (0, 0),
    _VOLATILE: (0, 0),
    _CONST: (0, 0),
    _RESTRICT: (0, 0),
    12: (0, 0),  # function
    _FUNC_PROTO: (0, 8),
    14: (4, 0),  # variable
    15: (0, 12),  # section
    16: (0, 0),  # floating point number
    17: (4, 0),  # tag of a declaration
    _TYPE_TAG: (0, 0),
    19: (0, 12),  # enum of 64 bits
}


class BtfError(ValueError):
    """These bytes are not BTF, or do not describe what was asked for; the message says which."""


class _Type(NamedTuple):
    name: int
    kind: int
    elements: int
    packed: bool
    """Whether offsets of members hold sizes of bit fields too."""
    size_or_type: int
    body: int
    """Where what follows it begins."""


class Btf:
    """The types of one kernel, found by name. Indexing takes some 0.1 s for a usual kernel."""

    def __init__(self, data: bytes) -> None:
        if len(data) < _HEADER.size:
            raise BtfError("BTF is shorter than its header")
        magic, version, _, header, types, type_bytes, strings, string_bytes = _HEADER.unpack_from(
            data
        )
        if magic != _MAGIC or version != 1:
            raise BtfError(f"BTF of magic {magic:#x} and version {version} is not known")
        self._data = data
        self._first = header + types
        self._end = self._first + type_bytes
        self._strings = header + strings
        self._strings_end = self._strings + string_bytes
        if max(self._end, self._strings_end) > len(data):
            raise BtfError("BTF is cut off")
        self._offsets = array("I", (0,))  # type 0 is void
        self._index()

    def _index(self) -> None:
        data, at, end, offsets = self._data, self._first, self._end, self._offsets
        unpack, size, follows = _TYPE.unpack_from, _TYPE.size, _FOLLOWS
        while at + size <= end:
            _, info, _ = unpack(data, at)
            kind = info >> 24 & 0x1F
            if kind not in follows:
                raise BtfError(f"BTF type {len(offsets)} is of the unknown kind {kind}")
            offsets.append(at)
            fixed, each = follows[kind]
            at += size + fixed + each * (info & 0xFFFF)
        if at != end:
            raise BtfError("the last BTF type is cut off")

    def find(self, kind: int, name: str) -> int:
        """Number of the type of this kind and name. Raises BtfError when there is none."""
        wanted = self._string_offset(name)
        data = self._data
        for number in range(1, len(self._offsets)):
            name_offset, info, _ = _TYPE.unpack_from(data, self._offsets[number])
            if name_offset in wanted and info >> 24 & 0x1F == kind:
                return number
        raise BtfError(f"this kernel has no type {name}")

    def offset(self, struct_name: str, *names: str, index: int = 0) -> int:
        """Bytes from the start of a structure to its member, to element ``index`` where that is an
        array. Of several names the first that the structure has counts. Members of unnamed members
        are found too.
        """
        number = self.find(_STRUCT, struct_name)
        for name in names:
            found = self._member(number, name, 0)
            if found is not None:
                bits, member = found
                if bits % 8:
                    raise BtfError(f"{struct_name}.{name} is a bit field")
                return bits // 8 + (index * self._element_bytes(member) if index else 0)
        raise BtfError(f"struct {struct_name} has no member {' or '.join(names)}")

    def tracepoint(self, name: str) -> "Tracepoint":
        """A raw tracepoint of the kernel, such as ``sched_switch``."""
        number = self.find(_TYPEDEF, f"btf_trace_{name}")
        prototype = self._plain(self._plain(number).size_or_type)
        if prototype.kind != _FUNC_PROTO:
            raise BtfError(f"btf_trace_{name} is not a function")
        types = [type_number for _, type_number in self._elements(prototype, _PARAMETER)]
        # The first parameter is the kernel's own, not the program's
        return Tracepoint(number, tuple(self._points_to(number) for number in types[1:]))

    def _member(self, number: int, name: str, depth: int) -> tuple[int, int] | None:
        """Offset in bits and type of a member."""
        if depth > MAX_DEPTH:
            return None
        found = self._plain(number)
        if found.kind not in (_STRUCT, _UNION):
            return None
        wanted = self._string_offset(name)
        for member_name, type_number, place in self._elements(found, _MEMBER):
            bits = place & 0xFFFFFF if found.packed else place
            if member_name in wanted:
                return bits, type_number
            if self._data[self._strings + member_name : self._strings + member_name + 1] == b"\0":
                inner = self._member(type_number, name, depth + 1)
                if inner is not None:
                    return bits + inner[0], inner[1]
        return None

    def _element_bytes(self, number: int) -> int:
        found = self._plain(number)
        if found.kind != _ARR or found.body + _ARRAY.size > len(self._data):
            raise BtfError("a member taken for an array is none")
        element = self._plain(_ARRAY.unpack_from(self._data, found.body)[0])
        return 8 if element.kind == _PTR else element.size_or_type

    def _points_to(self, number: int) -> str | None:
        """Name of the structure that a pointer points to."""
        pointer = self._plain(number)
        if pointer.kind != _PTR or not pointer.size_or_type:
            return None
        target = self._plain(pointer.size_or_type)
        return self._string(target.name) if target.kind == _STRUCT else None

    def _plain(self, number: int) -> _Type:
        """The type without typedefs and qualifiers."""
        for _ in range(MAX_DEPTH):
            found = self._type(number)
            if found.kind not in _TRANSPARENT:
                return found
            number = found.size_or_type
        raise BtfError(f"BTF type {number} goes round in a circle")

    def _type(self, number: int) -> _Type:
        if not 0 <= number < len(self._offsets):
            raise BtfError(f"there is no BTF type {number}")
        if number == 0:
            return _Type(0, 0, 0, False, 0, 0)  # noqa: FBT003 - a tuple in the order of the format
        at = self._offsets[number]
        name, info, size_or_type = _TYPE.unpack_from(self._data, at)
        return _Type(
            name, info >> 24 & 0x1F, info & 0xFFFF, bool(info >> 31), size_or_type, at + _TYPE.size
        )

    def _elements(self, found: _Type, layout: struct.Struct) -> Iterator[tuple[int, ...]]:
        body = memoryview(self._data)[found.body : found.body + found.elements * layout.size]
        return layout.iter_unpack(body)

    def _string(self, offset: int) -> str:
        start = self._strings + offset
        end = self._data.find(b"\0", start, self._strings_end)
        return self._data[start:end].decode(errors="replace") if end >= 0 else ""

    def _string_offset(self, text: str) -> set[int]:
        """Where the strings section has this text; kernels keep each text once, or as the end of
        a longer one.
        """
        return set(self._occurrences(text.encode() + b"\0"))

    def _occurrences(self, text: bytes) -> Iterable[int]:
        at = self._data.find(text, self._strings, self._strings_end)
        while at >= 0:
            yield at - self._strings
            at = self._data.find(text, at + 1, self._strings_end)


class Tracepoint(NamedTuple):
    """A raw tracepoint: its type's number, and for each argument the structure it points to."""

    number: int
    structs: tuple[str | None, ...]

    def argument(self, struct_name: str, nth: int = 0) -> int:
        """Index of the n-th argument that points to such a structure. Raises BtfError for none."""
        places = [index for index, name in enumerate(self.structs) if name == struct_name]
        if nth >= len(places):
            raise BtfError(f"tracepoint {self.number} has no argument {nth} of {struct_name}")
        return places[nth]
