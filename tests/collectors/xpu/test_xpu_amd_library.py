"""The true path through AMD's module, against a library that is not AMD's."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from xpu_sysfs import amd_card, write

from latencyprism.collectors.xpu.amd import Amd
from latencyprism.collectors.xpu.amd_library import AmdLibrary
from latencyprism.collectors.xpu.gpu_metrics import GpuMetrics

READ = """
import sys
from amdsmi import amdsmi_wrapper
from latencyprism.collectors.xpu.amd import Amd

def fill(spent):
    table = amdsmi_wrapper.amdsmi_gpu_metrics_t.from_buffer_copy(b"\\xff" * size)
    table.ppt_residency_acc, table.prochot_residency_acc = spent, 1
    table.current_gfxclks[0], table.current_gfxclks[1] = 1300, 1900
    table.current_socket_power, table.pcie_replay_count_acc = 611, 9
    table.xgmi_read_data_acc[0] = 4
    with open(sys.argv[2], "wb") as file:
        file.write(bytes(table))

import ctypes
size = ctypes.sizeof(amdsmi_wrapper.amdsmi_gpu_metrics_t)
amd = Amd(sys.argv[1], slow_interval_s=0)
for spent in (5, 6, 6):
    fill(spent)
    (reading,) = amd.read()
    print(reading.throttle_reasons, reading.core_clock_mhz, reading.pcie_replays_total,
          reading.link_bytes_total)
amd.close()
"""


@pytest.fixture
def rocm(tmp_path: Path) -> Path:
    """A folder as ROCm is installed in, with a library that has every function of the module."""
    found, compiler = find_spec("amdsmi"), shutil.which("cc")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the module amdsmi is not installed")
    if compiler is None:
        pytest.skip("there is no C compiler to build the fake library with")
    wrapper = Path(found.submodule_search_locations[0]) / "amdsmi_wrapper.py"
    fake = Path(__file__).with_name("fake_amdsmi.c")
    wanted = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", wrapper.read_text()))
    written = set(re.findall(r"^int (\w+)\(", fake.read_text(), re.MULTILINE))
    rest = tmp_path / "rest.c"
    rest.write_text("".join(f"int {name}(void) {{ return 2; }}\n" for name in wanted - written))
    library = tmp_path / "rocm/lib/libamd_smi.so"
    library.parent.mkdir(parents=True)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", fake, rest, "-o", library], check=True)
    return tmp_path / "rocm"


def unknown_table(sys_root: Path) -> None:
    write(amd_card(sys_root) / "gpu_metrics", b"\x10\x00\x01\x09" + bytes(12))


def test_a_table_that_is_not_known_is_asked_of_the_library(rocm: Path, tmp_path: Path) -> None:
    unknown_table(tmp_path / "sys")
    values = tmp_path / "values"

    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "sys"), str(values)],
        env={**os.environ, "ROCM_PATH": str(rocm), "FAKE_AMDSMI": str(values)},
        capture_output=True,
        text=True,
        check=True,
    )

    # The first reading finds that the table is unknown, the second has nothing to compare with.
    assert done.stdout.splitlines() == [
        "None 1800.0 4 None",
        "None 1900 9 4096",
        "() 1900 9 4096",
    ]


class MemoryLibrary(AmdLibrary):
    """A library that the test fills."""

    def __init__(self) -> None:
        super().__init__(None)
        self.spent = 0
        self.closed = False

    def metrics(self, address: str) -> GpuMetrics | None:
        self.spent += 1
        return GpuMetrics(residencies={"power_cap": self.spent}) if address else None

    def close(self) -> None:
        self.closed = True


def test_reasons_of_the_library_stay_until_it_is_asked_again(tmp_path: Path) -> None:
    unknown_table(tmp_path)
    library, now = MemoryLibrary(), [0.0]
    amd = Amd(str(tmp_path), monotonic_s=lambda: now[0], load_library=lambda: library)
    told = []
    for now[0] in (0.0, 1.0, 2.0, 2.2, 2.4):
        told.append(amd.read()[0].throttle_reasons)
    amd.close()

    assert told == [None, None, ("power_cap",), ("power_cap",), ("power_cap",)]
    assert library.closed


def test_without_the_library_nothing_is_lost_but_its_values(tmp_path: Path) -> None:
    # A module that fails as AMD's does where its shared library is missing.
    broken = tmp_path / "amdsmi.py"
    broken.write_text("print('Unable to find libamd_smi.so')\n{}['libamd_smi.so']\n")
    code = (
        "from latencyprism.collectors.xpu.amd_library import AmdLibrary; print(AmdLibrary.load())"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == "None"
