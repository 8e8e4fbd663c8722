"""Turns readings of accelerators into samples."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from latencyprism.collectors.xpu.owners import Owners
from latencyprism.collectors.xpu.reading import Reading
from latencyprism.schemas.records import XpuSample

N = TypeVar("N", int, float)

SOURCE = "xpu"
MAX_DEVICES = 1024
"""Devices that are remembered; beyond it the one not seen for longest is forgotten."""


class Sampler:
    """Makes totals into growth and rates, and finds the servers that use a device.

    A device that several servers use is told of each; one that none is known to use, of the host.
    """

    def __init__(self, host: str, owners: Owners) -> None:
        self._host = host
        self._owners = owners
        self._last: dict[str, tuple[int | None, Reading, list[str]]] = {}
        self.instances: set[str] = set()
        """Everything that samples were about so far."""

    def samples(self, readings: Sequence[Reading], now_ns: int) -> list[XpuSample]:
        """Samples of devices read at ``now_ns``, ns since the epoch, each device once."""
        return [sample for reading in readings for sample in self._of(reading, now_ns)]

    def _of(self, reading: Reading, now_ns: int) -> list[XpuSample]:
        nothing = Reading(device=reading.device, vendor=reading.vendor)
        last_ns, last, instances = self._last.pop(reading.device, (None, nothing, []))
        if reading.error is None:
            instances = self._owners.of(reading)
            self._last[reading.device] = (now_ns, reading, instances)
        else:
            self._last[reading.device] = (last_ns, last, instances)
        if len(self._last) > MAX_DEVICES:
            del self._last[next(iter(self._last))]
        sample = self._sample(reading, last, now_ns, last_ns)
        named = [replace(sample, instance=instance) for instance in instances] or [sample]
        self.instances.update(sample.instance for sample in named)
        return named

    def _sample(
        self, reading: Reading, last: Reading, now_ns: int, last_ns: int | None
    ) -> XpuSample:
        interval_ns = None if last_ns is None else max(now_ns - last_ns, 1)
        link_bytes = growth(last.link_bytes_total, reading.link_bytes_total)
        energy_j = growth(last.energy_total_j, reading.energy_total_j)
        return XpuSample(
            instance=self._host,
            source=SOURCE,
            observed_at_ns=now_ns,
            host=self._host,
            vendor=reading.vendor,
            device=reading.device,
            name=reading.name,
            error=reading.error,
            utilisation=reading.utilisation,
            memory_utilisation=reading.memory_utilisation,
            memory_used_bytes=reading.memory_used_bytes,
            memory_total_bytes=reading.memory_total_bytes,
            core_clock_mhz=reading.core_clock_mhz,
            core_clock_max_mhz=reading.core_clock_max_mhz,
            memory_clock_mhz=reading.memory_clock_mhz,
            throttle_reasons=reading.throttle_reasons,
            temperature_c=reading.temperature_c,
            power_w=_told(reading.power_w, rate(energy_j, interval_ns)),
            power_limit_w=reading.power_limit_w,
            ecc_corrected=growth(last.ecc_corrected_total, reading.ecc_corrected_total),
            ecc_uncorrected=growth(last.ecc_uncorrected_total, reading.ecc_uncorrected_total),
            xid=reading.xid,
            pcie_rx_bytes_s=reading.pcie_rx_bytes_s,
            pcie_tx_bytes_s=reading.pcie_tx_bytes_s,
            link_bytes_s=_told(reading.link_bytes_s, rate(link_bytes, interval_ns)),
            interval_ns=interval_ns,
            parent=reading.parent,
            memory_temperature_c=reading.memory_temperature_c,
            link_errors=growth(last.link_errors_total, reading.link_errors_total),
            pcie_replays=growth(last.pcie_replays_total, reading.pcie_replays_total),
            pcie_gen=reading.pcie_gen,
            pcie_width=reading.pcie_width,
        )


def growth(before: N | None, now: N | None) -> N | None:
    """Growth of a counter, from 0 after it went back; None when either was not told."""
    if before is None or now is None:
        return None
    return now - before if now >= before else now


def rate(amount: float | None, interval_ns: int | None) -> float | None:
    """Amount a second; None when either is not known."""
    if amount is None or interval_ns is None:
        return None
    return amount * 1e9 / interval_ns


def _told(value: float | None, otherwise: float | None) -> float | None:
    return otherwise if value is None else value
