"""An engine that is away is told of, and one failed scrape is not."""

import pytest

from latencyprism.schemas.records import EngineSample, Freshness
from latencyprism.streams.absence import Absence
from latencyprism.streams.detection.evidence import rank_causes
from latencyprism.streams.judge import Judgement

FAILED: tuple[Freshness, ...] = ("failed", "failed", "failed")
STALE: tuple[Freshness, ...] = ("stale", "stale", "stale")
ERRORS = {"failed": "Connection refused", "stale": "4 requests are open, but nothing moved"}
NORMAL = Judgement(verdict="normal", reason="as expected", features={}, version="v")


def scrape(freshness: Freshness) -> EngineSample:
    return EngineSample(
        instance="h:1",
        source="engine",
        observed_at_ns=1,
        freshness=freshness,
        error=ERRORS.get(freshness),
        scrape_ms=1.0,
        restarted=False,
    )


def absence(*freshness: Freshness) -> Absence:
    found = Absence()
    found.follow(map(scrape, freshness))
    return found


def test_an_engine_that_died_is_a_fault() -> None:
    judged = absence("fresh", *FAILED).overrule(NORMAL, chunks=0)

    assert (judged.verdict, judged.stage) == ("fault", "flow")
    assert judged.reason == ("the engine does not answer: Connection refused (3 scrapes in a row)")
    (cause,) = rank_causes({e.signal: e for e in judged.evidence}, "flow")
    assert cause.family == "engine"


def test_an_engine_that_stands_still_behind_its_web_server_is_a_fault() -> None:
    judged = absence("fresh", *STALE).overrule(NORMAL, chunks=0)

    assert (judged.verdict, judged.stage) == ("fault", "flow")
    assert judged.reason.startswith("the engine stands still: 4 requests are open")


def test_an_engine_that_never_answered_is_unknown() -> None:
    judged = absence(*FAILED).overrule(NORMAL, chunks=0)

    assert judged.verdict == "unknown"
    assert "Connection refused" in judged.reason


@pytest.mark.parametrize(
    ("freshness", "chunks"),
    [
        (["fresh", "failed", "failed"], 0),
        (["fresh", "failed", "failed", "failed"], 1),
        (["fresh", "failed", "failed", "failed", "fresh"], 0),
        (["fresh", "failed", "stale"], 0),
        (["fresh", "stale", "stale", "stale"], 1),
        ([], 0),
    ],
)
def test_what_is_no_absence(freshness: list[Freshness], chunks: int) -> None:
    assert absence(*freshness).overrule(NORMAL, chunks=chunks) is NORMAL
