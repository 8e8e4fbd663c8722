"""Which target gets the next request: least outstanding by weight, within every limit in force."""

from collections.abc import Mapping
from dataclasses import dataclass

from latencyprism.routers.lease import NORMAL, TargetState

NS_PER_S = 1_000_000_000


@dataclass(slots=True, kw_only=True)
class Target:
    """One target as the balancer sees it."""

    name: str
    """As commands name it."""
    address: str
    """host:port at which it is reached."""
    state: TargetState = NORMAL
    in_flight: int = 0
    down_until_ns: int = 0
    next_ns: int = 0
    """Earliest time of the next request under a rate limit."""
    credit: float = 0.0

    def ready_ns(self, now_ns: int) -> int | None:
        """When it may take a request, now at the earliest; None when no time alone changes that."""
        limit = self.state.concurrency_limit
        if self.state.ejected or (limit is not None and self.in_flight >= limit):
            return None
        paced_ns = self.next_ns if self.state.rate_limit_rps is not None else 0
        return max(now_ns, self.down_until_ns, paced_ns)


class Balancer:
    """Pure: time is passed in as monotonic ns. Not thread-safe; a pick costs one pass over targets.

    Each pick follows smooth weighted round robin with the weight a target has now: its share in
    force divided by its requests in flight plus one. So a busy or slow target gets less, and one
    of low weight still gets its trickle, from which its recovery can be seen.
    """

    def __init__(self, targets: Mapping[str, str]) -> None:
        self.targets = {
            name: Target(name=name, address=address) for name, address in targets.items()
        }

    def pick(self, now_ns: int) -> Target | None:
        """Take the next target and count a request in flight on it; None when none may take one."""
        ready = [target for target in self.targets.values() if target.ready_ns(now_ns) == now_ns]
        if not ready:
            return None
        total = 0.0
        for target in ready:
            share = target.state.weight / (target.in_flight + 1)
            target.credit += share
            total += share
        chosen = max(ready, key=lambda target: target.credit)
        chosen.credit -= total
        chosen.in_flight += 1
        rate = chosen.state.rate_limit_rps
        if rate is not None:
            chosen.next_ns = now_ns + round(NS_PER_S / rate)
        return chosen

    def release(self, target: Target) -> None:
        """A request on the target has ended."""
        target.in_flight -= 1

    def mark_down(self, target: Target, until_ns: int) -> None:
        """Leave a target alone that could not be reached."""
        target.down_until_ns = until_ns

    def set_state(self, name: str, state: TargetState) -> None:
        """Put a state into force; requests in flight are not touched."""
        self.targets[name].state = state

    def ready_ns(self, now_ns: int) -> int | None:
        """When the next target may take a request; None while that is not only a matter of time."""
        moments = [target.ready_ns(now_ns) for target in self.targets.values()]
        return min((moment for moment in moments if moment is not None), default=None)
