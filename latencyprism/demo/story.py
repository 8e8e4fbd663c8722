"""What happened in a demo, from the records that came out of the pipe; pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from latencyprism.recordings.report import ReportBuilder
from latencyprism.schemas.records import Ack, Alert, BatchProfile, Command
from latencyprism.simulator.load import Outcome, Summary, summarise

NS_PER_S = 1_000_000_000
GRACE_S = 3.0
"""An alert this long after the end of a burst or fault still belongs to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of the demo, ns since the epoch."""

    start_ns: int
    end_ns: int

    def holds(self, at_ns: int, grace_s: float = 0.0) -> bool:
        """Whether the moment lies in it, or at most ``grace_s`` behind its end."""
        return self.start_ns <= at_ns < self.end_ns + round(grace_s * NS_PER_S)


@dataclass(slots=True, kw_only=True)
class Story:
    """Records of one demo, and what they say."""

    whole: Span
    burst: Span
    fault: Span
    faulty: str
    """Instance that had the fault."""
    profiles: list[BatchProfile] = field(default_factory=list)
    alerts: list[tuple[int, Alert]] = field(default_factory=list)
    """With the wall time at which each came out of Kafka, ns."""
    commands: list[tuple[int, Command]] = field(default_factory=list)
    """The same."""
    acks: list[Ack] = field(default_factory=list)
    outcomes: Sequence[Outcome] = ()
    """Requests as their callers saw them."""

    def take(self, record: Any, now_ns: int) -> None:
        """Take a record that came out of the pipe at ``now_ns``."""
        match record:
            case BatchProfile():
                self.profiles.append(record)
            case Alert():
                self.alerts.append((now_ns, record))
            case Command():
                self.commands.append((now_ns, record))
            case Ack():
                self.acks.append(record)

    def fault_alerts(self) -> list[tuple[int, Alert]]:
        """Every fault alert as it first fired, with the time it came out."""
        return [
            (seen_ns, alert)
            for seen_ns, alert in self.alerts
            if alert.verdict == "fault" and alert.state == "firing"
        ]

    def found(self) -> tuple[int, Alert] | None:
        """The first alert about the faulty replica while its fault was on."""
        hits = (
            (seen_ns, alert)
            for seen_ns, alert in self.fault_alerts()
            if alert.instance == self.faulty and self.fault.holds(alert.fired_ns, GRACE_S)
        )
        return min(hits, key=lambda hit: hit[0], default=None)

    def burst_called_fault(self) -> bool:
        """Whether any fault alert fired on account of the burst."""
        return any(self.burst.holds(alert.fired_ns, GRACE_S) for _, alert in self.fault_alerts())

    def false_alarms(self) -> int:
        """Fault alerts that neither the fault nor its recovery explains, the burst's included."""
        return sum(not self.fault.holds(alert.fired_ns, 10.0) for _, alert in self.fault_alerts())

    @property
    def passed(self) -> bool:
        """Whether the fault was found and the burst was not called one."""
        return self.found() is not None and not self.burst_called_fault()

    def delay_s(self) -> float | None:
        """From the start of the fault until its alert came out of Kafka, wall time."""
        hit = self.found()
        return (hit[0] - self.fault.start_ns) / NS_PER_S if hit else None

    def first_command(self) -> Command | None:
        """The first command that steered traffic away from the faulty replica."""
        return next(
            (
                command
                for _, command in self.commands
                if command.target == self.faulty
                and command.action in ("weight", "drain")
                and self.fault.holds(command.issued_ns, GRACE_S)
            ),
            None,
        )

    def command_seen_ns(self, command: Command) -> int:
        """When the first record of a command came out of Kafka."""
        return min(seen for seen, c in self.commands if c.command_id == command.command_id)

    def answer_to(self, command: Command) -> Ack | None:
        """The first ack of a command."""
        return next((ack for ack in self.acks if ack.command_id == command.command_id), None)

    def verdicts(self, span: Span) -> Counter[str]:
        """Windows of a stretch by verdict, both replicas."""
        return Counter(p.verdict for p in self.profiles if span.holds(p.window_start_ns))

    def reason(self, span: Span, verdict: str) -> str | None:
        """The commonest reason given with a verdict in a stretch, numbers as in one example."""
        reasons = [
            p.reason
            for p in self.profiles
            if span.holds(p.window_start_ns) and p.verdict == verdict
        ]
        return reasons[len(reasons) // 2] if reasons else None

    def stage_shares(self, span: Span) -> dict[str, float]:
        """Share of each stage in the time of the requests that ended in a stretch."""
        totals: defaultdict[str, float] = defaultdict(float)
        for profile in self.profiles:
            if span.holds(profile.window_start_ns):
                for stage in profile.stages:
                    totals[stage.stage] += (stage.mean_ms or 0.0) * profile.requests_finished
        everything = sum(totals.values())
        return {stage: total / everything for stage, total in totals.items()} if everything else {}

    def traffic_share(self, span: Span) -> float | None:
        """Share of the requests sent in a stretch that the faulty replica served."""
        served = [o.served_by for o in self.outcomes if span.holds(o.sent_ns) and o.served_by]
        return served.count(self.faulty) / len(served) if served else None

    def seen(self, span: Span) -> Summary:
        """What the callers of a stretch saw."""
        return summarise(self.outcomes, from_ns=span.start_ns, until_ns=span.end_ns)

    def report(self) -> dict[str, Any]:
        """The report as ``--report`` writes it."""
        command = self.first_command()
        ack = self.answer_to(command) if command else None
        figures = {
            "demo.delay_s": self.delay_s(),
            "demo.false_alarms": self.false_alarms(),
            "demo.burst_called_fault": int(self.burst_called_fault()),
            "demo.command_delay_s": (self.command_seen_ns(command) - self.fault.start_ns) / NS_PER_S
            if command
            else None,
            "demo.ack_delay_ms": (ack.at_ns - command.issued_ns) / 1e6 if command and ack else None,
            "demo.failed_requests": sum(outcome.error is not None for outcome in self.outcomes),
        }
        builder = ReportBuilder(start_ns=self.whole.start_ns, end_ns=self.whole.end_ns)
        for record in (
            *self.profiles,
            *(alert for _, alert in self.alerts),
            *(command for _, command in self.commands),
            *self.acks,
        ):
            builder.add(record)
        known = {name: float(value) for name, value in figures.items() if value is not None}
        return builder.as_json(known) | {"passed": self.passed}
