import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.kernel.bpf import kernel_version, possible_cpus
from latencyprism.collectors.kernel.libraries import (
    CUDA_DRIVER,
    CUDA_RUNTIME,
    MAX_LIBRARIES,
    TLS_LIBRARY,
    executable_mappings,
    libraries,
)

MAPS = b"""\
55d0c000-55d0d000 r--p 00000000 fe:00 10                         /usr/bin/python3.11
55d0d000-55d0e000 r-xp 00001000 fe:00 10                         /usr/bin/python3.11
7f000000-7f001000 r-xp 00000000 fe:00 11                         /usr/lib/libssl.so.3
7f001000-7f002000 rw-p 00000000 fe:00 11                         /usr/lib/libssl.so.3
7f002000-7f003000 r-xp 00000000 fe:00 12                         /opt/my cuda/libcudart.so.12
7f003000-7f004000 r-xp 00000000 00:00 0                          [vdso]
7f004000-7f005000 r-xp 00000000 fe:00 13                         /tmp/libssl.so.1.1 (deleted)
7f005000-7f006000 rw-p 00000000 00:00 0
"""


def test_files_with_code_are_found_once() -> None:
    assert executable_mappings(MAPS) == [
        "/usr/bin/python3.11",
        "/usr/lib/libssl.so.3",
        "/opt/my cuda/libcudart.so.12",
    ]


def test_libraries_are_reached_through_their_process(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/maps").write_bytes(MAPS)
    files = Files(str(tmp_path))

    assert libraries(files, 7, CUDA_RUNTIME) == [f"{tmp_path}/7/root/opt/my cuda/libcudart.so.12"]
    assert [path.rpartition("/")[2] for path in libraries(files, 7, TLS_LIBRARY)] == [
        "python3.11",
        "libssl.so.3",
    ]
    assert libraries(files, 8, TLS_LIBRARY) == []


def test_a_process_with_many_libraries_is_not_searched_for_ever(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    lines = (f"1000-2000 r-xp 0 fe:00 {n} /x{n}/libssl.so\n" for n in range(1, 50))
    (tmp_path / "7/maps").write_text("".join(lines))

    assert len(libraries(Files(str(tmp_path)), 7, TLS_LIBRARY)) == MAX_LIBRARIES


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (TLS_LIBRARY, "libssl.so.3"),
        (TLS_LIBRARY, "libssl-5a8c2b7f.so.1.1"),
        (TLS_LIBRARY, "libssl3.so"),
        (TLS_LIBRARY, "_ssl.cpython-311-x86_64-linux-gnu.so"),
        (TLS_LIBRARY, "libpython3.12.so.1.0"),
        (CUDA_RUNTIME, "libcudart.so.12"),
        (CUDA_RUNTIME, "libcudart-e409450e.so.11.0"),
        (CUDA_DRIVER, "libcuda.so.1"),
        (CUDA_DRIVER, "libcuda.so.550.54.14"),
    ],
)
def test_names_that_are_known(pattern: re.Pattern[str], name: str) -> None:
    assert pattern.fullmatch(name)


@given(st.binary(max_size=400))
def test_any_bytes_are_read(data: bytes) -> None:
    assert all(path.startswith("/") for path in executable_mappings(data))


@pytest.mark.parametrize(("text", "count"), [("0", 1), ("0-1", 2), ("0-3,8-11", 8), ("0,2,4", 3)])
def test_cpus_that_may_be_are_counted(tmp_path: Path, text: str, count: int) -> None:
    (tmp_path / "possible").write_text(text + "\n")

    assert possible_cpus(str(tmp_path / "possible")) == count


@pytest.mark.parametrize(
    ("release", "version"),
    [("6.18.44-fc", (6, 18)), ("5.8", (5, 8)), ("5.15-generic", (5, 15)), ("odd", (0, 0))],
)
def test_versions_of_kernels(release: str, version: tuple[int, int]) -> None:
    assert kernel_version(release) == version
