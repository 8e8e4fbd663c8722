"""NVIDIA GPUs through NVML, by its own Python binding (nvidia-ml-py, whose module is pynvml).

Functions and constants are those of NVIDIA's NVML API reference. A call that a GPU, driver or
permission does not allow gives None; any other failure means that the GPU cannot be read.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import pynvml

from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.xpu.reading import Reading
from latencyprism.collectors.xpu.reasons import clocks_event_names

logger = logging.getLogger(__name__)
T = TypeVar("T")

VENDOR: Final = "nvidia"

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
_NOT_AVAILABLE: Final = frozenset(((1 << 32) - 1, (1 << 64) - 1))
_ADVICE: Final = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found: this host has no NVIDIA "
    "driver, or the container was not given the utility capability of NVIDIA's runtime",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "NVIDIA's kernel driver is not loaded",
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not open /dev/nvidiactl",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "NVIDIA's library and kernel driver have different "
    "versions: reload the driver or reboot",
}


ALL_LINKS: Final = 0xFFFFFFFF
LINKS: Final = range(18)
"""NVML_NVLINK_MAX_LINKS."""
Fields = tuple[tuple[int, int], ...]
"""Ids of ``nvmlDeviceGetFieldValues`` with their scope: a link, or 0 where it has none."""


def _per_link(*ids: int) -> Fields:
    return tuple((field_id, link) for field_id in ids for link in LINKS)


MEMORY_TEMPERATURE: Final[Fields] = ((pynvml.NVML_FI_DEV_MEMORY_TEMP, 0),)
PCIE_REPLAYS: Final[Fields] = ((pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, 0),)
LINK_TRAFFIC: Final[tuple[tuple[Fields, int], ...]] = (
    (
        (
            (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS),
            (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS),
        ),
        1024,
    ),
    (
        _per_link(
            pynvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES, pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES
        ),
        1,
    ),
)
"""Counters of NVLink's traffic and their unit in bytes; the first that a GPU tells is taken."""
LINK_ERRORS: Final[tuple[tuple[Fields, int], ...]] = (
    (  # up to Ampere
        (
            (pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 0),
            (pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, 0),
            (pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, 0),
            (pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 0),
        ),
        1,
    ),
    (  # Hopper
        _per_link(
            pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
            pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
            pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
        ),
        1,
    ),
    (  # Blackwell
        _per_link(
            pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS,
            pynvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS,
            pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS,
        ),
        1,
    ),
)
"""Counters of NVLink's errors, likewise."""
_VALUE_OF_TYPE: Final = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


@dataclass(slots=True)
class _Slow:
    """What is read at the slow pace; :attr:`traffic` is given out once, the rest until the next."""

    memory_clock_mhz: int | None = None
    power_limit_w: float | None = None
    corrected: int | None = None
    uncorrected: int | None = None
    link_errors: int | None = None
    replays: int | None = None
    gen: int | None = None
    width: int | None = None
    pids: tuple[int, ...] = ()
    traffic: tuple[float | None, float | None] = (None, None)


@dataclass(slots=True)
class _Slice:
    """A MIG instance; the driver tells neither its load nor its clocks."""

    handle: Any
    device: str
    aliases: frozenset[str]
    name: str | None
    pids: tuple[int, ...] = ()


@dataclass(slots=True)
class _Device:
    handle: Any
    device: str
    name: str | None
    aliases: frozenset[str] = frozenset()
    clock_max_mhz: int | None = None
    traffic: Fields = ()
    """The counters of links that this GPU tells, as well as below."""
    traffic_unit: int = 1
    errors: Fields = ()
    has_memory_sensor: bool = False
    slices: list[_Slice] = field(default_factory=list)
    slow: _Slow = field(default_factory=_Slow)


class Nvml:
    """The GPUs of this host. Raises :class:`UnavailableError` when there are none to read.

    :meth:`read` and :meth:`reopen` are called by one thread. What takes the driver long is read by
    a thread of its own every ``slow_interval_s``; without one, by whoever calls :meth:`read_slow`.
    Every call blocks for as long as the driver takes.
    """

    def __init__(
        self,
        slow_interval_s: float | None = None,
        *,
        rescan_s: float = 5.0,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as e:
            raise UnavailableError(_words(e)) from e
        self._rescan_s = rescan_s
        self._monotonic_s = monotonic_s
        self._rescan_due_s = 0.0
        self._events: Any = None
        self._devices: list[_Device] = []
        self._driver = threading.Lock()
        """Held while the slow thread calls the driver, and while the driver is opened anew."""
        self._ended = threading.Event()
        self._lost = ""
        """Why a GPU has no handle."""
        try:
            self._open()
        except pynvml.NVMLError as e:
            self.close()
            raise UnavailableError(f"NVML finds no GPU: {e}") from e
        if not self._devices:
            self.close()
            raise UnavailableError("NVML finds no GPU on this host")
        if slow_interval_s is not None:
            threading.Thread(
                target=self._read_slowly,
                args=(slow_interval_s,),
                name="xpu nvidia slow",
                daemon=True,
            ).start()

    @property
    def counts(self) -> Mapping[str, int]:
        """Nothing is refused: what the driver does not tell is left out."""
        return {}

    def read(self) -> list[Reading]:
        """Every GPU found so far and, after it, its MIG slices; one that fails has ``error``."""
        xids = self._xids()
        if self._monotonic_s() >= self._rescan_due_s:
            self._rescan_due_s = self._monotonic_s() + self._rescan_s
            self._rescan()
        return [
            reading
            for device in self._devices
            for reading in self._read(device, xids.get(_address(device.handle)))
        ]

    def read_slow(self) -> None:
        """Read what is dear: bus traffic takes the driver 20 ms each way. Does not raise."""
        for device in self._devices:
            with self._driver:
                handle = device.handle
                if handle is None:
                    continue
                try:
                    _read_state(device)
                except pynvml.NVMLError:
                    continue  # reading the GPU tells what is wrong with it
                device.slow.traffic = (
                    _bytes_s(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES),
                    _bytes_s(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES),
                )

    def reopen(self) -> None:
        """Open the driver anew, which finds a GPU again after it was reset. Never raises: what is
        still missing goes on being reported as such.
        """
        with self._driver:
            for device in self._devices:
                device.handle = None
                device.slices = []
            self._shut()
            self._lost = "not found when the driver was opened again"
            try:
                pynvml.nvmlInit()
                self._open()
            except pynvml.NVMLError as e:
                self._lost = _words(e)
                logger.warning("NVML cannot be opened again: %s", self._lost)

    def close(self) -> None:
        """Give the driver back."""
        self._ended.set()
        with self._driver:
            for device in self._devices:
                device.handle = None
            self._lost = "closed"
            self._shut()

    def _shut(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)
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
                device = known.get(name)
                if device is None:
                    device = _Device(handle, name, _told(pynvml.nvmlDeviceGetName, handle))
                    self._devices.append(device)
                device.handle = handle
                self._prepare(device)
            except pynvml.NVMLError as e:
                logger.warning("GPU %d cannot be opened: %s", index, e)

    def _prepare(self, device: _Device) -> None:
        """Ask once what does not change."""
        handle = device.handle
        address = _told(pynvml.nvmlDeviceGetPciInfo, handle)
        device.aliases = frozenset() if address is None else frozenset({_pci(address)})
        device.clock_max_mhz = _told(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM)
        device.traffic, device.traffic_unit = _first_told(handle, LINK_TRAFFIC)
        device.errors, _ = _first_told(handle, LINK_ERRORS)
        device.has_memory_sensor = bool(_field_values(handle, MEMORY_TEMPERATURE))
        events = pynvml.nvmlEventTypeXidCriticalError
        _told(pynvml.nvmlDeviceRegisterEvents, handle, events, self._events)
        _read_state(device)

    def _rescan(self) -> None:
        """Find the MIG slices again: they are made and removed while the driver runs."""
        for device in self._devices:
            if device.handle is not None:
                try:
                    device.slices = _slices(device)
                except pynvml.NVMLError:
                    device.slices = []  # reading the GPU tells what is wrong with it

    def _read(self, device: _Device, xid: int | None) -> list[Reading]:
        error = self._lost
        if device.handle is not None:
            try:
                whole = self._values(device, xid)
                return [whole, *(_slice_values(device, part) for part in device.slices)]
            except pynvml.NVMLError as e:
                error = str(e)
        return [
            Reading(
                device=device.device,
                vendor=VENDOR,
                aliases=device.aliases,
                name=device.name,
                error=error,
                xid=xid,
            )
        ]

    def _values(self, device: _Device, xid: int | None) -> Reading:
        handle, slow = device.handle, device.slow
        load = _told(pynvml.nvmlDeviceGetUtilizationRates, handle)
        used, total = _memory(handle)
        reasons = _told(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if reasons is None:  # drivers before 535
            reasons = _told(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        temperature = _told(pynvml.nvmlDeviceGetTemperatureV, handle, pynvml.NVML_TEMPERATURE_GPU)
        if temperature is None:  # drivers before 570
            temperature = _told(
                pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
            )
        sensor = MEMORY_TEMPERATURE if device.has_memory_sensor else ()
        fields = _field_values(handle, sensor + device.traffic)
        (received, sent), slow.traffic = slow.traffic, (None, None)
        return Reading(
            device=device.device,
            vendor=VENDOR,
            aliases=device.aliases,
            name=device.name,
            utilisation=None if load is None else load.gpu / 100,
            memory_utilisation=None if load is None else load.memory / 100,
            memory_used_bytes=used,
            memory_total_bytes=total,
            core_clock_mhz=_told(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            core_clock_max_mhz=device.clock_max_mhz,
            memory_clock_mhz=slow.memory_clock_mhz,
            throttle_reasons=None if reasons is None else clocks_event_names(reasons),
            temperature_c=temperature,
            memory_temperature_c=fields.get(MEMORY_TEMPERATURE[0]),
            power_w=_thousandth(_told(pynvml.nvmlDeviceGetPowerUsage, handle)),
            power_limit_w=slow.power_limit_w,
            ecc_corrected_total=slow.corrected,
            ecc_uncorrected_total=slow.uncorrected,
            xid=xid,
            pcie_rx_bytes_s=received,
            pcie_tx_bytes_s=sent,
            pcie_replays_total=slow.replays,
            pcie_gen=slow.gen,
            pcie_width=slow.width,
            link_bytes_total=_sum(fields, device.traffic, device.traffic_unit),
            link_errors_total=slow.link_errors,
            pids=slow.pids,
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

    def _read_slowly(self, interval_s: float) -> None:
        while True:
            self.read_slow()
            if self._ended.wait(interval_s):
                return


def _words(error: Any) -> str:
    """Why NVML cannot be opened, and what to do where that is known."""
    return _ADVICE.get(error.value, f"NVML cannot be opened: {error}")


def _read_state(device: _Device) -> None:
    """Read what changes seldom, or matters as a total only."""
    handle, slow = device.handle, device.slow
    fields = _field_values(handle, PCIE_REPLAYS + device.errors)
    slow.replays = fields.get(PCIE_REPLAYS[0])
    slow.link_errors = _sum(fields, device.errors, 1)
    slow.memory_clock_mhz = _told(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM)
    slow.power_limit_w = _thousandth(_told(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle))
    slow.corrected = _ecc(handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)
    slow.uncorrected = _ecc(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    slow.gen = _told(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle)
    slow.width = _told(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
    slow.pids = _pids(handle)
    for part in device.slices:
        part.pids = _pids(part.handle)


def _slices(device: _Device) -> list[_Slice]:
    """The MIG instances of a GPU, in their order; none while MIG is off."""
    mode = _told(pynvml.nvmlDeviceGetMigMode, device.handle)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return []
    count = _told(pynvml.nvmlDeviceGetMaxMigDeviceCount, device.handle) or 0
    known = {part.device: part for part in device.slices}
    found: list[_Slice] = []
    for index in range(count):
        handle = _told(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, device.handle, index)
        if handle is None:
            continue  # places need not be taken in order
        name = _told(pynvml.nvmlDeviceGetUUID, handle) or f"{device.device}/mig {index}"
        instance = _told(pynvml.nvmlDeviceGetGpuInstanceId, handle)
        part = known.get(name)
        if part is None:
            alias = () if instance is None else (f"{device.device}/{instance}",)
            part = _Slice(handle, name, frozenset(alias), _told(pynvml.nvmlDeviceGetName, handle))
            part.pids = _pids(handle)
        part.handle = handle
        found.append(part)
    return found


def _slice_values(device: _Device, part: _Slice) -> Reading:
    """A slice that is gone since the last look for slices tells nothing but its name."""
    used, total = _memory(part.handle)
    return Reading(
        device=part.device,
        vendor=VENDOR,
        aliases=part.aliases,
        parent=device.device,
        name=part.name,
        memory_used_bytes=used,
        memory_total_bytes=total,
        pids=part.pids,
    )


def _memory(handle: Any) -> tuple[int | None, int | None]:
    """Used and installed, bytes."""
    memory = _told(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if memory is None:  # drivers before 510
        memory = _told(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return (None, None) if memory is None else (_available(memory.used), _available(memory.total))


def _pids(handle: Any) -> tuple[int, ...]:
    processes = _told(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return tuple(process.pid for process in processes or ())


def _field_values(handle: Any, fields: Fields) -> dict[tuple[int, int], Any]:
    """Values of those fields that the GPU tells, in one call."""
    if not fields:
        return {}
    return told_values(_told(pynvml.nvmlDeviceGetFieldValues, handle, fields) or ())


def told_values(values: Iterable[Any]) -> dict[tuple[int, int], Any]:
    """Field and scope → value of each ``nvmlFieldValue_t`` that the driver filled in."""
    return {
        (value.fieldId, value.scopeId): told
        for value in values
        if value.nvmlReturn == pynvml.NVML_SUCCESS and value.valueType in _VALUE_OF_TYPE
        if (told := _available(getattr(value.value, _VALUE_OF_TYPE[value.valueType]))) is not None
    }


def _first_told(handle: Any, alternatives: Sequence[tuple[Fields, int]]) -> tuple[Fields, int]:
    """The first set of counters of which the GPU tells any, as far as it does, and its unit."""
    for fields, unit in alternatives:
        told = tuple(_field_values(handle, fields))
        if told:
            return told, unit
    return (), 1


def _sum(values: Mapping[tuple[int, int], Any], fields: Fields, unit: int) -> int | None:
    """Sum of counters; None unless all of them are told, since a part would look like growth."""
    if not fields or any(key not in values for key in fields):
        return None
    return sum(int(values[key]) for key in fields) * unit


def _pci(address: Any) -> str:
    """A PCI address as sysfs writes it."""
    return f"{address.domain:04x}:{address.bus:02x}:{address.device:02x}.0"


def _told(function: Callable[..., T], *arguments: Any) -> T | None:
    """What the driver answers; None for what it does not tell of this GPU to this user."""
    try:
        return _available(function(*arguments))
    except pynvml.NVMLError as e:
        if e.value in _UNTOLD:
            return None
        raise


def _available(answer: T) -> T | None:
    """An answer; None for NVML_VALUE_NOT_AVAILABLE, a number of all ones."""
    return None if isinstance(answer, int) and answer in _NOT_AVAILABLE else answer


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
