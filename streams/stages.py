"""Where the time of a request went: ingress → queue → prefill → decode → egress.

============ ========================================= ==========================================
stage        from                                      to
============ ========================================= ==========================================
ingress      first byte of the request                 its last byte, or the head of the answer
                                                       where the server sends that before it queues
queue        end of ingress                            begin of the step that made the first token
prefill      begin of that step                        first token
decode       first token                               last token
egress       last token                                last byte of the answer
============ ========================================= ==========================================

Ingress, decode and egress are measured. Where queue ends and prefill begins is inferred from the
engine's steps, unless the head of the answer marks it; the rest of a request, such as an answer
that is no stream, is its remainder. What an engine calls queue time often leaves out the wait for
the running step; here it is part of it.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from latencyprism.schemas.records import EngineSample, StageTime
from latencyprism.streams.config import NS_PER_MS
from latencyprism.streams.estimate import Line
from latencyprism.streams.observation import Bools, Floats, Ints, Steps
from latencyprism.streams.tracking import Exchange, RequestTracker

STAGES: Final = ("ingress", "queue", "prefill", "decode", "egress")
MEASURED: Final = frozenset({"ingress", "decode", "egress"})
HEAD_LEAD_MS: Final = 1.0
"""A head of the answer that comes this long before the first token came before the work."""
HEAD_BEGINS_PREFILL: Final = frozenset({"llamacpp"})
"""Engines that send the head of an answer when they take the request out of their queue: seen to
come the engine's own prompt time before the first token, within 0.4 ms in nine of ten."""
HIDDEN_SHARE: Final = 2.5
"""A step without joining streams that takes this many times the usual carries a piece of the
prompt of a request that waits (chunked prefill)."""
COMPARISONS_KEPT: Final = 64
"""Scrapes of which our prefill times were compared with the engine's own."""
COMPARISONS_NEEDED: Final = 8
STEPS_KEPT: Final = 1_024
"""Newest steps that are remembered to find the one in which a request joined."""
FINISHED_KEPT: Final = 4_096
"""Newest finished requests that are remembered to compare with the engine's own means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Stages of one request in the order of :data:`STAGES`, ms; NaN where unknown.

    The known ones and the remainder sum to the end-to-end time; none is negative.
    """

    stages_ms: tuple[float, ...]
    e2e_ms: float
    border_error_ms: float
    """Half width of the 90 % interval of where queue ends and prefill begins."""

    @property
    def remainder_ms(self) -> float:
        """What could not be placed."""
        return max(0.0, self.e2e_ms - sum(ms for ms in self.stages_ms if not math.isnan(ms)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """Mean stages of several requests; empty and None without any.

    A stage's mean is its share in the mean request: a request of which it is unknown adds nothing
    to it, but to the remainder.
    """

    stages: tuple[StageTime, ...] = ()
    e2e_ms: float | None = None
    remainder_ms: float | None = None


class StageEstimator:
    """Breaks the requests of one instance down, learning from its steps and scrapes."""

    def __init__(self) -> None:
        self._end_ns: Ints = np.empty(0, np.int64)
        self._duration_ms: Floats = np.empty(0)
        self._joined: Ints = np.empty(0, np.int64)
        self._usual_ms = math.nan
        """Usual time of a step in which nobody joins."""
        self._unplaced: list[Exchange] = []
        """Requests with a first token whose step was not reported yet."""
        self._finished: deque[tuple[int, float]] = deque(maxlen=FINISHED_KEPT)
        """End and prefill time of requests, for the comparison with scrapes."""
        self._head_begins_prefill = False
        self.prefill_of_tokens = Line()
        """Time of a joining step of the prompt tokens it had to compute."""
        self.differences_ms: deque[float] = deque(maxlen=COMPARISONS_KEPT)
        """Mean prefill times: ours less the engine's own, one a scrape."""

    def learn(self, steps: Steps, first: Sequence[Exchange], tracker: RequestTracker) -> None:
        """Take the steps of a window and the requests whose first token came in it.

        Each gets its ``prefill_ms`` as soon as the step it joined in is known.
        """
        self._remember(steps)
        waiting = self._unplaced
        self._unplaced = [e for e in first if not self._measure(e) and not self._place(e, tracker)]
        for exchange in waiting:
            if not self._place(exchange, tracker):
                self._guess(exchange, tracker)

    def compare(self, samples: Iterable[EngineSample]) -> None:
        """Learn what engine it is, and how far its own prefill times are from ours, of scrapes in
        which as many requests ended as we saw.
        """
        for sample in samples:
            if sample.engine is not None:
                self._head_begins_prefill = sample.engine in HEAD_BEGINS_PREFILL
            prefill = next((h for h in sample.histograms if h.stage == "prefill"), None)
            if sample.freshness != "fresh" or sample.interval_ns is None or not prefill:
                continue
            until_ns = sample.observed_at_ns
            ours = [
                ms
                for end_ns, ms in self._finished
                if until_ns - sample.interval_ns < end_ns <= until_ns
            ]
            if ours and len(ours) == prefill.count:
                engine_ms = 1_000 * prefill.sum / prefill.count
                self.differences_ms.append(sum(ours) / len(ours) - engine_ms)

    def breakdown(self, exchange: Exchange) -> Breakdown:
        """Stages of a request that ended."""
        begin_ns = exchange.arrival_ns
        ready_ns = self._ingress_end_ns(exchange)
        seen = exchange.request_end_ns is not None or ready_ns > begin_ns
        ingress_ms = (ready_ns - begin_ns) / NS_PER_MS if seen else math.nan
        end_ns = max(exchange.end_ns or begin_ns, ready_ns)
        e2e_ms = (end_ns - begin_ns) / NS_PER_MS
        if exchange.first_token_ns is None:
            return Breakdown(
                stages_ms=(ingress_ms, *(math.nan,) * 4), e2e_ms=e2e_ms, border_error_ms=math.nan
            )
        first_ns = min(max(exchange.first_token_ns, ready_ns), end_ns)
        last_ns = min(max(exchange.last_chunk_ns or first_ns, first_ns), end_ns)
        wait_ms = (first_ns - ready_ns) / NS_PER_MS
        prefill_ms = exchange.prefill_ms
        if prefill_ms is None:
            queue_ms, prefill_ms, error_ms = math.nan, math.nan, math.nan
        else:
            prefill_ms = min(prefill_ms, wait_ms)
            queue_ms = wait_ms - prefill_ms
            error_ms = self._border_error(exchange)
        return Breakdown(
            stages_ms=(
                ingress_ms,
                queue_ms,
                prefill_ms,
                (last_ns - first_ns) / NS_PER_MS,
                (end_ns - last_ns) / NS_PER_MS,
            ),
            e2e_ms=e2e_ms,
            border_error_ms=error_ms,
        )

    def summary(self, ended: Sequence[Exchange]) -> StageSummary:
        """Mean stages of the requests that ended in a window."""
        if not ended:
            return StageSummary()
        self._finished.extend(
            (exchange.end_ns, exchange.prefill_ms)
            for exchange in ended
            if exchange.end_ns is not None and exchange.prefill_ms is not None
        )
        parts = [self.breakdown(exchange) for exchange in ended]
        table = np.array([part.stages_ms for part in parts])
        known = ~np.isnan(table)
        means = np.where(known, table, 0.0).mean(axis=0)
        rest = np.array([part.remainder_ms for part in parts])
        border = np.array([part.border_error_ms for part in parts])
        border_ms = float(np.nan_to_num(border).mean())
        stages = tuple(
            _stage_time(
                stage,
                mean_ms=float(means[i]),
                known=known[:, i],
                rest=rest,
                error_ms=0.0 if stage in MEASURED else border_ms,
            )
            for i, stage in enumerate(STAGES)
        )
        e2e_ms = float(np.mean([part.e2e_ms for part in parts]))
        return StageSummary(
            stages=stages, e2e_ms=e2e_ms, remainder_ms=max(0.0, e2e_ms - float(means.sum()))
        )

    def forget(self) -> None:
        """Drop steps and requests; what was learned stays."""
        self._remember(Steps(), kept=0)
        self._unplaced.clear()
        self._finished.clear()

    def _remember(self, steps: Steps, *, kept: int = STEPS_KEPT) -> None:
        since = max(0, len(self._end_ns) + len(steps.end_ns) - kept)
        self._end_ns = np.concatenate((self._end_ns, steps.end_ns))[since:]
        self._duration_ms = np.concatenate((self._duration_ms, steps.duration_ms))[since:]
        self._joined = np.concatenate((self._joined, steps.joined))[since:]
        plain = self._duration_ms[self._joined == 0]
        if len(steps.end_ns) and len(plain):
            self._usual_ms = float(np.median(plain))

    def _ingress_end_ns(self, exchange: Exchange) -> int:
        """When the request began to wait for the engine, as far as was seen."""
        head_ns = None if self._head_begins_prefill else _head_ns(exchange)
        return exchange.ready_ns if head_ns is None else head_ns

    def _measure(self, exchange: Exchange) -> bool:
        """Note the prefill time where the head of the answer marks its begin."""
        head_ns = _head_ns(exchange) if self._head_begins_prefill else None
        if head_ns is None or exchange.first_token_ns is None:
            return False
        exchange.prefill_ms = (exchange.first_token_ns - head_ns) / NS_PER_MS
        exchange.prefill_error_ms = 0.0
        return True

    def _place(self, exchange: Exchange, tracker: RequestTracker) -> bool:
        """Note how long the steps took that computed the prompt; False when the one that made
        the first token was not reported.
        """
        first_ns = exchange.first_token_ns or 0
        joined = int(np.searchsorted(self._end_ns, first_ns, side="right")) - 1
        if joined < 0 or not self._joined[joined]:
            return False
        usual_ms = self._duration_ms[joined] if math.isnan(self._usual_ms) else self._usual_ms
        if first_ns - self._end_ns[joined] > usual_ms * NS_PER_MS:
            return False
        if self._joined[joined] == 1:
            self.prefill_of_tokens.learn(
                tracker.prefill_tokens(exchange), float(self._duration_ms[joined])
            )
        ready_ns = self._ingress_end_ns(exchange)
        step = joined
        while step and self._begin_ns(step - 1) >= ready_ns and self._hidden(step - 1):
            step -= 1
        exchange.prefill_ms = max(0, first_ns - max(self._begin_ns(step), ready_ns)) / NS_PER_MS
        return True

    def _guess(self, exchange: Exchange, tracker: RequestTracker) -> None:
        """Note what the prompt's length alone tells of the time to compute it."""
        tokens = tracker.prefill_tokens(exchange)
        if self.prefill_of_tokens.ready and not math.isnan(tokens):
            wait_ns = (exchange.first_token_ns or 0) - self._ingress_end_ns(exchange)
            expected_ms = self.prefill_of_tokens.predict(tokens)
            exchange.prefill_ms = min(max(0, wait_ns) / NS_PER_MS, expected_ms)
            exchange.prefill_error_ms = self.prefill_of_tokens.half_width

    def _hidden(self, step: int) -> bool:
        long_ms = HIDDEN_SHARE * self._usual_ms
        return bool(self._duration_ms[step] > long_ms and not self._joined[step])

    def _begin_ns(self, step: int) -> int:
        return int(self._end_ns[step]) - round(float(self._duration_ms[step]) * NS_PER_MS)

    def _border_error(self, exchange: Exchange) -> float:
        """Half width of the 90 % interval of a request's prefill time, ms."""
        if exchange.prefill_error_ms is not None:
            return exchange.prefill_error_ms
        if len(self.differences_ms) >= COMPARISONS_NEEDED:
            return float(np.quantile(np.abs(self.differences_ms), 0.9))
        return 0.0 if math.isnan(self._usual_ms) else self._usual_ms / 2


def _head_ns(exchange: Exchange) -> int | None:
    """When the head of the answer came, if it came before the work was done."""
    head_ns, first_ns = exchange.first_byte_ns, exchange.first_token_ns
    if head_ns is None or first_ns is None or first_ns - head_ns < HEAD_LEAD_MS * NS_PER_MS:
        return None
    return max(exchange.ready_ns, head_ns)


def _stage_time(
    stage: str, *, mean_ms: float, known: Bools, rest: Floats, error_ms: float
) -> StageTime:
    """A stage's share in the mean request; what is unknown of it widens its error."""
    if not known.any():
        return StageTime(stage=stage, how="unknown")
    unplaced_ms = float(np.where(known, 0.0, rest).mean())
    measured = stage in MEASURED and bool(known.all())
    return StageTime(
        stage=stage,
        mean_ms=mean_ms,
        error_ms=error_ms + unplaced_ms,
        how="measured" if measured else "inferred",
    )
