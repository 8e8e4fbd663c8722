import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from xpu_fake import Heard

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.xpu.config import XpuConfig
from latencyprism.collectors.xpu.owners import Owners
from latencyprism.collectors.xpu.reading import Reading, UnavailableError
from latencyprism.collectors.xpu.source import Sampler, XpuSource, growth
from latencyprism.schemas.codec import Codec, Pack
from latencyprism.schemas.topics import TELEMETRY_XPU

GPU = Reading(
    device="GPU-1",
    vendor="nvidia",
    name="H200",
    utilisation=0.5,
    throttle_reasons=("power_cap",),
    ecc_corrected_total=10,
    ecc_uncorrected_total=1,
    pcie_rx_bytes_s=5.0,
    pids=(1, 2),
)


class FakeOwners(Owners):
    """Owners that are told instead of looked up."""

    def __init__(self, instances: dict[int, str]) -> None:
        super().__init__(Files(), ())
        self._instances = instances

    def refresh(self) -> None:
        """Nothing to look up."""


def sampler(instances: dict[int, str] | None = None) -> Sampler:
    return Sampler("gpu-host", FakeOwners(instances or {}))


def test_the_first_sample_has_no_growth() -> None:
    (sample,) = sampler().samples([GPU], 1000)

    assert (sample.ecc_corrected, sample.ecc_uncorrected, sample.interval_ns) == (None, None, None)
    assert (sample.instance, sample.host, sample.observed_at_ns) == ("gpu-host", "gpu-host", 1000)
    assert (sample.utilisation, sample.throttle_reasons, sample.pcie_rx_bytes_s) == (
        0.5,
        ("power_cap",),
        5.0,
    )
    pack = Pack(agent="a", boot_ns=1, sequence=0, watermark_ns=1, samples=(sample,))
    codec = Codec()
    assert codec.decode(TELEMETRY_XPU, codec.encode(TELEMETRY_XPU, pack)) == pack


def test_counters_become_growth() -> None:
    made = sampler()
    made.samples([GPU], 1000)

    (sample,) = made.samples([replace(GPU, ecc_corrected_total=13)], 3000)

    assert (sample.ecc_corrected, sample.ecc_uncorrected, sample.interval_ns) == (3, 0, 2000)


def test_growth_goes_on_over_a_time_when_the_device_could_not_be_read() -> None:
    made = sampler({1: "a:1"})
    made.samples([GPU], 1000)
    lost = Reading(device="GPU-1", vendor="nvidia", error="GPU is lost", xid=79)

    (during,) = made.samples([lost], 2000)
    (after,) = made.samples([replace(GPU, ecc_corrected_total=14)], 5000)

    assert (during.instance, during.error, during.xid, during.utilisation) == (
        "a:1",
        "GPU is lost",
        79,
        None,
    )
    assert during.ecc_corrected is None
    assert (after.ecc_corrected, after.interval_ns) == (4, 4000)


@pytest.mark.parametrize(
    ("before", "now", "expected"), [(1, 3, 2), (5, 2, 2), (None, 2, None), (2, None, None)]
)
def test_growth(before: int | None, now: int | None, expected: int | None) -> None:
    assert growth(before, now) == expected


def test_a_device_is_told_to_each_server_that_uses_it() -> None:
    made = sampler({1: "b:2", 2: "a:1", 3: "c:3"})

    samples = made.samples([GPU, replace(GPU, device="GPU-2", pids=())], 1000)

    assert [(s.instance, s.device) for s in samples] == [
        ("a:1", "GPU-1"),
        ("b:2", "GPU-1"),
        ("gpu-host", "GPU-2"),
    ]
    assert made.instances == {"a:1", "b:2", "gpu-host"}


def test_owners_are_found_by_the_port_they_listen_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        owners = Owners(Files(), [("engine:1", port), ("nobody:2", 1)])
        assert owners.of([os.getpid()]) == []

        owners.refresh()

        assert owners.of([os.getpid(), 1 << 30]) == ["engine:1"]
    owners.refresh()
    assert owners.of([os.getpid()]) == []


class MemoryDevices:
    """Devices of which the test says what they are."""

    def __init__(self) -> None:
        self.readings = [GPU]
        self.reads = self.bus_reads = self.reopened = 0
        self.closed = False
        self.failure: Exception | None = None

    def read(self) -> list[Reading]:
        if self.failure:
            raise self.failure
        self.reads += 1
        return self.readings

    def read_pcie(self) -> None:
        self.bus_reads += 1

    def reopen(self) -> None:
        self.reopened += 1

    def close(self) -> None:
        self.closed = True


def run(devices: MemoryDevices, until: Callable[[Heard], bool]) -> Heard:
    """The source in its thread until something was heard."""
    heard, stop = Heard(), threading.Event()
    config = XpuConfig(interval_ms=20, pcie_interval_ms=100, retry_ms=1000)
    source = XpuSource([], config, host="gpu-host", open_devices=lambda: devices)
    thread = threading.Thread(target=source.run, args=(heard, stop))
    thread.start()
    deadline = time.monotonic() + 10
    try:
        while not until(heard):
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        stop.set()
        thread.join(5)
    return heard


def test_samples_then_watermark_at_every_interval() -> None:
    devices = MemoryDevices()

    heard = run(devices, lambda heard: len(heard.watermarks) >= 5)

    assert devices.closed
    assert devices.bus_reads <= devices.reads
    for sample, (instance, watermark_ns) in zip(heard.samples, heard.watermarks, strict=True):
        assert (instance, watermark_ns) == ("gpu-host", sample.observed_at_ns)
    gaps = [sample.interval_ns for sample in heard.samples[1:]]
    assert all(gap is not None and gap >= 10_000_000 for gap in gaps)


def test_bus_traffic_is_measured_beside_the_loop() -> None:
    devices = MemoryDevices()

    run(devices, lambda _: devices.bus_reads >= 2)

    assert devices.reads > devices.bus_reads


def test_the_driver_is_opened_anew_while_a_device_fails() -> None:
    devices = MemoryDevices()
    devices.readings = [replace(GPU, error="GPU is lost")]

    heard = run(devices, lambda _: devices.reopened >= 1)

    assert heard.samples[0].error == "GPU is lost"


def test_a_crash_gives_the_devices_back() -> None:
    devices = MemoryDevices()
    devices.failure = RuntimeError("a bug")
    source = XpuSource([], XpuConfig(), open_devices=lambda: devices)

    with pytest.raises(RuntimeError, match="a bug"):
        source.run(Heard(), threading.Event())

    assert devices.closed


def test_without_devices_the_source_says_why() -> None:
    def none() -> MemoryDevices:
        raise UnavailableError("no driver here")

    with pytest.raises(UnavailableError, match="no driver here"):
        XpuSource([], XpuConfig(), open_devices=none).run(Heard(), threading.Event())
