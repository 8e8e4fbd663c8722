"""What came out of a replay, as one JSON object."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from latencyprism.recordings.format import Damage
from latencyprism.schemas.records import Ack, Alert, BatchProfile, Command

STAGES = ("ingress", "queue", "prefill", "decode", "egress")


class ReportBuilder:
    """Gathers the records of a replay; what belongs to its warm part is passed over.

    Idempotent: a record that is delivered twice counts once. Bounded by the records of one
    replay: its alerts, its commands and the ids of its windows are held.
    """

    def __init__(self, *, start_ns: int, end_ns: int) -> None:
        """Time of the recording that counts, ns since the epoch; windows that start later are of
        the flush and don't count.
        """
        self._start_ns = start_ns
        self._end_ns = end_ns
        self._seen: set[str] = set()
        self._verdicts: Counter[str] = Counter()
        self._stage_ms: defaultdict[str, float] = defaultdict(float)
        self._alerts: dict[tuple[str, int], Alert] = {}
        self._commands: dict[str, Command] = {}
        self._acks: dict[str, Ack] = {}

    def add(self, record: Any) -> None:
        """Take one record of any topic that streams or routers write."""
        match record:
            case BatchProfile():
                self._profile(record)
            case Alert() if record.fired_ns >= self._start_ns:
                known = self._alerts.get((record.fingerprint, record.fired_ns))
                if known is None or record.updated_ns >= known.updated_ns:
                    self._alerts[record.fingerprint, record.fired_ns] = record
            case Command() if record.issued_ns >= self._start_ns:
                self._commands[record.command_id] = record
            case Ack() if record.at_ns >= self._start_ns:
                self._acks[record.ack_id] = record

    def as_json(
        self, figures: Mapping[str, float], *, damage: Iterable[Damage] = ()
    ) -> dict[str, Any]:
        """The report; ``figures`` are those of the run that made it, such as its duration.

        ``alerts`` show the last state of each, ordered by the time they fired, ``batches`` the
        number of windows by verdict, ``stages`` the share of the requests' time spent in each
        stage, ``remainder`` being what could not be placed, ``damage`` what could not be read.
        """
        alerts = sorted(self._alerts.values(), key=lambda a: (a.fired_ns, a.fingerprint))
        commands = sorted(self._commands.values(), key=lambda c: (c.issued_ns, c.command_id))
        acks = sorted(self._acks.values(), key=lambda a: (a.at_ns, a.ack_id))
        return {
            "alerts": [_alert(alert) for alert in alerts],
            "batches": dict(sorted(self._verdicts.items())),
            "commands": [asdict(command) for command in commands],
            "acks": [asdict(ack) for ack in acks],
            "stages": self._shares(),
            "figures": dict(figures),
            "damage": [asdict(piece) for piece in damage],
        }

    def _profile(self, profile: BatchProfile) -> None:
        inside = self._start_ns <= profile.window_end_ns and profile.window_start_ns <= self._end_ns
        if not inside or profile.batch_id in self._seen:
            return
        self._seen.add(profile.batch_id)
        self._verdicts[profile.verdict] += 1
        for stage in profile.stages:
            if stage.mean_ms is not None:
                self._stage_ms[stage.stage] += stage.mean_ms * profile.requests_finished
        if profile.remainder_ms is not None:
            self._stage_ms["remainder"] += profile.remainder_ms * profile.requests_finished

    def _shares(self) -> dict[str, float]:
        total = sum(self._stage_ms.values())
        if total <= 0:
            return {}
        return {
            stage: self._stage_ms[stage] / total
            for stage in (*STAGES, "remainder")
            if stage in self._stage_ms
        }


def _alert(alert: Alert) -> dict[str, Any]:
    return {
        "fingerprint": alert.fingerprint,
        "instance": alert.instance,
        "stage": alert.stage,
        "verdict": alert.verdict,
        "fired_ns": alert.fired_ns,
        "resolved_ns": alert.resolved_ns,
        "expected_ms": alert.expected_ms,
        "observed_ms": alert.observed_ms,
        "reason": alert.reason,
        "causes": [asdict(cause) for cause in alert.causes],
    }
