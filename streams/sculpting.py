"""What routers are told: one rule that reroutes around a fault, one that throttles overload.

Pure policy over the state of a :class:`~latencyprism.streams.fleet.Fleet`. Commands are leases:
renewed while they are meant, left to expire when nobody renews them.
"""

import hashlib
import logging
from dataclasses import dataclass, replace

from latencyprism.schemas.records import Ack, Action, Alert, Command
from latencyprism.streams.config import SculptingConfig
from latencyprism.streams.fleet import Fleet, Replica

logger = logging.getLogger(__name__)

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


@dataclass(slots=True)
class _Target:
    """Where one replica stands with its routers."""

    epoch: int = 0
    command: Command | None = None
    """Lease in force; None when the target is left alone."""
    step: int = -1
    """Index into the weights on the way back; -1 while the fault is on."""
    decided_ns: int = 0
    renewed_ns: int = 0
    relapses: int = 0
    restored_ns: int = 0
    over_ns: int | None = None
    """Since when it queues beyond the objective."""
    under_ns: int | None = None
    """Since when a throttled one no longer does."""


class Sculptor:
    """Decides about the replicas of one service. Bounded by the number of replicas.

    At most ``max_share`` of the replicas are rerouted around at once, and only while a healthy
    peer is left to take the traffic; workload never reroutes. A concurrency limit takes nothing
    from a replica that it is serving now (it is never below what is decoding), so the whole fleet
    may have one.
    """

    def __init__(self, service: str, config: SculptingConfig | None = None) -> None:
        self.service = service
        self.config = config or SculptingConfig()
        self._targets: dict[str, _Target] = {}

    def decide(self, fleet: Fleet, now_ns: int) -> list[Command]:
        """New decisions and renewals that are due at ``now_ns``."""
        if self.config.mode == "off":
            return []
        replicas = fleet.replicas(now_ns)
        commands: list[Command] = []
        for replica in replicas:
            target = self._targets.setdefault(replica.instance, _Target())
            fault = replica.alert("fault")
            if fault is not None:
                command = self._reroute(replica, target, fault, replicas, now_ns)
            elif target.command is not None and target.command.action in ("weight", "drain"):
                command = self._way_back(replica, target, now_ns)
            else:
                command = self._throttle(replica, target, now_ns)
            command = command or self._renewal(target, now_ns)
            if command is not None:
                commands.append(command)
        self._forget({replica.instance for replica in replicas}, now_ns)
        return commands

    def acknowledge(self, ack: Ack) -> None:
        """Take a router's answer: what it refused is not renewed, and tried again later."""
        target = self._targets.get(ack.target)
        if target is None or target.command is None or ack.epoch != target.epoch:
            return
        if ack.effect == "refused":
            logger.warning("%s refused %s: %s", ack.router, ack.command_id, ack.detail)
            target.command = None
            target.step = -1

    def _reroute(
        self,
        replica: Replica,
        target: _Target,
        fault: Alert,
        replicas: list[Replica],
        now_ns: int,
    ) -> Command | None:
        action: Action = "drain" if fault.reason.startswith("stalled") else "weight"
        held = target.command
        if held is not None and held.action in ("weight", "drain") and target.step < 0:
            if held.action == action or held.action == "drain":
                return None
        elif not self._may_reroute(replica, replicas):
            return None
        recent = now_ns - target.restored_ns < self.config.relapse_s * NS_PER_S
        relapse = target.step >= 0 or (held is None and recent)
        weight = None if action == "drain" else self.config.weight_floor
        reason = f"fault on {replica.instance}: {fault.reason}"
        command = self._command(
            replica, target, now_ns, action, weight, self.config.weight_floor, reason, fault
        )
        if command is not None:
            target.step = -1
            if relapse:
                target.relapses = min(target.relapses + 1, 3)
            elif held is None:
                target.relapses = 0
        return command

    def _may_reroute(self, replica: Replica, replicas: list[Replica]) -> bool:
        out = {
            name
            for name, target in self._targets.items()
            if target.command is not None and target.command.action in ("weight", "drain")
        } | {replica.instance}
        healthy = [
            peer for peer in replicas if peer.instance not in out and peer.alert("fault") is None
        ]
        return bool(healthy) and len(out) <= self.config.max_share * len(replicas) + 1e-9

    def _way_back(self, replica: Replica, target: _Target, now_ns: int) -> Command | None:
        """Half open: a little more traffic at a time, while no alert comes back."""
        wait_ns = self.config.step_s * 2**target.relapses * NS_PER_S
        if now_ns - target.decided_ns < wait_ns:
            return None
        step = target.step + 1
        if step >= len(self.config.back_weights):
            target.restored_ns = now_ns
            return self._restore(replica, target, now_ns, "the fault is over")
        weight = self.config.back_weights[step]
        reason = f"the fault on {replica.instance} is over; trying weight {weight:g}"
        command = self._command(
            replica, target, now_ns, "weight", weight, self.config.weight_floor, reason, None
        )
        if command is not None:
            target.step = step
        return command

    def _throttle(self, replica: Replica, target: _Target, now_ns: int) -> Command | None:
        config = self.config
        objective, ttft = config.ttft_objective_ms, replica.ttft_ms
        waiting, decoding = replica.waiting or 0.0, replica.decoding or 0.0
        over = ttft is not None and ttft > objective and waiting >= 1
        under = (ttft is None or ttft < 0.7 * objective) and waiting < 1
        target.over_ns = (target.over_ns or now_ns) if over else None
        target.under_ns = (target.under_ns or now_ns) if under else None
        if target.command is None:
            if target.over_ns is None or now_ns - target.over_ns < config.overload_s * NS_PER_S:
                return None
            limit = max(config.concurrency_floor, round(decoding))
            reason = (
                f"overload by workload: first tokens take {ttft:.0f} ms, objective "
                f"{objective:.0f} ms, {waiting:.0f} wait"
            )
            return self._command(
                replica,
                target,
                now_ns,
                "concurrency_limit",
                float(limit),
                float(config.concurrency_floor),
                reason,
                replica.alert("workload"),
            )
        if target.under_ns is None or now_ns - target.under_ns < config.step_s * NS_PER_S:
            return None
        return self._restore(replica, target, now_ns, "first tokens are within the objective")

    def _restore(
        self, replica: Replica, target: _Target, now_ns: int, reason: str
    ) -> Command | None:
        command = self._command(replica, target, now_ns, "restore", None, None, reason, None)
        if command is not None:
            target.command = None
            target.step = -1
            target.over_ns = target.under_ns = None
        return command

    def _command(
        self,
        replica: Replica,
        target: _Target,
        now_ns: int,
        action: Action,
        value: float | None,
        floor: float | None,
        reason: str,
        alert: Alert | None,
    ) -> Command | None:
        """A new decision, unless the last one about this target is too recent.

        Only a half-open target closes again at once: each try has waited its time already.
        """
        closing = alert is not None and target.step >= 0
        recent = now_ns - target.decided_ns < self.config.decision_s * NS_PER_S
        if target.epoch and recent and not closing:
            return None
        target.epoch = max(target.epoch + 1, now_ns // NS_PER_MS)
        target.decided_ns = target.renewed_ns = now_ns
        key = f"{self.service}\n{replica.instance}\n{target.epoch}"
        target.command = Command(
            command_id=hashlib.sha256(key.encode()).hexdigest()[:16],
            target=replica.instance,
            service=self.service,
            epoch=target.epoch,
            issued_ns=now_ns,
            lease_ms=self.config.lease_ms,
            action=action,
            value=value,
            floor=floor,
            reason=reason,
            alert=alert.fingerprint if alert else None,
            dry_run=self.config.mode == "dry_run",
        )
        return target.command

    def _renewal(self, target: _Target, now_ns: int) -> Command | None:
        if target.command is None:
            return None
        if now_ns - target.renewed_ns < self.config.lease_ms * NS_PER_MS // 3:
            return None
        target.renewed_ns = now_ns
        target.command = replace(target.command, issued_ns=now_ns)
        return target.command

    def _forget(self, present: set[str], now_ns: int) -> None:
        """Drop targets that are gone; their leases run out by themselves."""
        for name in list(self._targets):
            target = self._targets[name]
            idle_ns = now_ns - target.decided_ns
            if name not in present and idle_ns > self.config.relapse_s * NS_PER_S:
                del self._targets[name]
