"""An engine that does not answer, or stands still, is never normal, whatever else was seen."""

from collections.abc import Iterable
from dataclasses import replace

from latencyprism.schemas.records import EngineSample, Evidence
from latencyprism.streams.judge import Judgement

SCRAPES = 3
"""Scrapes in a row that must find nothing new; a single one says nothing about the engine."""
SURPRISE = 8.0
"""As surprising as evidence can be, in decades."""


class Absence:
    """Counts scrapes in a row that failed or found the engine standing still with open requests,
    and overrules a verdict while nothing comes.
    """

    def __init__(self) -> None:
        self._answered = False
        self._without = 0
        self._why = ""

    def follow(self, samples: Iterable[EngineSample]) -> None:
        """Take in the scrapes of a window, oldest first."""
        for sample in samples:
            if sample.freshness == "fresh":
                self._answered = True
                self._without = 0
                continue
            self._without += 1
            what = "does not answer" if sample.freshness == "failed" else "stands still"
            self._why = f"the engine {what}: {sample.error or 'no reason given'}"

    def overrule(self, judged: Judgement, *, chunks: int) -> Judgement:
        """The judgement, unless the engine neither tells anything new nor sends tokens.

        A fault when it answered before, unknown when it never did: it may not be up yet.
        """
        if self._without < SCRAPES or chunks:
            return judged
        reason = f"{self._why} ({self._without} scrapes in a row)"
        if not self._answered:
            return replace(judged, verdict="unknown", reason=reason, stage=None)
        evidence = Evidence(
            family="engine",
            signal="engine.failed_scrapes",
            observed=float(self._without),
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
            score=self._without / SCRAPES,
            threshold=1.0,
            evidence=(evidence, *judged.evidence),
        )
