"""What was read of one accelerator, and what a way of reading them promises."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One accelerator at one moment, in the units of ``XpuSample``; what is not told is None.

    Totals only grow, from whatever time the driver likes; :class:`~latencyprism.collectors.xpu.
    sampler.Sampler` makes growth and rates of them.
    """

    device: str
    vendor: str
    aliases: frozenset[str] = frozenset()
    """Further ids by which other ways of reading may know the same device."""
    parent: str | None = None
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
    memory_temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_total_j: float | None = None
    """Told instead of ``power_w`` where there is no power meter."""
    ecc_corrected_total: int | None = None
    ecc_uncorrected_total: int | None = None
    xid: int | None = None
    """Number of the last critical error since the reading before."""
    pcie_rx_bytes_s: float | None = None
    pcie_tx_bytes_s: float | None = None
    pcie_replays_total: int | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    link_bytes_s: float | None = None
    link_bytes_total: int | None = None
    """Told instead of ``link_bytes_s``: both directions of all links together."""
    link_errors_total: int | None = None
    pids: tuple[int, ...] = ()
    """Processes that compute on it."""
    files: tuple[str, ...] = ()
    """Device files that a process which computes on it holds open."""
    port: int | None = None
    """TCP port that the process which computes on it listens on."""


class Devices(Protocol):
    """The accelerators that one way of reading finds. Called by one thread; may block."""

    @property
    def counts(self) -> Mapping[str, int]:
        """What was refused since it was opened, by kind; from any thread."""

    def read(self) -> list[Reading]:
        """Every device found so far, in a steady order; one that fails with its ``error``.

        Raises OSError when the way itself fails, which says nothing about the devices.
        """

    def reopen(self) -> None:
        """Look for the devices again, those that were lost and new ones. Raises as ``read``."""

    def close(self) -> None:
        """Give them back. Does not raise."""
