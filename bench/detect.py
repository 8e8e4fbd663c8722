"""Detection on labelled recordings: each judged warm from the others of its engine, and cold."""

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from latencyprism.bench.figures import Figure
from latencyprism.recordings.format import Recording
from latencyprism.recordings.imports import import_trace
from latencyprism.recordings.replay import replay_in_process
from latencyprism.recordings.score import score
from latencyprism.replay import TRACE_FILE

Protocol = str
"""``real`` (warm) or ``cold``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One replay to score."""

    protocol: Protocol
    target: Path
    warm: tuple[Path, ...]


def measure(paths: Sequence[Path]) -> tuple[Mapping[str, Figure], Mapping[str, str]]:
    """Figures over all recordings together, as the frozen protocol counts them.

    Takes minutes. Each recording is judged after the others of its engine were replayed before it
    (``real.*``) and after nothing (``cold.*``); nothing of a label is an input.
    """
    if not paths:
        return {}, {"real.f1": "no recording was given: --recording DIR, repeatable"}
    with tempfile.TemporaryDirectory(prefix="latencyprism-") as temporary:
        folders = [_imported(path, Path(temporary)) for path in paths]
        cases = list(_cases(folders))
        with ProcessPoolExecutor(max_workers=2) as pool:
            counts = list(pool.map(_count, cases))
    figures: dict[str, Figure] = {}
    skipped: dict[str, str] = {}
    for protocol in ("real", "cold"):
        chosen = [c for case, c in zip(cases, counts, strict=True) if case.protocol == protocol]
        found = _figures(protocol, chosen)
        figures |= {name: figure for name, figure in found.items() if not math.isnan(figure.value)}
        skipped |= {n: "nothing to count" for n, f in found.items() if math.isnan(f.value)}
    return figures, skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What one scored replay adds to the figures."""

    name: str
    faults: int
    found: int
    false_alarms: int
    workload_called_fault: int
    delays_s: tuple[float, ...]
    placed: int
    rightly_placed: int

    @property
    def f1(self) -> float:
        """F1 of this recording alone; NaN without faults."""
        return f1(self.faults, self.found, self.false_alarms + self.workload_called_fault)


def f1(faults: int, found: int, wrong: int) -> float:
    """Harmonic mean of precision and recall; NaN without expected faults, 0 with none found."""
    if not faults:
        return math.nan
    return 2 * found / (faults + found + wrong)


def _imported(path: Path, temporary: Path) -> Path:
    if not (path / TRACE_FILE).exists():
        return path
    out = temporary / path.name
    import_trace(path, out)
    return out


def _cases(folders: Sequence[Path]) -> Iterator[Case]:
    engines = {folder: Recording(folder).meta.engine for folder in folders}
    for folder in folders:
        others = tuple(
            other for other in folders if other != folder and engines[other] == engines[folder]
        )
        if others:
            yield Case(protocol="real", target=folder, warm=others)
        yield Case(protocol="cold", target=folder, warm=())


def _count(case: Case) -> Count:
    report = replay_in_process(
        Recording(case.target), warm=[Recording(folder) for folder in case.warm]
    )
    windows = (result := score(case.target, report)).windows
    expected = [window for window in windows if window.expect == "fault"]
    found = [window for window in expected if window.alerts]
    placed = [window for window in found if window.family]
    return Count(
        name=case.target.name,
        faults=len(expected),
        found=len(found),
        false_alarms=int(result.figures["real.false_alarms"] or 0),
        workload_called_fault=int(result.figures["real.workload_called_fault"] or 0),
        delays_s=tuple(window.delay_s for window in found if window.delay_s is not None),
        placed=len(placed),
        rightly_placed=sum(window.family == window.place for window in placed),
    )


def _figures(protocol: Protocol, counts: Sequence[Count]) -> dict[str, Figure]:
    if not counts:
        return {f"{protocol}.f1": Figure(value=math.nan, unit="")}
    faults, found = sum(c.faults for c in counts), sum(c.found for c in counts)
    false_alarms = sum(c.false_alarms for c in counts)
    called = sum(c.workload_called_fault for c in counts)
    delays = [delay for c in counts for delay in c.delays_s]
    placed = sum(c.placed for c in counts)
    quiet = [c for c in counts if not c.faults]
    each = [c.f1 for c in counts if not math.isnan(c.f1)]
    values = {
        "f1": Figure(
            value=f1(faults, found, false_alarms + called),
            unit="",
            n=len(each),
            low=min(each, default=math.nan),
            high=max(each, default=math.nan),
        ),
        "precision": Figure(value=_ratio(found, found + false_alarms + called), unit=""),
        "recall": Figure(value=_ratio(found, faults), unit=""),
        "delay_p50_s": Figure(
            value=statistics.median(delays) if delays else math.nan, unit="s", n=len(delays)
        ),
        "workload_called_fault": Figure(value=called, unit="count"),
        "false_alarms": Figure(value=false_alarms, unit="count"),
        "base_alarms": Figure(
            value=sum(c.false_alarms for c in quiet) if quiet else math.nan, unit="count"
        ),
        "place_top1": Figure(
            value=_ratio(sum(c.rightly_placed for c in counts), placed), unit="", n=placed
        ),
    }
    return {f"{protocol}.{name}": figure for name, figure in values.items()} | {
        f"{protocol}.{c.name}.f1": Figure(value=c.f1, unit="") for c in counts
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
