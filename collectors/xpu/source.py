"""The accelerator source: a thread that reads every device at an even pace."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.host.source import local_servers
from latencyprism.collectors.source import Emit
from latencyprism.collectors.xpu.config import XpuConfig
from latencyprism.collectors.xpu.owners import Owners
from latencyprism.collectors.xpu.reading import Reading, UnavailableError
from latencyprism.schemas.records import XpuSample
from latencyprism.schemas.topics import TELEMETRY_XPU

logger = logging.getLogger(__name__)

SOURCE = "xpu"


class Devices(Protocol):
    """The accelerators of one vendor; :class:`~latencyprism.collectors.xpu.nvml.Nvml` is one."""

    def read(self) -> list[Reading]:
        """Every device, one that fails with its ``error``. Does not raise."""

    def read_pcie(self) -> None:
        """Measure the bus traffic for the next :meth:`read`; may block. Does not raise."""

    def reopen(self) -> None:
        """Look for the devices again. Does not raise."""

    def close(self) -> None:
        """Give them back."""


def open_devices() -> Devices:
    """The accelerators of this host. Raises :class:`UnavailableError`, saying why, without any."""
    from latencyprism.collectors.xpu.nvml import Nvml

    return Nvml()


def unavailable() -> str | None:
    """Why no accelerator can be read here, in words; None when one can."""
    try:
        open_devices().close()
    except UnavailableError as e:
        return str(e)
    return None


class Sampler:
    """Turns readings into samples: counters into growth, processes into instances.

    A device that several servers use is told of each; one that none uses, of the host.
    """

    def __init__(self, host: str, owners: Owners) -> None:
        self._host = host
        self._owners = owners
        self._last: dict[str, tuple[int | None, Reading]] = {}
        self._instances: dict[str, list[str]] = {}
        self.instances: set[str] = set()
        """Everything that samples were about so far."""

    def samples(self, readings: Sequence[Reading], now_ns: int) -> list[XpuSample]:
        """Samples of devices read at ``now_ns``, ns since the epoch."""
        return [sample for reading in readings for sample in self._of(reading, now_ns)]

    def _of(self, reading: Reading, now_ns: int) -> list[XpuSample]:
        nothing = Reading(device=reading.device, vendor=reading.vendor)
        last_ns, last = self._last.get(reading.device, (None, nothing))
        if reading.error is None:
            self._last[reading.device] = (now_ns, reading)
            self._instances[reading.device] = self._owners.of(reading.pids)
        instances = self._instances.get(reading.device) or [self._host]
        self.instances.update(instances)
        return [
            XpuSample(
                instance=instance,
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
                power_w=reading.power_w,
                power_limit_w=reading.power_limit_w,
                ecc_corrected=growth(last.ecc_corrected_total, reading.ecc_corrected_total),
                ecc_uncorrected=growth(last.ecc_uncorrected_total, reading.ecc_uncorrected_total),
                xid=reading.xid,
                pcie_rx_bytes_s=reading.pcie_rx_bytes_s,
                pcie_tx_bytes_s=reading.pcie_tx_bytes_s,
                interval_ns=None if last_ns is None else now_ns - last_ns,
            )
            for instance in instances
        ]


def growth(before: int | None, now: int | None) -> int | None:
    """Growth of a counter, from 0 after it went back; None when either was not told."""
    if before is None or now is None:
        return None
    return now - before if now >= before else now


class XpuSource:
    """Watches the accelerators of this host; see :class:`~latencyprism.collectors.source.Source`.

    Devices are mapped to those servers of ``engines`` that are on this host.
    """

    name = SOURCE

    def __init__(
        self,
        engines: Sequence[str],
        config: XpuConfig,
        *,
        host: str | None = None,
        open_devices: Callable[[], Devices] = open_devices,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engines = tuple(engines)
        self._config = config
        self._host = host or socket.gethostname()
        self._open_devices = open_devices
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns

    def run(self, emit: Emit, stop: threading.Event) -> None:
        """Read until ``stop``; returns when the calls of the driver that are under way have.

        Raises :class:`UnavailableError` when there is nothing to read, ValueError for a URL that
        names no server.
        """
        servers = local_servers(self._engines)
        devices = self._open_devices()
        files = Files(self._config.proc)
        ended = threading.Event()
        bus = threading.Thread(
            target=self._read_pcie, args=(devices, ended), name=f"{SOURCE} pcie", daemon=True
        )
        try:
            bus.start()
            self._read(devices, Owners(files, servers), emit, stop)
        finally:
            ended.set()
            bus.join()
            devices.close()
            files.close()

    def _read(self, devices: Devices, owners: Owners, emit: Emit, stop: threading.Event) -> None:
        config = self._config
        sampler = Sampler(self._host, owners)
        now_ns = self._monotonic_ns()
        search_ns, retry_ns = now_ns, now_ns + config.retry_ms * 1_000_000
        while not stop.is_set():
            began_ns = self._monotonic_ns()
            if began_ns >= search_ns:
                owners.refresh()
                search_ns = began_ns + config.owners_interval_ms * 1_000_000
            readings = devices.read()
            if began_ns >= retry_ns:
                retry_ns = began_ns + config.retry_ms * 1_000_000
                if any(reading.error for reading in readings):
                    devices.reopen()
            now_ns = self._wall_ns()
            for sample in sampler.samples(readings, now_ns):
                emit.sample(TELEMETRY_XPU, sample)
            for instance in sampler.instances:
                emit.watermark(TELEMETRY_XPU, instance, now_ns)
            spent_s = (self._monotonic_ns() - began_ns) / 1e9
            stop.wait(max(config.interval_ms / 1000 - spent_s, 0.0))

    def _read_pcie(self, devices: Devices, ended: threading.Event) -> None:
        while not ended.wait(self._config.pcie_interval_ms / 1000):
            devices.read_pcie()
