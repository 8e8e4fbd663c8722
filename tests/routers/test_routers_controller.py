"""The controller keeps the router in the state that is in force, also when the router fails."""

import pytest

from latencyprism.routers.adapter import AdapterError, MemoryAdapter
from latencyprism.routers.config import LeaseRules
from latencyprism.routers.controller import Controller
from latencyprism.routers.lease import NORMAL, Instant, LeaseBook, TargetState
from latencyprism.schemas.records import Action, Command

START_NS = 1_800_000_000 * 10**9


def at(ms: int) -> Instant:
    return Instant(wall_ns=START_NS + ms * 1_000_000, monotonic_ns=ms * 1_000_000)


def command(action: Action = "drain", *, epoch: int = 1, issued_ms: int = 0) -> Command:
    return Command(
        command_id=f"c{epoch}",
        target="a:1",
        service="small",
        epoch=epoch,
        issued_ns=START_NS + issued_ms * 1_000_000,
        lease_ms=5_000,
        action=action,
        value=0.5 if action == "weight" else None,
        reason="test",
        dry_run=False,
    )


@pytest.fixture
def adapter() -> MemoryAdapter:
    return MemoryAdapter()


@pytest.fixture
def controller(adapter: MemoryAdapter) -> Controller:
    controller = Controller(LeaseBook(("a:1", "b:1"), LeaseRules()), adapter, router="r")
    controller.verify()
    return controller


def test_command_is_applied_acknowledged_and_ended(
    controller: Controller, adapter: MemoryAdapter
) -> None:
    applied = controller.handle(command(), at(0))
    assert applied is not None
    assert (applied.effect, applied.detail) == ("applied", "drained: drained")
    assert adapter.states["a:1"] == TargetState(drained=True)
    assert controller.tick(at(4_999)) == []
    (expired,) = controller.tick(at(5_000))
    assert (expired.effect, expired.command_id) == ("expired", "c1")
    assert expired.detail == "the lease ended; the target is back to normal"
    assert adapter.states["a:1"] == NORMAL


def test_what_the_router_did_not_take_is_refused_and_not_in_force(
    controller: Controller, adapter: MemoryAdapter
) -> None:
    adapter.failure = "the socket is gone"
    answer = controller.handle(command(), at(0))
    assert answer is not None
    assert (answer.effect, answer.detail) == ("refused", "the socket is gone")
    assert controller.leases == ()
    adapter.failure = None
    renewed = controller.handle(command(issued_ms=100), at(100))
    assert renewed is not None
    assert renewed.effect == "applied"


def test_a_renewal_tells_when_the_lease_took_effect(controller: Controller) -> None:
    for issued_ms in (0, 100):
        answer = controller.handle(command(issued_ms=issued_ms), at(issued_ms))

        assert answer is not None
        assert (answer.effect, answer.at_ns) == ("applied", at(0).wall_ns)


def test_restore_that_failed_is_retried_until_it_succeeds(
    controller: Controller, adapter: MemoryAdapter
) -> None:
    controller.handle(command(), at(0))
    adapter.failure = "away"
    (expired,) = controller.tick(at(5_000))
    assert "could not be told yet" in (expired.detail or "")
    controller.verify()
    assert adapter.states["a:1"] == TargetState(drained=True)
    adapter.failure = None
    controller.verify()
    assert adapter.states["a:1"] == NORMAL


def test_router_that_forgot_is_put_right(controller: Controller, adapter: MemoryAdapter) -> None:
    controller.handle(command(), at(0))
    adapter.states.clear()
    controller.verify()
    assert adapter.states["a:1"] == TargetState(drained=True)
    assert controller.counts["corrected"] == 1


def test_what_an_earlier_run_left_behind_is_restored_at_the_start() -> None:
    adapter = MemoryAdapter()
    adapter.apply("a:1", TargetState(drained=True))
    Controller(LeaseBook(("a:1",), LeaseRules()), adapter, router="r").verify()
    assert adapter.states["a:1"] == NORMAL


def test_release_brings_every_target_back(controller: Controller, adapter: MemoryAdapter) -> None:
    controller.handle(command("weight"), at(0))
    controller.release()
    assert adapter.states == {"a:1": NORMAL, "b:1": NORMAL}
    assert controller.leases == ()


def test_newer_decision_that_came_too_late_still_ends_the_older(
    controller: Controller, adapter: MemoryAdapter
) -> None:
    controller.handle(command(issued_ms=6_000), at(6_000))
    late = controller.handle(command("weight", epoch=2, issued_ms=0), at(6_000))
    assert late is not None
    assert late.effect == "expired"
    controller.verify()
    assert adapter.states["a:1"] == NORMAL
    assert controller.counts["corrected"] == 0  # it was our own doing, not the router's


def test_memory_adapter_that_fails_cannot_be_asked(adapter: MemoryAdapter) -> None:
    adapter.failure = "away"
    with pytest.raises(AdapterError, match="away"):
        adapter.drifted({"a:1": NORMAL})
