"""Which libraries of a kind a process has loaded, and how to reach their files from here. Pure but
for reading ``/proc``.
"""

import re
from typing import Final

from latencyprism.collectors.host.files import Files

TLS_LIBRARY: Final = re.compile(
    r"libssl[.\-].*|libssl3.*|_ssl\..*|libpython3.*|python3.*|libboringssl.*"
)
"""OpenSSL and its like, by itself or inside an interpreter that was linked with it."""
CUDA_RUNTIME: Final = re.compile(r"libcudart[.\-].*")
CUDA_DRIVER: Final = re.compile(r"libcuda\.so.*")

MAX_LIBRARIES: Final = 8
"""Files of one kind of one process."""


def executable_mappings(maps: bytes) -> list[str]:
    """Paths of the files with code, from /proc/PID/maps, each once, in order.

    Deleted files are left out: nothing can be attached to them by name.
    """
    found: dict[str, None] = {}
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if len(fields) < 6 or b"x" not in fields[1] or not fields[5].startswith(b"/"):
            continue
        path = fields[5].decode(errors="surrogateescape")
        if not path.endswith(" (deleted)"):
            found[path] = None
    return list(found)


def libraries(files: Files, pid: int, kind: re.Pattern[str]) -> list[str]:
    """Paths of the libraries of a kind that a process has loaded, at most ``MAX_LIBRARIES``.

    They lead through ``/proc/PID/root``, into another mount namespace too. None for a process that
    may not be read.
    """
    maps = files.read_once(f"{files.proc}/{pid}/maps")
    matching = [
        f"{files.proc}/{pid}/root{path}"
        for path in executable_mappings(maps or b"")
        if kind.fullmatch(path.rpartition("/")[2])
    ]
    return matching[:MAX_LIBRARIES]
