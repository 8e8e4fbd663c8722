"""Leases: rules one by one, and the promises that hold whatever is sent in whatever order."""

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from latencyprism.routers.config import LeaseRules
from latencyprism.routers.lease import NORMAL, Decision, Instant, LeaseBook, TargetState, ack
from latencyprism.schemas.records import Action, Command

MS = 1_000_000
START_NS = 1_800_000_000 * 10**9
TARGETS = ("a:1", "b:1", "c:1", "d:1")


def at(ms: float, *, clock_set_ms: float = 0) -> Instant:
    """A moment ``ms`` after the start; ``clock_set_ms`` moves the wall clock alone."""
    return Instant(wall_ns=START_NS + round((ms + clock_set_ms) * MS), monotonic_ns=round(ms * MS))


def command(
    action: Action = "weight",
    value: float | None = 0.5,
    *,
    target: str = "a:1",
    epoch: int = 1,
    command_id: str | None = None,
    issued_ms: float = 0,
    lease_ms: int = 5_000,
    floor: float | None = None,
    dry_run: bool = False,
) -> Command:
    return Command(
        command_id=command_id or f"{target}-{epoch}",
        target=target,
        service="small",
        epoch=epoch,
        issued_ns=START_NS + round(issued_ms * MS),
        lease_ms=lease_ms,
        action=action,
        value=None if action in ("drain", "restore") else value,
        floor=floor,
        reason="test",
        dry_run=dry_run,
    )


def book(**rules: float) -> LeaseBook:
    return LeaseBook(TARGETS, LeaseRules(**rules))  # type: ignore[arg-type]  # ints among floats


def test_command_is_in_force_until_its_lease_ends() -> None:
    leases = book()
    decision = leases.offer(command(value=0.5), at(100))
    assert decision == Decision(
        outcome="applied", state=TargetState(weight=0.5), detail="weight 0.5"
    )
    assert leases.expire(at(4_999)) == ()
    assert leases.state("a:1") == TargetState(weight=0.5)
    (ended,) = leases.expire(at(5_000))
    assert ended.command.target == "a:1"
    assert leases.state("a:1") == NORMAL
    assert leases.expire(at(5_000)) == ()


@pytest.mark.parametrize(
    ("sent", "state"),
    [
        (command("drain"), TargetState(drained=True)),
        (command("weight", 0.25), TargetState(weight=0.25)),
        (command("weight", 0.0), TargetState(weight=0.0)),
        (command("concurrency_limit", 7.9), TargetState(concurrency_limit=7)),
        (command("rate_limit", 2.5), TargetState(rate_limit_rps=2.5)),
        (command("restore"), NORMAL),
    ],
)
def test_every_action(sent: Command, state: TargetState) -> None:
    leases = book()
    assert leases.offer(sent, at(0)).outcome == "applied"
    assert leases.state("a:1") == state


@pytest.mark.parametrize(
    ("sent", "state"),
    [
        (command("weight", 0.01), TargetState(weight=0.05)),
        (command("weight", 0.1, floor=0.3), TargetState(weight=0.3)),
        (command("weight", 0.0, floor=0.3), TargetState(weight=0.3)),
        (command("concurrency_limit", 0.0), TargetState(concurrency_limit=1)),
        (command("concurrency_limit", 2.0, floor=3.5), TargetState(concurrency_limit=4)),
        (command("rate_limit", 0.0), TargetState(rate_limit_rps=0.1)),
        (command("rate_limit", 1.0, floor=4.0), TargetState(rate_limit_rps=4.0)),
    ],
)
def test_value_below_the_floor_is_raised_and_the_answer_says_so(
    sent: Command, state: TargetState
) -> None:
    decision = book().offer(sent, at(0))
    assert decision.state == state
    assert "raised to the floor" in decision.detail


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (command("weight", None), "without a value"),
        (command("weight", 1.5), "not in 0 .. 1"),
        (command("weight", float("nan")), "nan is not in"),
        (command("weight", float("inf")), "inf is not in"),
        (command("concurrency_limit", -1), "-1 is not in"),
        (command("rate_limit", 1e12), "1e+12 is not in"),
        (command("weight", 0.5, floor=float("nan")), "floor nan"),
        (command("weight", 0.5, floor=-1.0), "floor -1"),
        (command(lease_ms=0), "lease of 0 ms"),
        (command(lease_ms=300_001), "lease of 300001 ms"),
        (command(issued_ms=2_001), "2.0 s in the future"),
    ],
)
def test_nonsense_is_refused_in_words_and_changes_nothing(sent: Command, words: str) -> None:
    leases = book()
    decision = leases.offer(sent, at(0))
    assert decision.outcome == "refused"
    assert words in decision.detail
    assert leases.state("a:1") == NORMAL
    assert leases.offer(command(value=0.5), at(0)).outcome == "applied"


def test_target_of_another_router_gets_no_answer() -> None:
    decision = book().offer(command(target="z:9"), at(0))
    assert (decision.outcome, decision.effect) == ("foreign", None)


def test_lower_epoch_is_stale() -> None:
    leases = book()
    leases.offer(command(epoch=5), at(0))
    decision = leases.offer(command("drain", epoch=4, issued_ms=100), at(100))
    assert decision.outcome == "refused"
    assert "epoch 4 is stale: 5 was seen" in decision.detail
    assert leases.state("a:1") == TargetState(weight=0.5)


def test_equal_epoch_renews_only_the_same_command() -> None:
    leases = book()
    leases.offer(command(), at(0))
    other = leases.offer(command("drain", command_id="other"), at(100))
    assert other.outcome == "refused"
    assert "belongs to command a:1-1" in other.detail
    assert leases.offer(command(issued_ms=4_000), at(4_000)).outcome == "applied"
    assert leases.expire(at(8_999)) == ()
    assert len(leases.expire(at(9_000))) == 1


def test_higher_epoch_replaces_the_whole_earlier_decision() -> None:
    leases = book()
    leases.offer(command("concurrency_limit", 3), at(0))
    leases.offer(command("weight", 0.5, epoch=2), at(0))
    assert leases.state("a:1") == TargetState(weight=0.5)


def test_repeated_delivery_does_not_prolong_the_lease() -> None:
    leases = book()
    for ms in (0, 1_000, 4_000):
        assert leases.offer(command(), at(ms)).outcome == "applied"
    assert len(leases.expire(at(5_000))) == 1


def test_reordered_renewal_does_not_shorten_the_lease() -> None:
    leases = book()
    leases.offer(command(issued_ms=3_000), at(3_000))
    leases.offer(command(issued_ms=1_000), at(3_100))
    assert leases.expire(at(7_999)) == ()


def test_sender_whose_clock_is_ahead_gets_no_longer_lease() -> None:
    leases = book()
    leases.offer(command(issued_ms=1_900), at(0))
    assert len(leases.expire(at(5_000))) == 1


def test_clock_that_is_set_back_does_not_prolong_the_lease() -> None:
    leases = book()
    leases.offer(command(), at(0))
    assert len(leases.expire(at(5_000, clock_set_ms=-3_600_000))) == 1


def test_expired_command_is_answered_and_ends_the_older_decision() -> None:
    leases = book()
    leases.offer(command(lease_ms=60_000), at(0))
    decision = leases.offer(command("drain", epoch=2, issued_ms=0, lease_ms=1_000), at(3_000))
    assert decision.outcome == "expired"
    assert "2.0 s before it was read" in decision.detail
    assert leases.state("a:1") == NORMAL
    assert leases.offer(command(epoch=1, issued_ms=3_000), at(3_000)).outcome == "refused"


def test_expired_repetition_leaves_the_renewed_lease_alone() -> None:
    leases = book()
    leases.offer(command(issued_ms=6_000), at(6_000))
    assert leases.offer(command(issued_ms=0), at(6_000)).outcome == "expired"
    assert leases.state("a:1") == TargetState(weight=0.5)


def test_restore_ends_the_lease_however_late_it_comes() -> None:
    leases = book()
    leases.offer(command("drain", lease_ms=60_000), at(0))
    assert leases.offer(command("restore", epoch=2, lease_ms=0), at(30_000)).outcome == "applied"
    assert leases.state("a:1") == NORMAL
    assert leases.expire(at(60_000)) == ()


def test_epoch_outlives_its_lease() -> None:
    leases = book()
    leases.offer(command(epoch=7), at(0))
    leases.expire(at(5_000))
    assert leases.offer(command(epoch=6, issued_ms=6_000), at(6_000)).outcome == "refused"


def test_dry_run_says_what_would_be_and_does_nothing() -> None:
    leases = book()
    decision = leases.offer(command("drain", epoch=9, dry_run=True), at(0))
    assert (decision.outcome, decision.detail) == ("applied", "would be drained")
    assert leases.state("a:1") == NORMAL
    assert leases.offer(command(epoch=1), at(0)).outcome == "applied"


def test_no_more_than_the_share_is_taken_out() -> None:
    leases = book(max_ejected_share=0.5)
    assert leases.offer(command("drain", target="a:1"), at(0)).outcome == "applied"
    assert leases.offer(command("weight", 0, target="b:1"), at(0)).outcome == "applied"
    refused = leases.offer(command("drain", target="c:1"), at(0))
    assert refused.outcome == "refused"
    assert "at most 2 of 4 targets may be out at once; out now: a:1, b:1" in refused.detail
    renewal = leases.offer(command("drain", target="a:1", issued_ms=10), at(10))
    assert renewal.outcome == "applied"
    leases.offer(command("restore", target="b:1", epoch=2), at(20))
    assert leases.offer(command("drain", target="c:1", epoch=2), at(20)).outcome == "applied"


def test_the_only_target_is_never_taken_out() -> None:
    leases = LeaseBook(("a:1",), LeaseRules(max_ejected_share=0.9))
    decision = leases.offer(command("drain"), at(0))
    assert decision.outcome == "refused"
    assert "at most 0 of 1" in decision.detail


def test_renewal_of_a_lease_that_ran_out_unnoticed_counts_as_a_new_ejection() -> None:
    leases = book(max_ejected_share=0.25)
    leases.offer(command("drain", target="a:1"), at(0))
    assert leases.offer(command("drain", target="b:1", issued_ms=5_000), at(5_000)).outcome == (
        "applied"
    )
    assert leases.offer(command("drain", target="a:1", issued_ms=5_001), at(5_001)).outcome == (
        "refused"
    )


def test_ack_id_is_the_same_in_every_repeated_delivery() -> None:
    first = ack(command(), router="r", effect="applied", detail="x", at_ns=1)
    again = ack(command(issued_ms=5), router="r", effect="applied", detail="y", at_ns=2)
    assert first.ack_id == again.ack_id
    assert len({first.ack_id, replace(first, ack_id="a-1/2/r/applied").ack_id}) == 2


class LeaseMachine(RuleBasedStateMachine):
    """Any commands in any order at any time, compared with what was promised."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds = LeaseRules(max_ejected_share=0.5, lease_max_ms=20_000)
        self.book = LeaseBook(TARGETS, self.bounds)
        self.now_ms = 0.0
        self.clock_set_ms = 0.0
        self.sent: list[Command] = []
        self.highest: dict[str, int] = {}

    @property
    def now(self) -> Instant:
        return at(self.now_ms, clock_set_ms=self.clock_set_ms)

    @rule(
        name=st.sampled_from(TARGETS),
        epoch=st.integers(1, 6),
        action=st.sampled_from(("weight", "drain", "restore", "concurrency_limit", "rate_limit")),
        value=st.one_of(st.none(), st.floats(-1, 3), st.just(0.0), st.just(float("nan"))),
        age_ms=st.integers(-3_000, 25_000),
        lease_ms=st.integers(-1, 25_000),
        other=st.booleans(),
        dry_run=st.booleans(),
    )
    def offer(
        self,
        name: str,
        epoch: int,
        action: Action,
        value: float | None,
        age_ms: int,
        lease_ms: int,
        other: bool,
        dry_run: bool,
    ) -> None:
        sent = command(
            action,
            value,
            target=name,
            epoch=epoch,
            command_id=f"{name}-{epoch}-{other}",
            issued_ms=self.now_ms + self.clock_set_ms - age_ms,
            lease_ms=lease_ms,
            dry_run=dry_run,
        )
        self.sent.append(sent)
        self.deliver(sent)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def redeliver(self, data: st.DataObject) -> None:
        self.deliver(data.draw(st.sampled_from(self.sent)))

    def deliver(self, sent: Command) -> None:
        before = {target: self.book.state(target) for target in TARGETS}
        decision = self.book.offer(sent, self.now)
        after = {target: self.book.state(target) for target in TARGETS}
        stale = sent.epoch < self.highest.get(sent.target, 0)
        if stale:
            assert decision.outcome == "refused"
        if stale or sent.dry_run or decision.outcome == "refused":
            assert before == after
        else:
            self.highest[sent.target] = sent.epoch
        assert all(before[t] == after[t] for t in TARGETS if t != sent.target)
        again = self.book.offer(sent, self.now)
        assert again == decision
        assert {target: self.book.state(target) for target in TARGETS} == after

    @rule(ms=st.floats(0, 10_000))
    def wait(self, ms: float) -> None:
        self.now_ms += ms
        self.book.expire(self.now)

    @rule(ms=st.floats(-50_000, 50_000))
    def set_clock(self, ms: float) -> None:
        self.clock_set_ms += ms

    @invariant()
    def share_is_kept(self) -> None:
        assert sum(self.book.state(target).ejected for target in TARGETS) <= 2

    @invariant()
    def floors_are_kept(self) -> None:
        for target in TARGETS:
            state = self.book.state(target)
            assert state.weight == 0 or self.bounds.min_weight <= state.weight <= 1
            assert state.concurrency_limit is None or state.concurrency_limit >= 1
            assert state.rate_limit_rps is None or state.rate_limit_rps >= self.bounds.min_rate_rps

    @invariant()
    def everything_ends_within_the_longest_lease(self) -> None:
        for lease in self.book.leases:
            left_ns = lease.expires_ns - self.now.monotonic_ns
            assert left_ns <= self.bounds.lease_max_ms * MS

    def teardown(self) -> None:
        self.book.expire(at(self.now_ms + self.bounds.lease_max_ms))
        assert all(self.book.state(target) == NORMAL for target in TARGETS)
        for target, epoch in self.highest.items():
            stale = command(target=target, epoch=epoch - 1, issued_ms=self.now_ms)
            assert self.book.offer(stale, at(self.now_ms)).outcome == "refused"


TestLeases = LeaseMachine.TestCase
