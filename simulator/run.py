"""Runs an engine in virtual time: a run of an hour takes seconds, and every truth is known."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from latencyprism.simulator.config import EngineConfig
from latencyprism.simulator.engine import Completed, Engine, Gauges, Request, Totals
from latencyprism.simulator.faults import Fault, FaultKind
from latencyprism.simulator.stats import EngineStats, Histogram
from latencyprism.simulator.workload import PREFIX_TOKENS, Ask, Draw, Phase

NS_PER_S = 1_000_000_000
SCRAPE_NS = NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request reached the server."""

    at_ns: int
    request: Request
    phase: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A step ended; what it brought leaves the server at ``sent_ns``."""

    at_ns: int
    completed: Completed
    sent_ns: int
    """Equal to ``at_ns`` unless the network holds it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scraped:
    """What the engine's metrics page says, once a second; cumulative."""

    at_ns: int
    gauges: Gauges
    totals: Totals
    histograms: dict[str, Histogram]


Moment = Arrived | Stepped | Scraped


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One instance under known load and known faults; nothing is computed before it is iterated.

    The same run iterated twice gives the same moments. At the end of the last phase nothing more
    arrives and what is under way is served to its end.
    """

    instance: str
    model: str = "small"
    config: EngineConfig = field(default_factory=EngineConfig)
    phases: Sequence[Phase] = ()
    faults: Sequence[Fault] = ()
    """Times in ns since the epoch, as ``start_ns``; :meth:`fault` makes them from seconds."""
    start_ns: int = 1_800_000_000 * NS_PER_S
    seed: int = 0

    def fault(self, kind: FaultKind, from_s: float, until_s: float, value: float = 0.0) -> Fault:
        """A fault between two times after the start. Raises ValueError as :class:`Fault`."""
        return Fault(
            kind=kind,
            value=value,
            from_ns=self.start_ns + round(from_s * NS_PER_S),
            until_ns=self.start_ns + round(until_s * NS_PER_S),
        )

    def moments(self) -> Iterator[Moment]:
        """All that happens, in order of time. Holds only what is under way."""
        return _Simulation(self).moments()


def simulate(
    *,
    instance: str,
    phases: Sequence[Phase],
    faults: Sequence[tuple[FaultKind, float, float, float]] = (),
    model: str = "small",
    config: EngineConfig | None = None,
    seed: int = 0,
    start_ns: int = 1_800_000_000 * NS_PER_S,
) -> Run:
    """A run with faults given as ``(kind, from_s, until_s, value)`` after its start."""
    run = Run(
        instance=instance,
        model=model,
        config=config or EngineConfig(),
        phases=tuple(phases),
        start_ns=start_ns,
        seed=seed,
    )
    return replace(run, faults=tuple(run.fault(*fault) for fault in faults))


class _Simulation:
    """State of one iteration over a run."""

    def __init__(self, run: Run) -> None:
        # Streams of chance of their own, so that a fault changes no request of an open phase.
        opens, callers, noise = np.random.SeedSequence(run.seed).spawn(3)
        self._run = run
        self._draw = Draw(np.random.default_rng(opens))
        self._callers_draw = Draw(np.random.default_rng(callers))
        self._engine = Engine(
            config=run.config, rng=np.random.default_rng(noise), faults=list(run.faults)
        )
        self._stats = EngineStats()
        self._arrivals: list[tuple[int, int, int, Ask]] = []
        """Heap of (time, number, phase, what)."""
        self._number = 0
        self._callers: dict[str, int] = {}
        """Phase of each open request of a closed phase."""
        self._ends_ns = [run.start_ns]
        for phase in run.phases:
            self._ends_ns.append(self._ends_ns[-1] + round(phase.duration_s * NS_PER_S))

    def moments(self) -> Iterator[Moment]:
        run, engine = self._run, self._engine
        opens = self._opens()
        self._next_open(opens)
        self._plan_callers()
        ingress_ns = round(run.config.ingress_ms * 1e6)
        now_ns, sent_ns, scrape_ns = run.start_ns, 0, run.start_ns + SCRAPE_NS
        submitted: list[tuple[int, str, Request]] = []
        step = None
        while True:
            times = [
                self._arrivals[0][0] if self._arrivals else None,
                submitted[0][0] if submitted else None,
                step.end_ns if step else engine.hung_until_ns(now_ns) if not engine.idle else None,
            ]
            known = [time for time in times if time is not None]
            if not known and scrape_ns > self._ends_ns[-1]:
                return
            now_ns = min((*known, scrape_ns))
            if now_ns == scrape_ns:
                yield self._scrape(now_ns)
                scrape_ns += SCRAPE_NS
            elif step is not None and now_ns == step.end_ns:
                completed = engine.complete()
                step = None
                self._stats.take(completed)
                sent_ns = max(sent_ns, now_ns + engine.output_delay_ns(now_ns))
                yield Stepped(at_ns=now_ns, completed=completed, sent_ns=sent_ns)
                for served in completed.served:
                    self._call_again(served.request.request_id, sent_ns)
            elif self._arrivals and now_ns == self._arrivals[0][0]:
                arrived = self._arrive(opens)
                request = arrived.request
                heapq.heappush(submitted, (now_ns + ingress_ns, request.request_id, request))
                yield arrived
            elif submitted and now_ns == submitted[0][0]:
                engine.submit(heapq.heappop(submitted)[2])
            if step is None:
                step = engine.begin(now_ns)

    def _opens(self) -> Iterator[tuple[int, int, Ask]]:
        """Arrivals of open and burst phases: (time, phase, what)."""
        for index, phase in enumerate(self._run.phases):
            at_ns, end_ns = self._ends_ns[index], self._ends_ns[index + 1]
            if phase.mode == "burst":
                for _ in range(phase.requests):
                    yield at_ns, index, self._draw.ask(phase)
            while phase.mode == "open":
                ask = self._draw.ask(phase)
                at_ns += round(self._draw.gap_s(phase) * NS_PER_S)
                if at_ns >= end_ns:
                    break
                yield at_ns, index, ask

    def _next_open(self, opens: Iterator[tuple[int, int, Ask]]) -> None:
        following = next(opens, None)
        if following is not None:
            self._push(*following)

    def _plan_callers(self) -> None:
        for index, phase in enumerate(self._run.phases):
            if phase.mode == "closed":
                for _ in range(phase.concurrency):
                    self._push(self._ends_ns[index], index, self._callers_draw.ask(phase))

    def _push(self, at_ns: int, phase: int, ask: Ask) -> None:
        heapq.heappush(self._arrivals, (at_ns, self._number, phase, ask))
        self._number += 1

    def _arrive(self, opens: Iterator[tuple[int, int, Ask]]) -> Arrived:
        at_ns, number, phase, ask = heapq.heappop(self._arrivals)
        request_id = f"{self._run.instance}-{self._run.seed}-{number}"
        if self._run.phases[phase].mode == "closed":
            self._callers[request_id] = phase
        else:
            self._next_open(opens)
        size = self._run.config.block_tokens
        blocks = () if ask.prefix is None else _blocks(ask.prefix, size)
        request = Request(
            request_id=request_id,
            arrival_ns=at_ns,
            prompt_tokens=ask.prompt_tokens,
            output_tokens=ask.output_tokens,
            blocks=blocks,
        )
        return Arrived(at_ns=at_ns, request=request, phase=phase)

    def _call_again(self, request_id: str, answered_ns: int) -> None:
        index = self._callers.pop(request_id, None)
        if index is None:
            return
        phase = self._run.phases[index]
        at_ns = answered_ns + round(self._callers_draw.think_s(phase) * NS_PER_S)
        if at_ns < self._ends_ns[index + 1]:
            self._push(at_ns, index, self._callers_draw.ask(phase))

    def _scrape(self, now_ns: int) -> Scraped:
        return Scraped(
            at_ns=now_ns,
            gauges=self._engine.gauges(now_ns),
            totals=replace(self._engine.totals),
            histograms={name: h.copy() for name, h in self._stats.histograms.items()},
        )


def _blocks(prefix: int, block_tokens: int) -> tuple[int, ...]:
    whole = PREFIX_TOKENS // block_tokens
    return tuple(prefix * whole + index for index in range(whole))
