"""The scoring protocol: fixed cases, and the frozen script's own answers where it is at hand."""

import gzip
import importlib.util
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from latencyprism.recordings.format import RecordingError
from latencyprism.recordings.score import Score, render, score, score_files

S = 1_000_000_000
T0 = 1_796_000_000 * S
TRACES = os.environ.get("LATENCYPRISM_TRACES")
"""Folder that holds the lab's traces and, beside it or in it, the frozen score.py."""


def fault(on_s: float, off_s: float, **more: Any) -> dict[str, Any]:
    return {"kind": "k", "t_on": T0 + int(on_s * S), "t_off": T0 + int(off_s * S), **more}


def folder(
    path: Path,
    windows: list[tuple[dict[str, Any], str]],
    *,
    foreign: list[dict[str, Any]] | None = None,
) -> Path:
    path.mkdir(exist_ok=True)
    (path / "faults.jsonl").write_text("".join(json.dumps(f) + "\n" for f, _ in windows))
    labels = [{"kind": "k", "expect": expect, "place": "host"} for _, expect in windows]
    (path / "labels.json").write_text(json.dumps({"windows": labels}))
    if foreign is not None:
        with gzip.open(path / "foreign.jsonl.gz", "wt") as out:
            out.writelines(json.dumps(row) + "\n" for row in foreign)
    return path


def alert(at_s: float, verdict: str = "fault", family: str | None = None) -> dict[str, Any]:
    causes = [{"family": family}] if family else []
    return {"verdict": verdict, "fired_ns": T0 + int(at_s * S), "causes": causes}


def scored(path: Path, *alerts: dict[str, Any]) -> Score:
    return score(path, {"alerts": list(alerts)})


def test_a_found_fault_and_nothing_else_is_perfect(tmp_path: Path) -> None:
    result = scored(folder(tmp_path, [(fault(10, 20), "fault")]), alert(10.5, family="host"))
    assert result.figures == {
        "real.precision": 1.0,
        "real.recall": 1.0,
        "real.f1": 1.0,
        "real.delay_p50_s": 0.5,
        "real.workload_called_fault": 0,
        "real.false_alarms": 0,
        "real.expected_faults": 1,
        "real.place_top1": 1.0,
    }


@pytest.mark.parametrize(
    ("at_s", "found", "false"),
    [(9.9, 0, 1), (10, 1, 0), (25, 1, 0), (25.1, 0, 0), (30, 0, 0), (30.1, 0, 1)],
)
def test_edges_of_a_fault_window(tmp_path: Path, at_s: float, found: int, false: int) -> None:
    figures = scored(folder(tmp_path, [(fault(10, 20), "fault")]), alert(at_s)).figures
    assert (figures["real.recall"], figures["real.false_alarms"]) == (found, false)


def test_a_pulsing_fault_begins_with_its_first_pulse(tmp_path: Path) -> None:
    pulsing = fault(10, 20, pauses=[[T0 + 12 * S, T0 + 13 * S]])
    assert (
        scored(folder(tmp_path, [(pulsing, "fault")]), alert(13)).figures["real.delay_p50_s"] == 1.0
    )
    assert scored(tmp_path, alert(11)).figures["real.false_alarms"] == 1


def test_workload_quiet_and_either(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        [(fault(10, 20), "workload"), (fault(50, 60), "quiet"), (fault(90, 100), "either")],
    )
    figures = scored(path, alert(29), alert(55), alert(95)).figures
    assert figures["real.workload_called_fault"] == 1
    assert figures["real.false_alarms"] == 1
    assert figures["real.precision"] == 0.0


def test_only_fault_verdicts_count(tmp_path: Path) -> None:
    path = folder(tmp_path, [(fault(10, 20), "fault")])
    figures = scored(path, alert(11, "workload"), alert(40, "unknown")).figures
    assert (figures["real.recall"], figures["real.false_alarms"]) == (0.0, 0)
    assert "real.delay_p50_s" not in figures


def test_moments_when_others_took_the_machine_are_masked(tmp_path: Path) -> None:
    busy = [{"t_ns": T0 + s * S, "ticks": 51 if s == 50 else 50} for s in range(40, 60)]
    path = folder(tmp_path, [(fault(10, 20), "fault")], foreign=busy)
    assert scored(path, alert(53)).figures["real.false_alarms"] == 0
    assert scored(path, alert(53.1)).figures["real.false_alarms"] == 1


def test_the_family_of_the_first_alert_is_compared(tmp_path: Path) -> None:
    path = folder(tmp_path, [(fault(10, 20), "fault"), (fault(50, 60), "fault")])
    late = alert(12, family="host")
    result = scored(path, late, alert(11, family="network"), alert(51, family="host"))
    assert result.figures["real.place_top1"] == 0.5
    assert [window.family for window in result.windows] == ["network", "host"]
    assert result.windows[0].alerts == 2


def test_labels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, [(fault(10, 20), "fault")])
    (path / "labels.json").write_text('{"windows": []}')
    with pytest.raises(RecordingError, match="0 windows"):
        scored(path)
    (path / "labels.json").unlink()
    with pytest.raises(RecordingError, match=r"no labels\.json"):
        scored(path)


def test_files_are_scored_and_rendered(tmp_path: Path) -> None:
    path = folder(tmp_path / "r", [(fault(10, 20), "fault")])
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"alerts": [alert(10.5)]}))
    result = score_files(path, report)
    assert result.figures["real.recall"] == 1.0
    console = Console(width=120)
    with console.capture() as captured:
        console.print(render(result))
    assert "real.delay_p50_s" in captured.get()
    report.write_text("[]")
    with pytest.raises(RecordingError, match="no report"):
        score_files(path, report)


def _frozen() -> Any:
    if TRACES is None:
        pytest.skip("LATENCYPRISM_TRACES does not point to the lab's traces")
    for path in (Path(TRACES) / "score.py", Path(TRACES).parent / "score.py"):
        if path.exists():
            spec = importlib.util.spec_from_file_location("frozen_score", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    pytest.skip(f"no score.py in or beside {TRACES}")


def test_agrees_with_the_frozen_script_to_the_digit() -> None:
    frozen = _frozen()
    assert TRACES is not None
    traces = [p.parent for p in sorted(Path(TRACES).glob("**/labels.json"))]
    assert traces, f"no trace in {TRACES}"
    chance = random.Random(7)
    for trace in traces:
        faults = [json.loads(line) for line in (trace / "faults.jsonl").read_text().splitlines()]
        first, last = faults[0]["t_on"] - 30 * S, faults[-1]["t_off"] + 30 * S
        for count in (0, 1, 5, 20, 80):
            report = {
                "alerts": [
                    {
                        "verdict": chance.choice(["fault", "fault", "workload"]),
                        "fired_ns": chance.randint(first, last),
                        "causes": chance.choice(
                            [[], [{"family": "host"}], [{"family": "network"}]]
                        ),
                    }
                    for _ in range(count)
                ]
            }
            figures, rows, false = frozen.score(trace, report)
            ours = score(trace, report)
            assert ours.figures == {k: v for k, v in figures.items() if v is not None}
            assert ours.as_json()["windows"] == rows
            assert list(ours.false_alarms_ns) == [a["fired_ns"] for a in false]
