"""The binary ``gpu_metrics`` table of AMD's kernel driver.

Layouts are those of ``kgd_pp_interface.h`` in the Linux kernel, for discrete devices (format 1). A
table is taken only if its revision and its size are both known, because revision 6 once had
another layout. Fields that the firmware does not fill are all ones.
"""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

U16, U32, U64 = ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64
Fields = list[tuple[str, Any]]

HEADER: Final = struct.Struct("<HBB")
"""Size of the table, format and content revision."""

THROTTLERS: Final = (
    (range(8), "power_cap"),
    (range(16, 24), "current_limit"),
    ((32, 33, 35, 36, 37, 42, 43), "thermal"),
    ((34,), "memory_thermal"),
    ((38, 39, 40, 41, 44, 45), "vr_thermal"),
    ((46, 47), "prochot"),
    ((56,), "power_cap"),
    ((57,), "reliability"),
)
"""Bits of ``indep_throttle_status``, which mean the same on every chip (``amdgpu_smu.h``)."""
RESIDENCIES: Final = {
    "prochot_residency_acc": "prochot",
    "ppt_residency_acc": "power_cap",
    "socket_thm_residency_acc": "thermal",
    "vr_thm_residency_acc": "vr_thermal",
    "hbm_thm_residency_acc": "memory_thermal",
}
"""Counters of newer tables that grow for as long as something holds the clocks back."""

USED: Final = frozenset(
    (
        *RESIDENCIES,
        "indep_throttle_status",
        "temperature_mem",
        "temperature_hotspot",
        "average_socket_power",
        "curr_socket_power",
        "current_gfxclk",
        "pcie_replay_count_acc",
        "xgmi_read_data_acc",
        "xgmi_write_data_acc",
    )
)
"""Fields that are taken out of a table."""


class UnknownTableError(ValueError):
    """A table of a revision or size that is not known here; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMetrics:
    """What a table tells beyond the files of sysfs; None for what it does not."""

    throttle_reasons: tuple[str, ...] | None = None
    """Reasons in force now, of tables that say so."""
    residencies: dict[str, int] = field(default_factory=dict)
    """Reason → time it was in force since the driver's start, in units of the firmware."""
    memory_temperature_c: float | None = None
    hotspot_temperature_c: float | None = None
    power_w: float | None = None
    core_clock_mhz: float | None = None
    pcie_replays_total: int | None = None
    link_bytes_total: int | None = None


def decode(table: bytes) -> GpuMetrics:
    """Take a table apart. Raises :class:`UnknownTableError`."""
    if len(table) < HEADER.size:
        raise UnknownTableError(f"gpu_metrics of {len(table)} bytes")
    size, form, content = HEADER.unpack_from(table)
    layout = _LAYOUTS.get((form, content))
    if layout is None or size != ctypes.sizeof(layout) or len(table) < size:
        raise UnknownTableError(
            f"gpu_metrics v{form}.{content} of {size} bytes, of which {len(table)} are here"
        )
    return metrics_of(_filled(layout.from_buffer_copy(table), _TAKEN[form, content]))


def metrics_of(values: Mapping[str, Any]) -> GpuMetrics:
    """What is used of a table's values, by the names of their fields; those not filled are not in
    it, or, in AMD's library, not numbers.
    """
    numbers = {name: value for name, value in values.items() if type(value) is int}
    return GpuMetrics(
        throttle_reasons=_throttlers(numbers.get("indep_throttle_status")),
        residencies={
            reason: numbers[name] for name, reason in RESIDENCIES.items() if name in numbers
        },
        memory_temperature_c=numbers.get("temperature_mem"),
        hotspot_temperature_c=numbers.get("temperature_hotspot"),
        power_w=_either(
            numbers, "average_socket_power", "curr_socket_power", "current_socket_power"
        ),
        core_clock_mhz=max(
            (*_list(values, "current_gfxclk"), *_list(values, "current_gfxclks")), default=None
        ),
        pcie_replays_total=numbers.get("pcie_replay_count_acc"),
        link_bytes_total=_link_bytes(values),
    )


def _filled(table: Any, fields: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Those of the fields that the firmware has filled; of arrays the filled elements."""
    found: dict[str, Any] = {}
    for name, missing in fields:
        value = getattr(table, name)
        if not isinstance(value, int):
            found[name] = [element for element in value if element != missing]
        elif value != missing:
            found[name] = value
    return found


def _used(layout: Any) -> list[tuple[str, int]]:
    """Fields of a layout that are used, each with the number that means it is not filled."""
    return [
        (
            name,
            (1 << 8 * ctypes.sizeof(kind._type_ if issubclass(kind, ctypes.Array) else kind)) - 1,
        )
        for name, kind in layout._fields_
        if name in USED
    ]


def _either(numbers: Mapping[str, int], *names: str) -> int | None:
    return next((numbers[name] for name in names if name in numbers), None)


def _list(values: Mapping[str, Any], name: str) -> list[int]:
    """Older tables have one value where newer ones have one for each die."""
    value = values.get(name)
    several = value if isinstance(value, list) else [value]
    return [element for element in several if type(element) is int]


def _link_bytes(values: Mapping[str, Any]) -> int | None:
    names = ("xgmi_read_data_acc", "xgmi_write_data_acc")
    kibibytes = [number for name in names for number in _list(values, name)]
    return sum(kibibytes) * 1024 if kibibytes else None


def _throttlers(status: int | None) -> tuple[str, ...] | None:
    if status is None:
        return None
    named = 0
    reasons: dict[str, None] = {}
    for bits, reason in THROTTLERS:
        mask = sum(1 << bit for bit in bits)
        named |= mask
        if status & mask:
            reasons[reason] = None
    if status & ~named:
        reasons["other"] = None
    return tuple(reasons)


def _structure(*parts: Fields) -> type[ctypes.Structure]:
    fields = [("header", U32), *(named for part in parts for named in part)]
    return type("Table", (ctypes.LittleEndianStructure,), {"_fields_": fields})


def _xcp(jpeg: int, accumulated: int) -> type[ctypes.Structure]:
    fields = [("busy", U32 * 8), ("jpeg", U16 * jpeg), ("vcn", U16 * 4), ("acc", U64 * accumulated)]
    return type("Partition", (ctypes.LittleEndianStructure,), {"_fields_": fields})


def _each(kind: Any, *names: str) -> Fields:
    return [(name, kind) for name in names]


_OLD: Final[Fields] = [
    *_each(U16, "temperature_edge", "temperature_hotspot", "temperature_mem"),
    *_each(U16, "temperature_vrgfx", "temperature_vrsoc", "temperature_vrmem"),
    *_each(U16, "average_gfx_activity", "average_umc_activity", "average_mm_activity"),
    *_each(U16, "average_socket_power"),
    *_each(U64, "energy_accumulator", "system_clock_counter"),
    ("average_clocks", U16 * 7),
    *_each(U16, "current_gfxclk", "current_socclk", "current_uclk"),
    ("current_video_clocks", U16 * 4),
    *_each(U32, "throttle_status"),
    *_each(U16, "current_fan_speed", "pcie_link_width", "pcie_link_speed", "padding"),
    *_each(U32, "gfx_activity_acc", "mem_activity_acc"),
    ("temperature_hbm", U16 * 4),
]
_FIRMWARE_TIME: Final[Fields] = _each(U64, "firmware_timestamp")
_VOLTAGES: Final[Fields] = [
    ("voltages", U16 * 4),
    *_each(U64, "indep_throttle_status"),
]

_HEAD: Final[Fields] = [
    *_each(U16, "temperature_hotspot", "temperature_mem", "temperature_vrsoc"),
    *_each(U16, "curr_socket_power", "average_gfx_activity", "average_umc_activity"),
]
_VCN: Final[Fields] = [("vcn_activity", U16 * 4)]
_JPEG: Final[Fields] = [("jpeg_activity", U16 * 32)]
_MAX_BANDWIDTH: Final[Fields] = _each(U64, "mem_max_bandwidth")
_ENERGY: Final[Fields] = _each(U64, "energy_accumulator", "system_clock_counter")
_STATUS: Final[Fields] = _each(U32, "throttle_status")
_RESIDENCIES: Final[Fields] = _each(U32, "accumulation_counter", *RESIDENCIES)
_LINKS: Final[Fields] = [
    *_each(U32, "gfxclk_lock_status"),
    *_each(U16, "pcie_link_width", "pcie_link_speed", "xgmi_link_width", "xgmi_link_speed"),
    *_each(U32, "gfx_activity_acc", "mem_activity_acc"),
    *_each(U64, "pcie_bandwidth_acc", "pcie_bandwidth_inst", "pcie_l0_to_recov_count_acc"),
    *_each(U64, "pcie_replay_count_acc", "pcie_replay_rover_count_acc"),
]
_NAKS: Final[Fields] = _each(U32, "pcie_nak_sent_count_acc", "pcie_nak_rcvd_count_acc")
_XGMI: Final[Fields] = [("xgmi_read_data_acc", U64 * 8), ("xgmi_write_data_acc", U64 * 8)]
_XGMI_STATUS: Final[Fields] = [("xgmi_link_status", U16 * 8), ("padding", U16)]
_CLOCKS: Final[Fields] = [
    *_FIRMWARE_TIME,
    ("current_gfxclk", U16 * 8),
    ("current_clocks", U16 * 12),
    *_each(U16, "current_uclk", "partitions"),
]


def _partitions(jpeg: int, accumulated: int) -> Fields:
    return [("xcp_stats", _xcp(jpeg, accumulated) * 8), ("pcie_other_end_recovery", U32)]


_NEW: Final = (_ENERGY, _RESIDENCIES, _LINKS, _NAKS, _XGMI)
_LAYOUTS: Final = {
    (1, 1): _structure(_OLD),
    (1, 2): _structure(_OLD, _FIRMWARE_TIME),
    (1, 3): _structure(_OLD, _FIRMWARE_TIME, _VOLTAGES),
    (1, 4): _structure(_HEAD, _VCN, _ENERGY, _STATUS, _LINKS, _XGMI, _CLOCKS),
    (1, 5): _structure(_HEAD, _VCN, _JPEG, _ENERGY, _STATUS, _LINKS, _NAKS, _XGMI, _CLOCKS),
    (1, 6): _structure(_HEAD, *_NEW, _CLOCKS, _partitions(32, 8)),
    (1, 7): _structure(_HEAD, _MAX_BANDWIDTH, *_NEW, _XGMI_STATUS, _CLOCKS, _partitions(32, 16)),
    (1, 8): _structure(_HEAD, _MAX_BANDWIDTH, *_NEW, _XGMI_STATUS, _CLOCKS, _partitions(40, 40)),
}
_TAKEN: Final = {version: _used(layout) for version, layout in _LAYOUTS.items()}
"""For each layout the fields that are used, and the number that means one is not filled."""
