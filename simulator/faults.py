"""Faults of known strength as modifiers of an engine over a window of time."""

from dataclasses import dataclass
from typing import Literal, get_args

FaultKind = Literal["slowdown", "added", "pause", "hang", "network_delay", "prefill_slowdown"]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)

NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, in force in ``[from_ns, until_ns)``.

    ===================  =======================================================================
    kind                 ``value``
    ===================  =======================================================================
    ``slowdown``         factor on the duration of every step
    ``added``            ms added to every step
    ``pause``            ms the engine stands still, once every ``every_ms``
    ``hang``             unused: no step begins; health stays well and gauges read 0
    ``network_delay``    ms every chunk is held back on its way out; order is kept
    ``prefill_slowdown`` factor on the prefill part of a step
    ===================  =======================================================================

    Raises ValueError for a value that means nothing.
    """

    kind: FaultKind
    value: float = 0.0
    from_ns: int
    until_ns: int
    every_ms: float = 2000.0

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise ValueError(f"kind {self.kind!r} is none of {', '.join(FAULT_KINDS)}")
        if not 0 <= self.value < 1e6:
            raise ValueError(f"{self.kind}: value {self.value} is not in 0 .. 1,000,000")
        if self.kind in ("slowdown", "prefill_slowdown") and self.value == 0:
            raise ValueError(f"{self.kind}: a factor of 0 would stop time; use hang")
        if self.kind == "pause" and not self.value < self.every_ms < 1e9:
            raise ValueError(
                f"pause: {self.value} ms do not fit into a period of every_ms = {self.every_ms}"
            )
        if self.until_ns <= self.from_ns:
            raise ValueError(f"{self.kind}: the window ends before it begins")

    def active(self, now_ns: int) -> bool:
        """Whether it is in force at this moment."""
        return self.from_ns <= now_ns < self.until_ns

    def through_pauses(self, start_ns: int, work_ns: int) -> int:
        """When work begun at ``start_ns`` ends if the engine stands still in every pause."""
        every, pause = round(self.every_ms * NS_PER_MS), round(self.value * NS_PER_MS)
        now, left = start_ns, work_ns
        while True:
            index = max(0, (now - self.from_ns) // every)
            begins = self.from_ns + index * every
            if begins >= self.until_ns:
                return now + left
            if begins <= now < begins + pause:
                now = begins + pause
            upcoming = begins if now < begins else begins + every
            if now + left <= upcoming:
                return now + left
            left -= upcoming - now
            now = upcoming
