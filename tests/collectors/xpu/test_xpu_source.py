"""The source's threads with ways of reading that the test controls."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest
from xpu_fake import Heard

from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.xpu.config import XpuConfig
from latencyprism.collectors.xpu.poller import Way
from latencyprism.collectors.xpu.reading import Reading
from latencyprism.collectors.xpu.source import Claims, XpuSource

GPU = Reading(device="GPU-1", vendor="nvidia", name="H200", utilisation=0.5)
CONFIG = XpuConfig(interval_ms=20, slow_interval_ms=100, retry_ms=1000)


class MemoryDevices:
    """Devices of which the test says what they are."""

    def __init__(self, *readings: Reading) -> None:
        self.readings = list(readings)
        self.reads = self.opened = self.reopened = self.closed = 0
        self.failure: Exception | None = None
        self.hang: threading.Event | None = None
        self.counts: Mapping[str, int] = {"refused": 3}

    def open(self) -> "MemoryDevices":
        self.opened += 1
        return self

    def read(self) -> list[Reading]:
        if self.hang:
            self.hang.wait(20)
        if self.failure:
            raise self.failure
        self.reads += 1
        return self.readings

    def reopen(self) -> None:
        self.reopened += 1

    def close(self) -> None:
        self.closed += 1


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextmanager
def running(
    *devices: MemoryDevices, config: XpuConfig = CONFIG
) -> Iterator[tuple[XpuSource, Heard]]:
    """The source in its thread, its ways named w0, w1, ... from near to far."""
    ways = [Way(f"w{place}", one.open, 0.02) for place, one in enumerate(devices)]
    source = XpuSource([], config, host="gpu-host", ways=lambda _: ways)
    heard, stop = Heard(), threading.Event()
    thread = threading.Thread(target=source.run, args=(heard, stop))
    thread.start()
    try:
        yield source, heard
    finally:
        stop.set()
        thread.join(5)
        assert not thread.is_alive()


def test_samples_and_watermarks_at_every_interval() -> None:
    devices = MemoryDevices(GPU)
    with running(devices) as (source, heard):
        until(lambda: len(heard.samples) >= 5 and len(heard.watermarks) >= 5)
        assert source.counts["w0 refused"] == 3

    until(lambda: devices.closed == 1)
    assert {instance for instance, _ in heard.watermarks} == {"gpu-host"}
    assert all(sample.device == "GPU-1" for sample in heard.samples)
    assert source.counts["samples"] == len(heard.samples)


def test_no_sample_is_earlier_than_a_promise_before_it() -> None:
    with running(MemoryDevices(GPU), MemoryDevices(replace(GPU, device="GPU-2"))) as (_, heard):
        until(lambda: len(heard.order) >= 60)

    promised = 0
    for kind, at_ns in heard.order:
        if kind == "watermark":
            promised = at_ns
        assert at_ns >= promised


def test_a_device_that_two_ways_see_is_told_by_the_nearer_one() -> None:
    near = MemoryDevices(replace(GPU, aliases=frozenset({"0000:3b:00.0"})))
    far = MemoryDevices(
        replace(GPU, utilisation=0.1),
        Reading(device="0", vendor="nvidia", aliases=frozenset({"0000:3b:00.0"})),
        replace(GPU, device="GPU-9"),
    )
    with running(near, far) as (source, heard):
        until(lambda: near.reads > 5 and far.reads > 5)
        heard.samples.clear()
        until(lambda: len(heard.samples) > 10)
        assert source.counts["duplicates"] > 5

    assert {(s.device, s.utilisation) for s in heard.samples} == {("GPU-1", 0.5), ("GPU-9", 0.5)}


def test_a_claim_ends_when_the_nearer_way_no_longer_tells() -> None:
    now = [0.0]
    claims = Claims(["nvidia", "exporter"], lambda: now[0])
    assert claims.take("exporter", [GPU]) == [GPU]
    assert claims.take("nvidia", [GPU]) == [GPU]
    assert claims.take("exporter", [GPU]) == []
    now[0] = 11.0
    assert claims.take("exporter", [GPU]) == [GPU]


def test_two_chips_of_one_card_are_both_told() -> None:
    card = frozenset({"0000:c1:00.0"})
    chips = [Reading(device=name, vendor="huawei", aliases=card) for name in ("die-1", "die-2")]

    assert Claims(["exporter"], lambda: 0.0).take("exporter", chips) == chips


def test_a_crash_of_one_way_costs_only_its_devices() -> None:
    good, bad = MemoryDevices(GPU), MemoryDevices(replace(GPU, device="GPU-2"))
    bad.failure = RuntimeError("a bug")
    with running(bad, good) as (source, heard):
        until(lambda: len(heard.samples) > 5)
        assert source.counts["w0 crashes"] == 1

    assert {sample.device for sample in heard.samples} == {"GPU-1"}
    assert bad.closed == bad.opened == 1


def test_the_only_way_is_opened_again_after_a_crash() -> None:
    devices = MemoryDevices(GPU)
    with running(devices) as (_, heard):
        until(lambda: devices.reads > 2)
        devices.failure = RuntimeError("a bug")
        until(lambda: devices.closed == 1)
        devices.failure = None
        heard.samples.clear()
        until(lambda: len(heard.samples) > 2)

    assert devices.opened == 2


def test_a_way_that_fails_is_read_again_and_says_nothing_of_its_devices() -> None:
    devices, other = MemoryDevices(GPU), MemoryDevices(replace(GPU, device="GPU-2"))
    with running(devices, other) as (source, heard):
        until(lambda: devices.reads > 2)
        devices.failure = OSError("the exporter is away")
        until(lambda: source.counts.get("w0 failures", 0) > 3)
        devices.failure, seen = None, devices.reads
        until(lambda: devices.reads > seen + 2)

    assert devices.opened == 1
    assert not any(sample.error for sample in heard.samples)


def test_devices_are_looked_for_again_while_one_fails() -> None:
    devices = MemoryDevices(replace(GPU, error="GPU is lost", utilisation=None))
    with running(devices) as (source, heard):
        until(lambda: devices.reopened >= 1)
        assert source.counts["device_errors"] > 0

    assert heard.samples[0].error == "GPU is lost"


def test_a_driver_that_hangs_is_told_as_an_error_of_its_devices() -> None:
    devices, other = MemoryDevices(GPU), MemoryDevices(replace(GPU, device="GPU-2"))
    config = replace(CONFIG, silence_ms=1000)
    with running(devices, other, config=config) as (_, heard):
        until(lambda: devices.reads > 2)
        devices.hang = threading.Event()
        until(lambda: any(sample.error for sample in heard.samples))
        devices.hang.set()

    silent = next(sample for sample in heard.samples if sample.error)
    assert (silent.device, silent.name, silent.utilisation) == ("GPU-1", "H200", None)
    assert silent.error is not None
    assert "hangs" in silent.error


def test_a_hanging_driver_does_not_keep_the_source_from_ending() -> None:
    devices = MemoryDevices(GPU)
    devices.hang = threading.Event()
    began = time.monotonic()
    with running(devices, MemoryDevices(replace(GPU, device="GPU-2"))) as (_, heard):
        until(lambda: len(heard.samples) > 2)
        began = time.monotonic()

    assert time.monotonic() - began < 0.5
    devices.hang.set()


def test_without_devices_the_source_says_why() -> None:
    def none() -> MemoryDevices:
        raise UnavailableError("no driver here")

    ways = [Way("nvidia", none, 0.02), Way("tpu", none, 0.02)]
    source = XpuSource([], CONFIG, ways=lambda _: ways)

    with pytest.raises(UnavailableError, match="nvidia: no driver here; tpu: no driver here"):
        source.run(Heard(), threading.Event())


def test_a_way_that_finds_nothing_yet_is_tried_again() -> None:
    tries: list[int] = []

    def later() -> MemoryDevices:
        tries.append(1)
        if len(tries) < 2:
            raise UnavailableError("the driver is not loaded")
        return MemoryDevices(replace(GPU, device="GPU-2"))

    ways = [Way("late", later, 0.02), Way("there", MemoryDevices(GPU).open, 0.02)]
    source = XpuSource([], CONFIG, host="gpu-host", ways=lambda _: ways)
    heard, stop = Heard(), threading.Event()
    thread = threading.Thread(target=source.run, args=(heard, stop))
    thread.start()
    until(lambda: any(sample.device == "GPU-2" for sample in heard.samples))
    stop.set()
    thread.join(5)
