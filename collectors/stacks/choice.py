"""Which alerts are worth the stacks of a server. Pure."""

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Final

from latencyprism.schemas.records import Alert, Severity

LATE_S: Final = 60.0
"""Alerts of longer ago are passed over: what the processes do now is another matter."""
MOST_IN_PAUSE: Final = 3
"""Profiles of one instance within the pause, each of another fingerprint."""
MAX_REMEMBERED: Final = 4096
"""Problems, and instances, that are remembered; the oldest are forgotten beyond it."""
RANK: Final[Mapping[Severity, int]] = {"info": 0, "warning": 1, "critical": 2}


class Choice:
    """Remembers what alerts said and what was sampled; kept over a restart of the source."""

    def __init__(self) -> None:
        self._severities: OrderedDict[tuple[str, int], int] = OrderedDict()
        """Fingerprint and time of firing → rank of the highest severity so far."""
        self._taken: OrderedDict[str, deque[tuple[float, str]]] = OrderedDict()
        """Instance → when, and for which fingerprint, stacks of it were taken."""

    def refusal(self, alert: Alert, *, pause_s: float, wall_ns: int, now_s: float) -> str | None:
        """Why no stacks are taken for the alert, as a kind to count; None when they are.

        Wanted is a fault that fires, or whose severity rises, of which the instance has no
        profile of the last ``pause_s`` yet.
        """
        if alert.verdict != "fault":
            return "no fault"
        rank, known = RANK[alert.severity], self._severity(alert)
        raised = alert.state == "updated" and known is not None and rank > known
        if alert.state != "firing" and not raised:
            return "no news"
        told_ns = alert.updated_ns if raised else alert.fired_ns
        if wall_ns - told_ns > LATE_S * 1e9:
            return "late"
        recent = [
            fingerprint
            for at_s, fingerprint in self._taken.get(alert.instance, ())
            if now_s - at_s < pause_s
        ]
        if alert.fingerprint in recent or len(recent) >= MOST_IN_PAUSE:
            return "too soon"
        return None

    def _severity(self, alert: Alert) -> int | None:
        """The highest rank before this record of the problem, which is remembered from now on."""
        key, rank = (alert.fingerprint, alert.fired_ns), RANK[alert.severity]
        known = self._severities.pop(key, None)
        self._severities[key] = rank if known is None else max(rank, known)
        if len(self._severities) > MAX_REMEMBERED:
            self._severities.popitem(last=False)
        return known

    def took(self, alert: Alert, now_s: float) -> None:
        """Stacks were taken for the alert."""
        self._taken.setdefault(alert.instance, deque(maxlen=MOST_IN_PAUSE)).append(
            (now_s, alert.fingerprint)
        )
        self._taken.move_to_end(alert.instance)
        if len(self._taken) > MAX_REMEMBERED:
            self._taken.popitem(last=False)
