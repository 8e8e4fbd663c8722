"""A node with one part's extra does not need the libraries of the others."""

import subprocess
import sys

import pytest

HEAVY = ("numpy", "sklearn", "scipy", "faust", "aiokafka", "chdb", "clickhouse_connect", "aiohttp",
         "uvicorn", "starlette", "pyarrow", "httptools", "pynvml")  # fmt: skip
NEEDED = {
    "latencyprism.cli": (),
    "latencyprism.collectors.agent": ("httptools", "pynvml"),
    "latencyprism.routers.consumer": (),
    "latencyprism.routers.proxy": ("aiohttp", "uvicorn", "httptools"),
    "latencyprism.sinks.writer": ("clickhouse_connect", "numpy", "pyarrow"),
    "latencyprism.streams.worker": ("numpy", "sklearn", "scipy", "faust", "aiokafka"),
}


@pytest.mark.parametrize("module", NEEDED)
def test_a_part_loads_without_the_libraries_of_others(module: str) -> None:
    absent = [name for name in HEAVY if name not in NEEDED[module]]
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in absent)
    code = f"import sys; {blocked}; import {module}"

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
