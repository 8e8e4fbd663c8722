"""AMD, Intel and Gaudi, against a /sys that the test writes."""

import random
import shutil
from pathlib import Path

import pytest
from xpu_fake import near
from xpu_sysfs import amd_card, card, intel_card, table, write

from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.xpu.amd import Amd
from latencyprism.collectors.xpu.gaudi import Gaudi
from latencyprism.collectors.xpu.intel import Intel
from latencyprism.collectors.xpu.reading import Reading


def test_amd_reads_a_card(tmp_path: Path) -> None:
    device = amd_card(tmp_path)
    write(device / "gpu_metrics", table(1, 3, indep_throttle_status=1, current_gfxclk=1790))

    (reading,) = Amd(str(tmp_path)).read()

    assert reading == Reading(
        device="0ce0c6d49f5b0d86",
        vendor="amd",
        aliases=frozenset({"0000:c1:00.0", "692409005400"}),
        name="AMD Instinct MI300X OAM",
        utilisation=near(0.91),
        memory_utilisation=near(0.44),
        memory_used_bytes=150 << 30,
        memory_total_bytes=192 << 30,
        core_clock_mhz=1790,
        core_clock_max_mhz=2100,
        memory_clock_mhz=near(1300),
        throttle_reasons=("power_cap",),
        temperature_c=74,
        memory_temperature_c=66,
        power_w=near(612),
        power_limit_w=near(750),
        ecc_corrected_total=23,
        ecc_uncorrected_total=1,
        pcie_replays_total=4,
        pcie_gen=5,
        pcie_width=16,
        files=("/dev/dri/renderD128",),
    )


def test_amd_reasons_are_those_whose_time_grows(tmp_path: Path) -> None:
    device = amd_card(tmp_path)
    path = device / "gpu_metrics"
    write(path, table(1, 8, ppt_residency_acc=5, hbm_thm_residency_acc=7))
    amd = Amd(str(tmp_path))
    assert amd.read()[0].throttle_reasons is None

    write(path, table(1, 8, ppt_residency_acc=6, hbm_thm_residency_acc=7))
    assert amd.read()[0].throttle_reasons == ("power_cap",)
    assert amd.read()[0].throttle_reasons == ()


def test_amd_goes_without_a_table_that_it_does_not_know(tmp_path: Path) -> None:
    device = amd_card(tmp_path)
    write(device / "gpu_metrics", b"\x10\x00\x01\x09" + bytes(12))
    amd = Amd(str(tmp_path), slow_interval_s=0, load_library=lambda: None)

    for _ in range(2):
        (reading,) = amd.read()

    assert (reading.error, reading.throttle_reasons, reading.core_clock_mhz) == (None, None, 1800)
    assert amd.counts == {"unknown_tables": 2}


def test_amd_finds_the_processes_of_the_compute_driver(tmp_path: Path) -> None:
    amd_card(tmp_path)
    node = tmp_path / "class/kfd/kfd/topology/nodes/1"
    write(node / "gpu_id", 51110)
    write(node / "properties", f"cpu_cores_count 0\nlocation_id {0xC1 << 8}\ndomain 0")
    write(tmp_path / "class/kfd/kfd/topology/nodes/0/gpu_id", 0)
    processes = tmp_path / "class/kfd/kfd/proc"
    write(processes / "4711/vram_51110", 1 << 30)
    write(processes / "4712/vram_51110", 0)

    (reading,) = Amd(str(tmp_path)).read()

    assert (reading.pids, reading.files) == ((4711,), ())


def test_amd_reads_error_counters_at_the_slow_pace(tmp_path: Path) -> None:
    device = amd_card(tmp_path)
    now = [0.0]
    amd = Amd(str(tmp_path), slow_interval_s=1, monotonic_s=lambda: now[0])
    amd.read()
    write(device / "ras/umc_err_count", "ue: 2\nce: 21")
    now[0] = 0.9
    assert amd.read()[0].ecc_uncorrected_total == 1

    now[0] = 1.0
    assert amd.read()[0].ecc_uncorrected_total == 2


def test_a_card_that_falls_off_the_bus_is_told_and_found_again(tmp_path: Path) -> None:
    device = amd_card(tmp_path)
    amd_card(tmp_path, 1, "0000:c2:00.0")
    amd = Amd(str(tmp_path))
    kept = tmp_path / "kept"
    shutil.move(device, kept)
    amd.reopen()

    lost, other = amd.read()

    assert (lost.device, other.error) == ("0ce0c6d49f5b0d86", None)
    assert lost.error == "0000:c1:00.0 is gone from the PCI bus"
    shutil.move(kept, device)
    amd.reopen()
    assert [reading.error for reading in amd.read()] == [None, None]


def test_a_card_whose_driver_no_longer_answers_is_told(tmp_path: Path) -> None:
    device = amd_card(tmp_path)
    amd = Amd(str(tmp_path))
    for name in ("gpu_busy_percent", "mem_info_vram_used"):
        (device / name).unlink()
    amd.reopen()

    (reading,) = amd.read()

    assert reading.error is not None
    assert "no longer answers" in reading.error


def test_a_sleeping_card_is_not_woken(tmp_path: Path) -> None:
    device = amd_card(tmp_path)
    amd = Amd(str(tmp_path))
    write(device / "power/runtime_status", "suspended")
    amd.reopen()

    (reading,) = amd.read()

    assert (reading.error, reading.utilisation, reading.ecc_corrected_total) == (None, None, None)


@pytest.mark.parametrize("open_devices", [Amd, Intel, Gaudi])
def test_a_machine_without_such_a_card_says_so(
    tmp_path: Path, open_devices: type[Amd | Intel | Gaudi]
) -> None:
    card(tmp_path, 0, "0000:01:00.0", "0x10de")

    with pytest.raises(UnavailableError, match=str(tmp_path)):
        open_devices(str(tmp_path))


def test_intel_reads_a_card_of_xe(tmp_path: Path) -> None:
    intel_card(tmp_path)

    (reading,) = Intel(str(tmp_path)).read()

    assert reading == Reading(
        device="0000:03:00.0",
        vendor="intel",
        name="Intel GPU 0xe20b",
        memory_total_bytes=12 << 30,
        core_clock_mhz=2400,
        core_clock_max_mhz=2850,
        throttle_reasons=(),
        temperature_c=61,
        memory_temperature_c=70,
        power_limit_w=near(190),
        energy_total_j=near(5),
        pcie_gen=4,
        pcie_width=8,
        files=("/dev/dri/renderD129",),
    )


def test_intel_names_what_holds_the_clocks_back(tmp_path: Path) -> None:
    throttle = intel_card(tmp_path) / "tile0/gt0/freq0/throttle"
    for reason in ("status", "reason_pl1", "reason_psys_pl1", "reason_new_thing", "reason_p0_freq"):
        write(throttle / reason, 1)

    (reading,) = Intel(str(tmp_path)).read()

    assert reading.throttle_reasons == ("new_thing", "power_cap")


def test_intel_reads_a_card_of_i915(tmp_path: Path) -> None:
    card(tmp_path, 0, "0000:00:02.0", "0x8086")
    gt = tmp_path / "class/drm/card0/gt/gt0"
    write(gt / "rps_act_freq_mhz", 0)
    write(gt / "rps_RP0_freq_mhz", 1500)
    write(gt / "throttle_reason_status", 1)
    write(gt / "throttle_reason_thermal", 1)
    intel = Intel(str(tmp_path))

    (reading,) = intel.read()

    assert (reading.core_clock_mhz, reading.core_clock_max_mhz) == (0, 1500)
    assert (reading.throttle_reasons, reading.power_limit_w) == (("thermal",), None)
    shutil.rmtree(gt)
    intel.reopen()
    (lost,) = intel.read()
    assert lost.error is not None


def gaudi_card(sys: Path) -> Path:
    folder = sys / "class/accel/accel0/device"
    for name, value in {
        "status": "Operational",
        "pci_addr": "0000:33:00.0",
        "device_type": "GAUDI2",
        "clk_cur_freq_mhz": 1500,
        "clk_max_freq_mhz": 1650,
        "max_power": 600_000,
        "hwmon/hwmon1/temp1_input": 55000,
        "hwmon/hwmon1/power1_input": 410_000_000,
    }.items():
        write(folder / name, value)
    return folder


def test_gaudi_reads_a_device(tmp_path: Path) -> None:
    gaudi_card(tmp_path)

    (reading,) = Gaudi(str(tmp_path)).read()

    assert reading == Reading(
        device="0000:33:00.0",
        vendor="habana",
        name="GAUDI2",
        core_clock_mhz=1500,
        core_clock_max_mhz=1650,
        temperature_c=55,
        power_w=near(410),
        power_limit_w=600,
        files=("/dev/accel/accel0",),
    )


@pytest.mark.parametrize("status", ["Malfunction", "In reset"])
def test_gaudi_tells_a_device_that_does_not_work(tmp_path: Path, status: str) -> None:
    folder = gaudi_card(tmp_path)
    gaudi = Gaudi(str(tmp_path))
    write(folder / "status", status)

    assert gaudi.read()[0].error == f"status: {status}"
    shutil.rmtree(folder)
    gaudi.reopen()
    assert "is gone" in str(gaudi.read()[0].error)


def test_gaudi_of_older_kernels(tmp_path: Path) -> None:
    shutil.move(gaudi_card(tmp_path), tmp_path / "old")
    (tmp_path / "class/habanalabs").mkdir(parents=True)
    shutil.move(tmp_path / "old", tmp_path / "class/habanalabs/hl0")

    assert Gaudi(str(tmp_path)).read()[0].files == ("/dev/habanalabs/hl0",)


@pytest.mark.parametrize("seed", range(40))
def test_files_of_any_content_cost_their_values_only(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    amd_card(tmp_path)
    intel_card(tmp_path)
    amd, intel = Amd(str(tmp_path)), Intel(str(tmp_path))
    pieces = [b"", b"-1\n", b"1e9", b"99999999999999999999", b"0: 1Mhz *", b"\xff\xfe", b"ue: x"]
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name not in ("vendor", "runtime_status"):
            path.write_bytes(rng.choice([*pieces, rng.randbytes(rng.randrange(64))]))
    for devices in (amd, intel, Amd(str(tmp_path)), Intel(str(tmp_path))):
        devices.reopen()
        assert devices.read()
        devices.close()
