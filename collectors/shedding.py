"""When the agent costs too much: which kind of source goes, and when it comes back. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from latencyprism.collectors.config import CostConfig

NOTICEABLE = 0.05
"""Share of the memory ceiling by which ending a source must lower the memory to be of use."""
MOST_DOUBLINGS = 4
"""How often the wait for a kind doubles that has to be shed again and again."""

Resource = Literal["cpu", "bytes", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the whole agent took over the last second."""

    cpu_pct: float
    rss_mb: float
    bytes_s: float

    def __str__(self) -> str:
        return (
            f"{self.cpu_pct:.1f} % of a core, {self.rss_mb:.0f} MB and "
            f"{self.bytes_s / 1e6:.2f} MB/s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one source, or all of a kind, took of it."""

    cpu_pct: float
    bytes_s: float

    def __add__(self, other: "Share") -> "Share":
        return Share(cpu_pct=self.cpu_pct + other.cpu_pct, bytes_s=self.bytes_s + other.bytes_s)


NOTHING = Share(cpu_pct=0.0, bytes_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now; ``kind`` is None when nothing can be done, which is said once."""

    action: Literal["shed", "resume", "none"]
    kind: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class _Shed:
    kind: str
    resource: Resource
    rss_mb: float
    """Memory of the agent when it was shed."""


class Shedder:
    """Decides from the cost of each second whether to shed a kind of source or to try one again.

    Above a ceiling for ``patience_s``, the kind that took most of that resource meanwhile goes.
    Memory cannot be told apart by source: there it is the one that took most CPU time. The last
    kind that takes any CPU time is never shed. Where ending a source did not lower the memory, it
    comes back, and memory is left alone until it was below its ceiling again: ending the others
    would be in vain too. After ``resume_s`` below all ceilings the kind shed last is tried again,
    and after twice that, four times ... when it has to be shed again before another ``resume_s``.
    """

    def __init__(self, config: CostConfig) -> None:
        self.config = config
        self._shed: list[_Shed] = []
        self._above_s = 0
        self._below_s = 0
        self._taken: dict[str, Share] = {}
        self._tries: Counter[str] = Counter()
        self._memory_in_vain = False
        self._said = False

    @property
    def shed(self) -> list[str]:
        """Kinds that are shed, the latest last."""
        return [shed.kind for shed in self._shed]

    def forget(self, kind: str) -> None:
        """A kind that is shed is not asked for any more."""
        self._shed = [shed for shed in self._shed if shed.kind != kind]

    def observe(self, cost: Cost, kinds: Mapping[str, Share]) -> Decision | None:
        """Take the cost of one more second, and of each kind that runs."""
        if cost.rss_mb <= self.config.rss_mb:
            self._memory_in_vain = False
        resource = self._exceeded(cost)
        if resource is None:
            return self._below()
        self._below_s = 0
        self._above_s += 1
        for kind, share in kinds.items():
            self._taken[kind] = self._taken.get(kind, NOTHING) + share
        if self._above_s < self.config.patience_s:
            return None
        try:
            return self._above(resource, cost)
        finally:
            self._above_s = 0
            self._taken.clear()

    def _exceeded(self, cost: Cost) -> Resource | None:
        if cost.cpu_pct > self.config.cpu_pct:
            return "cpu"
        if cost.bytes_s > self.config.bytes_s:
            return "bytes"
        if cost.rss_mb > self.config.rss_mb and not self._memory_in_vain:
            return "memory"
        return None

    def _above(self, resource: Resource, cost: Cost) -> Decision | None:
        if resource == "memory" and self._was_in_vain(cost):
            self._memory_in_vain = True
            return Decision(
                action="resume",
                kind=self._shed.pop().kind,
                reason=f"memory stayed at {cost.rss_mb:.0f} MB without it",
            )
        costly = {
            kind: share.bytes_s if resource == "bytes" else share.cpu_pct
            for kind, share in self._taken.items()
            if share.cpu_pct > 0
        }
        dearest = max(costly, key=costly.__getitem__, default=None)
        if dearest is None or len(costly) < 2 or costly[dearest] <= 0:
            said, self._said = self._said, True
            return None if said else Decision(action="none", kind=None, reason=f"{cost}")
        self._shed.append(_Shed(dearest, resource, cost.rss_mb))
        return Decision(action="shed", kind=dearest, reason=f"the agent took {cost}")

    def _was_in_vain(self, cost: Cost) -> bool:
        """Whether a kind was shed for the memory and that helped nothing."""
        latest = self._shed[-1] if self._shed else None
        return (
            latest is not None
            and latest.resource == "memory"
            and cost.rss_mb > latest.rss_mb - NOTICEABLE * self.config.rss_mb
        )

    def _below(self) -> Decision | None:
        self._above_s = 0
        self._taken.clear()
        self._said = False
        self._below_s += 1
        if not self._shed:
            if self._below_s >= self.config.resume_s:
                self._tries.clear()
            return None
        kind = self._shed[-1].kind
        if self._below_s < self.config.resume_s * 2 ** min(self._tries[kind], MOST_DOUBLINGS):
            return None
        self._below_s = 0
        self._tries[kind] += 1
        self._shed.pop()
        return Decision(action="resume", kind=kind, reason="the agent is below its ceilings")
