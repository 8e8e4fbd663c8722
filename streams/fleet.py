"""The replicas of one service side by side: profiles in, alerts out."""

import hashlib
import math
from collections import deque
from dataclasses import dataclass, field, replace

from latencyprism.schemas.records import Alert, BatchProfile, Cause, Evidence, Severity, Verdict
from latencyprism.streams.config import FleetConfig
from latencyprism.streams.detection.evidence import is_decisive, rank_causes

NS_PER_S = 1_000_000_000
MAX_BATCHES = 64
"""Windows that an alert names; also its contract in alert.avsc."""
ALERTING: tuple[Verdict, ...] = ("fault", "workload")


@dataclass(slots=True)
class _Trouble:
    """An alert that is on, or workload that may become one."""

    alert: Alert
    evidence: dict[str, Evidence] = field(default_factory=dict)
    batches: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_BATCHES))
    worst: float = 0.0
    last_ns: int = 0
    records: int = 0
    """Records sent; 0 while it has not fired."""
    changed: bool = False
    causes_ns: dict[str, int] = field(default_factory=dict)
    """When each signal that shows a cause at work was last unusual."""
    level: float | None = None
    """Slowdown of the alert's stage, logarithm, smoothed over about a second."""
    settled: float | None = None
    """The same when the alert was as old as an update."""


@dataclass(slots=True)
class Replica:
    """What is known of one replica: its newest profile, smoothed over about two seconds."""

    instance: str
    profile: BatchProfile
    waiting: float | None = None
    decoding: float | None = None
    ttft_ms: float | None = None
    troubles: dict[Verdict, _Trouble] = field(default_factory=dict)

    @property
    def seen_ns(self) -> int:
        """When it last reported, event time."""
        return self.profile.closed_at_ns

    def alert(self, verdict: Verdict) -> Alert | None:
        """Its alert of that verdict, if one is on."""
        trouble = self.troubles.get(verdict)
        return trouble.alert if trouble and trouble.records else None

    def follow(self, profile: BatchProfile) -> None:
        """Take in the next profile."""
        self.profile = profile
        self.waiting = _smooth(self.waiting, profile.features.get("waiting"), 1 / 8)
        self.decoding = _smooth(self.decoding, profile.features.get("decoding"), 1 / 8)
        self.ttft_ms = _smooth(self.ttft_ms, profile.ttft_ms, 1 / 4)


def _smooth(before: float | None, value: float | None, share: float) -> float | None:
    """Exponential mean; what isn't known changes nothing."""
    if value is None or before is None:
        return before if value is None else value
    return before + (value - before) * share


class Fleet:
    """Alerts of one service. Pure; memory bounded by the number of replicas.

    While an alert is on, every window of its instance and verdict belongs to it, whichever stage
    the window names: one trouble is one alert.
    """

    def __init__(self, service: str, config: FleetConfig | None = None) -> None:
        self.service = service
        self.config = config or FleetConfig()
        self._replicas: dict[str, Replica] = {}

    def replicas(self, now_ns: int) -> list[Replica]:
        """Replicas that reported lately, by name."""
        since = now_ns - int(self.config.peer_s * NS_PER_S)
        return [
            self._replicas[name]
            for name in sorted(self._replicas)
            if self._replicas[name].seen_ns >= since
        ]

    def alerts(self) -> list[Alert]:
        """Alerts that are on."""
        return [
            trouble.alert
            for replica in self._replicas.values()
            for trouble in replica.troubles.values()
            if trouble.records
        ]

    def add(self, profile: BatchProfile) -> list[Alert]:
        """Alerts that changed with a profile; one delivered before, or late, changes nothing."""
        replica = self._replicas.get(profile.instance)
        if replica is None:
            self._make_room()
            replica = self._replicas[profile.instance] = Replica(
                instance=profile.instance, profile=profile
            )
        elif profile.window_start_ns <= replica.profile.window_start_ns:
            return []
        replica.follow(profile)
        ended: list[Alert] = []
        if profile.verdict in ALERTING:
            self._extend(replica, profile, ended)
        return [*ended, *self._report(replica, profile.closed_at_ns)]

    def tick(self, now_ns: int) -> list[Alert]:
        """Alerts that resolve because their replica fell silent; forgets those long gone."""
        resolved: list[Alert] = []
        for name, replica in list(self._replicas.items()):
            silent_ns = now_ns - replica.seen_ns
            if silent_ns >= self.config.silence_s * NS_PER_S:
                for trouble in replica.troubles.values():
                    if trouble.records:
                        seconds = silent_ns // NS_PER_S
                        reason = f"no data from {name} for {seconds} s; last: "
                        resolved.append(self._resolve(trouble, now_ns, reason))
                replica.troubles.clear()
            if silent_ns >= self.config.forget_s * NS_PER_S:
                del self._replicas[name]
        return resolved

    def _make_room(self) -> None:
        if len(self._replicas) >= self.config.max_replicas:
            oldest = min(self._replicas.values(), key=lambda replica: replica.seen_ns)
            del self._replicas[oldest.instance]

    def _other_cause(self, trouble: _Trouble, profile: BatchProfile) -> bool:
        """Whether a cause is seen at work that the alert has not known for some time."""
        since_ns = profile.closed_at_ns - int(self.config.new_cause_s * NS_PER_S)
        age_ns = profile.closed_at_ns - trouble.alert.fired_ns
        return age_ns >= self.config.update_s * NS_PER_S and any(
            trouble.causes_ns.get(found.signal, 0) <= since_ns
            for found in profile.evidence
            if is_decisive(found)
        )

    def _much_worse(self, trouble: _Trouble, profile: BatchProfile) -> bool:
        """Whether the stage of an alert that had settled has slowed a good deal more."""
        observed_ms, expected_ms = profile.observed_ms or 0.0, profile.expected_ms or 0.0
        sound = 0 < observed_ms < math.inf and 0 < expected_ms < math.inf
        if profile.stage != trouble.alert.stage or not sound:
            return False
        trouble.level = _smooth(trouble.level, math.log(observed_ms / expected_ms), 1 / 6)
        age_ns = profile.closed_at_ns - trouble.alert.fired_ns
        if age_ns < self.config.update_s * NS_PER_S or trouble.level is None:
            return False
        if trouble.settled is None:
            trouble.settled = trouble.level
        return trouble.level >= trouble.settled + math.log(self.config.worse_ratio)

    def _extend(self, replica: Replica, profile: BatchProfile, ended: list[Alert]) -> None:
        trouble = replica.troubles.get(profile.verdict)
        if trouble is not None and trouble.records and profile.verdict == "fault":
            if self._other_cause(trouble, profile):
                over = "another cause took over; "
            elif self._much_worse(trouble, profile):
                over = "it became much worse; "
            else:
                over = ""
            if over:
                ended.append(self._resolve(trouble, profile.closed_at_ns, over))
                trouble = None
        if trouble is None:
            trouble = replica.troubles[profile.verdict] = _Trouble(
                alert=self._new_alert(profile), last_ns=profile.closed_at_ns
            )
        trouble.last_ns = profile.closed_at_ns
        trouble.batches.append(profile.batch_id)
        for found in profile.evidence:
            known = trouble.evidence.get(found.signal)
            if known is None or found.surprise > known.surprise:
                trouble.evidence[found.signal] = found
            if is_decisive(found):
                trouble.causes_ns[found.signal] = profile.closed_at_ns
        weight = (profile.score or 0.0) / (profile.threshold or 1.0)
        if weight > trouble.worst or not trouble.records:
            trouble.worst = max(weight, trouble.worst)
            trouble.changed = True
            trouble.alert = replace(
                trouble.alert,
                stage=profile.stage or trouble.alert.stage,
                observed_ms=profile.observed_ms,
                expected_ms=profile.expected_ms,
                score=profile.score or 0.0,
                threshold=profile.threshold or 0.0,
                reason=profile.reason,
            )

    def _new_alert(self, profile: BatchProfile) -> Alert:
        stage = profile.stage or "decode"
        key = "\n".join((self.service, profile.instance, stage, profile.verdict))
        return Alert(
            alert_id="",
            fingerprint=hashlib.sha256(key.encode()).hexdigest()[:16],
            state="firing",
            severity="warning",
            verdict=profile.verdict,
            instance=profile.instance,
            service=self.service,
            model=profile.model,
            stage=stage,
            fired_ns=profile.closed_at_ns,
            updated_ns=profile.closed_at_ns,
            first_batch_ns=profile.window_start_ns,
            score=0.0,
            threshold=0.0,
            reason=profile.reason,
            peers_affected=1,
            peers_total=1,
        )

    def _report(self, replica: Replica, now_ns: int) -> list[Alert]:
        """Fire, update or resolve the troubles of a replica."""
        config, reports = self.config, []
        for verdict, trouble in list(replica.troubles.items()):
            quiet_ns = now_ns - trouble.last_ns
            if quiet_ns >= config.resolve_s * NS_PER_S:
                del replica.troubles[verdict]
                if trouble.records:
                    reports.append(self._resolve(trouble, now_ns, ""))
            elif not trouble.records:
                lasted_ns = now_ns - trouble.alert.fired_ns
                if verdict == "fault" or lasted_ns >= config.workload_s * NS_PER_S:
                    reports.append(self._tell(trouble, now_ns, fired_ns=now_ns))
            elif (
                trouble.changed and now_ns - trouble.alert.updated_ns >= config.update_s * NS_PER_S
            ):
                reports.append(self._tell(trouble, now_ns, fired_ns=trouble.alert.fired_ns))
        return reports

    def _tell(self, trouble: _Trouble, now_ns: int, *, fired_ns: int) -> Alert:
        alert = trouble.alert
        peers = self.replicas(now_ns)
        since = now_ns - int(self.config.peer_s * NS_PER_S)
        affected = sum(
            alert.verdict in peer.troubles and peer.troubles[alert.verdict].last_ns >= since
            for peer in peers
        )
        trouble.changed = False
        trouble.records += 1
        trouble.alert = replace(
            alert,
            alert_id=f"{alert.fingerprint}-{fired_ns}-{trouble.records}",
            state="firing" if trouble.records == 1 else "updated",
            severity=self._severity(alert),
            fired_ns=fired_ns,
            updated_ns=now_ns,
            causes=blame_peers(
                rank_causes(trouble.evidence, alert.stage), affected=affected, total=len(peers)
            ),
            batches=tuple(trouble.batches),
            peers_affected=max(1, affected),
            peers_total=max(1, len(peers)),
        )
        return trouble.alert

    def _resolve(self, trouble: _Trouble, now_ns: int, prefix: str) -> Alert:
        alert = trouble.alert
        return replace(
            alert,
            alert_id=f"{alert.fingerprint}-{alert.fired_ns}-{trouble.records + 1}",
            state="resolved",
            updated_ns=now_ns,
            resolved_ns=now_ns,
            reason=prefix + alert.reason,
            batches=tuple(trouble.batches),
        )

    def _severity(self, alert: Alert) -> Severity:
        if alert.verdict == "workload":
            return "info"
        if alert.stage == "flow" and alert.reason.startswith("stalled"):
            return "critical"
        observed, expected = alert.observed_ms, alert.expected_ms
        if observed and expected and observed >= self.config.critical_ratio * expected:
            return "critical"
        return "warning"


def blame_peers(causes: tuple[Cause, ...], *, affected: int, total: int) -> tuple[Cause, ...]:
    """Weigh causes by who else suffers, best first; scores still sum to at most 1.

    One replica of several speaks for its host or process. When all of three or more suffer at
    once, a host is unlikely: what they share is put first.
    """
    if total < 3 or affected < total:
        return causes
    weighed = [
        replace(cause, score=cause.score * (0.3 if cause.family in {"host", "hardware"} else 0.6))
        for cause in causes
    ]
    shared = Cause(
        family="upstream",
        cause=f"all {total} replicas suffer at once: something they share",
        score=0.4,
    )
    return tuple(sorted([shared, *weighed], key=lambda cause: -cause.score))
