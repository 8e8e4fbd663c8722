"""Which alerts have the stacks of a server taken."""

from dataclasses import replace

from latencyprism.collectors.stacks.choice import Choice
from latencyprism.schemas.records import Alert

S = 1_000_000_000
T0 = 1_764_547_200 * S
FAULT = Alert(
    alert_id="a1",
    fingerprint="f1",
    state="firing",
    severity="warning",
    verdict="fault",
    instance="127.0.0.1:8000",
    service="m",
    stage="decode",
    fired_ns=T0,
    updated_ns=T0,
    first_batch_ns=T0,
    score=9.0,
    threshold=5.0,
    reason="decode takes three times as long",
    peers_affected=1,
    peers_total=1,
)


def refusal(choice: Choice, alert: Alert, at_s: float = 0.0) -> str | None:
    wall_ns = T0 + int(at_s * 1e9)
    said = choice.refusal(alert, pause_s=60.0, wall_ns=wall_ns, now_s=at_s)
    if said is None:
        choice.took(alert, at_s)
    return said


def test_a_workload_alert_leaves_the_pause_to_a_fault() -> None:
    choice = Choice()
    assert refusal(choice, replace(FAULT, verdict="workload", fingerprint="w")) == "no fault"
    assert refusal(choice, FAULT) is None
    assert refusal(choice, FAULT, 30.0) == "too soon"


def test_a_try_that_took_nothing_leaves_the_pause_unused() -> None:
    choice = Choice()
    for _ in range(2):
        assert choice.refusal(FAULT, pause_s=60.0, wall_ns=T0, now_s=0.0) is None


def test_other_faults_of_an_instance_are_taken_within_the_pause_but_no_more_than_three() -> None:
    choice = Choice()
    others = [replace(FAULT, fingerprint=f"f{number}") for number in range(5)]
    said = [refusal(choice, other, number) for number, other in enumerate(others)]
    assert said == [None, None, None, "too soon", "too soon"]
    assert refusal(choice, replace(FAULT, instance="b:1"), 5.0) is None


def test_a_fault_that_gets_worse_is_news_once() -> None:
    # Every record of a problem has an id of its own, as the streams write them.
    choice = Choice()
    choice.refusal(FAULT, pause_s=60.0, wall_ns=T0, now_s=0.0)
    same = replace(FAULT, alert_id="a2", state="updated")
    worse = replace(same, alert_id="a3", severity="critical", updated_ns=T0 + 90 * S)
    assert refusal(choice, same, 1.0) == "no news"
    assert refusal(choice, worse, 90.0) is None
    assert refusal(choice, replace(worse, alert_id="a4"), 170.0) == "no news"


def test_a_problem_that_fires_again_is_news_again() -> None:
    choice = Choice()
    worst = replace(FAULT, severity="critical")
    again = replace(FAULT, alert_id="b1", fired_ns=T0 + 90 * S, updated_ns=T0 + 90 * S)
    worse = replace(again, alert_id="b2", state="updated", severity="critical")
    assert refusal(choice, worst) is None
    assert choice.refusal(again, pause_s=60.0, wall_ns=T0 + 90 * S, now_s=90.0) is None
    assert refusal(choice, worse, 91.0) is None


def test_an_alert_of_long_ago_tells_nothing_of_now() -> None:
    assert refusal(Choice(), FAULT, 61.0) == "late"
