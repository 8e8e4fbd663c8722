"""The source with all its true ways at once, each against the fake of its own."""

import ctypes
import threading
import time
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
from xpu_fake import HEALTHY, SLICE, Heard, Host, build_library
from xpu_pages import served
from xpu_sysfs import amd_card, intel_card, write
from xpu_tpu import Runtime, serving, tpu_machine

from latencyprism.collectors.xpu.config import XpuConfig
from latencyprism.collectors.xpu.source import XpuSource

PAGE = b"""DCGM_FI_DEV_GPU_TEMP{UUID="GPU-fake-0"} 1
DCGM_FI_DEV_GPU_TEMP{UUID="GPU-other-node"} 2
DCGM_FI_DEV_FB_USED{UUID="GPU-fake-0",GPU_I_ID="7"} 3
gpu_edge_temperature{gpu_uuid="x",serial_number="692409005400"} 4
xpum_power_watts{pci_bdf="0000:03:00.0",uuid="u"} 5
npu_chip_info_temperature{id="0",vdie_id="die"} 6
"""


def test_every_device_is_told_once_and_by_the_nearest_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(build_library(tmp_path))))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "gpus"))
    host = Host(tmp_path / "gpus", [{**HEALTHY, "mig": 1}, {**HEALTHY, "field.138.all": 1}])
    host.slices = {0: SLICE}
    host.write()
    sys = tmp_path / "sys"
    amd_card(sys)
    intel_card(sys)
    tpu_machine(sys)
    heard, stop = Heard(), threading.Event()
    with serving(Runtime()) as runtime, served({"/metrics": PAGE}) as url:
        config = XpuConfig(
            interval_ms=20,
            slow_interval_ms=100,
            sys=str(sys),
            exporters=(url,),
            tpu_addresses=(runtime,),
        )
        source = XpuSource([], config, host="gpu-host")
        thread = threading.Thread(target=source.run, args=(heard, stop))
        thread.start()
        deadline = time.monotonic() + 15
        expected = {
            "GPU-fake-0",
            "MIG-fake-100",
            "GPU-fake-1",
            "0ce0c6d49f5b0d86",
            "0000:03:00.0",
            *(f"{runtime}/{device}" for device in range(4)),
            "GPU-other-node",
            "die",
        }
        while not expected <= {sample.device for sample in heard.samples[-200:]}:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        host.gpus[1]["lost"] = 1
        host.write()
        write(sys / "class/drm/card1/device/tile0/gt0/freq0/throttle/reason_thermal", 1)
        heard.samples.clear()
        while not any(sample.error for sample in heard.samples) or len(heard.samples) < 100:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        stop.set()
        thread.join(5)

    assert not thread.is_alive()
    told = {sample.device: sample for sample in heard.samples}
    assert told.keys() == expected
    assert (told["GPU-fake-1"].error, told["GPU-fake-0"].temperature_c) == ("GPU is lost", 61)
    assert (told["MIG-fake-100"].parent, told["MIG-fake-100"].memory_used_bytes) == (
        "GPU-fake-0",
        SLICE["memory_used"],
    )
    assert (told["0000:03:00.0"].throttle_reasons, told["0000:03:00.0"].power_w) == (
        ("thermal",),
        0,
    )
    assert told["GPU-other-node"].temperature_c == 2
    counts = source.counts
    assert counts["duplicates"] > 0
    assert counts["device_errors"] > 0
    assert not any(kind.endswith((" crashes", " failures")) for kind in counts)


def test_a_source_of_exporters_alone_waits_for_them() -> None:
    heard, stop = Heard(), threading.Event()
    config = replace(
        XpuConfig(interval_ms=20, slow_interval_ms=100), ways=(), exporters=("http://127.0.0.1:1",)
    )
    source = XpuSource([], config, host="gpu-host")
    thread = threading.Thread(target=source.run, args=(heard, stop))
    thread.start()
    deadline = time.monotonic() + 10
    while source.counts.get("exporter http://127.0.0.1:1 failures", 0) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stop.set()
    thread.join(5)

    assert not heard.samples
