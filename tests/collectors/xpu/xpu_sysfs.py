"""A /sys for tests: files that answer as those of the kernel's drivers do."""

import ctypes
import struct
from pathlib import Path
from typing import Any

from latencyprism.collectors.xpu import gpu_metrics


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())


def card(sys: Path, number: int, address: str, vendor: str) -> Path:
    """A card's device folder, linked as the kernel does."""
    device = sys / "devices/pci0000:00" / address
    write(device / "vendor", vendor)
    entry = sys / f"class/drm/card{number}"
    entry.mkdir(parents=True)
    (entry / "device").symlink_to(device)
    (sys / f"class/drm/card{number}-DP-1").mkdir()
    return device


def table(form: int, content: int, **values: Any) -> bytes:
    """A gpu_metrics table; fields not named are not filled by the firmware."""
    layout = gpu_metrics._LAYOUTS[form, content]
    size = ctypes.sizeof(layout)
    filled = layout.from_buffer_copy(b"\xff" * size)
    for name, value in values.items():
        if isinstance(value, list):
            array = getattr(filled, name)
            for place, number in enumerate(value):
                array[place] = number
        else:
            setattr(filled, name, value)
    return struct.pack("<HBB", size, form, content) + bytes(filled)[4:]


def amd_card(sys: Path, number: int = 0, address: str = "0000:c1:00.0") -> Path:
    """An MI300X under load."""
    device = card(sys, number, address, "0x1002")
    for name, value in {
        "unique_id": f"{number}ce0c6d49f5b0d86",
        "serial_number": f"69240900540{number}",
        "product_name": "AMD Instinct MI300X OAM",
        "gpu_busy_percent": 91,
        "mem_busy_percent": 44,
        "mem_info_vram_used": 150 << 30,
        "mem_info_vram_total": 192 << 30,
        "pp_dpm_sclk": "0: 132Mhz\n1: 1800Mhz *\n2: 2100Mhz",
        "pcie_replay_count": 4,
        "current_link_speed": "32.0 GT/s PCIe",
        "current_link_width": 16,
        "power/runtime_status": "active",
        "hwmon/hwmon3/freq1_input": 1_800_000_000,
        "hwmon/hwmon3/freq2_input": 1_300_000_000,
        "hwmon/hwmon3/temp1_input": 74000,
        "hwmon/hwmon3/temp1_label": "junction",
        "hwmon/hwmon3/temp2_input": 66000,
        "hwmon/hwmon3/temp2_label": "mem",
        "hwmon/hwmon3/power1_input": 612_000_000,
        "hwmon/hwmon3/power1_cap": 750_000_000,
        "ras/umc_err_count": "ue: 1\nce: 20",
        "ras/gfx_err_count": "ue: 0\nce: 3",
        "ras/features": "feature mask: 0x0",
    }.items():
        write(device / name, value)
    (device / f"drm/renderD{128 + number}").mkdir(parents=True)
    return device


def intel_card(sys: Path, number: int = 1, address: str = "0000:03:00.0") -> Path:
    """A card of the xe driver."""
    device = card(sys, number, address, "0x8086")
    for name, value in {
        "device": "0xe20b",
        "tile0/gt0/freq0/act_freq": 2400,
        "tile0/gt0/freq0/rp0_freq": 2850,
        "tile0/gt0/freq0/throttle/status": 0,
        "tile0/gt0/freq0/throttle/reason_pl1": 0,
        "tile0/gt0/freq0/throttle/reason_psys_pl1": 0,
        "tile0/gt0/freq0/throttle/reason_thermal": 0,
        "tile0/gt1/freq0/act_freq": 1000,
        "tile0/gt1/freq0/rp0_freq": 1500,
        "tile0/physical_vram_size_bytes": 12 << 30,
        "hwmon/hwmon5/energy1_input": 5_000_000,
        "hwmon/hwmon5/power1_max": 190_000_000,
        "hwmon/hwmon5/temp2_input": 61000,
        "hwmon/hwmon5/temp3_input": 70000,
        "current_link_speed": "16.0 GT/s PCIe",
        "current_link_width": 8,
    }.items():
        write(device / name, value)
    (device / "drm/renderD129").mkdir(parents=True)
    return device
