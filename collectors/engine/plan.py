"""Finds the metrics of an engine among the series of its pages."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from latencyprism.collectors.engine.aliases import (
    APART_LABELS,
    ENGINES,
    PRIORITY_LABEL,
    SELECTED,
    TOGETHER_LABELS,
    Distribution,
    Engine,
)
from latencyprism.collectors.engine.exposition import Series, Table, Values

Numbers = tuple[int, ...]
"""Series of one table, by number."""
Totals = list[list[Numbers]]
"""Alternatives, each the parts of one total."""
Rank = tuple[str | None, ...]
"""Values of the labels by which engines on one page are told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Where a histogram stands."""

    sum: Numbers
    count: Numbers
    buckets: list[tuple[int, list[tuple[float, int]]]]
    """For each series of ``count`` those of its buckets with their bounds, rising, the infinite
    one left out."""
    unit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where the metrics of one engine stand in one table."""

    engine: Engine
    gauges: Mapping[str, Totals]
    shares: Mapping[str, Totals]
    counters: Mapping[str, Totals]
    histograms: Mapping[str, list[Timed]]
    shared: Numbers
    """All of the shares."""
    named: Numbers
    """Gauges, shares and counters."""
    monotone: Numbers
    """Series that only grow while the engine runs. Sums are left out: where those of several
    processes are added up, their last digits can go back."""

    pulse: Numbers
    """Totals that move with the steps of the engine."""
    models: tuple[tuple[int, str | None], ...]
    """Models that the gauges, or without any the counters, are of."""

    def known(self, values: Values) -> int:
        """How many of its series are on a page."""
        return sum(1 for number in self.named if values[number] is not None)


@dataclass(slots=True)
class Index:
    """What the labels of the series of one table say."""

    table: Table
    places: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Series by the names of the alias tables."""
    ranks: list[Rank] = field(default_factory=list)

    def learn(self) -> bool:
        """Take in the series that the table has got since; whether there were any."""
        known = len(self.ranks)
        for number in range(known, len(self.table.series)):
            series = self.table.series[number]
            self.ranks.append(tuple(series.label(label) for label in APART_LABELS))
            if all(series.label(label) in (None, "", "0") for label in TOGETHER_LABELS):
                self.places[_place(series)].append(number)
        return len(self.ranks) > known

    def plan(self, values: Values) -> Plan | None:
        """Where the engine stands that has most series on the page, None without any."""
        best = max(map(self._plan, ENGINES), key=lambda plan: plan.known(values))
        return best if best.known(values) else None

    def one(self, name: str, values: Values) -> float | None:
        """Value of a metric that has a single series; several say nothing of one process."""
        numbers = self.places.get(name, ())
        return values[numbers[0]] if len(numbers) == 1 else None

    def label(self, number: int, name: str) -> str | None:
        """A label's value of a series."""
        return self.table.series[number].label(name)

    def _plan(self, engine: Engine) -> Plan:
        find = _Finder(self, engine)
        gauges = {key: find.gauges(names) for key, names in engine.gauges.items()}
        shares = {key: find.gauges(names) for key, names in engine.shares.items()}
        counters = {key: find.totals(totals) for key, totals in engine.counters.items()}
        histograms = {
            stage: [find.timed(names) for names in alternatives]
            for stage, alternatives in engine.histograms.items()
        }
        counted = set(_numbers(counters.values()))
        timed = {
            number
            for alternatives in histograms.values()
            for one in alternatives
            for number in (*one.count, *(n for _, bounds in one.buckets for _, n in bounds))
        }
        shared = tuple(_numbers(shares.values()))
        read = (*_numbers(gauges.values()), *shared)
        return Plan(
            engine=engine,
            gauges=gauges,
            shares=shares,
            counters=counters,
            histograms=histograms,
            shared=shared,
            named=(*read, *counted),
            monotone=tuple(sorted(counted | timed)),
            pulse=tuple(n for name in engine.pulse for n in find.series(name)),
            models=tuple((n, self.label(n, engine.model_label)) for n in read or counted),
        )


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds the series of one engine by name."""

    index: Index
    engine: Engine

    def series(self, name: str) -> Numbers:
        numbers = self.index.places.get(name, [])
        label = self.engine.model_label
        anchors = self._anchors()
        if not anchors:
            return tuple(numbers)
        return tuple(n for n in numbers if self.index.label(n, label) in anchors)

    def _anchors(self) -> set[str | None]:
        anchor = self.engine.anchor
        if anchor is None:
            return set()
        return {
            self.index.label(number, self.engine.model_label)
            for name, numbers in self.index.places.items()
            if name.partition("{")[0] == anchor
            for number in numbers
        }

    def gauges(self, names: Iterable[str]) -> Totals:
        found = [self.series(name) for name in names]
        return [
            [tuple(n for n in numbers if not self.index.label(n, PRIORITY_LABEL))]
            for numbers in found
        ]

    def totals(self, totals: Iterable[tuple[str, ...]]) -> Totals:
        return [[self.series(name) for name in parts] for parts in totals]

    def timed(self, names: Distribution) -> Timed:
        series = self.index.table.series
        buckets: defaultdict[frozenset[tuple[str, str]], list[tuple[float, int]]]
        buckets = defaultdict(list)
        for number in self.series(names.bucket or ""):
            labels = dict(series[number].labels)
            bound = _bound(labels.pop("le", ""))
            if bound < inf:
                buckets[frozenset(labels.items())].append((bound, number))
        counts = self.series(names.count)
        return Timed(
            sum=self.series(names.sum),
            count=counts,
            buckets=[(n, sorted(buckets[frozenset(series[n].labels)])) for n in counts],
            unit=names.unit,
        )


def _bound(text: str) -> float:
    """A bucket's upper bound; infinite for text that is none, which leaves the bucket out."""
    try:
        return float(text)
    except ValueError:
        return inf


def _place(series: Series) -> str:
    label = SELECTED.get(series.name)
    if label is None:
        return series.name
    return f'{series.name}{{{label}="{series.label(label)}"}}'


def _numbers(fields: Iterable[Totals]) -> list[int]:
    return [n for totals in fields for parts in totals for numbers in parts for n in numbers]
