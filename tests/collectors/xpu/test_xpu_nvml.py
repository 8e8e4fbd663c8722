"""The true path through NVIDIA's binding, against a library that is not NVIDIA's."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from xpu_fake import HEALTHY, SLICE, Host, build_library

from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.xpu.nvml import Nvml
from latencyprism.collectors.xpu.reading import Reading
from latencyprism.collectors.xpu.reasons import clocks_event_names


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def host(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Two healthy GPUs behind the binding, as if the loader had found the library."""
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "gpus"))
    found = Host(tmp_path / "gpus", [dict(HEALTHY), dict(HEALTHY)])
    found.write()
    return found


@pytest.fixture
def nvml(host: Host) -> Iterator[Nvml]:
    opened = Nvml(rescan_s=0)
    yield opened
    opened.close()


def test_reads_a_healthy_gpu(nvml: Nvml, host: Host) -> None:
    host.gpus[0] |= {"reasons": 0x001 | 0x004 | 0x040, "pid": 4711, "pid2": 4712}
    host.write()
    nvml.read_slow()

    first, second = nvml.read()

    assert first == Reading(
        device="GPU-fake-0",
        vendor="nvidia",
        aliases=frozenset({"0000:3b:00.0"}),
        name="Fake GPU",
        utilisation=0.87,
        memory_utilisation=0.4,
        memory_used_bytes=60 << 30,
        memory_total_bytes=80 << 30,
        core_clock_mhz=1755,
        core_clock_max_mhz=1980,
        memory_clock_mhz=2619,
        throttle_reasons=("power_cap", "hw_thermal"),
        temperature_c=61,
        memory_temperature_c=74,
        power_w=412.5,
        power_limit_w=700.0,
        ecc_corrected_total=10,
        ecc_uncorrected_total=0,
        pcie_rx_bytes_s=1_024_000.0,
        pcie_tx_bytes_s=2_048_000.0,
        pcie_replays_total=3,
        pcie_gen=5,
        pcie_width=16,
        pids=(4711, 4712),
    )
    assert second.device == "GPU-fake-1"
    assert second.throttle_reasons == ()
    assert second.pids == ()


def test_bus_traffic_is_given_out_once(nvml: Nvml) -> None:
    assert nvml.read()[0].pcie_rx_bytes_s is None
    nvml.read_slow()
    assert nvml.read()[0].pcie_rx_bytes_s == 1_024_000.0
    assert nvml.read()[0].pcie_rx_bytes_s is None


def test_what_is_not_told_is_none(host: Host) -> None:
    host.gpus[0] = {}
    host.write()
    nvml = Nvml()
    nvml.read_slow()

    reading = nvml.read()[0]

    assert reading == Reading(
        device="GPU-fake-0",
        vendor="nvidia",
        aliases=frozenset({"0000:3b:00.0"}),
        name="Fake GPU",
    )
    nvml.close()


def link_fields(**values: int) -> dict[str, int]:
    return {f"field.{name.removeprefix('f').replace('_', '.')}": n for name, n in values.items()}


@pytest.mark.parametrize(
    ("fields", "traffic", "errors"),
    [
        (  # up to Ampere: totals of all links
            link_fields(f138_all=10, f139_all=20, f38=1, f45=2, f52=4, f59=8),
            30 * 1024,
            15,
        ),
        (  # Hopper: errors link by link
            link_fields(f138_all=1, f139_all=1, f161=1, f161_1=2, f162_1=4, f163_17=8),
            2 * 1024,
            15,
        ),
        (link_fields(f202=5, f204=6, f202_1=7, f208=1, f219_1=2, f215_1=4), 18, 7),  # Blackwell
        (link_fields(f138_all=1, f139_all=2), 3 * 1024, None),
        ({}, None, None),
    ],
)
def test_link_counters_of_each_generation(
    host: Host, fields: dict[str, int], traffic: int | None, errors: int | None
) -> None:
    host.gpus[0] |= fields
    host.write()
    nvml = Nvml()

    reading = nvml.read()[0]

    assert (reading.link_bytes_total, reading.link_errors_total) == (traffic, errors)
    nvml.close()


def test_a_link_that_no_longer_tells_its_errors_makes_the_total_unknown(host: Host) -> None:
    host.gpus[0] |= link_fields(f161=5, f161_1=6)
    host.write()
    nvml = Nvml()
    assert nvml.read()[0].link_errors_total == 11

    del host.gpus[0]["field.161.1"]
    host.write()
    nvml.read_slow()

    assert nvml.read()[0].link_errors_total is None
    nvml.close()


def test_mig_slices_are_devices_with_a_parent(nvml: Nvml, host: Host) -> None:
    host.gpus[0]["mig"] = 1
    host.slices = {0: {**SLICE, "pid": 11}, 3: {**SLICE, "memory_used": 1}}
    host.write()

    whole, first, last, other = nvml.read()

    assert (whole.device, whole.parent, other.device) == ("GPU-fake-0", None, "GPU-fake-1")
    assert first == Reading(
        device="MIG-fake-100",
        vendor="nvidia",
        aliases=frozenset({"GPU-fake-0/7"}),
        parent="GPU-fake-0",
        name="Fake GPU MIG 1g.10gb",
        memory_used_bytes=4 << 30,
        memory_total_bytes=10 << 30,
        pids=(11,),
    )
    assert (last.device, last.memory_used_bytes, last.utilisation) == ("MIG-fake-103", 1, None)


def test_mig_slices_come_and_go(nvml: Nvml, host: Host) -> None:
    host.gpus[0]["mig"] = 1
    host.slices = {0: SLICE}
    host.write()
    assert len(nvml.read()) == 3
    host.slices = {1: {**SLICE, "pid": 12}}
    host.write()
    nvml.read()
    nvml.read_slow()

    assert [(r.device, r.pids) for r in nvml.read() if r.parent] == [("MIG-fake-101", (12,))]
    host.gpus[0]["mig"] = 0
    host.write()
    assert len(nvml.read()) == 2


def test_slices_of_a_lost_gpu_are_told_by_the_gpu(nvml: Nvml, host: Host) -> None:
    host.gpus[0]["mig"] = 1
    host.slices = {0: SLICE}
    host.write()
    nvml.read()
    host.gpus[0]["lost"] = 1
    host.write()
    nvml.read_slow()

    assert [(r.device, r.error) for r in nvml.read()] == [
        ("GPU-fake-0", "GPU is lost"),
        ("GPU-fake-1", None),
    ]


def test_its_own_thread_reads_what_is_dear(host: Host) -> None:
    nvml = Nvml(0.01)
    deadline = time.monotonic() + 5
    while (reading := nvml.read()[0]).pcie_rx_bytes_s is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)

    assert reading.pcie_tx_bytes_s == 2_048_000.0
    nvml.close()
    assert nvml.read()[0].error is not None


@pytest.mark.parametrize("code", [3, 4, 6, 13, 25])
def test_a_refused_call_costs_its_value_only(nvml: Nvml, host: Host, code: int) -> None:
    host.gpus[0] |= {"error.power": code}
    host.write()

    reading = nvml.read()[0]

    assert (reading.error, reading.power_w, reading.temperature_c) == (None, None, 61)


def test_numbers_that_mean_not_available_are_none(nvml: Nvml, host: Host) -> None:
    missing = (1 << 64) - 1
    host.gpus[0] |= {"memory_used": missing, "ecc_corrected": missing, "power": (1 << 32) - 1}
    host.gpus[0] |= {"field.94": missing}
    host.write()
    nvml.read_slow()

    reading = nvml.read()[0]

    assert (reading.memory_used_bytes, reading.ecc_corrected_total, reading.power_w) == (None,) * 3
    assert (reading.pcie_replays_total, reading.memory_total_bytes) == (None, 80 << 30)


@pytest.mark.parametrize("function", ["memory2", "temperature2", "reasons2"])
def test_drivers_that_lack_the_newer_calls(nvml: Nvml, host: Host, function: str) -> None:
    before = nvml.read()[0]
    host.gpus[0] |= {f"error.{function}": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
    host.write()

    assert nvml.read()[0] == before


def test_a_gpu_that_falls_off_the_bus_is_told_with_its_last_error(nvml: Nvml, host: Host) -> None:
    host.gpus[1] |= {"lost": 1, "xid": 79, "events": 1}
    host.write()
    nvml.read_slow()

    first, second = nvml.read()

    assert first.error is None
    assert second == Reading(
        device="GPU-fake-1",
        vendor="nvidia",
        aliases=frozenset({"0000:3c:00.0"}),
        name="Fake GPU",
        error="GPU is lost",
        xid=79,
    )
    assert nvml.read()[1].xid is None


@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_UNKNOWN,
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_TIMEOUT,
    ],
)
def test_a_failing_driver_is_a_fault_of_the_gpu(nvml: Nvml, host: Host, code: int) -> None:
    host.gpus[0]["error.clock"] = code
    host.write()

    first, second = nvml.read()

    assert first.error == str(pynvml.NVMLError(code))
    assert (first.device, first.utilisation, second.error) == ("GPU-fake-0", None, None)


def test_a_driver_that_was_unloaded_is_found_again(nvml: Nvml) -> None:
    pynvml.nvmlShutdown()
    assert [reading.error for reading in nvml.read()] == ["Uninitialized", "Uninitialized"]

    nvml.reopen()

    assert not any(reading.error for reading in nvml.read())


def test_a_lost_gpu_comes_back_when_the_driver_is_opened_anew(nvml: Nvml, host: Host) -> None:
    host.gpus[1]["lost"] = 1
    host.write()
    nvml.reopen()
    nvml.read_slow()
    assert [reading.error for reading in nvml.read()] == [
        None,
        "not found when the driver was opened again",
    ]

    host.gpus[1]["lost"] = 0
    host.write()
    nvml.reopen()

    assert [(r.device, r.error) for r in nvml.read()] == [
        ("GPU-fake-0", None),
        ("GPU-fake-1", None),
    ]


def test_a_driver_that_goes_away_is_an_error_of_every_gpu(nvml: Nvml, host: Host) -> None:
    host.host["error.init"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    host.write()

    nvml.reopen()

    assert {reading.error for reading in nvml.read()} == {"NVIDIA's kernel driver is not loaded"}
    host.host.clear()
    host.write()
    nvml.reopen()
    assert not any(reading.error for reading in nvml.read())


def test_only_the_last_xid_of_an_interval_counts(nvml: Nvml, host: Host) -> None:
    for number, xid in ((1, 13), (2, 48)):
        host.gpus[0] |= {"xid": xid, "events": number}
        host.write()
    assert nvml.read()[0].xid == 48
    assert nvml.read()[0].xid is None


def test_gpus_without_events_are_read_all_the_same(host: Host) -> None:
    host.gpus[0]["error.register"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    host.write()
    nvml = Nvml()

    assert nvml.read()[0].error is None
    nvml.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "driver is not loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot"),
        (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error"),
    ],
)
def test_a_driver_that_cannot_be_opened_says_why(host: Host, code: int, words: str) -> None:
    host.host["error.init"] = code
    host.write()

    with pytest.raises(UnavailableError, match=words):
        Nvml()


def test_a_host_without_gpus_says_so(host: Host) -> None:
    host.gpus.clear()
    host.write()

    with pytest.raises(UnavailableError, match="no GPU"):
        Nvml()


def test_bits_without_a_name_are_told() -> None:
    assert clocks_event_names(0x001) == ()
    assert clocks_event_names(0x008 | 1 << 40) == ("hw_slowdown", "other")


def run_python(code: str, **environment: str) -> str:
    """In a process of its own, whose loader has its own idea of what libraries there are."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_loader_finds_the_library_by_its_name(library: Path, host: Host) -> None:
    code = "from latencyprism.collectors.xpu.nvml import Nvml; print(Nvml().read()[1].device)"

    seen = run_python(code, LD_LIBRARY_PATH=str(library.parent), FAKE_NVML=str(host.path))

    assert seen == "GPU-fake-1"


@pytest.mark.skipif(
    bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="this host has a real NVIDIA driver"
)
def test_without_the_library_the_source_is_unavailable_in_words(tmp_path: Path) -> None:
    (card := tmp_path / "bus/pci/devices/0000:3b:00.0").mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    code = (
        "from latencyprism.collectors.xpu.config import XpuConfig;"
        "from latencyprism.collectors.xpu.source import unavailable;"
        f"print(unavailable(XpuConfig(ways=('nvidia',), sys={str(tmp_path)!r})))"
    )

    assert "libnvidia-ml.so.1 was not found" in run_python(code)
