"""What `latencyprism up` shows: the newest state of every instance, alert and command."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from latencyprism.schemas.records import Ack, Alert, BatchProfile, Command

COLOURS = {"normal": "green", "workload": "cyan", "fault": "bold red", "unknown": "yellow"}
NEWS = 8
INSTANCES = 64
FORGET_NS = 60_000_000_000


class Board:
    """Takes records as they come; draws them. Holds at most 64 instances and 8 news."""

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._profiles: dict[str, BatchProfile] = {}
        self._firing: dict[str, Alert] = {}
        self._news: deque[Text] = deque(maxlen=NEWS)

    def take(self, record: Any) -> None:
        """Take a record of latency.batches, alerts, control.commands or control.acks."""
        match record:
            case BatchProfile():
                self._profile(record)
            case Alert():
                self._alert(record)
            case Command():
                value = "" if record.value is None else f" {record.value:g}"
                dry = " (dry run)" if record.dry_run else ""
                text = f"{record.action}{value} on {record.target}{dry}: {record.reason}"
                colour = "green" if record.action == "restore" else "magenta"
                self._tell(record.issued_ns, text, colour, once=True)
            case Ack(effect="refused"):
                text = f"{record.router} refused a command on {record.target}: {record.detail}"
                self._tell(record.at_ns, text, "red", once=True)
            case Ack(effect="expired"):
                text = f"{record.router}: a lease on {record.target} ran out, back to normal"
                self._tell(record.at_ns, text, "yellow", once=True)

    def render(self, status: str) -> RenderableType:
        """The board as it stands, with a line of status under it."""
        table = Table(title="LatencyPrism", title_justify="left", expand=True)
        for name in ("instance", "verdict"):
            table.add_column(name, no_wrap=True)
        for name in ("open", "TTFT ms", "TPOT ms"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("why", ratio=1)
        now_ns = self._clock_ns()
        for instance, profile in sorted(self._profiles.items()):
            table.add_row(
                instance,
                Text(profile.verdict, COLOURS[profile.verdict]),
                str(profile.requests_open),
                *map(_ms, (profile.ttft_ms, profile.tpot_ms)),
                _why(profile, now_ns),
            )
        firing = [
            Text(f"● {a.severity} {a.instance} {a.stage}: {a.reason}", COLOURS[a.verdict])
            for a in self._firing.values()
        ]
        return Group(table, *firing, *self._news, Text(status, "dim"))

    def _profile(self, profile: BatchProfile) -> None:
        known = self._profiles.get(profile.instance)
        if known and known.window_start_ns > profile.window_start_ns:
            return
        self._profiles[profile.instance] = profile
        horizon = profile.window_end_ns - FORGET_NS
        stale = [name for name, p in self._profiles.items() if p.window_end_ns < horizon]
        oldest_first = sorted(self._profiles, key=lambda name: self._profiles[name].window_end_ns)
        for name in {*stale, *oldest_first[:-INSTANCES]}:
            del self._profiles[name]

    def _alert(self, alert: Alert) -> None:
        if alert.state == "resolved":
            self._firing.pop(alert.fingerprint, None)
            self._tell(alert.updated_ns, f"resolved {alert.instance} {alert.stage}", "green")
            return
        if alert.state == "firing":
            text = f"{alert.verdict} on {alert.instance} {alert.stage}: {alert.reason}"
            self._tell(alert.fired_ns, text, COLOURS[alert.verdict])
        self._firing[alert.fingerprint] = alert

    def _tell(self, at_ns: int, text: str, colour: str, *, once: bool = False) -> None:
        if once and any(news.plain.endswith(text) for news in self._news):
            return
        at = time.strftime("%H:%M:%S", time.localtime(at_ns / 1e9))
        self._news.append(Text(f"{at} {text}", colour))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _why(profile: BatchProfile, now_ns: int) -> str:
    age_s = (now_ns - profile.window_end_ns) / 1e9
    return f"(nothing for {age_s:.0f} s) {profile.reason}" if age_s > 3 else profile.reason
