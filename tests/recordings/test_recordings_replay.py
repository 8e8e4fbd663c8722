"""Replays of the short recording through the pure streams."""

import json
from pathlib import Path
from typing import Any

import pytest

from latencyprism.recordings import replay as replay_module
from latencyprism.recordings.cut import cut
from latencyprism.recordings.format import Recording, RecordingError
from latencyprism.recordings.replay import (
    ReplayError,
    flush_ns,
    replay_config,
    replay_in_process,
)
from latencyprism.recordings.score import score
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.schemas.topics import TELEMETRY_HOST
from latencyprism.streams.config import StreamsConfig

SHORT = Path(__file__).parents[1] / "data" / "vllm-short"
WINDOW_NS = 250_000_000


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return replay_in_process(Recording(SHORT))


def test_the_fault_is_found_placed_and_nothing_else_is(report: dict[str, Any]) -> None:
    figures = score(SHORT, report).figures
    assert figures["real.f1"] == 1.0
    assert figures["real.place_top1"] == 1.0
    assert figures["real.delay_p50_s"] <= 2.0


def test_every_window_of_the_recording_has_a_verdict(report: dict[str, Any]) -> None:
    meta = Recording(SHORT).meta
    windows = meta.end_ns // WINDOW_NS - meta.start_ns // WINDOW_NS + 1
    assert sum(report["batches"].values()) == windows


def test_stages_sum_to_the_whole(report: dict[str, Any]) -> None:
    assert sum(report["stages"].values()) == pytest.approx(1.0)
    assert report["stages"]["decode"] > 0.5


def test_alerts_carry_what_a_report_promises(report: dict[str, Any]) -> None:
    for alert in report["alerts"]:
        assert set(alert) == {
            "fingerprint",
            "instance",
            "stage",
            "verdict",
            "fired_ns",
            "resolved_ns",
            "expected_ms",
            "observed_ms",
            "reason",
            "causes",
        }
    assert json.loads(json.dumps(report))["batches"] == report["batches"]


def test_a_replay_is_deterministic(report: dict[str, Any]) -> None:
    again = replay_in_process(Recording(SHORT))
    assert {k: v for k, v in again.items() if k != "figures"} == {
        k: v for k, v in report.items() if k != "figures"
    }


def test_a_warm_recording_teaches_and_its_alerts_are_not_told(report: dict[str, Any]) -> None:
    warmed = replay_in_process(Recording(SHORT), warm=[Recording(SHORT)])
    assert score(SHORT, warmed).figures["real.recall"] == 1.0
    assert sum(warmed["batches"].values()) == sum(report["batches"].values())
    assert warmed["batches"].get("unknown", 0) < report["batches"]["unknown"]
    start_ns = Recording(SHORT).meta.start_ns
    assert all(alert["fired_ns"] >= start_ns for alert in warmed["alerts"])


def test_a_replay_goes_by_the_recordings_clock() -> None:
    config = replay_config(StreamsConfig(window_ms=500))
    assert (config.clock, config.window_ms) == ("event", 500)
    assert flush_ns(config) >= (config.window_ms + config.grace_ms) * 1_000_000


def test_a_cut_keeps_times_records_and_labels_of_its_span(tmp_path: Path) -> None:
    source = Recording(SHORT)
    start_ns = source.meta.start_ns + 30_000_000_000
    end_ns = start_ns + 10_000_000_000
    counts = cut(source, tmp_path / "c", start_ns=start_ns, end_ns=end_ns)
    part = Recording(tmp_path / "c")
    assert counts["telemetry.host"] == pytest.approx(100, abs=2)
    assert list(part.records(TELEMETRY_HOST)) == [
        r for r in source.records(TELEMETRY_HOST) if start_ns <= r.observed_at_ns <= end_ns
    ]
    assert len(json.loads((tmp_path / "c" / "labels.json").read_text())["windows"]) == 1
    assert set(part.meta.truth) == set(source.meta.truth)
    for name in part.meta.truth:
        assert (part.folder / "truth" / name).stat().st_size > 0
    early = cut(source, tmp_path / "d", start_ns=source.meta.start_ns, end_ns=start_ns)
    assert early["telemetry.requests"] > 0
    assert json.loads((tmp_path / "d" / "labels.json").read_text())["windows"] == []
    with pytest.raises(RecordingError, match="nothing from"):
        cut(source, tmp_path / "e", start_ns=0, end_ns=1)


def test_a_damaged_recording_is_replayed_and_the_damage_told(tmp_path: Path) -> None:
    source = Recording(SHORT)
    cut(source, tmp_path / "c", start_ns=source.meta.start_ns, end_ns=source.meta.end_ns)
    path = tmp_path / "c" / "telemetry.host.avro"
    path.write_bytes(path.read_bytes()[:-1000])
    report = replay_in_process(Recording(tmp_path / "c"))
    assert [row["file"] for row in report["damage"]] == ["telemetry.host.avro"]


@pytest.mark.kafka
def test_a_replay_without_workers_ends_in_words(
    kafka: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "PATIENCE_S", 1.0)
    with pytest.raises(ReplayError, match=f"is a worker running for prefix '{kafka.prefix}'"):
        replay_module.replay(Recording(SHORT), kafka)
