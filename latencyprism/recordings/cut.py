"""A part of a recording as a recording of its own."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

from latencyprism.recordings.format import (
    FAULTS,
    FOREIGN,
    LABELS,
    TRUTH,
    Recording,
    RecordingError,
    RecordingWriter,
)

TIMES = {"t_log_s": 1e9, "start_ns": 1}
"""Column of the time in the tables of the truth, and its unit in ns."""


def cut(source: Recording, out: Path, *, start_ns: int, end_ns: int) -> dict[str, int]:
    """Write what was observed in [start, end] to ``out``; records written by topic name.

    Times stay as they are. Fault windows that begin in the span are kept with their labels, so
    the span should not end within one. Raises RecordingError when
    nothing was observed in the span, or when ``out`` holds something.
    """
    counts: dict[str, int] = {}
    origin = f"{source.meta.source}, cut to {(end_ns - start_ns) / 1e9:.0f} s"
    with RecordingWriter(out, engine=source.meta.engine, source=origin) as writer:
        writer.details = source.meta.details
        writer.truth = source.meta.truth
        for topic, record in source.merged():
            if start_ns <= record.observed_at_ns <= end_ns:
                writer.write(topic, record)
                counts[topic.name] = counts.get(topic.name, 0) + 1
    if not counts:
        raise RecordingError(f"{source.folder} has nothing from {start_ns} to {end_ns}")
    _cut_labels(source.folder, out, start_ns, end_ns)
    for name in source.meta.truth:
        _cut_truth(source.folder / TRUTH / name, out / TRUTH / name, start_ns, end_ns)
    return counts


def _cut_labels(folder: Path, out: Path, start_ns: int, end_ns: int) -> None:
    if (folder / FAULTS).exists() and (folder / LABELS).exists():
        faults = [json.loads(line) for line in (folder / FAULTS).read_text().splitlines()]
        labels = json.loads((folder / LABELS).read_text())
        kept = [
            (fault, label)
            for fault, label in zip(faults, labels["windows"], strict=True)
            if start_ns <= fault["t_on"] <= end_ns
        ]
        (out / FAULTS).write_text("".join(json.dumps(fault) + "\n" for fault, _ in kept))
        text = json.dumps(labels | {"windows": [label for _, label in kept]}, indent=1)
        (out / LABELS).write_text(text + "\n")
    if (folder / FOREIGN).exists():
        with gzip.open(folder / FOREIGN, "rt") as rows:
            inside = [row for row in rows if start_ns <= _time(json.loads(row)) <= end_ns]
        (out / FOREIGN).write_bytes(gzip.compress("".join(inside).encode(), mtime=0))


def _cut_truth(source: Path, out: Path, start_ns: int, end_ns: int) -> None:
    """Rows of a table that tell of the span; a file that is no such table is copied."""
    out.parent.mkdir(exist_ok=True)
    if source.suffix != ".gz":
        shutil.copyfile(source, out)
        return
    with gzip.open(source, "rt", newline="") as file:
        header, *rows = file.readlines()
    columns = header.strip().split(",")
    column = next(columns.index(name) for name in TIMES if name in columns)
    unit = TIMES[columns[column]]
    inside = [r for r in rows if start_ns <= float(r.split(",")[column]) * unit <= end_ns]
    out.write_bytes(gzip.compress("".join([header, *inside]).encode(), mtime=0))


def _time(row: dict[str, Any]) -> int:
    return int(row.get("t_ns") or row["t"])
