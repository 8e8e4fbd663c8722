"""Gaudi accelerators through the files of the kernel's habanalabs driver.

The driver tells a device's status and clocks; utilisation and memory come from Habana's exporter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.xpu import sysfs
from latencyprism.collectors.xpu.reading import Reading

VENDOR: Final = "habana"
WORKING: Final = "operational"


@dataclass(frozen=True, slots=True)
class _Device:
    folder: str
    device: str
    name: str | None
    sensors: str | None
    file: str


class Gaudi:
    """The accelerators of this host. Raises :class:`UnavailableError` when there are none."""

    def __init__(self, sys: str = "/sys") -> None:
        self._files = Files(sys=sys)
        self._devices: dict[str, _Device] = {}
        self.reopen()
        if not self._devices:
            raise UnavailableError(f"no device of the habanalabs driver in {sys}/class/accel")

    @property
    def counts(self) -> Mapping[str, int]:
        """Nothing is refused: what is no number is not told."""
        return {}

    def read(self) -> list[Reading]:
        """Every device found so far; one that does not work says its status as ``error``."""
        return [self._read(device) for device in self._devices.values()]

    def reopen(self) -> None:
        """Find devices again; one that is gone stays known, as lost."""
        self._files.close()
        for group, prefix in (("accel", "accel"), ("habanalabs", "hl")):  # since and before 6.2
            root = f"{self._files.sys}/class/{group}"
            for name in sorted(self._files.names(root)):
                if name.startswith(prefix) and name.removeprefix(prefix).isdigit():
                    self._find(f"{root}/{name}", f"/dev/{group}/{name}")

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _find(self, entry: str, file: str) -> None:
        files = self._files
        folder = next((f for f in (f"{entry}/device", entry) if sysfs.exists(f"{f}/status")), None)
        address = None if folder is None else sysfs.once(files, f"{folder}/pci_addr")
        if folder is not None and address is not None:
            self._devices[address] = _Device(
                folder=folder,
                device=address,
                name=sysfs.once(files, f"{folder}/device_type"),
                sensors=sysfs.hwmon(files, folder) or sysfs.hwmon(files, entry),
                file=file,
            )

    def _read(self, device: _Device) -> Reading:
        files, folder = self._files, device.folder
        status = sysfs.text(files, f"{folder}/status")
        error = None
        if status is None:
            error = f"{device.device} is gone: {folder}/status cannot be read"
        elif status.lower() != WORKING:
            error = f"status: {status}"
        return Reading(
            device=device.device,
            vendor=VENDOR,
            name=device.name,
            error=error,
            core_clock_mhz=sysfs.number(files, f"{folder}/clk_cur_freq_mhz"),
            core_clock_max_mhz=sysfs.number(files, f"{folder}/clk_max_freq_mhz"),
            temperature_c=self._of(device, "temp1_input", 1e-3),
            power_w=self._of(device, "power1_input", 1e-6),
            power_limit_w=sysfs.number(files, f"{folder}/max_power", 1e-3),
            files=(device.file,),
        )

    def _of(self, device: _Device, name: str, scale: float) -> float | None:
        if device.sensors is None:
            return None
        return sysfs.number(self._files, f"{device.sensors}/{name}", scale)
