"""The benches by name, and the bars their figures are held against."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from latencyprism.bench.figures import Figure, Report

BARS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "collect": {
            "network.cpu_pct": "≤ 1.2",
            "network.events_lost": "0",
            "network.token_time_error_p99_us": "≤ 50",
            "network.offline_pkts_per_s": "≥ 300,000",
            "engine.parse_ms": "≤ 0.3",
            "host.cpu_pct": "≤ 0.5",
            "agent.cpu_pct": "≤ 2",
            "agent.rss_mb": "≤ 80",
            "server.throughput_delta_pct": "± 0.5, or as noise",
            "server.p99_delta_pct": "± 1, or as noise",
        },
        "detect": {
            "real.f1": "≥ .95",
            "real.delay_p50_s": "≤ 1",
            "real.workload_called_fault": "0",
            "real.base_alarms": "0",
            "real.place_top1": "≥ .9",
        },
        "sink": {
            "chdb.rows_per_s": "≥ 100,000",
            "kills.missing_rows": "0",
            "kills.duplicate_rows": "0",
        },
    }
)

Measured = tuple[Mapping[str, Figure], Mapping[str, str]]


def run_bench(name: str, *, recordings: Sequence[Path] = (), engine: str | None = None) -> Report:
    """Measure one bench; takes up to some minutes. Raises LookupError for an unknown name.

    ``recordings`` are those of detect, ``engine`` the live server of collect.
    """
    benches: dict[str, Callable[[], Measured]] = {
        "collect": lambda: _collect(engine),
        "detect": lambda: _detect(recordings),
        "sink": _sink,
    }
    if name not in benches:
        raise LookupError(f"no bench {name!r}; there are {', '.join(benches)}")
    figures, skipped = benches[name]()
    return Report(bench=name, figures=figures, skipped=skipped, bars=BARS[name])


def _collect(engine: str | None) -> Measured:
    from latencyprism.bench.collect import measure

    return measure(engine)


def _detect(recordings: Sequence[Path]) -> Measured:
    from latencyprism.bench.detect import measure

    return measure(recordings)


def _sink() -> Measured:
    from latencyprism.bench.sink import measure

    return measure()
