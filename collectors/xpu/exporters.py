"""What each exporter of accelerators calls the things of a :class:`Reading`.

A field lists alternatives; the first that the page tells of a device is taken. Names, units and
labels are those of the exporters' public documentation and default settings. A field that is not
of :class:`Reading` is turned into one by :mod:`latencyprism.collectors.xpu.pages`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

MEBI: Final = float(1 << 20)
GIGA: Final = 1e9
PERCENT: Final = 0.01
MILLI: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Column:
    """One metric, or several whose values are parts of one."""

    names: tuple[str, ...]
    scale: float = 1.0
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label → values it may have; a series without the label is not meant."""
    combine: Literal["sum", "max", "mean"] = "max"
    """What to do with several values of one device: tiles, dies, links."""


def one(name: str, scale: float = 1.0) -> tuple[Column]:
    """A metric that has no alternative."""
    return (Column((name,), scale),)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exporter:
    """How one exporter names its metrics and devices."""

    name: str
    vendor: str
    device: tuple[str, ...]
    """Labels that may hold a device's id, best first."""
    aliases: tuple[str, ...] = ()
    """Labels that hold further ids."""
    slice: str | None = None
    """Label of a slice's number; the device is then a part of the one its id names."""
    tile: str | None = None
    """Label of a part that is no device; parts count only where the whole tells nothing."""
    product: tuple[str, ...] = ()
    """Labels that may hold the product's name."""
    columns: Mapping[str, tuple[Column, ...]]
    """Field → alternatives."""
    blanks: tuple[tuple[float, float], ...] = ()
    """Ranges of numbers that mean a missing value, ends included."""


DCGM = Exporter(
    name="dcgm",
    vendor="nvidia",
    device=("UUID",),
    aliases=("pci_bus_id",),
    slice="GPU_I_ID",
    product=("modelName",),
    columns={
        "utilisation": (
            Column(("DCGM_FI_DEV_GPU_UTIL",), PERCENT),
            Column(("DCGM_FI_PROF_GR_ENGINE_ACTIVE",)),
        ),
        "memory_utilisation": (
            Column(("DCGM_FI_DEV_MEM_COPY_UTIL",), PERCENT),
            Column(("DCGM_FI_PROF_DRAM_ACTIVE",)),
        ),
        "memory_used_bytes": one("DCGM_FI_DEV_FB_USED", MEBI),
        "memory_free_bytes": one("DCGM_FI_DEV_FB_FREE", MEBI),
        "memory_reserved_bytes": one("DCGM_FI_DEV_FB_RESERVED", MEBI),
        "memory_total_bytes": one("DCGM_FI_DEV_FB_TOTAL", MEBI),
        "core_clock_mhz": one("DCGM_FI_DEV_SM_CLOCK"),
        "core_clock_max_mhz": one("DCGM_FI_DEV_MAX_SM_CLOCK"),
        "memory_clock_mhz": one("DCGM_FI_DEV_MEM_CLOCK"),
        "clocks_event_reasons": (
            Column(("DCGM_FI_DEV_CLOCKS_EVENT_REASONS",)),
            Column(("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS",)),
        ),
        "temperature_c": one("DCGM_FI_DEV_GPU_TEMP"),
        "memory_temperature_c": one("DCGM_FI_DEV_MEMORY_TEMP"),
        "power_w": one("DCGM_FI_DEV_POWER_USAGE"),
        "power_limit_w": one("DCGM_FI_DEV_POWER_MGMT_LIMIT"),
        "ecc_corrected_total": one("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"),
        "ecc_uncorrected_total": one("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"),
        "last_error_code": one("DCGM_FI_DEV_XID_ERRORS"),
        # DCGM_FI_DEV_PCIE_*_THROUGHPUT and NVLINK_BANDWIDTH_TOTAL changed their unit between
        # versions, so they are no alternatives.
        "pcie_rx_bytes_s": one("DCGM_FI_PROF_PCIE_RX_BYTES"),
        "pcie_tx_bytes_s": one("DCGM_FI_PROF_PCIE_TX_BYTES"),
        "pcie_replays_total": one("DCGM_FI_DEV_PCIE_REPLAY_COUNTER"),
        "pcie_gen": one("DCGM_FI_DEV_PCIE_LINK_GEN"),
        "pcie_width": one("DCGM_FI_DEV_PCIE_LINK_WIDTH"),
        "link_bytes_s": (
            Column(("DCGM_FI_PROF_NVLINK_TX_BYTES", "DCGM_FI_PROF_NVLINK_RX_BYTES"), combine="sum"),
        ),
        "link_errors_total": (
            Column(
                (
                    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
                    "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
                    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
                    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
                ),
                combine="sum",
            ),
        ),
    },
    # Blank, not found, not supported, not permitted, and room for more, as int32, int64, double.
    blanks=(
        (float(0x7FFFFFF0), float(0x7FFFFFFF)),
        (float(0x7FFFFFFFFFFFFFF0), float("inf")),
        (float(1 << 47), float((1 << 47) + 15)),
    ),
)

_SYSTEM_CLOCK = {"clock_type": ("system", "gpu_clock_type_system")}
_MEMORY_CLOCK = {"clock_type": ("memory", "gpu_clock_type_memory")}

AMD = Exporter(
    name="amd",
    vendor="amd",
    device=("gpu_uuid", "serial_number", "gpu_id"),
    aliases=("serial_number", "pcie_bus_id"),
    product=("card_series", "card_model"),
    columns={
        "utilisation": one("gpu_gfx_activity", PERCENT),
        "memory_utilisation": one("gpu_umc_activity", PERCENT),
        "memory_used_bytes": one("gpu_used_vram", MEBI),
        "memory_total_bytes": one("gpu_total_vram", MEBI),
        "core_clock_mhz": (Column(("gpu_clock",), where=_SYSTEM_CLOCK),),
        "core_clock_max_mhz": (Column(("gpu_max_clock",), where=_SYSTEM_CLOCK),),
        "memory_clock_mhz": (Column(("gpu_clock",), where=_MEMORY_CLOCK),),
        "violation.prochot": one("gpu_violation_processor_hot_residency_percentage"),
        "violation.power_cap": one("gpu_violation_ppt_residency_percentage"),
        "violation.thermal": one("gpu_violation_socket_thermal_residency_percentage"),
        "violation.vr_thermal": one("gpu_violation_vr_thermal_residency_percentage"),
        "violation.memory_thermal": one("gpu_violation_hbm_thermal_residency_percentage"),
        "temperature_c": (
            Column(("gpu_edge_temperature",)),
            Column(("gpu_junction_temperature",)),
        ),
        "memory_temperature_c": one("gpu_memory_temperature"),
        "power_w": (
            Column(("gpu_package_power",)),
            Column(("gpu_average_package_power",)),
            Column(("gpu_power_usage",)),
        ),
        "ecc_corrected_total": one("gpu_ecc_correct_total"),
        "ecc_uncorrected_total": one("gpu_ecc_uncorrect_total"),
        "pcie_replays_total": one("pcie_replay_count"),
        "pcie_speed_gts": one("pcie_speed"),
    },
)

_HCCS_LINKS = range(1, 8)

ASCEND = Exporter(
    name="ascend",
    vendor="huawei",
    device=("vdie_id", "id"),
    aliases=("pcie_bus_info",),
    product=("model_name",),
    columns={
        "health": one("npu_chip_info_health_status"),
        "last_error_code": one("npu_chip_info_error_code"),
        "utilisation": (
            Column(("npu_chip_info_utilization",), PERCENT),
            Column(("npu_chip_info_overall_utilization",), PERCENT),
        ),
        "memory_utilisation": one("npu_chip_info_hbm_bandwidth_utilization", PERCENT),
        "memory_used_bytes": (
            Column(("npu_chip_info_hbm_used_memory",), MEBI),
            Column(("npu_chip_info_used_memory",), MEBI),
        ),
        "memory_total_bytes": (
            Column(("npu_chip_info_hbm_total_memory",), MEBI),
            Column(("npu_chip_info_total_memory",), MEBI),
        ),
        "core_clock_mhz": one("npu_chip_info_aicore_current_freq"),
        "temperature_c": one("npu_chip_info_temperature"),
        "memory_temperature_c": one("npu_chip_info_hbm_temperature"),
        "power_w": one("npu_chip_info_power"),
        "ecc_corrected_total": one("npu_chip_info_hbm_ecc_total_single_bit_error_cnt"),
        "ecc_uncorrected_total": one("npu_chip_info_hbm_ecc_total_double_bit_error_cnt"),
        "link_bytes_s": (
            Column(
                (
                    "npu_chip_info_hccs_bandwidth_info_total_tx",
                    "npu_chip_info_hccs_bandwidth_info_total_rx",
                ),
                GIGA,
                combine="sum",
            ),
        ),
        "link_errors_total": (
            Column(
                tuple(
                    f"npu_chip_info_hccs_statistic_info_crc_err_cnt_{link}" for link in _HCCS_LINKS
                ),
                combine="sum",
            ),
        ),
    },
)

XPUM = Exporter(
    name="xpum",
    vendor="intel",
    device=("pci_bdf", "uuid"),
    aliases=("uuid",),
    tile="sub_dev",
    product=("dev_name",),
    columns={
        "utilisation": (Column(("xpum_engine_ratio",), combine="mean"),),
        "memory_utilisation": (Column(("xpum_memory_bandwidth_ratio",), combine="mean"),),
        "memory_used_bytes": (Column(("xpum_memory_used_bytes",), combine="sum"),),
        "core_clock_mhz": (
            Column(("xpum_frequency_mhz",), where={"location": ("gpu",), "type": ("actual",)}),
        ),
        "temperature_c": (Column(("xpum_temperature_celsius",), where={"location": ("gpu",)}),),
        "memory_temperature_c": (
            Column(("xpum_temperature_celsius",), where={"location": ("mem",)}),
        ),
        "power_w": (Column(("xpum_power_watts",), combine="sum"),),
        "energy_total_j": (Column(("xpum_energy_joules_total",), combine="sum"),),
        "ecc_corrected_total": (
            Column(("xpum_cache_errors_total",), where={"type": ("correctable",)}, combine="sum"),
        ),
        "ecc_uncorrected_total": (
            Column(("xpum_cache_errors_total",), where={"type": ("uncorrectable",)}, combine="sum"),
        ),
    },
)

HABANA = Exporter(
    name="habana",
    vendor="habana",
    device=("uuid", "serial", "device", "id"),
    aliases=("pci_addr", "bus_id"),
    product=("model", "product"),
    columns={
        "utilisation": one("habanalabs_utilization", PERCENT),
        "memory_used_bytes": one("habanalabs_memory_used_bytes"),
        "memory_total_bytes": one("habanalabs_memory_total_bytes"),
        "core_clock_mhz": one("habanalabs_clock_soc_mhz"),
        "core_clock_max_mhz": one("habanalabs_clock_soc_max_mhz"),
        "temperature_c": one("habanalabs_temperature_onchip"),
        "power_w": one("habanalabs_power_mW", MILLI),
        "power_limit_w": one("habanalabs_power_default_limit_mW", MILLI),
        "pcie_replays_total": one("habanalabs_pcie_replay_count"),
        "pcie_width": one("habanalabs_pci_link_width"),
    },
)

EXPORTERS = (DCGM, AMD, ASCEND, XPUM, HABANA)
