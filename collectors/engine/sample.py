"""Two pages of one engine → what happened between them, under the names of EngineSample; pure."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isnan
from typing import Any

from latencyprism.collectors.engine.aliases import (
    CPU_SECONDS,
    ENGINES,
    MODEL_LABEL,
    RANK_LABELS,
    START_SECONDS,
    Distribution,
    Engine,
)
from latencyprism.collectors.engine.exposition import Page, Table
from latencyprism.schemas.records import EngineSample, Freshness, HistogramDelta

STALE_PAGES = 2
"""Frozen pages in a row that make the next sample stale; CPU time is told in steps of 10 ms, and
one page in a hundred costs less."""


@dataclass(frozen=True, slots=True)
class Cumulative:
    """A histogram as the page has it: everything since the engine's start."""

    count: float
    sum: float
    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    """Observations up to each bound and, last, all; empty without buckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One page under our names, totals still since the engine's start."""

    engine: Engine | None
    model: str | None
    gauges: dict[str, Any]
    counters: dict[str, Any]
    histograms: dict[str, Cumulative]
    cpu_seconds: float | None
    start_seconds: float | None

    @property
    def open_requests(self) -> float:
        """Requests that the engine says it is working on or holding back."""
        return float(self.gauges.get("running", 0.0) + self.gauges.get("waiting", 0.0))


class Reader:
    """Finds an engine's metrics on its pages; remembers where they stand between pages."""

    def __init__(self) -> None:
        self._table: Table | None = None
        self._seen = 0
        self._numbers: defaultdict[str, list[int]] = defaultdict(list)
        self._bounds: dict[int, float] = {}

    def read(self, page: Page) -> Reading:
        """The page under our names; what is not on it is missing, not 0."""
        self._learn(page.table)
        engine = max(ENGINES, key=lambda engine: self._known(engine, page))
        if not self._known(engine, page):
            return Reading(
                engine=None,
                model=None,
                gauges={},
                counters={},
                histograms={},
                cpu_seconds=self._sum(CPU_SECONDS, page),
                start_seconds=self._sum(START_SECONDS, page),
            )
        gauges = {name: self._first(names, page) for name, names in engine.gauges.items()}
        shares = {name: self._share(names, page) for name, names in engine.shares.items()}
        counters = {name: self._total(parts, page) for name, parts in engine.counters.items()}
        histograms = {
            stage: self._histogram(alternatives, page)
            for stage, alternatives in engine.histograms.items()
        }
        return Reading(
            engine=engine,
            model=self._model(engine, page),
            gauges={k: v for k, v in (gauges | shares).items() if v is not None},
            counters={k: v for k, v in counters.items() if v is not None},
            histograms={k: v for k, v in histograms.items() if v is not None},
            cpu_seconds=self._sum(CPU_SECONDS, page),
            start_seconds=self._sum(START_SECONDS, page),
        )

    def _learn(self, table: Table) -> None:
        if table is not self._table:
            self._table, self._seen = table, 0
            self._numbers.clear()
            self._bounds.clear()
        for number in range(self._seen, len(table.series)):
            series = table.series[number]
            if not all(series.label(rank) in (None, "", "0") for rank in RANK_LABELS):
                continue
            self._numbers[series.name].append(number)
            bound = series.label("le")
            if bound is not None:
                self._bounds[number] = float(bound)
        self._seen = len(table.series)

    def _present(self, name: str, page: Page) -> Iterable[tuple[int, float]]:
        for number in self._numbers.get(name, ()):
            value = page.values[number] if number < len(page.values) else None
            if value is not None and not isnan(value):
                yield number, value

    def _known(self, engine: Engine, page: Page) -> int:
        names = {
            name for known in (engine.gauges, engine.shares) for n in known.values() for name in n
        }
        names |= {n for total in engine.counters.values() for parts in total for n in parts}
        return sum(1 for name in names if any(True for _ in self._present(name, page)))

    def _sum(self, name: str, page: Page) -> float | None:
        values = [value for _, value in self._present(name, page)]
        return sum(values) if values else None

    def _first(self, names: Iterable[str], page: Page) -> float | None:
        return next((v for name in names if (v := self._sum(name, page)) is not None), None)

    def _share(self, names: Iterable[str], page: Page) -> float | None:
        for name in names:
            if values := [value for _, value in self._present(name, page)]:
                return sum(values) / len(values)
        return None

    def _total(self, alternatives: Iterable[tuple[str, ...]], page: Page) -> float | None:
        for main, *others in alternatives:
            total = self._sum(main, page)
            if total is not None:
                return total + sum(self._sum(other, page) or 0.0 for other in others)
        return None

    def _histogram(self, alternatives: Iterable[Distribution], page: Page) -> Cumulative | None:
        for names in alternatives:
            count, total = self._sum(names.count, page), self._sum(names.sum, page)
            if count is None or total is None:
                continue
            buckets: defaultdict[float, float] = defaultdict(float)
            for number, value in self._present(names.bucket or "", page):
                if number in self._bounds:
                    buckets[self._bounds[number]] += value
            bounds = sorted(buckets)
            return Cumulative(
                count,
                total,
                tuple(bound for bound in bounds if bound != float("inf")),
                (*(buckets[b] for b in bounds if b != float("inf")), count) if bounds else (),
            )
        return None

    def _model(self, engine: Engine, page: Page) -> str | None:
        assert self._table is not None
        models = {
            self._table.series[number].label(MODEL_LABEL)
            for names in engine.gauges.values()
            for name in names
            for number, _ in self._present(name, page)
        }
        return ",".join(sorted(m for m in models if m)) or None


def growth(before: Cumulative | None, now: Cumulative, stage: str) -> HistogramDelta:
    """Observations between two pages; all of ``now`` when there is no ``before``.

    Buckets are left out when there were no observations, or when their bounds changed.
    """
    before = before or Cumulative(0.0, 0.0, now.bounds, (0.0,) * len(now.counts))
    delta = HistogramDelta(stage=stage, count=now.count - before.count, sum=now.sum - before.sum)
    if not delta.count or not now.counts or now.bounds != before.bounds:
        return delta
    up_to = [new - old for new, old in zip(now.counts, before.counts, strict=True)]
    counts = (up_to[0], *(high - low for low, high in pairwise(up_to)))
    return replace(delta, bounds=now.bounds, counts=counts)


def went_back(before: Reading, now: Reading) -> bool:
    """Whether the engine was restarted between two readings: a total shrank, or it says so."""
    starts = (before.start_seconds, now.start_seconds)
    return (
        (None not in starts and starts[0] != starts[1])
        or any(now.counters.get(name, old) < old for name, old in before.counters.items())
        or any(
            stage in now.histograms and now.histograms[stage].count < old.count
            for stage, old in before.histograms.items()
        )
    )


def frozen(before: Reading, now: Reading) -> bool:
    """Whether a page is an old one shown again: requests are open, yet no total moved, and
    neither did the CPU time of the process that should have rendered it.

    An engine that hangs behind a live web server is not frozen in this sense: its page is true.
    Never true of engines that do not tell their CPU time.
    """
    return (
        now.open_requests > 0
        and now.cpu_seconds is not None
        and now.cpu_seconds == before.cpu_seconds
        and now.counters == before.counters
        and now.histograms == before.histograms
    )


class Tracker:
    """Turns the pages of one instance into samples; remembers the last good one."""

    def __init__(self, instance: str) -> None:
        self.version: str | None = None
        """Version that the engine was asked for: None not yet, empty when it did not tell;
        forgotten when it restarts."""
        self._instance = instance
        self._reader = Reader()
        self._last: Reading | None = None
        self._last_ns = 0
        self._frozen = 0

    @property
    def engine(self) -> Engine | None:
        """The engine as last recognised."""
        return self._last.engine if self._last else None

    def page(
        self, page: Page, *, observed_at_ns: int, monotonic_ns: int, scrape_ms: float
    ) -> EngineSample:
        """Sample of a whole page; counters grow since the last good one."""
        now, before = self._reader.read(page), self._last
        if now.engine is None:
            return self._sample(observed_at_ns, scrape_ms, "fresh")
        if before is None:
            self._last, self._last_ns = now, monotonic_ns
            return replace(self._sample(observed_at_ns, scrape_ms, "fresh"), **now.gauges)
        self._frozen = self._frozen + 1 if frozen(before, now) else 0
        if self._frozen >= STALE_PAGES:
            error = "requests are open, but neither a counter nor the CPU time moved"
            return self._sample(observed_at_ns, scrape_ms, "stale", error)
        restarted = went_back(before, now)
        if restarted:
            self.version = None
        counters = {} if restarted else before.counters
        histograms = {} if restarted else before.histograms
        interval_ns = monotonic_ns - self._last_ns
        self._last, self._last_ns = now, monotonic_ns
        return replace(
            self._sample(observed_at_ns, scrape_ms, "fresh"),
            interval_ns=interval_ns,
            restarted=restarted,
            histograms=tuple(
                growth(histograms.get(stage), value, stage)
                for stage, value in now.histograms.items()
            ),
            **now.gauges,
            **{name: value - counters.get(name, 0.0) for name, value in now.counters.items()},
        )

    def failed(self, error: str, *, observed_at_ns: int, scrape_ms: float) -> EngineSample:
        """Sample of a scrape that gave no page; everything the page would tell is null."""
        return self._sample(observed_at_ns, scrape_ms, "failed", error)

    def _sample(
        self, observed_at_ns: int, scrape_ms: float, freshness: Freshness, error: str | None = None
    ) -> EngineSample:
        last = self._last
        return EngineSample(
            instance=self._instance,
            source="engine",
            observed_at_ns=observed_at_ns,
            engine=last.engine.name if last and last.engine else None,
            version=self.version or None,
            model=last.model if last else None,
            freshness=freshness,
            error=error,
            scrape_ms=scrape_ms,
            restarted=False,
        )
