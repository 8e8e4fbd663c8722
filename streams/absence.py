"""An engine that does not answer is never normal, whatever else was or was not seen."""

from collections.abc import Iterable
from dataclasses import replace

from latencyprism.schemas.records import EngineSample, Evidence
from latencyprism.streams.judge import Judgement

SCRAPES = 3
"""Scrapes in a row that must fail; a single one says nothing about the engine."""
SURPRISE = 8.0
"""As surprising as evidence can be, in decades."""


class Absence:
    """Counts failed scrapes in a row, and overrules a verdict while nothing comes."""

    def __init__(self) -> None:
        self._answered = False
        self._failed = 0
        self._error = ""

    def follow(self, samples: Iterable[EngineSample]) -> None:
        """Take in the scrapes of a window, oldest first."""
        for sample in samples:
            if sample.freshness == "failed":
                self._failed += 1
                self._error = sample.error or "no reason given"
            else:
                self._answered = True
                self._failed = 0

    def overrule(self, judged: Judgement, *, chunks: int) -> Judgement:
        """The judgement, unless the engine neither answers nor sends tokens.

        A fault when it answered before, unknown when it never did: it may not be up yet.
        """
        if self._failed < SCRAPES or chunks:
            return judged
        reason = f"the engine does not answer, {self._failed} scrapes in a row: {self._error}"
        if not self._answered:
            return replace(judged, verdict="unknown", reason=reason, stage=None)
        evidence = Evidence(
            family="engine",
            signal="engine.failed_scrapes",
            observed=float(self._failed),
            baseline=0.0,
            surprise=SURPRISE,
        )
        return replace(
            judged,
            verdict="fault",
            reason=reason,
            stage="flow",
            observed_ms=None,
            expected_ms=None,
            score=self._failed / SCRAPES,
            threshold=1.0,
            evidence=(evidence, *judged.evidence),
        )
