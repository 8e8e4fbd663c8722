"""Scores a replay's report against what is expected of a recording's fault windows.

The protocol is frozen. Every window carries an expectation:

=========  ======================================================================================
fault      it slows the service: an alert with verdict ``fault`` must fire in [on, off + 5 s]
workload   a legitimate change of load: one in [on, off + 10 s] is a workload called a fault
quiet      it has no effect here: one is a false alarm
either     nothing is counted in [on, off + 10 s]
=========  ======================================================================================

Outside of the windows with 10 s of recovery after each, any fault alert is a false alarm unless
other programs took more than half a core of the machine within 3 s of it.
"""

import gzip
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from latencyprism.recordings.format import FAULTS, FOREIGN, LABELS, RecordingError

GRACE_NS = 5_000_000_000
RECOVERY_NS = 10_000_000_000
MASK_NS = 3_000_000_000
BUSY_CORES = 0.5
TICKS_PER_S = 100
"""Unit of the CPU time in foreign.jsonl.gz."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What was made of one fault window."""

    kind: str
    expect: str
    place: str | None
    """Family that the first cause should name; None when any is right."""
    alerts: int
    delay_s: float | None
    """From the first moment of effect to the first alert; None without one."""
    family: str | None
    """Family of that alert's first cause; None when it named none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Figures by the names of the ``real.`` row, what they come from, and the false alarms."""

    figures: Mapping[str, int | float]
    """A figure that can't be told, such as the delay when nothing was found, is missing."""
    windows: tuple[Window, ...]
    false_alarms_ns: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """The object that ``latencyprism score --json`` prints."""
        return {
            "figures": {name: {"value": value} for name, value in self.figures.items()},
            "windows": [asdict(window) for window in self.windows],
        }


def score(recording: Path, report: Mapping[str, Any]) -> Score:
    """Score a report by the labels of a recording's (or a trace's) folder.

    Of each alert only ``verdict``, ``fired_ns`` and the family of the first of its ``causes`` are
    read. Raises RecordingError when the folder has no labels or they don't fit its faults.
    """
    faults = _json_lines(recording / FAULTS)
    labels = _labels(recording / LABELS)
    if len(labels) != len(faults):
        raise RecordingError(
            f"{recording}: {LABELS} tells of {len(labels)} windows, {FAULTS} of {len(faults)}"
        )
    alerts = sorted(
        (alert for alert in report["alerts"] if alert["verdict"] == "fault"),
        key=lambda alert: int(alert["fired_ns"]),
    )
    windows = tuple(
        _window(fault, label, alerts) for fault, label in zip(faults, labels, strict=True)
    )
    excused = [
        (_onset(fault), fault["t_off"] + RECOVERY_NS)
        for fault, label in zip(faults, labels, strict=True)
        if label["expect"] != "quiet"
    ]
    busy = _busy_moments(recording / FOREIGN)
    false = tuple(
        alert["fired_ns"]
        for alert in alerts
        if not any(on <= alert["fired_ns"] <= end for on, end in excused)
        and not any(abs(alert["fired_ns"] - moment) <= MASK_NS for moment in busy)
    )
    return Score(figures=_figures(windows, len(false)), windows=windows, false_alarms_ns=false)


def score_files(recording: Path, report: Path) -> Score:
    """:func:`score` of a report's file. Raises RecordingError when it is no report."""
    try:
        alerts = json.loads(report.read_text())["alerts"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise RecordingError(f"{report} is no report: {type(e).__name__} {e}") from e
    return score(recording, {"alerts": alerts})


def render(result: Score) -> RenderableType:
    """The score for people: a table of the windows, the false alarms and the figures."""
    windows = Table("window", "expected", "alerts", "delay s", "first cause", "right cause")
    for window in result.windows:
        windows.add_row(
            window.kind,
            window.expect,
            str(window.alerts),
            "" if window.delay_s is None else f"{window.delay_s:.2f}",
            window.family or "",
            window.place or "",
        )
    figures = Table("figure", "value")
    for name, value in result.figures.items():
        figures.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    return Group(windows, figures)


def _window(
    fault: Mapping[str, Any], label: Mapping[str, Any], alerts: Sequence[Mapping[str, Any]]
) -> Window:
    on = _onset(fault)
    end = fault["t_off"] + (GRACE_NS if label["expect"] == "fault" else RECOVERY_NS)
    hits = [alert for alert in alerts if on <= alert["fired_ns"] <= end]
    causes = hits[0].get("causes") if hits else None
    return Window(
        kind=fault["kind"],
        expect=label["expect"],
        place=label.get("place"),
        alerts=len(hits),
        delay_s=(hits[0]["fired_ns"] - on) / 1e9 if hits else None,
        family=causes[0].get("family") if causes else None,
    )


def _onset(fault: Mapping[str, Any]) -> int:
    """First moment of effect: the first pulse where the fault pulses."""
    pulses = fault.get("pauses") or fault.get("stalls")
    return int(pulses[0][0] if pulses else fault["t_on"])


def _figures(windows: Sequence[Window], false_alarms: int) -> dict[str, int | float]:
    expected = [window for window in windows if window.expect == "fault"]
    found = [window for window in expected if window.alerts]
    wrong = sum(1 for window in windows if window.expect == "workload" and window.alerts)
    placed = [window for window in found if window.family]
    precision = len(found) / max(1, len(found) + false_alarms + wrong)
    recall = len(found) / max(1, len(expected))
    both = precision + recall
    figures: dict[str, int | float] = {
        "real.precision": precision,
        "real.recall": recall,
        "real.f1": 2 * precision * recall / both if both else 0.0,
    }
    if found:
        delays = [window.delay_s for window in found if window.delay_s is not None]
        figures["real.delay_p50_s"] = statistics.median(delays)
    figures |= {
        "real.workload_called_fault": wrong,
        "real.false_alarms": false_alarms,
        "real.expected_faults": len(expected),
    }
    if placed:
        right = sum(window.family == window.place for window in placed)
        figures["real.place_top1"] = right / len(placed)
    return figures


def _busy_moments(path: Path) -> list[int]:
    """Ends of the intervals in which other programs took more than half a core."""
    rows = _json_lines(path) if path.exists() else []
    moments = []
    last = 0
    for row in rows:
        at = int(row.get("t_ns") or row["t"])
        ticks = row.get("ticks", row.get("total", 0))
        if last and at > last and ticks / TICKS_PER_S / ((at - last) / 1e9) > BUSY_CORES:
            moments.append(at)
        last = at
    return moments


def _labels(path: Path) -> list[dict[str, Any]]:
    try:
        windows: list[dict[str, Any]] = json.loads(path.read_text())["windows"]
    except FileNotFoundError:
        raise RecordingError(f"{path.parent} has no {path.name}: nothing to score by") from None
    return windows


def _json_lines(path: Path) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise RecordingError(f"{path.parent} has no {path.name}: nothing to score by") from None
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]
