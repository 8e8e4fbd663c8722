import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.locate import Target
from latencyprism.collectors.xpu import sampler as sampling
from latencyprism.collectors.xpu.owners import Owners
from latencyprism.collectors.xpu.reading import Reading
from latencyprism.collectors.xpu.sampler import Sampler, growth
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
    pcie_replays_total=7,
    pcie_gen=5,
    pcie_width=16,
    link_bytes_total=1000,
    link_errors_total=2,
    memory_temperature_c=80,
    pids=(1, 2),
)
SECOND_NS = 1_000_000_000


class FakeOwners(Owners):
    """Owners that are told instead of looked up."""

    def __init__(self, instances: dict[int, str]) -> None:
        super().__init__(Files(), ())
        self._pids = instances


def sampler(instances: dict[int, str] | None = None) -> Sampler:
    return Sampler("gpu-host", FakeOwners(instances or {}))


def test_the_first_sample_has_no_growth() -> None:
    (sample,) = sampler().samples([GPU], 1000)

    assert (sample.ecc_corrected, sample.ecc_uncorrected, sample.interval_ns) == (None, None, None)
    assert (sample.link_bytes_s, sample.link_errors, sample.pcie_replays) == (None, None, None)
    assert (sample.instance, sample.host, sample.observed_at_ns) == ("gpu-host", "gpu-host", 1000)
    assert (sample.utilisation, sample.throttle_reasons, sample.pcie_rx_bytes_s) == (
        0.5,
        ("power_cap",),
        5.0,
    )
    assert (sample.pcie_gen, sample.pcie_width, sample.memory_temperature_c) == (5, 16, 80)


def test_counters_become_growth_and_rates() -> None:
    made = sampler()
    made.samples([GPU], SECOND_NS)

    (sample,) = made.samples(
        [
            replace(
                GPU,
                ecc_corrected_total=13,
                link_bytes_total=5000,
                link_errors_total=3,
                pcie_replays_total=9,
            )
        ],
        3 * SECOND_NS,
    )

    assert (sample.ecc_corrected, sample.ecc_uncorrected) == (3, 0)
    assert (sample.link_bytes_s, sample.link_errors, sample.pcie_replays) == (2000.0, 1, 2)
    assert sample.interval_ns == 2 * SECOND_NS


def test_energy_becomes_power_where_there_is_no_meter() -> None:
    made = sampler()
    card = Reading(device="0000:03:00.0", vendor="intel", energy_total_j=100.0)
    assert made.samples([card], SECOND_NS)[0].power_w is None

    (sample,) = made.samples([replace(card, energy_total_j=200.0)], SECOND_NS + SECOND_NS // 2)

    assert sample.power_w == 200.0


def test_what_is_told_as_a_rate_stays() -> None:
    made = sampler()
    told = replace(GPU, link_bytes_total=None, link_bytes_s=7.0, power_w=3.0, energy_total_j=1.0)
    made.samples([told], SECOND_NS)

    (sample,) = made.samples([replace(told, energy_total_j=2.0)], 2 * SECOND_NS)

    assert (sample.link_bytes_s, sample.power_w) == (7.0, 3.0)


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


def test_every_field_of_a_sample_is_published() -> None:
    full = replace(GPU, parent="GPU-0", xid=79, error="ill", memory_used_bytes=1)

    (sample,) = sampler().samples([full], 1000)

    pack = Pack(agent="a", boot_ns=1, sequence=0, watermark_ns=1, samples=(sample,))
    codec = Codec()
    assert codec.decode(TELEMETRY_XPU, codec.encode(TELEMETRY_XPU, pack)) == pack
    assert (sample.parent, sample.xid, sample.error) == ("GPU-0", 79, "ill")


def test_devices_beyond_the_bound_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_DEVICES", 2)
    made = sampler()
    for number in range(4):
        made.samples([replace(GPU, device=f"MIG-{number}")], 1000)

    assert made.samples([replace(GPU, device="MIG-3")], 2000)[0].interval_ns == 1000
    assert made.samples([replace(GPU, device="MIG-0")], 2000)[0].interval_ns is None


def reading(**fields: object) -> Reading:
    return Reading(device="d", vendor="v", **fields)  # type: ignore[arg-type]


def test_owners_are_found_by_processes_device_files_and_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, Path("/dev/null").open():
        port = listener.getsockname()[1]
        servers = [Target(instance="engine:1", port=port), Target(instance="nobody:2", port=1)]
        owners = Owners(Files(), servers, [port, 2])
        assert owners.of(reading(pids=(os.getpid(),))) == []

        owners.refresh()

        assert owners.of(reading(pids=(os.getpid(), 1 << 30))) == ["engine:1"]
        assert owners.of(reading(files=("/dev/null", "/dev/dri/renderD128"))) == ["engine:1"]
        assert owners.of(reading(files=("/dev/dri/renderD128",))) == []
        assert owners.of(reading(port=port)) == ["engine:1"]
        assert owners.of(reading(port=2)) == []
    owners.refresh()
    assert owners.of(reading(pids=(os.getpid(),), port=port)) == []
    owners.close()
