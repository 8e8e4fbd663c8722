"""What was read of one accelerator, before it is compared with the last time."""

from dataclasses import dataclass


class UnavailableError(OSError):
    """There is no accelerator to read here; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One accelerator at one moment, in the units of ``XpuSample``; what is not told is None.

    Errors of memory are counted since the driver was loaded; ``xid`` is the last one since the
    reading before; ``pids`` are the processes that compute on it.
    """

    device: str
    vendor: str
    name: str | None = None
    error: str | None = None
    utilisation: float | None = None
    memory_utilisation: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    core_clock_mhz: float | None = None
    core_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    ecc_corrected_total: int | None = None
    ecc_uncorrected_total: int | None = None
    xid: int | None = None
    pcie_rx_bytes_s: float | None = None
    pcie_tx_bytes_s: float | None = None
    pids: tuple[int, ...] = ()
