"""NVIDIA GPUs through NVML, by its own Python binding (nvidia-ml-py, whose module is pynvml).

Functions and constants are those of NVIDIA's NVML API reference. A call that a GPU, driver or
permission does not allow gives None; any other failure means that the GPU cannot be read.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pynvml

from latencyprism.collectors.xpu.reading import Reading, UnavailableError

logger = logging.getLogger(__name__)
T = TypeVar("T")

VENDOR: Final = "nvidia"

THROTTLE_REASONS: Final = {
    0x002: "application_clocks",
    0x004: "power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "thermal",
    0x040: "hw_thermal",
    0x080: "power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of ``nvmlClocksEventReasons``; that of an idle GPU (1) holds nothing back."""
_IDLE: Final = 0x001

_UNTOLD: Final = frozenset(
    (
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_DATA,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    )
)
_ADVICE: Final = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found: this host has no NVIDIA "
    "driver, or the container was not given the utility capability of NVIDIA's runtime",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "NVIDIA's kernel driver is not loaded",
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not open /dev/nvidiactl",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "NVIDIA's library and kernel driver have different "
    "versions: reload the driver or reboot",
}


def throttle_names(reasons: int) -> tuple[str, ...]:
    """Names of the set bits; those without a name are ``other``."""
    names = [name for bit, name in THROTTLE_REASONS.items() if reasons & bit]
    return (*names, "other") if reasons & ~(sum(THROTTLE_REASONS) | _IDLE) else tuple(names)


@dataclass(slots=True)
class _Device:
    handle: Any
    device: str
    name: str | None
    pcie: tuple[float | None, float | None] = (None, None)


class Nvml:
    """The GPUs of this host. Raises :class:`UnavailableError` when there are none to read.

    :meth:`read` is called by one thread, :meth:`read_pcie` may be called by another; every call
    blocks for as long as the driver takes.
    """

    def __init__(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as e:
            raise UnavailableError(_ADVICE.get(e.value, f"NVML cannot be opened: {e}")) from e
        self._events: Any = None
        self._devices: list[_Device] = []
        try:
            self._open()
        except pynvml.NVMLError as e:
            self.close()
            raise UnavailableError(f"NVML finds no GPU: {e}") from e
        if not self._devices:
            self.close()
            raise UnavailableError("NVML finds no GPU on this host")

    def read(self) -> list[Reading]:
        """Every GPU that was there at the start, in its order; one that fails has ``error``."""
        xids = self._xids()
        return [self._read(device, xids.get(_address(device.handle))) for device in self._devices]

    def read_pcie(self) -> None:
        """Measure the bus traffic of every GPU, 20 ms each way; :meth:`read` gives it out once."""
        for device in self._devices:
            handle = device.handle
            if handle is not None:
                device.pcie = (
                    _bytes_s(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES),
                    _bytes_s(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES),
                )

    def reopen(self) -> None:
        """Open the driver anew, which finds a GPU again after it was reset. Never raises: what is
        still missing goes on being reported as such.
        """
        for device in self._devices:
            device.handle = None
        self.close()
        try:
            pynvml.nvmlInit()
            self._open()
        except pynvml.NVMLError as e:
            logger.warning("NVML cannot be opened again: %s", e)

    def close(self) -> None:
        """Give the driver back."""
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as e:
            logger.debug("NVML was closed already: %s", e)

    def _open(self) -> None:
        """Find the GPUs: the known ones get a new handle, others are added."""
        self._events = pynvml.nvmlEventSetCreate()
        known = {device.device: device for device in self._devices}
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                name = _told(pynvml.nvmlDeviceGetUUID, handle) or f"index {index}"
            except pynvml.NVMLError as e:
                logger.warning("GPU %d cannot be opened: %s", index, e)
                continue
            device = known.get(name)
            if device is None:
                device = _Device(handle, name, _told(pynvml.nvmlDeviceGetName, handle))
                self._devices.append(device)
            device.handle = handle
            events = pynvml.nvmlEventTypeXidCriticalError
            _told(pynvml.nvmlDeviceRegisterEvents, handle, events, self._events)

    def _read(self, device: _Device, xid: int | None) -> Reading:
        error = "not found when the driver was opened again"
        if device.handle is not None:
            try:
                return self._values(device, xid)
            except pynvml.NVMLError as e:
                error = str(e)
        return Reading(device=device.device, vendor=VENDOR, name=device.name, error=error, xid=xid)

    def _values(self, device: _Device, xid: int | None) -> Reading:
        handle = device.handle
        load = _told(pynvml.nvmlDeviceGetUtilizationRates, handle)
        memory = _told(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
        if memory is None:
            memory = _told(pynvml.nvmlDeviceGetMemoryInfo, handle)
        reasons = _told(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if reasons is None:  # drivers before 535
            reasons = _told(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        temperature = _told(pynvml.nvmlDeviceGetTemperatureV, handle, pynvml.NVML_TEMPERATURE_GPU)
        if temperature is None:  # drivers before 570
            temperature = _told(
                pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
            )
        processes = _told(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
        (received, sent), device.pcie = device.pcie, (None, None)
        return Reading(
            device=device.device,
            vendor=VENDOR,
            name=device.name,
            utilisation=None if load is None else load.gpu / 100,
            memory_utilisation=None if load is None else load.memory / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            core_clock_mhz=_told(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            core_clock_max_mhz=_told(
                pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM
            ),
            memory_clock_mhz=_told(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
            throttle_reasons=None if reasons is None else throttle_names(reasons),
            temperature_c=temperature,
            power_w=_thousandth(_told(pynvml.nvmlDeviceGetPowerUsage, handle)),
            power_limit_w=_thousandth(_told(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            ecc_corrected_total=_ecc(handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected_total=_ecc(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            xid=xid,
            pcie_rx_bytes_s=received,
            pcie_tx_bytes_s=sent,
            pids=tuple(process.pid for process in processes or ()),
        )

    def _xids(self) -> dict[int | None, int]:
        """The last critical error since the last call, by the address of the GPU's handle."""
        found: dict[int | None, int] = {}
        for _ in range(1000):  # a GPU that fails may report faster than is read
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError:
                break  # a timeout, so there is none; or a lost GPU, which reading it tells
            found[_address(event.device)] = event.eventData
        return found


def _told(function: Callable[..., T], *arguments: Any) -> T | None:
    """What the driver answers; None for what it does not tell of this GPU to this user."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as e:
        if e.value in _UNTOLD:
            return None
        raise


def _ecc(handle: Any, kind: int) -> int | None:
    return _told(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, pynvml.NVML_VOLATILE_ECC)


def _bytes_s(handle: Any, direction: int) -> float | None:
    try:
        kib_s = _told(pynvml.nvmlDeviceGetPcieThroughput, handle, direction)
    except pynvml.NVMLError:
        return None  # reading the GPU tells what is wrong with it
    return None if kib_s is None else kib_s * 1024.0


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000


def _address(handle: Any) -> int | None:
    return None if handle is None else ctypes.cast(handle, ctypes.c_void_p).value
