"""The reader of symbol tables, on libraries that the C compiler makes and on damaged ones."""

import ctypes.util
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latencyprism.collectors.kernel.elf import ElfError, function_offsets, read_function_offsets


def tiny_library(
    functions: dict[str, int], *, load_at: int = 0x4000, file_at: int = 0x1000, kind: int = 11
) -> bytes:
    """An ELF file with one loaded segment and a table of the functions, by address."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in functions)
    symbols = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    at = 1
    for name, address in functions.items():
        symbols += struct.pack("<IBBHQQ", at, 0x12, 0, 1, address, 16)
        at += len(name) + 1
    strings_at = 64 + 56
    symbols_at = strings_at + len(names)
    sections_at = symbols_at + len(symbols)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, sections_at, 0, 64, 56, 1, 64, 2, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, file_at, load_at, load_at, 0x2000, 0x2000, 0x1000)
    sections = struct.pack("<IIQQQQIIQQ", 0, kind, 2, 0, symbols_at, len(symbols), 1, 1, 8, 24)
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, strings_at, len(names), 0, 0, 1, 0)
    return header + segment + names + symbols + sections


@pytest.mark.parametrize("kind", [2, 11])
def test_an_address_is_turned_into_a_place_in_the_file(kind: int) -> None:
    library = tiny_library({"SSL_write": 0x4100, "SSL_read": 0x4200}, kind=kind)

    assert function_offsets(library, ["SSL_write", "SSL_peek"]) == {"SSL_write": 0x1100}


def test_a_name_at_the_end_of_a_longer_one_is_not_taken_for_it() -> None:
    library = tiny_library({"MY_SSL_write": 0x4100})

    assert function_offsets(library, ["SSL_write"]) == {}


def test_an_address_outside_what_is_loaded_has_no_place() -> None:
    assert function_offsets(tiny_library({"SSL_write": 0x9000}), ["SSL_write"]) == {}


@pytest.mark.parametrize("data", [b"", b"#!/bin/sh\n" * 20, b"\x7fELF\x01\x01" + bytes(200)])
def test_what_is_no_elf_file_is_refused(data: bytes) -> None:
    with pytest.raises(ElfError):
        function_offsets(data, ["SSL_write"])


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()

    with pytest.raises(ElfError, match="empty"):
        read_function_offsets(str(tmp_path / "empty"), ["SSL_write"])


def test_real_libraries_say_what_the_linker_says(tmp_path: Path) -> None:
    if shutil.which("cc") is None or shutil.which("nm") is None:
        pytest.skip("needs a C compiler and nm")
    source, library = tmp_path / "x.c", tmp_path / "libx.so"
    source.write_text("int one(void){return 1;} int two(void){return 2;} static int no(void);")
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    lines = subprocess.run(["nm", "-D", library], check=True, capture_output=True, text=True)
    addresses = {
        line.split()[2]: int(line.split()[0], 16)
        for line in lines.stdout.splitlines()
        if " T " in line
    }

    found = read_function_offsets(str(library), ["one", "two", "no"])

    assert found.keys() == {"one", "two"}
    assert found["two"] - found["one"] == addresses["two"] - addresses["one"]
    with library.open("rb") as file:
        file.seek(found["one"])
        assert file.read(4) != bytes(4)


def test_versioned_symbols_are_found() -> None:
    name = ctypes.util.find_library("c")
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in maps if str(name) in line}
    if not paths:
        pytest.skip("this Python is not linked with a shared C library")

    assert "read" in read_function_offsets(paths.pop(), ["read"])


def test_the_interpreter_can_be_read() -> None:
    assert isinstance(read_function_offsets(sys.executable, ["SSL_write"]), dict)


@settings(max_examples=200)
@given(st.data())
def test_damage_is_refused_or_passed_over(data: st.DataObject) -> None:
    library = bytearray(tiny_library({"SSL_write": 0x4100, "SSL_read": 0x4200}))
    for _ in range(data.draw(st.integers(1, 6))):
        library[data.draw(st.integers(0, len(library) - 1))] = data.draw(st.integers(0, 255))
    library = library[: data.draw(st.integers(0, len(library)))]

    try:
        found = function_offsets(bytes(library), ["SSL_write", "SSL_read"])
    except ElfError:
        return
    assert found.keys() <= {"SSL_write", "SSL_read"}
