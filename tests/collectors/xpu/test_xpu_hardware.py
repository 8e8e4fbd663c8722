"""The same code on the accelerators that this machine really has; skipped where it has none."""

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import get_args

import pytest
from xpu_fake import Heard

from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.xpu import config as settings
from latencyprism.collectors.xpu.config import XpuConfig
from latencyprism.collectors.xpu.reading import Devices, Reading
from latencyprism.collectors.xpu.source import XpuSource
from latencyprism.collectors.xpu.ways import ways
from latencyprism.schemas.codec import Codec, Pack
from latencyprism.schemas.topics import TELEMETRY_XPU

WAYS: tuple[settings.Way, ...] = get_args(settings.Way)
BUDGET_S = 0.02
"""CPU time that reading one device may take, generous to slow machines."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> settings.Way:
    name: settings.Way = request.param
    return name


@pytest.fixture
def devices(way: settings.Way) -> Iterator[Devices]:
    try:
        opened = ways(XpuConfig(ways=(way,)))[0].open()
    except UnavailableError as missing:
        pytest.skip(f"no such hardware here: {missing}")
    yield opened
    opened.close()


def plausible(reading: Reading) -> bool:
    """Whether the values that are told can be true of any accelerator."""
    ranges = (
        (reading.utilisation, 0, 1),
        (reading.memory_utilisation, 0, 1),
        (reading.memory_used_bytes, 0, reading.memory_total_bytes or 1 << 50),
        (reading.memory_total_bytes, 1 << 20, 1 << 50),
        (reading.core_clock_mhz, 0, 10_000),
        (reading.memory_clock_mhz, 0, 50_000),
        (reading.temperature_c, -20, 130),
        (reading.memory_temperature_c, -20, 130),
        (reading.power_w, 0, 5_000),
        (reading.power_limit_w, 1, 5_000),
        (reading.pcie_gen, 1, 7),
        (reading.pcie_width, 1, 32),
    )
    return all(value is None or low <= value <= high for value, low, high in ranges)


def test_what_is_told_is_plausible_and_totals_only_grow(devices: Devices) -> None:
    before = devices.read()
    time.sleep(1.2)
    after = devices.read()

    assert [reading.device for reading in before] == [reading.device for reading in after]
    for old, new in zip(before, after, strict=True):
        assert plausible(new), new
        for name in ("energy_total_j", "link_bytes_total", "pcie_replays_total"):
            was, now = getattr(old, name), getattr(new, name)
            assert was is None or now is None or now >= was, name


def test_reading_is_cheap(devices: Devices) -> None:
    count = len(devices.read())
    began = time.process_time()
    for _ in range(10):
        devices.read()

    assert (time.process_time() - began) / 10 / count < BUDGET_S


def test_samples_of_the_source_can_be_published(way: settings.Way, devices: Devices) -> None:
    expected = {reading.device for reading in devices.read()}
    heard, stop = Heard(), threading.Event()
    source = XpuSource([], XpuConfig(ways=(way,)))
    thread = threading.Thread(target=source.run, args=(heard, stop))
    thread.start()
    time.sleep(3)
    stop.set()
    thread.join(5)

    assert {sample.device for sample in heard.samples} == expected
    pack = Pack(
        agent="a", boot_ns=1, sequence=0, watermark_ns=1, samples=tuple(heard.samples[:100])
    )
    codec = Codec()
    assert codec.decode(TELEMETRY_XPU, codec.encode(TELEMETRY_XPU, pack)) == pack


def test_nvidia_agrees_with_its_own_program() -> None:
    program = shutil.which("nvidia-smi")
    if program is None:
        pytest.skip("there is no nvidia-smi here to compare with")
    asked = "uuid,name,memory.total,clocks.max.sm,pcie.link.width.current"
    answer = subprocess.run(
        [program, f"--query-gpu={asked}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        pytest.skip(f"nvidia-smi fails here: {answer.stdout.strip() or answer.stderr.strip()}")
    opened = ways(XpuConfig(ways=("nvidia",)))[0].open()
    try:
        told = {reading.device: reading for reading in opened.read()}
    finally:
        opened.close()

    for line in answer.stdout.splitlines():
        uuid, name, memory_mib, clock_mhz, width = (part.strip() for part in line.split(","))
        reading = told[uuid]
        assert reading.name == name
        assert reading.memory_total_bytes == int(memory_mib) << 20
        assert str(reading.core_clock_max_mhz) == clock_mhz
        assert str(reading.pcie_width) == width
