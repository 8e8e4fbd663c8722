"""Which command is in force for each target: leases, epochs, floors and the share of the fleet.

One lease a target: a decision with a higher epoch replaces the whole earlier one. Everything
fails open: whatever ends, the target is back to normal.
"""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from latencyprism.routers.config import LeaseRules
from latencyprism.schemas.records import Ack, Command, Effect

NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """One moment on both clocks: a lease is compared with the wall clock once, when it comes, and
    then runs out on the monotonic one, so that a clock that is set cannot prolong it.
    """

    wall_ns: int
    """Nanoseconds since the epoch."""
    monotonic_ns: int

    @classmethod
    def now(cls) -> "Instant":
        """This moment."""
        return cls(wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns())


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetState:
    """What a router does with a target."""

    weight: float = 1.0
    """Share of its normal traffic, 0..1."""
    drained: bool = False
    """No new requests; those under way finish."""
    concurrency_limit: int | None = None
    """Requests in flight at most; None for no limit."""
    rate_limit_rps: float | None = None
    """New requests a second at most; None for no limit."""

    @property
    def ejected(self) -> bool:
        """Whether it gets no new request at all."""
        return self.drained or self.weight == 0

    def __str__(self) -> str:
        parts = []
        if self.drained:
            parts.append("drained")
        if self.weight != 1:
            parts.append(f"weight {self.weight:g}")
        if self.concurrency_limit is not None:
            parts.append(f"at most {self.concurrency_limit} requests in flight")
        if self.rate_limit_rps is not None:
            parts.append(f"at most {self.rate_limit_rps:g} requests a second")
        return ", ".join(parts) or "normal"


NORMAL = TargetState()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A command in force."""

    command: Command
    state: TargetState
    expires_ns: int
    """On the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Answer to one command; the state of its target has been changed already."""

    outcome: Literal["applied", "refused", "expired", "foreign"]
    """``foreign``: the target belongs to another router; nothing is answered."""
    state: TargetState
    """State of the target from now on; of a dry command, the one it would bring."""
    detail: str

    @property
    def effect(self) -> Effect | None:
        """Effect for the ack; None when there is to be none."""
        return None if self.outcome == "foreign" else self.outcome


@dataclass(frozen=True, slots=True)
class _Seen:
    epoch: int
    command_id: str


class _RefusedError(Exception):
    """The command breaks a rule; the text is for the ack."""


class LeaseBook:
    """Leases of a fixed set of targets. Bounded: one lease and one epoch a target.

    Pure: the router's own clocks are passed in. Not thread-safe.
    """

    def __init__(self, targets: Collection[str], rules: LeaseRules) -> None:
        self._targets = frozenset(targets)
        self._rules = rules
        self._leases: dict[str, Lease] = {}
        self._seen: dict[str, _Seen] = {}

    @property
    def targets(self) -> frozenset[str]:
        """Targets it answers for."""
        return self._targets

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Leases in force as of the last call with a time."""
        return tuple(self._leases.values())

    def state(self, target: str) -> TargetState:
        """What is in force for a target as of the last call with a time."""
        lease = self._leases.get(target)
        return lease.state if lease else NORMAL

    def offer(self, command: Command, now: Instant) -> Decision:
        """Take, refuse or ignore a command.

        Idempotent: the same command again, however late, changes nothing but is answered the
        same way while its lease lasts. Leases that have run out are left to :meth:`expire`.
        """
        if command.target not in self._targets:
            return Decision(
                outcome="foreign", state=NORMAL, detail=f"{command.target} is not served here"
            )
        try:
            self._check_epoch(command)
            self._check_clock(command, now)
            state, detail = self._wanted(command)
            left_ns = self._left_ns(command, now)
            if left_ns <= 0 and command.action != "restore":
                return self._too_late(command, -left_ns)
            if state.ejected:
                self._check_share(command.target, now)
        except _RefusedError as refusal:
            current = self.state(command.target)
            return Decision(outcome="refused", state=current, detail=str(refusal))
        if command.dry_run:
            return Decision(outcome="applied", state=state, detail=f"would be {detail}")
        self._see(command)
        if command.action == "restore":
            self._leases.pop(command.target, None)
        else:
            expires_ns = now.monotonic_ns + left_ns
            self._take(Lease(command=command, state=state, expires_ns=expires_ns))
        return Decision(outcome="applied", state=state, detail=detail)

    def expire(self, now: Instant) -> tuple[Lease, ...]:
        """End the leases that have run out and return them; their targets are normal again."""
        ended = tuple(
            lease for lease in self._leases.values() if lease.expires_ns <= now.monotonic_ns
        )
        for lease in ended:
            del self._leases[lease.command.target]
        return ended

    def revoke(self, target: str) -> None:
        """Drop a lease that could not be put into effect; a renewal may try again."""
        self._leases.pop(target, None)

    def _check_epoch(self, command: Command) -> None:
        seen = self._seen.get(command.target)
        if seen is None:
            return
        if command.epoch < seen.epoch:
            raise _RefusedError(
                f"epoch {command.epoch} is stale: {seen.epoch} was seen for {command.target}"
            )
        if command.epoch == seen.epoch and command.command_id != seen.command_id:
            raise _RefusedError(
                f"epoch {command.epoch} of {command.target} belongs to command "
                f"{seen.command_id}; a new decision needs a higher one"
            )

    def _check_clock(self, command: Command, now: Instant) -> None:
        ahead_ns = command.issued_ns - now.wall_ns
        if ahead_ns > self._rules.clock_tolerance_ms * NS_PER_MS:
            raise _RefusedError(
                f"issued {ahead_ns / 1e9:.1f} s in the future; the clocks of the router and the "
                "sender disagree"
            )

    @staticmethod
    def _left_ns(command: Command, now: Instant) -> int:
        """What is left of the lease; never more than its length, whatever the sender's clock."""
        age_ns = max(0, now.wall_ns - command.issued_ns)
        return command.lease_ms * NS_PER_MS - age_ns

    def _wanted(self, command: Command) -> tuple[TargetState, str]:
        """State a command asks for within the rules, and that in words."""
        rules = self._rules
        if command.action == "restore":
            return NORMAL, "normal"
        if not 0 < command.lease_ms <= rules.lease_max_ms:
            raise _RefusedError(
                f"lease of {command.lease_ms} ms is not in 1 .. {rules.lease_max_ms} ms"
            )
        if command.action == "drain":
            state = replace(NORMAL, drained=True)
            return state, str(state)
        value = self._value(command)
        match command.action:
            case "weight":
                if value > 1:
                    raise _RefusedError(f"weight {value:g} is not in 0 .. 1")
                lowest = 0.0 if value == 0 else rules.min_weight
                lowest = min(1.0, max(lowest, _floor(command)))
                state = replace(NORMAL, weight=max(value, lowest))
            case "concurrency_limit":
                lowest = max(rules.min_concurrency, math.ceil(_floor(command)))
                state = replace(NORMAL, concurrency_limit=max(math.floor(value), lowest))
            case "rate_limit":
                lowest = max(rules.min_rate_rps, _floor(command))
                state = replace(NORMAL, rate_limit_rps=max(value, lowest))
        raised = f" ({value:g} was asked, raised to the floor)" if value < lowest else ""
        return state, f"{state}{raised}"

    def _value(self, command: Command) -> float:
        value = command.value
        if value is None:
            raise _RefusedError(f"{command.action} without a value")
        if not 0 <= value <= self._rules.max_value:
            raise _RefusedError(
                f"{command.action} {value:g} is not in 0 .. {self._rules.max_value:g}"
            )
        return value

    def _check_share(self, target: str, now: Instant) -> None:
        """Refuse to take another target out when as many as may are out already."""
        out = sorted(
            lease.command.target
            for lease in self._leases.values()
            if lease.state.ejected and lease.expires_ns > now.monotonic_ns
        )
        # The addition guards against 0.7 * 10 being a hair below 7.
        allowed = math.floor(self._rules.max_ejected_share * len(self._targets) + 1e-9)
        if target in out or len(out) < allowed:
            return
        raise _RefusedError(
            f"at most {allowed} of {len(self._targets)} targets may be out at once; out now: "
            f"{', '.join(out) or 'none'}"
        )

    def _too_late(self, command: Command, late_ns: int) -> Decision:
        """A lease that ran out before it came; as the newer decision it still ends the older."""
        seen = self._seen.get(command.target)
        if not command.dry_run and (seen is None or command.epoch > seen.epoch):
            self._see(command)
            self._leases.pop(command.target, None)
        return Decision(
            outcome="expired",
            state=self.state(command.target),
            detail=f"the lease had run out {late_ns / 1e9:.1f} s before it was read",
        )

    def _see(self, command: Command) -> None:
        self._seen[command.target] = _Seen(command.epoch, command.command_id)

    def _take(self, lease: Lease) -> None:
        held = self._leases.get(lease.command.target)
        if (
            held is not None
            and held.command.epoch == lease.command.epoch
            and held.command.issued_ns >= lease.command.issued_ns
        ):
            return  # a repeated or reordered delivery neither lengthens nor shortens the lease
        self._leases[lease.command.target] = lease


def _floor(command: Command) -> float:
    floor = command.floor or 0.0
    if not math.isfinite(floor) or floor < 0:
        raise _RefusedError(f"floor {floor:g} is no number from 0 up")
    return floor


def ack(command: Command, *, router: str, effect: Effect, detail: str, at_ns: int) -> Ack:
    """Answer to a command; the same id however often the command is delivered."""
    return Ack(
        ack_id=f"{command.command_id}/{command.epoch}/{router}/{effect}",
        command_id=command.command_id,
        target=command.target,
        epoch=command.epoch,
        router=router,
        effect=effect,
        detail=detail,
        dry_run=command.dry_run,
        at_ns=at_ns,
    )
