"""Steps and stages of recorded real engines, compared with what those engines logged.

Needs ``LATENCYPRISM_TRACES``, a folder of traces with ``iterations.csv.gz`` and ``spans.csv.gz``.
"""

import csv
import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
from emulated_engine import MS, KeepingJudge

from latencyprism.recordings.feed import feed
from latencyprism.recordings.format import Recording
from latencyprism.recordings.imports import import_trace
from latencyprism.streams.config import StreamsConfig
from latencyprism.streams.observation import Floats, Ints, Steps
from latencyprism.streams.pipeline import InstancePipeline

TRACES = os.environ.get("LATENCYPRISM_TRACES")
NAMES = ("vllm-base", "vllm-clean", "vllm-quick")
DISTORTING = ("net_delay", "net_rate", "net_stall", "noisy_neighbor", "client_stall")
"""Faults during which the connections that were recorded do not show the engine's steps."""
AFTER_NS = 2_000 * MS
LOG_LEAD_NS = 700_000
"""A step's first event may be this much earlier than its line in the engine's log."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(TRACES is None, reason="LATENCYPRISM_TRACES names no folder of traces"),
]


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A trace and what was made of it."""

    folder: Path
    steps: Steps
    prefill_ms: dict[int, float]
    """Mean prefill time of windows in which one request ended, by the end of the window."""


@pytest.fixture(scope="module", params=NAMES)
def replayed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    folder = Path(TRACES or "") / str(request.param)
    out = tmp_path_factory.mktemp("recording") / folder.name
    import_trace(folder, out)
    judge = KeepingJudge()
    pipelines: dict[str, InstancePipeline] = {}
    config = StreamsConfig(clock="event", settle_ms=0)
    for now_ms, parcels in enumerate(feed(Recording(out))):
        for parcel in parcels:
            pipeline = pipelines.setdefault(
                parcel.instance, InstancePipeline(parcel.instance, config=config, judge=judge)
            )
            pipeline.add(parcel.topic, parcel.pack, now_ms * MS)
        for pipeline in pipelines.values():
            pipeline.advance(now_ms * MS)
    (only,) = pipelines.values()
    assert not any(only.counters().values())
    found = [observation.steps for observation in judge.seen]
    prefill = {
        observation.end_ns: stage.mean_ms
        for observation in judge.seen
        for stage in observation.stages
        if stage.stage == "prefill" and observation.requests_finished == 1 and stage.mean_ms
    }
    return Replayed(
        folder=folder,
        steps=Steps(
            **{
                field.name: np.concatenate([getattr(steps, field.name) for steps in found])
                for field in fields(Steps)
            }
        ),
        prefill_ms=prefill,
    )


def rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt") as file:
        yield from csv.DictReader(file)


def distorted(folder: Path, at_ns: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which moments lie in a fault that hides the engine's steps from the recorded client."""
    hidden = np.zeros(len(at_ns), np.bool_)
    for line in (folder / "faults.jsonl").read_text().splitlines():
        fault = json.loads(line)
        if fault["kind"] in DISTORTING:
            hidden |= (at_ns > fault["t_on"]) & (at_ns < fault["t_off"] + AFTER_NS)
    return hidden


def matched(steps: Steps, logged_ns: Ints) -> Ints:
    """Position of the step of each line of the log, -1 where none is."""
    at = np.searchsorted(steps.end_ns, logged_ns - LOG_LEAD_NS)
    following = np.append(logged_ns[1:], logged_ns[-1] + 1_000 * MS) - LOG_LEAD_NS
    found = np.minimum(at, len(steps.end_ns) - 1)
    limit = np.minimum(following, logged_ns + 20 * MS)
    return np.where((at < len(steps.end_ns)) & (steps.end_ns[found] < limit), found, -1)


def test_steps_are_those_of_the_engines_log(replayed: Replayed) -> None:
    log = list(rows(replayed.folder / "iterations.csv.gz"))
    logged_ns = np.array([round(float(row["t_log_s"]) * 1e6) * 1_000 for row in log])
    joined = np.array([int(row["ctx_reqs"]) for row in log])
    batch = joined + np.array([int(row["gen_reqs"]) for row in log])
    steps = replayed.steps
    told = (logged_ns > steps.end_ns[0]) & (logged_ns < steps.end_ns[-1]) & (batch >= 2)
    told &= ~distorted(replayed.folder, logged_ns)
    step = matched(steps, logged_ns)
    hit = told & (step >= 0)
    period_ms = np.append(np.nan, np.diff(logged_ns)) / MS
    elapsed_ms = np.array([float(row["elapsed_ms"]) for row in log])
    in_a_row = hit & (np.abs(period_ms - elapsed_ms) < 6)
    error: Floats = np.abs(steps.duration_ms[step] - period_ms)[in_a_row] / period_ms[in_a_row]
    assert hit.sum() / told.sum() > 0.99
    assert np.median(error) < 0.01
    assert np.mean(steps.joined[step[hit]] == joined[hit]) > 0.99
    assert np.mean((steps.decode_sequences + steps.joined)[step[hit]] == batch[hit]) > 0.99


def test_prefill_times_are_those_of_the_engines_spans(replayed: Replayed) -> None:
    errors = []
    for span in rows(replayed.folder / "spans.csv.gz"):
        end_ns = -(-int(span["end_ns"]) // (250 * MS)) * 250 * MS
        found_ms = replayed.prefill_ms.get(end_ns)
        if found_ms is not None:
            error_ms = abs(found_ms - 1_000 * float(span["prefill_s"]))
            errors.append(error_ms / (1_000 * float(span["ttft_s"])))
    assert len(errors) > 100
    assert np.median(errors) < 0.05
