"""Two pages of one engine → what happened between them, under the names of EngineSample; pure.

Growth is reckoned series by series, so that one which appears, with a new adapter say, counts from
0 and takes nothing from the others; then the series are added up.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise, zip_longest
from math import isfinite, nan
from typing import Any

from latencyprism.collectors.engine.aliases import CPU_SECONDS, START_SECONDS, Engine
from latencyprism.collectors.engine.exposition import Page, Values
from latencyprism.collectors.engine.plan import Index, Numbers, Plan, Timed, Totals
from latencyprism.schemas.records import EngineSample, Freshness, HistogramDelta

STALE_S = 5.0
"""How long an engine may move nothing while requests are open, unless said otherwise."""
CLOCK_S = 1.0
"""Start times no further apart than this are of one process."""

Sum = Callable[[Numbers], float | None]
"""Adds up the series that are on the page; None without any, NaN where one is no number."""


class Tracker:
    """Turns the pages of one instance into samples; remembers the last good one."""

    def __init__(self, instance: str, *, stale_s: float = STALE_S) -> None:
        self.version: str | None = None
        """Version that the engine was asked for: None not yet, empty when it did not tell;
        forgotten when it restarts."""
        self.engine: Engine | None = None
        """The engine as last recognised."""
        self._instance = instance
        self._stale_ns = stale_s * 1e9
        self._model: str | None = None
        self._index: Index | None = None
        self._plan: Plan | None = None
        self._last: Values | None = None
        """The last good page; None before it."""
        self._last_ns = 0
        self._moved_ns = 0
        """When the engine last moved something, or no request was open."""

    def page(
        self, page: Page, *, observed_at_ns: int, monotonic_ns: int, scrape_ms: float
    ) -> EngineSample:
        """Sample of a whole page; counters grow since the last good one."""
        values = _without_infinities(page.values)
        plan = self._planned(page, values)
        if plan is None:
            return self._sample(observed_at_ns, scrape_ms, "fresh")
        assert self._index is not None
        self.engine, self._model = plan.engine, _model(plan, values)
        here = _adder(values)
        gauges: dict[str, Any] = {
            k: _number(_first(totals, here)) for k, totals in plan.gauges.items()
        }
        gauges |= {k: _number(_mean(totals, values)) for k, totals in plan.shares.items()}
        sample = self._sample(observed_at_ns, scrape_ms, "fresh")
        before, before_ns = self._last, self._last_ns
        if before is None:
            self._last, self._last_ns, self._moved_ns = values, monotonic_ns, monotonic_ns
            return replace(sample, **gauges)
        base: Values = [old for old, _ in zip_longest(before, values)]
        growth = _growth(base, values)
        still = self._still(plan, values, growth, gauges, monotonic_ns)
        if still is not None:
            return self._sample(observed_at_ns, scrape_ms, "stale", still)
        restarted = _begin_anew(plan, self._index, base, values, growth)
        if restarted:
            self.version = None
        self._last, self._last_ns = values, monotonic_ns
        grown = _adder(growth)
        counters: dict[str, Any] = {
            k: _number(_first(totals, grown)) for k, totals in plan.counters.items()
        }
        return replace(
            sample,
            version=self.version or None,
            interval_ns=monotonic_ns - before_ns,
            restarted=restarted,
            histograms=tuple(
                delta
                for stage, alternatives in plan.histograms.items()
                if (delta := _histogram(stage, alternatives, base, growth)) is not None
            ),
            **gauges,
            **counters,
        )

    def failed(self, error: str, *, observed_at_ns: int, scrape_ms: float) -> EngineSample:
        """Sample of a scrape that gave no page; everything the page would tell is null."""
        return self._sample(observed_at_ns, scrape_ms, "failed", error)

    def answered(
        self, engine: Engine, model: str | None, *, observed_at_ns: int, scrape_ms: float
    ) -> EngineSample:
        """Sample of an engine that has no metrics page, but answered and named its model."""
        self.engine, self._model = engine, model
        return self._sample(observed_at_ns, scrape_ms, "fresh")

    def _planned(self, page: Page, values: Values) -> Plan | None:
        """The plan for a page, None when no engine known has a metric on it."""
        if self._index is None or self._index.table is not page.table:
            self._index, self._plan, self._last = Index(page.table), None, None
        if self._index.learn():
            self._plan = self._index.plan(values) or self._plan
        return self._plan if self._plan is not None and self._plan.known(values) else None

    def _still(
        self,
        plan: Plan,
        values: Values,
        growth: Values,
        gauges: Mapping[str, float | None],
        monotonic_ns: int,
    ) -> str | None:
        """Why the page is stale, None if it is not: requests are open, but for too long nothing
        moved that the engine itself moves, totals and the use of its KV cache.

        An engine without a pulse on its page moves nothing between requests; then the CPU time of
        the process that renders the page must stand still too.
        """
        assert self._index is not None
        assert self._last is not None
        cpu = self._index.one(CPU_SECONDS, values)
        rendered = cpu is None or cpu != self._index.one(CPU_SECONDS, self._last)
        told = any(values[number] is not None for number in plan.pulse)
        open_requests = (gauges.get("running") or 0.0) + (gauges.get("waiting") or 0.0)
        moved = any(growth[number] for number in (*plan.monotone, *plan.shared))
        if moved or not open_requests or (rendered and not told):
            self._moved_ns = monotonic_ns
        still_ns = monotonic_ns - self._moved_ns
        if still_ns < self._stale_ns:
            return None
        still = f"{open_requests:g} requests are open, but nothing moved for {still_ns / 1e9:.1f} s"
        if rendered:
            return f"{still}: the engine hangs, waits, or takes one step that long"
        return f"{still}, nor did the server's CPU time: an old page is shown again"

    def _sample(
        self, observed_at_ns: int, scrape_ms: float, freshness: Freshness, error: str | None = None
    ) -> EngineSample:
        return EngineSample(
            instance=self._instance,
            source="engine",
            observed_at_ns=observed_at_ns,
            engine=self.engine.name if self.engine else None,
            version=self.version or None,
            model=self._model,
            freshness=freshness,
            error=error,
            scrape_ms=scrape_ms,
            restarted=False,
        )


def _without_infinities(values: Values) -> Values:
    """Values with NaN for infinite ones, so that growth and sums of them are NaN, not infinite."""
    if isfinite(sum(filter(None, values))):
        return values
    return [v if v is None or isfinite(v) else nan for v in values]


def _growth(base: Values, values: Values) -> Values:
    """Growth of each series; of a new one, its value."""
    return [
        None if now is None else now if before is None else now - before
        for before, now in zip(base, values, strict=True)
    ]


def _begin_anew(plan: Plan, index: Index, base: Values, values: Values, growth: Values) -> bool:
    """Let the growth of ranks that were restarted begin at 0; whether there were any.

    A rank was restarted when one of its totals went back, all were when the server says so or
    totals of the server as a whole went back.
    """
    started, starts = index.one(START_SECONDS, base), index.one(START_SECONDS, values)
    everything = started is not None and starts is not None and abs(starts - started) > CLOCK_S
    back = {index.ranks[n] for n in plan.monotone if (growth[n] or 0.0) < 0}
    everything = everything or any(not any(rank) for rank in back)
    for number, value in enumerate(values):
        if value is not None and (everything or index.ranks[number] in back):
            base[number], growth[number] = 0.0, value
    return everything or bool(back)


def _adder(values: Values) -> Sum:
    def add(numbers: Numbers) -> float | None:
        present = [value for number in numbers if (value := values[number]) is not None]
        return sum(present) if present else None

    return add


def _first(alternatives: Totals, add: Sum) -> float | None:
    """Sum of the parts of the first alternative whose main part is on the page."""
    for main, *others in alternatives:
        total = add(main)
        if total is not None:
            return total + sum(add(part) or 0.0 for part in others)
    return None


def _mean(alternatives: Totals, values: Values) -> float | None:
    for (numbers,) in alternatives:
        present = [value for number in numbers if (value := values[number]) is not None]
        if present:
            return sum(present) / len(present)
    return None


def _number(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _histogram(
    stage: str, alternatives: list[Timed], base: Values, growth: Values
) -> HistogramDelta | None:
    """Growth of the first alternative on the page, None without any, or with one that is no
    number.

    Buckets are left out when there were no observations, and when those of two pages or of two
    ranks do not match.
    """
    add = _adder(growth)
    for timed in alternatives:
        count, total = add(timed.count), add(timed.sum)
        if count is None or total is None:
            continue
        if not isfinite(count) or not isfinite(total):
            return None
        bounds, counts = _buckets(timed, base, growth) if count else ((), ())
        return HistogramDelta(
            stage=stage,
            count=count,
            sum=max(total, 0.0) * timed.unit,
            bounds=bounds,
            counts=counts,
        )
    return None


def _buckets(
    timed: Timed, base: Values, growth: Values
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bounds, and the observations in each bucket, the last one without a bound."""
    bounds: list[float] = []
    up_to: list[float] = []
    for count, buckets in timed.buckets:
        observed = growth[count]
        if observed is None:
            continue
        present = [(bound, n, up) for bound, n in buckets if (up := growth[n]) is not None]
        here = [bound for bound, _, _ in present]
        new = base[count] is None
        if (up_to and here != bounds) or any((base[n] is None) != new for _, n, _ in present):
            return (), ()
        ups = [*(up for _, _, up in present), observed]
        bounds, up_to = here, [a + b for a, b in zip(up_to, ups, strict=True)] if up_to else ups
    counts = tuple(high - low for low, high in pairwise((0.0, *up_to)))
    if not bounds or not all(number >= 0 for number in counts):
        return (), ()
    return tuple(bounds), counts


def _model(plan: Plan, values: Values) -> str | None:
    models = {model for number, model in plan.models if model and values[number] is not None}
    return ",".join(sorted(models)) or None
