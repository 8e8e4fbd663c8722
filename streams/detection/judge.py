"""The judge of one instance: mixture per stage, adaptive threshold, evidence, verdict."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from latencyprism.schemas.records import StageScore, Verdict
from latencyprism.streams.detection import snapshot
from latencyprism.streams.detection.config import DetectionConfig
from latencyprism.streams.detection.evidence import (
    CORROBORATION,
    OTHERS_HOLD_NS,
    SIGNALS,
    EvidenceBook,
)
from latencyprism.streams.detection.mixture import ConditionalMixture, fit_mixture
from latencyprism.streams.detection.stage import Demand, StageJudge, StageView
from latencyprism.streams.detection.workload import (
    FEATURES,
    Rows,
    StepMemory,
    stage_rows,
    summary,
)
from latencyprism.streams.judge import Judgement
from latencyprism.streams.observation import Observation

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

CHOICE = 0.9
"""Decades by which the strongest of about eight independent signals exceeds any one."""
MOST_SUPPORT = 4.0
UNTOLD_FACTOR = 1.3
"""Threshold of a slowdown that nothing else speaks for, over that of one that something does."""
DECISIVE_FACTOR = {"ingress": 0.5, "prefill": 0.5, "decode": 0.5, "egress": 0.5, "flow": 0.55}
"""The same of one whose cause was seen at work; silence alone strays more than the rest."""
RECENT_WINDOWS = 4
ENGINE_SILENCE_NS = 3_000_000_000
"""Without a scrape for this long the engine's counters explain nothing."""
UNTIMED_NS = 10_000_000_000
"""Requests that end for this long without a single token's time are seen by a gateway alone."""
WORKLOAD_RATIO = 1.4
UNEXPLAINED = 1.3
"""Surprise of a window, in decades, from which its workload hardly explains it."""
DEMAND_RATIO = 1.5
"""Growth of demand from which it may be why a stage is slow."""
DECISIVE: Flags = np.array([signal.decisive for signal in SIGNALS])
SPEAKS_FOR_FAULT: Flags = np.array([bool(signal.slows) for signal in SIGNALS])
SLOWS: dict[str, Flags] = {
    stage: np.array([stage in signal.slows for signal in SIGNALS]) for stage in FEATURES
}
TOLD_EFFECT = {"ingress": 1.0, "prefill": 2.5, "decode": 1.0, "egress": 1.0, "flow": 5.0}
"""Least effect of a stage in units of the configured one: the rarer its observations, the more
one of them can stray."""
QUEUE_STAGES = ("ingress", "prefill", "flow")
"""Stages that more demand lengthens beyond what each request's own work explains."""
WORK_STAGES = ("decode", "prefill")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One window in quarantine: what it would teach."""

    rows: dict[str, Rows]
    statistics: dict[str, tuple[float, float]]
    evidence: Floats
    calm: bool
    """Whether nothing spoke for a fault; what was slow or torn then isn't the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Verdict, its reason, and the stage it is about."""

    verdict: Verdict
    reason: str
    view: StageView | None = None


class MixtureJudge:
    """Judge of one instance; see :class:`latencyprism.streams.judge.Judge`.

    A window is a fault when a stage is slower than its workload explains, lastingly or grossly,
    and no load of unobserved clients, read from the engine's own counters, accounts for it.
    Evidence of a cause lowers the threshold, since trouble that shows twice is less often chance.
    Windows judged faulty are never learned.
    """

    def __init__(self, config: DetectionConfig | None = None, *, seed: int = 0) -> None:
        self.config = config or DetectionConfig()
        self._generator = np.random.default_rng(seed)
        self._stages = {
            stage: StageJudge(stage, self.config, self._generator) for stage in FEATURES
        }
        self._book = EvidenceBook(self.config.history_windows)
        self._memory = StepMemory()
        self._demand = Demand()
        self._quarantine: deque[Lesson] = deque()
        self._recent: deque[Floats] = deque(maxlen=RECENT_WINDOWS)
        self._recent_values: deque[Floats] = deque(maxlen=RECENT_WINDOWS)
        self._peak: Floats = np.zeros(len(SIGNALS))
        """Surprise of each signal, the largest of the recent windows."""
        self._peak_values: Floats = np.full(len(SIGNALS), np.nan)
        """What was measured when it was that surprising."""
        self._faulty: set[str] = set()
        self._chunk_ns = 0
        """End of the newest window with token times."""
        self._untimed = False
        """Whether a request ended since then: nothing tells of its tokens."""
        self._steps = 0
        self._generation = 0
        self._now_ns = 0
        self._fitted_ns = 0
        self._fitted_rows = dict.fromkeys(FEATURES, 0)
        self._novel_windows = 0
        self._fitting = False

    @property
    def version(self) -> str:
        """``mixture-`` and the number of fits so far."""
        return f"mixture-{self._generation}"

    def judge(self, observation: Observation) -> Judgement:
        """Score the observation, then learn from it; takes one or two milliseconds."""
        self._now_ns = observation.end_ns
        self._steps += len(observation.steps.end_ns)
        if observation.chunks:
            self._chunk_ns, self._untimed = observation.end_ns, False
        elif observation.requests_finished > observation.requests_failed:
            self._untimed = True
        self._demand.follow(
            observation.requests_started,
            float(np.nansum(observation.first_tokens.prompt_tokens)),
        )
        surprise = self._book.observe(observation)
        self._recent.append(surprise)
        self._recent_values.append(self._book.values)
        recent = np.array(self._recent)
        at = recent.argmax(axis=0), np.arange(len(SIGNALS))
        self._peak, self._peak_values = recent[at], np.array(self._recent_values)[at]
        rows = stage_rows(observation, self._memory)
        views = {
            stage: self._stages[stage].view(found, observation.end_ns, self._support(stage))
            for stage, found in rows.items()
        }
        decision = self._decide(observation, views)
        self._teach(rows, views, decision.verdict)
        view = decision.view
        threshold = self._stages["decode"].test.threshold
        return Judgement(
            verdict=decision.verdict,
            reason=decision.reason,
            stage=view.stage if view else None,
            observed_ms=view.observed_ms if view else None,
            expected_ms=view.expected_ms if view else None,
            score=view.score if view else None,
            threshold=threshold if view else None,
            scores=tuple(
                StageScore(
                    stage=stage,
                    observed_ms=found.observed_ms,
                    expected_ms=found.expected_ms,
                    low_ms=found.low_ms,
                    high_ms=found.high_ms,
                    surprise=found.surprise,
                    score=found.score,
                    threshold=threshold if found.score is not None else None,
                    observations=found.observations,
                )
                for stage, found in views.items()
            ),
            evidence=self._book.notable(self._peak, self._peak_values),
            features=summary(observation),
            version=self.version,
        )

    def refit(self) -> Callable[[], Callable[[], None]] | None:
        """Work of the fits that are due, None when none is or one is under way."""
        if self._fitting:
            return None
        due = [stage for stage in FEATURES if self._is_due(stage)]
        if not due:
            return None
        self._fitting = True
        self._fitted_ns = self._now_ns
        self._novel_windows = 0
        tables = {}
        for stage in due:
            reference = self._stages[stage].reference
            self._fitted_rows[stage] = reference.seen
            tables[stage] = reference.draw(self.config.fit_rows)
        components = self.config.components

        def work() -> Callable[[], None]:
            fitted = {
                stage: fit_mixture(table[:, :-1], table[:, -1], components=components)
                for stage, table in tables.items()
            }
            return lambda: self._install(fitted)

        return work

    def state(self) -> bytes:
        """All that was learned, at most 2 MB; see :mod:`.snapshot`."""
        return snapshot.pack(self._stages, self._book, self._steps, self._generation)

    def restore(self, state: bytes) -> None:
        """Take up a state. Raises ValueError when it is damaged or of an unknown format."""
        self._steps, self._generation = snapshot.unpack(state, self._stages, self._book)
        self._fitted_rows = {stage: judge.reference.seen for stage, judge in self._stages.items()}

    def _is_due(self, stage: str) -> bool:
        seen, fitted = self._stages[stage].reference.seen, self._fitted_rows[stage]
        if self._stages[stage].model is None:
            least = self.config.first_fit_steps if stage == "decode" else 48
            return seen >= max(least, 1.3 * fitted)
        age = (self._now_ns - self._fitted_ns) / 1e9
        if seen >= 2 * fitted or self._novel_windows >= 20:
            return age >= min(5.0, self.config.refit_seconds)
        return seen >= 1.1 * fitted and age >= self.config.refit_seconds

    def _install(self, fitted: dict[str, ConditionalMixture]) -> None:
        for stage, model in fitted.items():
            self._stages[stage].model = model
        self._generation += 1
        self._fitting = False

    def _teach(self, rows: dict[str, Rows], views: dict[str, StageView], verdict: Verdict) -> None:
        """Learn windows that have stood in quarantine; a fault empties it unlearned."""
        if verdict == "fault":
            self._quarantine.clear()
            return
        cold = self._stages["decode"].model is None
        if any(view.novel for view in views.values()):
            self._novel_windows += 1
        self._quarantine.append(
            Lesson(
                rows=rows,
                statistics={
                    stage: view.statistics for stage, view in views.items() if view.statistics
                },
                evidence=self._book.fresh_values(),
                calm=cold or bool(self._recent[-1][SPEAKS_FOR_FAULT].max() < CORROBORATION),
            )
        )
        while len(self._quarantine) > (0 if cold else self.config.quarantine_windows):
            lesson = self._quarantine.popleft()
            if lesson.calm:
                for stage, found in lesson.rows.items():
                    self._stages[stage].learn(found, lesson.statistics.get(stage))
            self._book.learn(lesson.evidence)

    def _decide(self, observation: Observation, views: dict[str, StageView]) -> Decision:
        if self._stages["decode"].model is None:
            missing = max(0, self.config.first_fit_steps - self._steps)
            return Decision(
                verdict="unknown",
                reason=f"learning: {missing} more steps until the first verdict"
                if missing
                else "learning: the first fit is under way",
            )
        for stage in sorted(self._faulty):
            if self._stages[stage].recovered(observation.end_ns):
                self._stages[stage].calm()
                self._faulty.discard(stage)
        stalled = self._stalled(observation)
        if stalled is not None:
            self._faulty.add("flow")
            return Decision(verdict="fault", reason=stalled, view=self._stages["flow"].last)
        suspects = self._suspects()
        if not suspects:
            return self._calm_decision(views)
        view = self._stages[suspects[0]].last
        if self._faulty:
            self._faulty.update(suspects)
            return Decision(verdict="fault", reason=self._fault_reason(suspects[0]), view=view)
        decisive = self._strongest(DECISIVE) >= CORROBORATION
        others = False if decisive else self._others(observation, suspects[0])
        if others is None:
            reason = f"{suspects[0]} is slow; waiting for the engine's counters to tell why"
            return Decision(verdict="normal", reason=reason, view=view)
        if others:
            reason = self._others_reason(suspects[0])
            for judge in self._stages.values():
                judge.calm()
            self._quarantine.clear()
            return Decision(verdict="workload", reason=reason, view=view)
        grown = self._demand.growth()
        excusable = suspects[0] in QUEUE_STAGES or not self._told(suspects[0])
        if not decisive and excusable and grown >= max(DEMAND_RATIO, 1 + self._effect(suspects[0])):
            self._stages[suspects[0]].calm()
            reason = f"{suspects[0]} is slow while clients ask for {grown:.1f} times the usual"
            return Decision(verdict="workload", reason=reason, view=view)
        self._faulty.update(suspects)
        return Decision(verdict="fault", reason=self._fault_reason(suspects[0]), view=view)

    def _told(self, stage: str) -> bool:
        """Whether anything else speaks for a fault that can slow the stage."""
        return self._strongest(SLOWS[stage]) >= CORROBORATION

    def _suspects(self) -> list[str]:
        """Stages beyond their threshold, the clearest first."""
        config = self.config
        decisive = self._strongest(DECISIVE) >= CORROBORATION
        found = []
        for stage, judge in self._stages.items():
            told = self._told(stage)
            if not told and stage == "flow":
                continue
            if told:
                least = TOLD_EFFECT[stage] * config.minimum_effect
            else:
                beyond = math.expm1(config.unexplained_spreads * judge.usual_wander)
                least = max(config.minimum_effect, beyond)
            height = judge.test.threshold * (
                DECISIVE_FACTOR[stage] if decisive else 1.0 if told else UNTOLD_FACTOR
            )
            slow = judge.test.score >= height and self._effect(stage) >= least
            if slow or stage in self._faulty:
                found.append(stage)
        return sorted(found, key=lambda stage: -self._stages[stage].test.score)

    def _effect(self, stage: str) -> float:
        """Relative slowdown of the run; that of the first byte in shares of the first token."""
        judge = self._stages[stage]
        if stage != "ingress":
            return judge.effect
        return judge.excess_ms / self._stages["prefill"].trend.usual_ms()

    def _support(self, stage: str) -> float:
        """Surprise of the newest evidence that can slow the stage, less the choice of many."""
        strongest = float(self._recent[-1][SLOWS[stage]].max())
        return min(max(0.0, strongest - CHOICE), MOST_SUPPORT)

    def _strongest(self, which: Flags) -> float:
        return float(self._peak[which].max())

    def _others(self, observation: Observation, stage: str) -> bool | None:
        """Whether unobserved clients load the engine; None while its counters don't tell yet."""
        ledger = self._book.ledger
        if observation.end_ns - ledger.scraped_ns > ENGINE_SILENCE_NS:
            return False
        judge = self._stages[stage]
        began_ns = min(judge.run_began_ns, observation.end_ns - OTHERS_HOLD_NS)
        if ledger.others_ns and ledger.others_ns >= began_ns:
            return True
        since_ns = judge.suspect_since_ns
        return False if since_ns is None or ledger.scraped_ns >= since_ns else None

    def _stalled(self, observation: Observation) -> str | None:
        """Why the instance counts as stalled; None when it moves."""
        still_ns = observation.end_ns - self._memory.progress_ns
        here = observation.open_requests
        waiting = here.decoding + here.waiting
        others_ns = self._book.ledger.others_ns
        if still_ns < self.config.stall_ms * 1e6 or not waiting:
            return None
        if others_ns and observation.end_ns - others_ns <= OTHERS_HOLD_NS:
            return None
        engine = observation.last_engine
        if engine is not None and observation.end_ns - engine.observed_at_ns < ENGINE_SILENCE_NS:
            moved = (engine.generation_tokens or 0) + (engine.prompt_tokens or 0)
            covered = engine.observed_at_ns - self._memory.progress_ns
            if moved > 0 or covered < 0.5 * still_ns:
                return None
        return f"stalled: {waiting} open requests and no token for {still_ns / 1e9:.1f} s"

    def _calm_decision(self, views: dict[str, StageView]) -> Decision:
        for stage in WORK_STAGES:
            view = views.get(stage)
            if view is None:
                continue
            slower, work, feature = self._stages[stage].trend.growth()
            if slower < math.log(WORKLOAD_RATIO):
                continue
            grown = FEATURES[stage][feature]
            if view.novel is not None:
                work = max(work, math.log(self._demand.growth()))
                explained = slower <= work
            else:
                explained = view.surprise is not None and view.surprise < UNEXPLAINED
            if explained:
                reason = (
                    f"{stage} takes {math.exp(slower):.1f} times its usual time and the work "
                    f"explains it: {grown} grew {math.exp(work):.1f} times"
                )
                return Decision(verdict="workload", reason=reason, view=view)
            if view.novel is None:
                reason = f"{stage} takes longer than its work explains; not yet certain"
                return Decision(verdict="normal", reason=reason, view=view)
        for stage in WORK_STAGES:
            view = views.get(stage)
            if view is not None and view.novel is not None:
                reason = f"{stage} with {view.novel} as never before: no verdict"
                return Decision(verdict="unknown", reason=reason, view=view)
        if self._untimed and self._now_ns - self._chunk_ns > UNTIMED_NS:
            reason = "requests are seen when they end, but none of their tokens: no verdict"
            return Decision(verdict="unknown", reason=reason)
        return Decision(verdict="normal", reason="as expected")

    def _fault_reason(self, stage: str) -> str:
        judge = self._stages[stage]
        strongest = self._book.notable(self._peak, self._peak_values, most=1)
        told = f"; {strongest[0].signal} is unusual" if strongest else "; nothing else is unusual"
        times = f"{1 + judge.effect:.1f} times"
        return f"{stage} lately took {times} what its workload explains{told}"

    def _others_reason(self, stage: str) -> str:
        return (
            f"{stage} is slow and {self._book.ledger.share:.0%} of the engine's work comes from "
            "clients that are not observed"
        )
