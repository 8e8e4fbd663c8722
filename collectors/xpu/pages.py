"""Accelerators through the metrics page of an exporter.

The page's series are looked up once in the tables of :mod:`latencyprism.collectors.xpu.exporters`;
a later page with the same series costs a walk over its values.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from latencyprism.collectors.engine.client import Client, ScrapeError, checked_page
from latencyprism.collectors.engine.exposition import ExpositionError, Page, Parser, Series, Table
from latencyprism.collectors.xpu.exporters import EXPORTERS, Column, Exporter
from latencyprism.collectors.xpu.reading import Reading
from latencyprism.collectors.xpu.reasons import clocks_event_names
from latencyprism.collectors.xpu.sysfs import PCIE_GENERATIONS

MAX_DEVICES: Final = 256
"""Devices taken from one page; those beyond are counted."""
LARGEST: Final = float(1 << 53)
"""Larger numbers are no measurement, and would not fit the record."""
LARGEST_CODE: Final = (1 << 31) - 1
WHOLE: Final = frozenset(
    (
        "memory_used_bytes",
        "memory_total_bytes",
        "ecc_corrected_total",
        "ecc_uncorrected_total",
        "pcie_replays_total",
        "pcie_gen",
        "pcie_width",
        "link_errors_total",
    )
)
SHARES: Final = frozenset(("utilisation", "memory_utilisation"))
MADE: Final = frozenset(
    (
        "memory_free_bytes",
        "memory_reserved_bytes",
        "clocks_event_reasons",
        "last_error_code",
        "pcie_speed_gts",
        "health",
    )
)
"""Fields of the tables that others are made of, beside the violations."""


@dataclass(frozen=True, slots=True, eq=False)
class _Device:
    exporter: Exporter
    device: str
    parent: str | None
    aliases: frozenset[str]
    name: str | None


@dataclass(frozen=True, slots=True)
class _Place:
    """What one series means."""

    device: _Device
    field: str
    rank: int
    column: Column
    tile: bool


@dataclass(slots=True)
class _Values:
    """Values of one field of one device on one page: those of the best alternative."""

    rank: int
    column: Column
    whole: list[float] = field(default_factory=list)
    tiles: list[float] = field(default_factory=list)

    def combined(self) -> float:
        values = self.whole or self.tiles
        match self.column.combine:
            case "sum":
                return sum(values)
            case "mean":
                return sum(values) / len(values)
            case "max":
                return max(values)


class Reader:
    """Makes readings of the pages of one exporter, whichever it is."""

    def __init__(self) -> None:
        self._parser = Parser()
        self._table: Table | None = None
        self._places: list[list[_Place]] = []
        self._devices: dict[tuple[str, str], _Device] = {}
        self._codes: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        """What was refused, by kind."""

    def read(self, page: bytes) -> list[Reading]:
        """Devices of a page, in its order. Raises ExpositionError."""
        parsed = self._parser.parse(page)
        self._look_up(parsed)
        found: dict[_Device, dict[str, _Values]] = {}
        for places, value in zip(self._places, parsed.values, strict=False):
            if value is None or not places:
                continue
            for place in places:
                self._take(found.setdefault(place.device, {}), place, value)
        return [self._reading(device, fields) for device, fields in found.items() if fields]

    def _look_up(self, page: Page) -> None:
        if page.table is not self._table:
            self._table, self._places = page.table, []
            self._devices.clear()
        for series in page.table.series[len(self._places) :]:
            self._places.append(self._meant(series))

    def _meant(self, series: Series) -> list[_Place]:
        labels = {name.lower(): value for name, value in series.labels if value}
        found: list[_Place] = []
        for exporter, name, rank, column in _NAMES.get(_plain(series.name), ()):
            if all(labels.get(key, "").lower() in values for key, values in column.where.items()):
                device = self._device(exporter, labels)
                if device is not None:
                    tile = exporter.tile is not None and exporter.tile in labels
                    found.append(_Place(device, name, rank, column, tile))
        return found

    def _device(self, exporter: Exporter, labels: Mapping[str, str]) -> _Device | None:
        whole = next(iter(_of(labels, exporter.device)), None)
        if whole is None:
            self.counts["series_without_device"] += 1
            return None
        part = None if exporter.slice is None else labels.get(exporter.slice.lower())
        device = whole if part is None else f"{whole}/{part}"
        key = (exporter.name, device)
        if key not in self._devices:
            if len(self._devices) >= MAX_DEVICES:
                self.counts["devices_too_many"] += 1
                return None
            self._devices[key] = _Device(
                exporter,
                device,
                None if part is None else whole,
                frozenset(map(_pci, _of(labels, exporter.aliases)))
                if part is None
                else frozenset(),
                next(iter(_of(labels, exporter.product)), None),
            )
        return self._devices[key]

    def _take(self, fields: dict[str, _Values], place: _Place, value: float) -> None:
        blank = any(low <= value <= high for low, high in place.device.exporter.blanks)
        if blank or not 0 <= value * place.column.scale <= LARGEST:  # NaN is neither
            self.counts["values_missing"] += 1
            return
        values = fields.get(place.field)
        if values is None or place.rank < values.rank:
            values = fields[place.field] = _Values(place.rank, place.column)
        if place.rank == values.rank:
            (values.tiles if place.tile else values.whole).append(value * place.column.scale)

    def _reading(self, device: _Device, fields: Mapping[str, _Values]) -> Reading:
        told: dict[str, Any] = {name: values.combined() for name, values in fields.items()}
        made = {name: told.pop(name) for name in [*told] if name in MADE or name[:9] == "violation"}
        for name in WHOLE & told.keys():
            told[name] = int(told[name])
        for name in SHARES & told.keys():
            told[name] = min(told[name], 1.0)
        free = made.get("memory_free_bytes")
        if "memory_total_bytes" not in told and free is not None and "memory_used_bytes" in told:
            reserved = made.get("memory_reserved_bytes", 0.0)
            told["memory_total_bytes"] = int(told["memory_used_bytes"] + free + reserved)
        if "pcie_speed_gts" in made:
            told["pcie_gen"] = PCIE_GENERATIONS.get(made["pcie_speed_gts"])
        if made.get("health") == 0:
            told["error"] = "the exporter says that the device is not healthy"
        return Reading(
            device=device.device,
            vendor=device.exporter.vendor,
            aliases=device.aliases,
            parent=device.parent,
            name=device.name,
            throttle_reasons=_reasons(made),
            xid=self._new_code(device.device, made.get("last_error_code")),
            **told,
        )

    def _new_code(self, device: str, code: float | None) -> int | None:
        """An error code that was not there the last time; the page shows the last one for ever."""
        if code is None or code > LARGEST_CODE:
            return None
        before = self._codes.get(device)
        if before is None and len(self._codes) >= MAX_DEVICES:
            return None
        self._codes[device] = int(code)
        return int(code) if before is not None and code and code != before else None


class Pages:
    """The devices that the exporter at a URL tells of. Raises ValueError for a URL that is none.

    Blocks for up to ``timeout_s`` for each read of the connection.
    """

    def __init__(self, url: str, *, timeout_s: float = 2.0) -> None:
        self._url = url
        self._client = Client(url, timeout_s)
        self._path = "" if urlsplit(url).path.strip("/") else "/metrics"
        self._reader = Reader()

    @property
    def counts(self) -> Mapping[str, int]:
        """What was refused, by kind."""
        return self._reader.counts

    def read(self) -> list[Reading]:
        """The devices of the page now. Raises OSError when there is no usable page."""
        try:
            page = checked_page(*self._client.get(self._path))
            return self._reader.read(page)
        except (ScrapeError, ExpositionError) as error:
            raise OSError(f"exporter {self._url}: {error}") from error

    def reopen(self) -> None:
        """Nothing to do: every page is read anew."""

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _names() -> dict[str, list[tuple[Exporter, str, int, Column]]]:
    """Metric → what it may mean: exporter, field, rank among the alternatives, column."""
    found: dict[str, list[tuple[Exporter, str, int, Column]]] = {}
    for exporter in EXPORTERS:
        for name, columns in exporter.columns.items():
            for rank, column in enumerate(columns):
                for metric in column.names:
                    found.setdefault(_plain(metric), []).append((exporter, name, rank, column))
    return found


def _plain(name: str) -> str:
    """A metric's name without what settings may change: AMD's has capitals or a prefix."""
    return name.lower().removeprefix("amd_")


_NAMES: Final = _names()


def _of(labels: Mapping[str, str], names: Iterable[str]) -> list[str]:
    return [labels[name.lower()] for name in names if name.lower() in labels]


def _pci(identity: str) -> str:
    """A PCI address as sysfs writes it; another id stays as it is."""
    parts = identity.lower().split(":")
    if len(parts) == 3 and len(parts[0]) == 8 and parts[0].startswith("0000"):
        return ":".join((parts[0][4:], *parts[1:]))
    return identity.lower() if len(parts) == 3 else identity


def _reasons(made: Mapping[str, float]) -> tuple[str, ...] | None:
    mask = made.get("clocks_event_reasons")
    if mask is not None:
        return clocks_event_names(int(mask))
    violations = {
        name.removeprefix("violation."): share
        for name, share in made.items()
        if name.startswith("violation.")
    }
    return tuple(reason for reason, share in violations.items() if share) if violations else None
