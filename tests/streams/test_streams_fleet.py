"""Profiles of replicas in, alerts out."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.schemas.records import Alert, BatchProfile, Cause, Evidence, Verdict
from latencyprism.streams.config import FleetConfig
from latencyprism.streams.fleet import MAX_BATCHES, Fleet, blame_peers

T0 = 1_700_000_000_000_000_000
WINDOW = 250_000_000
STOPPED = Evidence(
    family="engine", signal="engine.stopped_share", observed=0.3, baseline=0.0, surprise=5.0
)
CROWDED = Evidence(
    family="host", signal="host.runqueue_ratio", observed=0.6, baseline=0.1, surprise=4.0
)


def profile(
    window: int, verdict: Verdict = "normal", instance: str = "a:1", **values: Any
) -> BatchProfile:
    start = T0 + window * WINDOW
    defaults: dict[str, Any] = {
        "requests_started": 1,
        "requests_finished": 1,
        "requests_failed": 0,
        "requests_open": 2,
        "chunks": 40,
        "steps": 20,
        "late_samples": 0,
        "reason": "as expected",
        "model_version": "test-1",
    }
    if verdict == "fault":
        defaults |= {
            "stage": "decode",
            "observed_ms": 18.0,
            "expected_ms": 10.0,
            "score": 9.0,
            "threshold": 7.0,
            "reason": "decode is slow",
        }
    return BatchProfile(
        **defaults
        | values
        | {
            "batch_id": f"{instance}/{window}",
            "instance": instance,
            "service": "svc",
            "window_start_ns": start,
            "window_end_ns": start + WINDOW,
            "closed_at_ns": start + WINDOW + 50_000_000,
            "verdict": verdict,
        }
    )


def run(fleet: Fleet, *profiles: BatchProfile) -> list[Alert]:
    return [alert for one in profiles for alert in fleet.add(one)]


def test_normal_windows_raise_nothing() -> None:
    fleet = Fleet("svc")
    assert run(fleet, *(profile(n) for n in range(50))) == []
    assert fleet.alerts() == []


def test_a_fault_fires_at_its_first_window_and_tells_all_of_it() -> None:
    (alert,) = run(Fleet("svc"), profile(0), profile(1, "fault", evidence=(CROWDED,)))
    first = profile(1)
    assert (alert.state, alert.verdict, alert.severity) == ("firing", "fault", "warning")
    assert (alert.instance, alert.service, alert.stage) == ("a:1", "svc", "decode")
    assert (alert.observed_ms, alert.expected_ms, alert.score) == (18.0, 10.0, 9.0)
    assert alert.fired_ns == alert.updated_ns == first.closed_at_ns
    assert alert.first_batch_ns == first.window_start_ns
    assert alert.batches == (first.batch_id,)
    assert [cause.family for cause in alert.causes] == ["host"]
    assert alert.causes[0].evidence == (CROWDED,)
    assert (alert.peers_affected, alert.peers_total) == (1, 1)


def test_it_resolves_after_two_seconds_without_a_fault_and_not_before() -> None:
    fleet = Fleet("svc")
    run(fleet, profile(0, "fault"))
    assert run(fleet, *(profile(n) for n in range(1, 8))) == []
    (over,) = run(fleet, profile(8))
    assert over.state == "resolved"
    assert over.resolved_ns == profile(8).closed_at_ns
    assert fleet.alerts() == []


def test_what_comes_back_has_the_same_fingerprint_and_other_ids() -> None:
    fleet = Fleet("svc")
    alerts = run(
        fleet,
        profile(0, "fault"),
        *(profile(n) for n in range(1, 12)),
        profile(12, "fault"),
    )
    assert [alert.state for alert in alerts] == ["firing", "resolved", "firing"]
    assert len({alert.fingerprint for alert in alerts}) == 1
    assert len({alert.alert_id for alert in alerts}) == 3


def test_updates_come_when_it_gets_worse_and_at_most_every_two_seconds() -> None:
    worse = [profile(n, "fault", score=9.0 + n, observed_ms=18.0 + n / 10) for n in range(24)]
    alerts = run(Fleet("svc"), *worse)
    times = [alert.updated_ns for alert in alerts]
    assert [alert.state for alert in alerts] == ["firing", "updated", "updated"]
    assert all(later - earlier >= 2 * 10**9 for earlier, later in itertools.pairwise(times))
    assert alerts[-1].observed_ms == 18.0 + 1.6
    assert run(Fleet("svc"), *(profile(n, "fault") for n in range(24)))[1:] == []


def test_other_stages_of_one_trouble_make_no_second_alert() -> None:
    fleet = Fleet("svc")
    run(fleet, profile(0, "fault"), profile(1, "fault", stage="prefill"))
    assert [alert.stage for alert in fleet.alerts()] == ["decode"]


def test_a_cause_that_is_first_seen_at_work_later_is_another_trouble() -> None:
    fleet = Fleet("svc")
    alerts = run(
        fleet,
        *(profile(n, "fault", evidence=(CROWDED,)) for n in range(12)),
        profile(12, "fault", evidence=(CROWDED, STOPPED)),
        profile(13, "fault", evidence=(CROWDED, STOPPED)),
    )
    assert [alert.state for alert in alerts] == ["firing", "resolved", "firing"]
    assert alerts[2].fired_ns == profile(12).closed_at_ns
    assert alerts[2].causes[0].family == "engine"


def test_a_cause_that_was_there_from_the_start_stays_one_trouble() -> None:
    faults = [profile(n, "fault", evidence=(STOPPED,)) for n in range(40)]
    assert [alert.state for alert in run(Fleet("svc"), *faults)] == ["firing"]


def test_a_stage_that_slows_once_more_is_another_trouble() -> None:
    fleet = Fleet("svc")
    settled = [profile(n, "fault", observed_ms=13.0) for n in range(30)]
    worse = [profile(n, "fault", observed_ms=21.0) for n in range(30, 40)]
    alerts = run(fleet, *settled, *worse)
    assert [alert.state for alert in alerts] == ["firing", "resolved", "firing"]
    assert alerts[1].reason.startswith("it became much worse")
    assert alerts[2].fired_ns - profile(30).closed_at_ns <= 10**9


@pytest.mark.parametrize(
    ("values", "severity"),
    [
        ({}, "warning"),
        ({"observed_ms": 31.0}, "critical"),
        ({"stage": "flow", "reason": "stalled: 3 open requests and no token"}, "critical"),
    ],
)
def test_severity(values: dict[str, Any], severity: str) -> None:
    (alert,) = run(Fleet("svc"), profile(0, "fault", **values))
    assert alert.severity == severity


def test_workload_is_told_once_it_lasts_and_as_information() -> None:
    fleet = Fleet("svc")
    assert run(fleet, *(profile(n, "workload") for n in range(8))) == []
    (alert,) = run(fleet, profile(8, "workload"))
    assert (alert.verdict, alert.severity) == ("workload", "info")
    assert run(Fleet("svc"), profile(0, "workload"), *(profile(n) for n in range(1, 20))) == []


def test_unknown_is_never_an_alert() -> None:
    assert run(Fleet("svc"), *(profile(n, "unknown") for n in range(40))) == []


def test_peers_are_counted_with_the_trouble_they_share() -> None:
    fleet = Fleet("svc")
    names = [f"h{n}:1" for n in range(8)]
    run(fleet, *(profile(0, instance=name) for name in names))
    (alone,) = run(fleet, profile(1, "fault", "h3:1", evidence=(CROWDED,)))
    assert (alone.peers_affected, alone.peers_total) == (1, 8)
    assert alone.causes[0].family == "host"


def test_when_all_of_eight_suffer_what_they_share_is_blamed() -> None:
    fleet = Fleet("svc")
    names = [f"h{n}:1" for n in range(8)]
    run(fleet, *(profile(0, instance=name) for name in names))
    alerts = run(fleet, *(profile(1, "fault", name, evidence=(CROWDED,)) for name in names))
    last = alerts[-1]
    assert (last.peers_affected, last.peers_total) == (8, 8)
    assert last.causes[0].family == "upstream"
    assert sum(cause.score for cause in last.causes) <= 1


def test_two_of_two_do_not_yet_blame_what_is_shared() -> None:
    causes = (Cause(family="host", cause="threads wait", score=0.8),)
    assert blame_peers(causes, affected=2, total=2) == causes


def test_a_replica_that_fell_silent_has_its_alert_resolved() -> None:
    fleet = Fleet("svc", FleetConfig(silence_s=10))
    run(fleet, profile(0, "fault"))
    now = profile(0).closed_at_ns
    assert fleet.tick(now + 9 * 10**9) == []
    (over,) = fleet.tick(now + 10 * 10**9)
    assert over.state == "resolved"
    assert over.reason.startswith("no data from a:1 for 10 s")
    assert fleet.tick(now + 11 * 10**9) == []


def test_replicas_and_batches_are_bounded() -> None:
    fleet = Fleet("svc", FleetConfig(max_replicas=3, forget_s=20))
    for number in range(9):
        run(fleet, profile(number, instance=f"h{number}:1"))
    assert [replica.instance for replica in fleet.replicas(profile(8).closed_at_ns)] == [
        "h6:1",
        "h7:1",
        "h8:1",
    ]
    fleet.tick(profile(8).closed_at_ns + 20 * 10**9)
    assert fleet.replicas(profile(8).closed_at_ns) == []
    long = Fleet("svc")
    run(long, *(profile(n, "fault") for n in range(100)))
    (over,) = run(long, *(profile(n) for n in range(100, 110)))
    assert len(over.batches) == MAX_BATCHES
    assert over.batches[-1] == "a:1/99"


verdicts = st.sampled_from(["normal", "workload", "fault", "unknown"])


@given(st.lists(st.tuples(verdicts, st.integers(1, 6)), max_size=40))
def test_repeated_and_late_deliveries_change_nothing(runs: list[tuple[Verdict, int]]) -> None:
    profiles: list[BatchProfile] = []
    for verdict, length in runs:
        for _ in range(length):
            profiles.append(profile(len(profiles), verdict))
    repeated = [
        copy for n, one in enumerate(profiles) for copy in (one, one, *profiles[max(0, n - 3) : n])
    ]
    assert run(Fleet("svc"), *repeated) == run(Fleet("svc"), *profiles)


@given(st.lists(st.tuples(verdicts, st.integers(1, 12)), max_size=30))
def test_states_follow_one_another(runs: list[tuple[Verdict, int]]) -> None:
    fleet, number = Fleet("svc"), 0
    states: dict[str, str] = {}
    seen: set[str] = set()
    for verdict, length in runs:
        for _ in range(length):
            for alert in fleet.add(profile(number, verdict)):
                before = states.get(alert.fingerprint, "resolved")
                assert (before, alert.state) in {
                    ("resolved", "firing"),
                    ("firing", "updated"),
                    ("firing", "resolved"),
                    ("updated", "updated"),
                    ("updated", "resolved"),
                }
                assert alert.alert_id not in seen
                assert (alert.resolved_ns is not None) == (alert.state == "resolved")
                states[alert.fingerprint] = alert.state
                seen.add(alert.alert_id)
            number += 1


def test_service_and_instance_are_part_of_the_fingerprint() -> None:
    one = run(Fleet("svc"), profile(0, "fault"))[0]
    other_instance = run(Fleet("svc"), profile(0, "fault", "b:1"))[0]
    other_service = run(Fleet("other"), replace(profile(0, "fault"), service="other"))[0]
    prints = {one.fingerprint, other_instance.fingerprint, other_service.fingerprint}
    assert len(prints) == 3


@pytest.mark.parametrize("wrong", [-1.0, 0.0, float("nan"), float("inf")])
def test_times_that_cannot_be_do_not_stop_the_fleet(wrong: float) -> None:
    fleet = Fleet("svc")
    for window in range(40):
        fleet.add(profile(window, "fault", stage="decode", observed_ms=20.0, expected_ms=wrong))

    assert [alert.stage for alert in fleet.alerts()] == ["decode"]
