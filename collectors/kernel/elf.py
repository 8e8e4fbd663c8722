"""Where functions lie in a shared library or program: a reader of ELF's symbol tables.

Layout as in the System V ABI, 64 bits, little endian. Pure; bounded by the size of the file.
"""

import mmap
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

Bytes: TypeAlias = bytes | mmap.mmap

MAX_SYMBOLS: Final = 1 << 20
"""Symbols of one table that are looked at."""

_HEADER: Final = struct.Struct("<16s2HI3QI6H")
_SECTION: Final = struct.Struct("<2I4Q2I2Q")
_SEGMENT: Final = struct.Struct("<2I6Q")
_SYMBOL: Final = struct.Struct("<I2BH2Q")
_IDENT: Final = b"\x7fELF\x02\x01"  # 64 bits, little endian
_SYMTAB, _DYNSYM = 2, 11
_LOAD: Final = 1
_FUNCTIONS: Final = frozenset((2, 10))  # STT_FUNC and STT_GNU_IFUNC


class ElfError(ValueError):
    """These bytes are no ELF file of 64 bits and little endian, or a damaged one."""


class _Table(NamedTuple):
    kind: int
    offset: int
    size: int
    link: int


def function_offsets(data: Bytes, names: Collection[str]) -> dict[str, int]:
    """Offsets in the file of the functions of these names that it defines.

    Looks at the table for dynamic linking, then at the full one, which stripped files lack. A
    version behind the name (``@``) does not count. Raises ElfError.
    """
    wanted = {name.encode(): name for name in names}
    found: dict[str, int] = {}
    sections, segments = _layout(data)
    for kind in (_DYNSYM, _SYMTAB):
        for table in sections:
            if table.kind == kind and table.link < len(sections) and len(found) < len(wanted):
                symbols = _addresses(data, table, sections[table.link], wanted)
                for name, address in symbols.items():
                    offset = _file_offset(segments, address)
                    if offset is not None:
                        found.setdefault(name, offset)
    return found


def read_function_offsets(path: str, names: Collection[str]) -> dict[str, int]:
    """:func:`function_offsets` of a file, of which only what is needed is read.

    Raises ElfError, and OSError for a file that can't be opened.
    """
    with Path(path).open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except ValueError as empty:
            raise ElfError("an empty file") from empty
        with data:
            return function_offsets(data, names)


def _layout(data: Bytes) -> tuple[list[_Table], list[tuple[int, int, int]]]:
    """Sections, and loaded segments as (address, offset in the file, bytes in the file)."""
    if len(data) < _HEADER.size or data[: len(_IDENT)] != _IDENT:
        raise ElfError("no ELF file of 64 bits and little endian")
    header = _HEADER.unpack_from(data)
    segments_at, sections_at = header[5], header[6]
    segment_size, segment_count, section_size, section_count = header[9:13]
    segments = [
        (segment[3], segment[2], segment[5])
        for segment in _entries(data, _SEGMENT, segments_at, segment_size, segment_count)
        if segment[0] == _LOAD
    ]
    sections = [
        _Table(section[1], section[4], section[5], section[6])
        for section in _entries(data, _SECTION, sections_at, section_size, section_count)
    ]
    return sections, segments


def _entries(
    data: Bytes, layout: struct.Struct, at: int, size: int, count: int
) -> list[tuple[int, ...]]:
    if not count:
        return []
    if size < layout.size or at + size * count > len(data):
        raise ElfError("a table of the ELF header lies outside the file")
    return [layout.unpack_from(data, at + number * size) for number in range(count)]


def _addresses(
    data: Bytes, table: _Table, strings: _Table, wanted: dict[bytes, str]
) -> dict[str, int]:
    if max(table.offset + table.size, strings.offset + strings.size) > len(data):
        raise ElfError("a symbol table lies outside the file")
    count = min(table.size // _SYMBOL.size, MAX_SYMBOLS)
    symbols = data[table.offset : table.offset + count * _SYMBOL.size]
    names = data[strings.offset : strings.offset + strings.size]
    found = {}
    places = _places(names, wanted)
    for name_at, info, _, section, address, _ in _SYMBOL.iter_unpack(symbols):
        if name_at in places and section and info & 0xF in _FUNCTIONS:
            found[places[name_at]] = address
    return found


def _places(strings: bytes, wanted: dict[bytes, str]) -> dict[int, str]:
    """Where in the strings the wanted names stand, perhaps as the end of a longer one."""
    places = {}
    for encoded, name in wanted.items():
        for terminator in (b"\0", b"@"):
            at = strings.find(encoded + terminator)
            while at >= 0:
                places[at] = name
                at = strings.find(encoded + terminator, at + 1)
    return places


def _file_offset(segments: list[tuple[int, int, int]], address: int) -> int | None:
    for start, offset, size in segments:
        if start <= address < start + size:
            return address - start + offset
    return None
