"""The policy: when it reroutes, when it throttles, and what it never does."""

import itertools
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_streams_fleet import profile

from latencyprism.schemas.records import Ack, BatchProfile, Command, Effect, Verdict
from latencyprism.streams.config import SculptingConfig
from latencyprism.streams.fleet import Fleet
from latencyprism.streams.sculpting import Sculptor

SECOND = 10**9


class Control:
    """A fleet and its sculptor, one window of all replicas after the other."""

    def __init__(self, replicas: int, **config: Any) -> None:
        self.names = [f"h{n}:1" for n in range(replicas)]
        self.fleet = Fleet("svc")
        self.sculptor = Sculptor("svc", SculptingConfig(**{"mode": "on", **config}))
        self.window = 0
        self.now_ns = 0

    def step(self, verdicts: dict[int, Verdict] | None = None, **values: Any) -> list[Command]:
        """Every replica reports; those named with that verdict and those values."""
        commands: list[Command] = []
        for number, name in enumerate(self.names):
            if verdicts and number in verdicts:
                self.report(profile(self.window, verdicts[number], name, **values))
            else:
                self.report(profile(self.window, instance=name))
            commands += self.sculptor.decide(self.fleet, self.now_ns)
        self.window += 1
        return commands

    def report(self, one: BatchProfile) -> None:
        self.fleet.add(one)
        self.now_ns = one.closed_at_ns

    def run(
        self, seconds: float, verdicts: dict[int, Verdict] | None = None, **values: Any
    ) -> list[Command]:
        return [
            command for _ in range(round(4 * seconds)) for command in self.step(verdicts, **values)
        ]


def actions(commands: list[Command], target: str | None = None) -> list[tuple[str, float | None]]:
    """New decisions, renewals left out."""
    seen: set[str] = set()
    return [
        (command.action, command.value)
        for command in commands
        if target in (None, command.target)
        and not (command.command_id in seen or seen.add(command.command_id))  # type: ignore[func-returns-value]
    ]


def test_a_fault_moves_traffic_to_healthy_peers_at_once() -> None:
    control = Control(2)
    assert control.run(1) == []
    (command,) = control.step({0: "fault"})
    assert (command.target, command.action, command.value) == ("h0:1", "weight", 0.1)
    assert (command.floor, command.lease_ms, command.dry_run) == (0.1, 5_000, False)
    assert command.alert == control.fleet.alerts()[0].fingerprint
    assert "decode is slow" in command.reason


def test_the_lease_is_renewed_three_times_a_lease_while_the_fault_lasts() -> None:
    control = Control(2)
    commands = control.run(10, {0: "fault"})
    assert actions(commands) == [("weight", 0.1)]
    assert len({(c.command_id, c.epoch) for c in commands}) == 1
    issued = [command.issued_ns for command in commands]
    gaps = [later - earlier for earlier, later in itertools.pairwise(issued)]
    assert max(gaps) <= 2 * SECOND
    assert min(gaps) >= 1.5 * SECOND


def test_the_way_back_is_half_open_and_ends_in_a_restore() -> None:
    control = Control(2)
    control.run(2, {0: "fault"})
    commands = control.run(20)
    assert actions(commands) == [
        ("weight", 0.1),
        ("weight", 0.25),
        ("weight", 0.5),
        ("restore", None),
    ]
    epochs = [command.epoch for command in commands]
    assert epochs == sorted(epochs)
    assert control.run(5) == []


def test_a_relapse_on_the_way_back_closes_again_and_waits_longer_next_time() -> None:
    control = Control(2)
    control.run(2, {0: "fault"})
    control.run(7)
    again = control.run(1, {0: "fault"})
    assert actions(again)[-1] == ("weight", 0.1)
    control.run(20)
    relapse_at = control.now_ns
    control.run(2, {0: "fault"})
    first_try = next(c for c in control.run(30) if c.value == 0.25)
    assert first_try.issued_ns - relapse_at >= 8 * SECOND


def test_a_stalled_replica_is_drained() -> None:
    control = Control(2)
    stalled = {"stage": "flow", "reason": "stalled: 4 open requests and no token for 2.0 s"}
    (command,) = control.step({1: "fault"}, **stalled)
    assert (command.target, command.action, command.value) == ("h1:1", "drain", None)


def test_a_slow_replica_that_stalls_is_drained_after_the_rate_limit() -> None:
    control = Control(2)
    control.run(4, {0: "fault"})
    stalled = {"stage": "flow", "reason": "stalled: 4 open requests", "score": 99.0}
    commands = control.run(6, {0: "fault"}, **stalled)
    assert ("drain", None) in actions(commands)


@pytest.mark.parametrize(
    ("replicas", "faulty", "touched"), [(1, 1, 0), (2, 2, 0), (4, 3, 2), (8, 5, 4)]
)
def test_no_more_than_half_of_the_fleet_is_rerouted_and_never_without_a_healthy_peer(
    replicas: int, faulty: int, touched: int
) -> None:
    control = Control(replicas)
    control.run(1)
    verdicts: dict[int, Verdict] = dict.fromkeys(range(faulty), "fault")
    for number, name in enumerate(control.names):
        verdict = verdicts.get(number, "normal")
        control.report(profile(control.window, verdict, name))
    commands = control.sculptor.decide(control.fleet, control.now_ns)
    assert len({command.target for command in commands}) == touched


@given(
    st.lists(
        st.tuples(
            st.dictionaries(
                st.integers(0, 3), st.sampled_from(["fault", "workload", "unknown"]), max_size=4
            ),
            st.integers(1, 20),
        ),
        max_size=12,
    )
)
def test_whatever_happens_at_most_half_is_out_and_epochs_only_grow(
    story: list[tuple[dict[int, Verdict], int]],
) -> None:
    control = Control(4)
    out: dict[str, int] = {}
    epochs: dict[str, tuple[int, str]] = {}
    for verdicts, windows in story:
        for _ in range(windows):
            for command in control.step(verdicts):
                epoch, lease = epochs.get(command.target, (0, ""))
                assert command.epoch > epoch or (command.epoch, command.command_id) == (
                    epoch,
                    lease,
                )
                epochs[command.target] = (command.epoch, command.command_id)
                if command.action == "restore":
                    out.pop(command.target, None)
                else:
                    out[command.target] = command.issued_ns + 5 * SECOND
                assert sum(until > control.now_ns for until in out.values()) <= 2


def test_epochs_survive_a_restart_because_they_start_at_the_clock() -> None:
    first = Control(2)
    (before,) = first.step({0: "fault"})
    second = Control(2)
    second.window = 40
    (after,) = second.step({0: "fault"})
    assert after.epoch > before.epoch == before.issued_ns // 1_000_000


def test_a_burst_never_reroutes_and_a_short_one_does_nothing_at_all() -> None:
    control = Control(2)
    burst = {"ttft_ms": 900.0, "features": {"waiting": 6.0, "decoding": 30.0}}
    assert control.run(8, {0: "workload", 1: "workload"}, **burst) == []


def test_lasting_overload_beyond_the_objective_is_throttled_and_released() -> None:
    control = Control(2)
    overload = {"ttft_ms": 4_000.0, "features": {"waiting": 20.0, "decoding": 12.0}}
    commands = control.run(12, {0: "workload", 1: "workload"}, **overload)
    assert {command.action for command in commands} == {"concurrency_limit"}
    assert {command.target for command in commands} == {"h0:1", "h1:1"}
    assert all(command.value == 12.0 and command.floor == 4.0 for command in commands)
    calm = {"ttft_ms": 100.0, "features": {"waiting": 0.0, "decoding": 4.0}}
    released = control.run(15, {0: "unknown", 1: "unknown"}, **calm)
    assert actions(released, "h0:1")[-1] == ("restore", None)


def test_a_throttled_replica_keeps_the_floor() -> None:
    control = Control(2)
    overload = {"ttft_ms": 9_000.0, "features": {"waiting": 9.0, "decoding": 1.0}}
    commands = control.run(10, {0: "workload"}, **overload)
    assert {command.value for command in commands} == {4.0}


@pytest.mark.parametrize(("mode", "expected"), [("off", None), ("dry_run", True), ("on", False)])
def test_modes(mode: Literal["off", "dry_run", "on"], expected: bool | None) -> None:
    commands = Control(2, mode=mode).step({0: "fault"})
    assert [command.dry_run for command in commands] == ([] if expected is None else [expected])


def ack(command: Command, effect: Effect) -> Ack:
    return Ack(
        ack_id="1",
        command_id=command.command_id,
        target=command.target,
        epoch=command.epoch,
        router="test",
        effect=effect,
        dry_run=False,
        at_ns=command.issued_ns,
    )


def test_what_a_router_refused_is_not_renewed_but_tried_anew() -> None:
    control = Control(2)
    (command,) = control.step({0: "fault"})
    control.sculptor.acknowledge(ack(command, "refused"))
    assert control.run(2.5, {0: "fault"}) == []
    (again,) = control.run(1, {0: "fault"})
    assert again.epoch > command.epoch


def test_an_ack_of_an_older_epoch_or_of_nobody_known_is_passed_over() -> None:
    control = Control(2)
    (command,) = control.step({0: "fault"})
    stale = ack(command, "refused")
    for wrong in ({"epoch": command.epoch - 1}, {"target": "x:1"}):
        values = {name: getattr(stale, name) for name in Ack.__dataclass_fields__} | wrong
        control.sculptor.acknowledge(Ack(**values))
    control.sculptor.acknowledge(ack(command, "applied"))
    assert len(control.run(4, {0: "fault"})) == 2


def test_nothing_is_steered_unless_asked_for() -> None:
    control = Control(4, mode=SculptingConfig().mode)
    control.run(10)

    commands = control.run(5, {0: "fault"})

    assert commands
    assert all(command.dry_run for command in commands)
