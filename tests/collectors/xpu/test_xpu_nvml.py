"""The true path through NVIDIA's binding, against a library that is not NVIDIA's."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from xpu_fake import HEALTHY, Host, build_library

from latencyprism.collectors.xpu.nvml import Nvml, throttle_names
from latencyprism.collectors.xpu.reading import Reading, UnavailableError


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
    opened = Nvml()
    yield opened
    opened.close()


def test_reads_a_healthy_gpu(nvml: Nvml, host: Host) -> None:
    host.gpus[0] |= {"reasons": 0x001 | 0x004 | 0x040, "pid": 4711}
    host.write()
    nvml.read_pcie()

    first, second = nvml.read()

    assert first == Reading(
        device="GPU-fake-0",
        vendor="nvidia",
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
        power_w=412.5,
        power_limit_w=700.0,
        ecc_corrected_total=10,
        ecc_uncorrected_total=0,
        pcie_rx_bytes_s=1_024_000.0,
        pcie_tx_bytes_s=2_048_000.0,
        pids=(4711,),
    )
    assert second.device == "GPU-fake-1"
    assert second.throttle_reasons == ()
    assert second.pids == ()


def test_bus_traffic_is_given_out_once(nvml: Nvml) -> None:
    assert nvml.read()[0].pcie_rx_bytes_s is None
    nvml.read_pcie()
    assert nvml.read()[0].pcie_rx_bytes_s == 1_024_000.0
    assert nvml.read()[0].pcie_rx_bytes_s is None


def test_what_is_not_told_is_none(nvml: Nvml, host: Host) -> None:
    host.gpus[0] = {}
    host.write()
    nvml.read_pcie()

    reading = nvml.read()[0]

    assert reading == Reading(device="GPU-fake-0", vendor="nvidia", name="Fake GPU")


@pytest.mark.parametrize("code", [3, 4, 6, 13, 25])
def test_a_refused_call_costs_its_value_only(nvml: Nvml, host: Host, code: int) -> None:
    host.gpus[0] |= {"error.power": code}
    host.write()

    reading = nvml.read()[0]

    assert (reading.error, reading.power_w, reading.temperature_c) == (None, None, 61)


@pytest.mark.parametrize("function", ["memory2", "temperature2", "reasons2"])
def test_drivers_that_lack_the_newer_calls(nvml: Nvml, host: Host, function: str) -> None:
    before = nvml.read()[0]
    host.gpus[0] |= {f"error.{function}": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
    host.write()

    assert nvml.read()[0] == before


def test_a_gpu_that_falls_off_the_bus_is_told_with_its_last_error(nvml: Nvml, host: Host) -> None:
    host.gpus[1] |= {"lost": 1, "xid": 79, "events": 1}
    host.write()
    nvml.read_pcie()

    first, second = nvml.read()

    assert first.error is None
    assert second == Reading(
        device="GPU-fake-1", vendor="nvidia", name="Fake GPU", error="GPU is lost", xid=79
    )
    assert nvml.read()[1].xid is None


def test_a_lost_gpu_comes_back_when_the_driver_is_opened_anew(nvml: Nvml, host: Host) -> None:
    host.gpus[1]["lost"] = 1
    host.write()
    nvml.reopen()
    nvml.read_pcie()
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

    assert all(reading.error for reading in nvml.read())
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
    assert throttle_names(0x001) == ()
    assert throttle_names(0x008 | 1 << 40) == ("hw_slowdown", "other")


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
def test_without_the_library_the_source_is_unavailable_in_words() -> None:
    code = "from latencyprism.collectors.xpu.source import unavailable; print(unavailable())"

    assert "libnvidia-ml.so.1 was not found" in run_python(code)
