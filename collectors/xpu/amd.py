"""AMD GPUs through the files of their kernel driver: no library, no privilege.

Files are those of the kernel's amdgpu documentation. ``pcie_bw`` is never read: it sleeps for a
second in the kernel. Those that the driver has to ask the firmware for one by one (error counters)
are read at the slow pace.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.xpu import sysfs
from latencyprism.collectors.xpu.amd_library import AmdLibrary
from latencyprism.collectors.xpu.gpu_metrics import GpuMetrics, UnknownTableError, decode
from latencyprism.collectors.xpu.reading import Reading

logger = logging.getLogger(__name__)

VENDOR: Final = "amd"
PCI_VENDOR: Final = "0x1002"

_LEVEL = re.compile(r"(\d+)Mhz", re.IGNORECASE)
_COUNT = re.compile(r"^(ue|ce):\s*(\d+)", re.MULTILINE)


@dataclass(slots=True)
class _Slow:
    """What is read at the slow pace, kept until the next time."""

    corrected: int | None = None
    uncorrected: int | None = None
    replays: int | None = None
    gen: int | None = None
    width: int | None = None
    pids: tuple[int, ...] = ()
    table: GpuMetrics | None = None
    """What AMD's library tells, of a card whose own table is not known."""


@dataclass(slots=True)
class _Card:
    folder: str
    address: str
    device: str
    aliases: frozenset[str]
    name: str | None
    clock_max_mhz: float | None
    sensors: str | None
    temperatures: dict[str, str]
    files: tuple[str, ...]
    kfd: str | None
    slow: _Slow = field(default_factory=_Slow)
    unknown_table: bool = False
    residencies: dict[str, int] = field(default_factory=dict)
    """Those of the reading before."""


class Amd:
    """The GPUs of this host. Raises :class:`UnavailableError` when there are none."""

    def __init__(
        self,
        sys: str = "/sys",
        *,
        slow_interval_s: float = 1.0,
        monotonic_s: Callable[[], float] = time.monotonic,
        load_library: Callable[[], AmdLibrary | None] = AmdLibrary.load,
    ) -> None:
        self._files = Files(sys=sys)
        self._slow_interval_s = slow_interval_s
        self._monotonic_s = monotonic_s
        self._slow_due_s = -float("inf")
        self._cards: dict[str, _Card] = {}
        self._counts: Counter[str] = Counter()
        self._load_library = load_library
        self._library: AmdLibrary | None = None
        self._library_tried = False
        self.reopen()
        if not self._cards:
            raise UnavailableError(f"no card of AMD's amdgpu driver in {sys}/class/drm")

    @property
    def counts(self) -> Mapping[str, int]:
        """What was refused, by kind."""
        return self._counts

    def read(self) -> list[Reading]:
        """Every card found so far."""
        if self._monotonic_s() >= self._slow_due_s:
            self._slow_due_s = self._monotonic_s() + self._slow_interval_s
            users = _users(self._files)
            for card in self._cards.values():
                self._read_slow(card, users)
        return [self._read(card) for card in self._cards.values()]

    def reopen(self) -> None:
        """Find cards again; one that is gone stays known, as lost."""
        self._files.close()
        nodes = _kfd_nodes(self._files)
        for folder in sysfs.cards(self._files, PCI_VENDOR):
            if sysfs.exists(f"{folder}/mem_info_vram_total"):
                card = self._open(folder, nodes)
                self._cards[card.device] = card

    def close(self) -> None:
        """Close the files, and the library if it was needed."""
        self._files.close()
        if self._library is not None:
            self._library.close()

    def _open(self, folder: str, nodes: Mapping[str, str]) -> _Card:
        files, address = self._files, sysfs.pci_address(folder)
        unique, serial = (
            sysfs.once(files, f"{folder}/{n}") for n in ("unique_id", "serial_number")
        )
        sensors = sysfs.hwmon(files, folder)
        return _Card(
            folder=folder,
            address=address,
            device=unique or address,
            aliases=frozenset(filter(None, (address, serial))),
            name=sysfs.once(files, f"{folder}/product_name"),
            clock_max_mhz=max(self._levels(f"{folder}/pp_dpm_sclk"), default=None),
            sensors=sensors,
            temperatures=sysfs.sensors(files, sensors, "temp"),
            files=sysfs.render_node(files, folder),
            kfd=nodes.get(address),
        )

    def _read(self, card: _Card) -> Reading:
        files, folder, slow = self._files, card.folder, card.slow
        if sysfs.asleep(files, folder):
            return Reading(device=card.device, vendor=VENDOR, aliases=card.aliases, name=card.name)
        busy = sysfs.number(files, f"{folder}/gpu_busy_percent", 0.01)
        used = sysfs.whole(files, f"{folder}/mem_info_vram_used")
        table = self._table(card)
        if busy is None and used is None and table is None:
            return Reading(
                device=card.device,
                vendor=VENDOR,
                aliases=card.aliases,
                name=card.name,
                error=f"the driver no longer answers for {card.address} in {folder}"
                if sysfs.exists(folder)
                else f"{card.address} is gone from the PCI bus",
            )
        table = table or slow.table or GpuMetrics()
        celsius = {name: self._sensor(at, 0.001) for name, at in card.temperatures.items()}
        memory_c = celsius.get("mem")
        return Reading(
            device=card.device,
            vendor=VENDOR,
            aliases=card.aliases,
            name=card.name,
            utilisation=busy,
            memory_utilisation=sysfs.number(files, f"{folder}/mem_busy_percent", 0.01),
            memory_used_bytes=used,
            memory_total_bytes=sysfs.whole(files, f"{folder}/mem_info_vram_total"),
            core_clock_mhz=sysfs.first((table.core_clock_mhz, self._of(card, "freq1_input", 1e-6))),
            core_clock_max_mhz=card.clock_max_mhz,
            memory_clock_mhz=self._of(card, "freq2_input", 1e-6),
            throttle_reasons=table.throttle_reasons,
            temperature_c=sysfs.first(
                (celsius.get("edge"), celsius.get("junction"), table.hotspot_temperature_c)
            ),
            memory_temperature_c=sysfs.first((memory_c, table.memory_temperature_c)),
            power_w=sysfs.first(
                (
                    self._of(card, "power1_average", 1e-6),
                    self._of(card, "power1_input", 1e-6),
                    table.power_w,
                )
            ),
            power_limit_w=self._of(card, "power1_cap", 1e-6),
            ecc_corrected_total=slow.corrected,
            ecc_uncorrected_total=slow.uncorrected,
            pcie_replays_total=slow.replays
            if table.pcie_replays_total is None
            else table.pcie_replays_total,
            pcie_gen=slow.gen,
            pcie_width=slow.width,
            link_bytes_total=table.link_bytes_total,
            pids=slow.pids,
            files=() if card.kfd else card.files,
        )

    def _read_slow(self, card: _Card, users: Mapping[str, list[int]]) -> None:
        if sysfs.asleep(self._files, card.folder):
            return
        corrected, uncorrected = self._errors(f"{card.folder}/ras")
        gen, width = sysfs.link(self._files, card.folder)
        card.slow = _Slow(
            corrected=corrected,
            uncorrected=uncorrected,
            replays=sysfs.whole(self._files, f"{card.folder}/pcie_replay_count"),
            gen=gen,
            width=width,
            pids=tuple(users.get(card.kfd or "", ())),
            table=self._ask_library(card) if card.unknown_table else None,
        )

    def _of(self, card: _Card, name: str, scale: float) -> float | None:
        if card.sensors is None:
            return None
        return sysfs.number(self._files, f"{card.sensors}/{name}", scale)

    def _sensor(self, start: str, scale: float) -> float | None:
        return sysfs.number(self._files, f"{start}_input", scale)

    def _levels(self, path: str) -> list[float]:
        return [float(level) for level in _LEVEL.findall(sysfs.once(self._files, path) or "")]

    def _errors(self, folder: str) -> tuple[int | None, int | None]:
        """Corrected and uncorrected errors of all blocks of the chip."""
        total: Counter[str] = Counter()
        for name in self._files.names(folder):
            if name.endswith("_err_count"):
                counts = sysfs.text(self._files, f"{folder}/{name}") or ""
                for kind, count in _COUNT.findall(counts):
                    total[kind] += int(count)
        return total.get("ce"), total.get("ue")

    def _table(self, card: _Card) -> GpuMetrics | None:
        content = self._files.read(f"{card.folder}/gpu_metrics")
        if content is None:
            return None
        try:
            table = decode(content)
        except UnknownTableError as unknown:
            if not card.unknown_table:
                logger.info("%s: %s is not known here", card.address, unknown)
            card.unknown_table = True
            self._counts["unknown_tables"] += 1
            return None
        return replace(table, throttle_reasons=_throttle(card, table))

    def _ask_library(self, card: _Card) -> GpuMetrics | None:
        if not self._library_tried:
            self._library_tried = True
            self._library = self._load_library()
        table = None if self._library is None else self._library.metrics(card.address)
        return None if table is None else replace(table, throttle_reasons=_throttle(card, table))


def _throttle(card: _Card, table: GpuMetrics) -> tuple[str, ...] | None:
    """Reasons that a table tells, or whose time has grown since the reading before."""
    before, card.residencies = card.residencies, table.residencies
    if table.throttle_reasons is not None or not before or not table.residencies:
        return table.throttle_reasons
    return tuple(
        reason for reason, spent in table.residencies.items() if spent > before.get(reason, spent)
    )


def _kfd_nodes(files: Files) -> dict[str, str]:
    """PCI address → id by which the compute driver names the GPU in its files of processes."""
    found: dict[str, str] = {}
    folder = f"{files.sys}/class/kfd/kfd/topology/nodes"
    for node in files.names(folder):
        lines = (sysfs.once(files, f"{folder}/{node}/properties") or "").splitlines()
        properties = dict(line.split() for line in lines if len(line.split()) == 2)
        identity = sysfs.once(files, f"{folder}/{node}/gpu_id")
        location, domain = (properties.get(key, "0") for key in ("location_id", "domain"))
        if identity not in (None, "0") and location.isdigit() and domain.isdigit():
            bits = int(location)
            address = f"{int(domain):04x}:{bits >> 8 & 0xFF:02x}:{bits >> 3 & 0x1F:02x}.{bits & 7}"
            found[address] = str(identity)
    return found


def _users(files: Files) -> dict[str, list[int]]:
    """Id of a GPU → processes that hold memory on it."""
    users: dict[str, list[int]] = {}
    folder = f"{files.sys}/class/kfd/kfd/proc"
    for pid in files.names(folder):
        for name in files.names(f"{folder}/{pid}"):
            if name.startswith("vram_") and pid.isdigit():
                held = sysfs.once(files, f"{folder}/{pid}/{name}")
                if held not in (None, "0"):
                    users.setdefault(name.removeprefix("vram_"), []).append(int(pid))
    return users
