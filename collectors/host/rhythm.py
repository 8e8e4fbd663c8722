"""When to do what is too dear to do at every tick."""

SHARE = 0.0005
"""CPU time that one dear thing may take, as a share of a core: 0.05 %."""
LONGEST = 60
"""Longest pause between two times, in multiples of the usual one."""


class Rhythm:
    """Something done every ``interval_ns``, or as much more rarely as its cost asks."""

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns
        self._due_ns: int | None = None
        self._last_ns = 0

    def due(self, now_ns: int) -> bool:
        """Whether it is time; always so at first."""
        return self._due_ns is None or now_ns >= self._due_ns

    def done(self, now_ns: int, cost_ns: int, *, idle: bool = False) -> None:
        """It was done at ``now_ns`` and took ``cost_ns`` of CPU time; half as often will do while
        it is ``idle``, with nothing to be seen.
        """
        pause_ns = min(max(self._interval_ns, int(cost_ns / SHARE)), LONGEST * self._interval_ns)
        if idle:
            pause_ns = max(pause_ns, 2 * self._interval_ns)
        self._last_ns, self._due_ns = now_ns, now_ns + pause_ns

    def hasten(self) -> None:
        """Let the next time be due as soon as a fifth of the usual pause has passed."""
        self._due_ns = self._last_ns + self._interval_ns // 5
