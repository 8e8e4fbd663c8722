"""What one way of reading accelerators finds on this machine, for a person to read."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from latencyprism.collectors.source import UnavailableError
from latencyprism.collectors.xpu.poller import Way
from latencyprism.collectors.xpu.reading import Reading

SIGNALS: Final = {
    "load": ("utilisation",),
    "memory": ("memory_used_bytes",),
    "clocks": ("core_clock_mhz",),
    "throttling": ("throttle_reasons",),
    "temperature": ("temperature_c",),
    "power": ("power_w", "energy_total_j"),
    "memory errors": ("ecc_uncorrected_total",),
}
"""Signal → fields of a reading, any of which tells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found; ``missing`` says why nothing was."""

    devices: tuple[str, ...] = ()
    """Products, with how many there are of each, and those that fail with their error."""
    failing: int = 0
    untold: tuple[str, ...] = ()
    """Signals that no device tells."""
    missing: str | None = None


def survey(way: Way) -> Survey:
    """Open what a source would open, read it and close it again. Raises nothing but bugs."""
    try:
        devices = way.open()
    except UnavailableError as error:
        return Survey(missing=str(error))
    try:
        devices.read()
        return _told(devices.read())  # some is told by comparison with the time before
    except OSError as error:
        return Survey(missing=str(error))
    finally:
        devices.close()


def _told(readings: Sequence[Reading]) -> Survey:
    whole = [reading for reading in readings if reading.parent is None]
    names = Counter(reading.name or f"{reading.vendor} device" for reading in whole)
    failing = [f"{reading.device}: {reading.error}" for reading in readings if reading.error]
    return Survey(
        devices=(*(f"{count} x {name}" for name, count in names.items()), *failing),
        failing=len(failing),
        untold=tuple(
            signal
            for signal, fields in SIGNALS.items()
            if not any(getattr(r, name) is not None for r in readings for name in fields)
        ),
    )
