"""Intel GPUs through the files of their kernel drivers, i915 and xe.

Files are those of the kernel's ABI documentation. Neither driver tells utilisation or used memory
in files: they stay unknown.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from latencyprism.collectors.host.files import Files
from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.xpu import sysfs
from latencyprism.collectors.xpu.reading import Reading

VENDOR: Final = "intel"
PCI_VENDOR: Final = "0x8086"

REASONS: Final = {
    "pl1": "power_cap",
    "pl2": "power_cap",
    "psys_pl1": "power_cap",
    "psys_pl2": "power_cap",
    "pl4": "current_limit",
    "iccmax": "current_limit",
    "psys_crit": "current_limit",
    "fastvmode": "current_limit",
    "vr_tdc": "current_limit",
    "thermal": "thermal",
    "soc_thermal": "thermal",
    "soc_avg_thermal": "thermal",
    "ratl": "thermal",
    "mem_thermal": "memory_thermal",
    "vr_thermal": "vr_thermal",
    "vr_thermalert": "vr_thermal",
    "prochot": "prochot",
}
"""The drivers' reasons in the words of all vendors; another one is told as the driver names it."""
_NO_REASONS: Final = frozenset(("status", "p0_freq"))
"""The sum of all, and running at the highest clock there is."""


@dataclass(frozen=True, slots=True)
class _Engine:
    """Files of one GT, a part of the chip with a clock of its own."""

    clock: str
    clock_max: str
    reasons: dict[str, str]
    """File → the reason it tells of."""


@dataclass(frozen=True, slots=True)
class _Card:
    folder: str
    device: str
    name: str
    engines: tuple[_Engine, ...]
    sensors: str | None
    memory: tuple[str, ...]
    files: tuple[str, ...]


class Intel:
    """The GPUs of this host. Raises :class:`UnavailableError` when there are none."""

    def __init__(self, sys: str = "/sys") -> None:
        self._files = Files(sys=sys)
        self._cards: dict[str, _Card] = {}
        self.reopen()
        if not self._cards:
            raise UnavailableError(f"no card of Intel's i915 or xe driver in {sys}/class/drm")

    @property
    def counts(self) -> Mapping[str, int]:
        """Nothing is refused: what is no number is not told."""
        return {}

    def read(self) -> list[Reading]:
        """Every card found so far."""
        return [self._read(card) for card in self._cards.values()]

    def reopen(self) -> None:
        """Find cards again; one that is gone stays known, as lost."""
        self._files.close()
        for folder in sysfs.cards(self._files, PCI_VENDOR):
            engines = tuple(_engines(self._files, folder))
            if engines:
                card = self._open(folder, engines)
                self._cards[card.device] = card

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _open(self, folder: str, engines: tuple[_Engine, ...]) -> _Card:
        tiles = [name for name in self._files.names(folder) if re.fullmatch(r"tile\d+", name)]
        return _Card(
            folder=folder,
            device=sysfs.pci_address(folder),
            name=f"Intel GPU {sysfs.once(self._files, f'{folder}/device') or 'of unknown kind'}",
            engines=engines,
            sensors=sysfs.hwmon(self._files, folder),
            memory=tuple(f"{folder}/{tile}/physical_vram_size_bytes" for tile in sorted(tiles)),
            files=sysfs.render_node(self._files, folder),
        )

    def _read(self, card: _Card) -> Reading:
        files = self._files
        if sysfs.asleep(files, card.folder):
            return Reading(device=card.device, vendor=VENDOR, name=card.name)
        clocks = _told(sysfs.number(files, engine.clock) for engine in card.engines)
        if not clocks:
            return Reading(
                device=card.device,
                vendor=VENDOR,
                name=card.name,
                error=f"the driver no longer answers for it in {card.folder}"
                if sysfs.exists(card.folder)
                else f"{card.device} is gone from the PCI bus",
            )
        gen, width = sysfs.link(files, card.folder)
        memory = _told(sysfs.number(files, path) for path in card.memory)
        return Reading(
            device=card.device,
            vendor=VENDOR,
            name=card.name,
            memory_total_bytes=int(sum(memory)) if memory else None,
            core_clock_mhz=max(clocks),
            core_clock_max_mhz=max(
                _told(sysfs.number(files, engine.clock_max) for engine in card.engines),
                default=None,
            ),
            throttle_reasons=self._reasons(card),
            temperature_c=self._of(card, "temp2_input", 1e-3),
            memory_temperature_c=self._of(card, "temp3_input", 1e-3),
            power_limit_w=sysfs.first(
                # 0 means that there is no limit.
                self._of(card, f"power{which}_max", 1e-6) or None
                for which in (1, 2)
            ),
            energy_total_j=sysfs.first(
                self._of(card, f"energy{which}_input", 1e-6) for which in (1, 2)
            ),
            pcie_gen=gen,
            pcie_width=width,
            files=card.files,
        )

    def _reasons(self, card: _Card) -> tuple[str, ...] | None:
        told = [
            (reason, on)
            for engine in card.engines
            for path, reason in engine.reasons.items()
            if (on := sysfs.number(self._files, path)) is not None
        ]
        return tuple(dict.fromkeys(reason for reason, on in told if on)) if told else None

    def _of(self, card: _Card, name: str, scale: float) -> float | None:
        if card.sensors is None:
            return None
        return sysfs.number(self._files, f"{card.sensors}/{name}", scale)


def _told(values: Iterator[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _engines(files: Files, folder: str) -> Iterator[_Engine]:
    """Those of xe, below the device, or of i915, below the card."""
    for tile in sorted(files.names(folder)):
        if re.fullmatch(r"tile\d+", tile):
            for name in sorted(files.names(f"{folder}/{tile}")):
                clock = f"{folder}/{tile}/{name}/freq0"
                if sysfs.exists(f"{clock}/act_freq"):
                    throttle = f"{clock}/throttle"
                    yield _Engine(
                        f"{clock}/act_freq",
                        f"{clock}/rp0_freq",
                        _reason_files(files, throttle, "reason_"),
                    )
    gts = f"{folder.removesuffix('/device')}/gt"
    for name in sorted(files.names(gts)):
        if sysfs.exists(f"{gts}/{name}/rps_act_freq_mhz"):
            yield _Engine(
                f"{gts}/{name}/rps_act_freq_mhz",
                f"{gts}/{name}/rps_RP0_freq_mhz",
                _reason_files(files, f"{gts}/{name}", "throttle_reason_"),
            )


def _reason_files(files: Files, folder: str, prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in sorted(files.names(folder)):
        reason = name.removeprefix(prefix)
        if name.startswith(prefix) and reason not in _NO_REASONS:
            found[f"{folder}/{name}"] = REASONS.get(reason, reason)
    return found
