"""A figure, its bar, and the report that one bench prints."""

import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from latencyprism import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value: the median of ``n`` runs with its lowest and highest."""

    value: float
    unit: str
    n: int = 1
    low: float | None = None
    high: float | None = None


def median(values: Sequence[float], unit: str) -> Figure:
    """Figure of repeated runs. Raises ValueError without any."""
    if not values:
        raise ValueError("a figure needs at least one run")
    return Figure(
        value=statistics.median(values), unit=unit, n=len(values), low=min(values), high=max(values)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures of one bench; what could not be measured is absent and says why in ``skipped``."""

    bench: str
    figures: Mapping[str, Figure]
    skipped: Mapping[str, str] = field(default_factory=dict)
    bars: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The report as the tools read it."""
        return {
            "bench": self.bench,
            "version": __version__,
            "commit": commit(),
            "machine": machine(),
            "figures": {
                name: {k: v for k, v in asdict(figure).items() if v is not None}
                for name, figure in self.figures.items()
            },
            "skipped": dict(self.skipped),
        }

    def table(self) -> Table:
        """The report for a person, each figure beside its bar."""
        table = Table("figure", "value", "unit", "low", "high", "runs", "bar", title=self.bench)
        for name, f in self.figures.items():
            spread = ("" if v is None else f"{v:,.4g}" for v in (f.low, f.high))
            bar = self.bars.get(name, "")
            table.add_row(name, f"{f.value:,.4g}", f.unit, *spread, str(f.n), bar)
        for name, why in self.skipped.items():
            table.add_row(name, "-", why, style="yellow")
        return table


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        model = next((value.strip() for key, _, value in lines if key.strip() == "model name"), "")
    return {
        "cpus": os.cpu_count(),
        "cpu": model or platform.processor(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def commit() -> str | None:
    """Commit of the tree the code runs from, with ``+`` when it has changes; None outside git."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],  # noqa: S607 whatever git is on the path
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
