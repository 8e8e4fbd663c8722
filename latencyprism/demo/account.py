"""The account that the demo prints: what was seen, said, done, and where to look further."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from latencyprism.demo.story import NS_PER_S, Span, Story
from latencyprism.simulator.load import Summary


def account(story: Story) -> RenderableType:
    """Everything a newcomer should see of one demo."""
    return Group(
        Panel(Text("\n").join(_sentences(story)), title="What happened", title_align="left"),
        _stages(story),
        _callers(story),
    )


def _sentences(story: Story) -> Iterator[Text]:
    burst = story.verdicts(story.burst)
    yield Text.assemble(
        ("Burst. ", "bold"),
        "called a fault"
        if story.burst_called_fault()
        else "Windows judged "
        + ", ".join(f"{n} {verdict}" for verdict, n in sorted(burst.items()))
        + "; no fault alert.",
    )
    if reason := story.reason(story.burst, "workload"):
        yield Text(f"  “{reason}”", "italic")
    yield from _fault(story)
    yield from _steering(story)
    if false_alarms := story.false_alarms():
        yield Text(f"{false_alarms} alerts had no cause.", "red")


def _fault(story: Story) -> Iterator[Text]:
    hit = story.found()
    if hit is None:
        yield Text("Fault. Not found.", "bold red")
        return
    alert = hit[1]
    yield Text.assemble(
        ("Fault. ", "bold"),
        f"Alert on {alert.instance} {story.delay_s():.2f} s after it began "
        f"(stage {alert.stage}, {alert.severity}).",
    )
    yield Text(f"  “{alert.reason}”", "italic")
    for cause in alert.causes[:3]:
        yield Text(f"  {cause.score:.0%} {cause.family}: {cause.cause}")


def _steering(story: Story) -> Iterator[Text]:
    command = story.first_command()
    if command is None:
        yield Text("Command. None was issued.", "yellow")
        return
    value = "" if command.value is None else f" {command.value:g}"
    after_s = (story.command_seen_ns(command) - story.fault.start_ns) / NS_PER_S
    yield Text.assemble(
        ("Command. ", "bold"),
        f"{command.action}{value} on {command.target}, {after_s:.2f} s after the fault began, "
        f"lease {command.lease_ms / 1000:g} s.",
    )
    ack = story.answer_to(command)
    if ack is None:
        yield Text("Ack. None came.", "yellow")
    else:
        took_ms = (ack.at_ns - command.issued_ns) / 1e6
        yield Text.assemble(
            ("Ack. ", "bold"), f"{ack.router}: {ack.effect} after {took_ms:.0f} ms ({ack.detail})."
        )
    before = Span(start_ns=story.whole.start_ns, end_ns=story.burst.start_ns)
    during = Span(start_ns=command.issued_ns, end_ns=story.fault.end_ns)
    yield Text.assemble(
        ("Effect. ", "bold"),
        f"The faulty replica's share of traffic went from {_percent(story.traffic_share(before))} "
        f"to {_percent(story.traffic_share(during))}.",
    )


def _stages(story: Story) -> RenderableType:
    table = Table(title="Where the time went (share of the requests that ended)")
    spans = {
        "normal": Span(start_ns=story.whole.start_ns, end_ns=story.burst.start_ns),
        "burst": story.burst,
        "fault": story.fault,
    }
    shares = {name: story.stage_shares(span) for name, span in spans.items()}
    table.add_column("stage")
    for name in spans:
        table.add_column(name, justify="right")
    for stage in ("ingress", "queue", "prefill", "decode", "egress"):
        table.add_row(stage, *(_percent(shares[name].get(stage)) for name in spans))
    return table


def _callers(story: Story) -> RenderableType:
    table = Table(title="What the callers saw (p95, ms)")
    for name in ("", "requests", "failed", "TTFT", "inter-token"):
        table.add_column(name, justify="right" if name else "left")
    command = story.first_command()
    rows = [
        ("normal", Span(start_ns=story.whole.start_ns, end_ns=story.burst.start_ns)),
        ("burst", story.burst),
    ]
    if command is None:
        rows.append(("fault", story.fault))
    else:
        rows += [
            ("fault, before the command",
             Span(start_ns=story.fault.start_ns, end_ns=command.issued_ns)),
            ("fault, after it", Span(start_ns=command.issued_ns, end_ns=story.fault.end_ns)),
        ]  # fmt: skip
    for name, span in rows:
        table.add_row(name, *_row(story.seen(span)))
    return table


def _row(seen: Summary) -> tuple[str, ...]:
    return (
        str(seen.requests),
        str(seen.failed),
        f"{seen.ttft_ms.p95:.0f}",
        f"{seen.itl_ms.p95:.1f}",
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
