"""Names of why clocks are held back, the same for all vendors where they mean the same."""

from typing import Final

CLOCKS_EVENTS: Final = {
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
"""Bits of ``nvmlClocksEventReasons``, which DCGM tells too; that of an idle GPU (1) holds nothing
back."""
_IDLE: Final = 0x001


def clocks_event_names(reasons: int) -> tuple[str, ...]:
    """Names of the set bits; those without a name are ``other``."""
    names = [name for bit, name in CLOCKS_EVENTS.items() if reasons & bit]
    return (*names, "other") if reasons & ~(sum(CLOCKS_EVENTS) | _IDLE) else tuple(names)
