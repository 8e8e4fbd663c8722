from collections.abc import Iterable, Mapping

from hypothesis import given
from hypothesis import strategies as st

from latencyprism.collectors.config import CostConfig
from latencyprism.collectors.shedding import MOST_DOUBLINGS, Cost, Decision, Share, Shedder

CONFIG = CostConfig(cpu_pct=5, rss_mb=100, bytes_s=1000, patience_s=3, resume_s=4)
CALM = Cost(cpu_pct=1, rss_mb=50, bytes_s=10)
BUSY = Cost(cpu_pct=6, rss_mb=50, bytes_s=10)
TALKATIVE = Cost(cpu_pct=1, rss_mb=50, bytes_s=2000)
LARGE = Cost(cpu_pct=1, rss_mb=120, bytes_s=10)
KINDS = {
    "host": Share(cpu_pct=2, bytes_s=100),
    "network": Share(cpu_pct=3, bytes_s=50),
    "engine": Share(cpu_pct=1, bytes_s=10),
}


def told(
    shedder: Shedder, costs: Iterable[Cost], kinds: Mapping[str, Share] = KINDS
) -> list[tuple[str, str | None] | None]:
    """What it decides each second, kinds that it shed not running."""
    decisions: list[tuple[str, str | None] | None] = []
    for cost in costs:
        running = {kind: share for kind, share in kinds.items() if kind not in shedder.shed}
        decision = shedder.observe(cost, running)
        decisions.append((decision.action, decision.kind) if decision else None)
    return decisions


def test_one_quiet_second_starts_the_patience_over() -> None:
    shedder = Shedder(CONFIG)

    assert told(shedder, [BUSY, BUSY, CALM, BUSY, BUSY]) == [None] * 5
    assert told(shedder, [BUSY]) == [("shed", "network")]


def test_what_took_most_of_the_exceeded_resource_goes() -> None:
    assert told(Shedder(CONFIG), [BUSY] * 3)[-1] == ("shed", "network")
    assert told(Shedder(CONFIG), [TALKATIVE] * 3)[-1] == ("shed", "host")
    assert told(Shedder(CONFIG), [LARGE] * 3)[-1] == ("shed", "network")


def test_cost_counts_over_the_whole_patience_and_not_in_its_last_second_alone() -> None:
    shedder = Shedder(CONFIG)
    spike = {"host": Share(cpu_pct=4, bytes_s=0), "engine": Share(cpu_pct=0.1, bytes_s=0)}
    told(shedder, [BUSY, BUSY], KINDS)

    assert told(shedder, [BUSY], KINDS | spike) == [("shed", "network")]


def test_the_last_kind_that_costs_anything_is_never_shed_and_that_is_said_once() -> None:
    shedder = Shedder(CONFIG)
    kinds = KINDS | {"discovery": Share(cpu_pct=0, bytes_s=0)}
    decisions = [decision for decision in told(shedder, [BUSY] * 30, kinds) if decision]

    assert decisions == [("shed", "network"), ("shed", "host"), ("none", None)]


def test_memory_that_stays_brings_the_source_back_and_sheds_no_other() -> None:
    shedder = Shedder(CONFIG)
    decisions = [decision for decision in told(shedder, [LARGE] * 30) if decision]

    assert decisions == [("shed", "network"), ("resume", "network")]
    # Once it has been below the ceiling, it counts again.
    told(shedder, [CALM])
    assert told(shedder, [LARGE] * 3)[-1] == ("shed", "network")


def test_memory_that_falls_but_not_enough_sheds_the_next() -> None:
    shedder = Shedder(CONFIG)
    told(shedder, [LARGE] * 3)
    lower = Cost(cpu_pct=1, rss_mb=110, bytes_s=10)

    assert told(shedder, [lower] * 3)[-1] == ("shed", "host")


def test_memory_above_its_ceiling_does_not_hide_the_cpu() -> None:
    shedder = Shedder(CONFIG)
    told(shedder, [LARGE] * 6)
    both = Cost(cpu_pct=6, rss_mb=120, bytes_s=10)

    assert told(shedder, [both] * 3)[-1] == ("shed", "network")


def test_latest_comes_back_first() -> None:
    shedder = Shedder(CONFIG)
    told(shedder, [BUSY] * 6)
    decisions = [decision for decision in told(shedder, [CALM] * 8) if decision]

    assert decisions == [("resume", "host"), ("resume", "network")]
    assert shedder.shed == []


def test_wait_doubles_for_what_has_to_be_shed_again_and_again_and_is_bounded() -> None:
    shedder = Shedder(CONFIG)
    waits = []
    for _ in range(7):
        assert told(shedder, [BUSY] * 3)[-1] == ("shed", "network")
        waited = 1
        while told(shedder, [CALM]) == [None]:
            waited += 1
        waits.append(waited)

    assert waits == [4, 8, 16, 32, 64, 64, 64]
    assert waits[-1] == CONFIG.resume_s * 2**MOST_DOUBLINGS
    told(shedder, [CALM] * CONFIG.resume_s)
    told(shedder, [BUSY] * 3)
    assert told(shedder, [CALM] * 4)[-1] == ("resume", "network")


def test_kind_that_is_not_wanted_any_more_does_not_come_back() -> None:
    shedder = Shedder(CONFIG)
    told(shedder, [BUSY] * 3)
    shedder.forget("network")

    assert shedder.shed == []
    assert told(shedder, [CALM] * 20) == [None] * 20


def test_reason_tells_the_cost() -> None:
    shedder = Shedder(CONFIG)
    decisions = [shedder.observe(BUSY, KINDS) for _ in range(3)]

    assert decisions[-1] == Decision(
        action="shed",
        kind="network",
        reason="the agent took 6.0 % of a core, 50 MB and 0.00 MB/s",
    )


costs = st.builds(
    Cost,
    cpu_pct=st.floats(0, 10),
    rss_mb=st.floats(0, 200),
    bytes_s=st.floats(0, 2000),
)


@given(st.lists(costs, max_size=200))
def test_one_kind_always_runs_and_only_what_was_shed_comes_back(seconds: list[Cost]) -> None:
    shedder = Shedder(CONFIG)
    running = set(KINDS)
    for cost in seconds:
        decision = shedder.observe(cost, {kind: KINDS[kind] for kind in running})
        match decision:
            case Decision(action="shed", kind=str(kind)):
                running.remove(kind)
            case Decision(action="resume", kind=str(kind)):
                assert kind not in running
                running.add(kind)
        assert running
        assert running.isdisjoint(shedder.shed)
        assert len(running) + len(shedder.shed) == len(KINDS)
