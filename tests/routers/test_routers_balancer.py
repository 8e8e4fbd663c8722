"""Which target gets the next request, and who waits how long for it."""

import asyncio
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.routers.adapter import AdapterError
from latencyprism.routers.balancer import NS_PER_S, Balancer, Target
from latencyprism.routers.lease import NORMAL, TargetState
from latencyprism.routers.pool import BusyError, Pool, PoolAdapter

TARGETS = {"a:1": "a:1", "b:1": "b:1"}


def picks(balancer: Balancer, count: int, *, keep: bool = False) -> Counter[str]:
    """Targets of so many requests, one after the other or all at once."""
    chosen: Counter[str] = Counter()
    for _ in range(count):
        target = balancer.pick(0)
        assert target is not None
        chosen[target.name] += 1
        if not keep:
            balancer.release(target)
    return chosen


def test_equal_targets_take_turns() -> None:
    assert picks(Balancer(TARGETS), 10) == {"a:1": 5, "b:1": 5}


def test_weight_is_the_share_of_traffic_also_when_nothing_else_is_under_way() -> None:
    balancer = Balancer(TARGETS)
    balancer.set_state("a:1", TargetState(weight=0.25))
    assert picks(balancer, 100) == {"a:1": 20, "b:1": 80}


def test_busy_target_gets_less() -> None:
    balancer = Balancer(TARGETS)
    balancer.targets["a:1"].in_flight = 9
    assert picks(balancer, 110)["a:1"] == 10


@given(weights=st.lists(st.floats(0.05, 1), min_size=2, max_size=6))
def test_requests_that_stay_are_spread_by_weight(weights: list[float]) -> None:
    names = {f"{index}:1": "x" for index in range(len(weights))}
    balancer = Balancer(names)
    for name, weight in zip(names, weights, strict=True):
        balancer.set_state(name, TargetState(weight=weight))
    picks(balancer, 300, keep=True)
    for target in balancer.targets.values():
        assert target.in_flight > 0


@pytest.mark.parametrize("state", [TargetState(drained=True), TargetState(weight=0)])
def test_target_that_is_out_gets_nothing(state: TargetState) -> None:
    balancer = Balancer(TARGETS)
    balancer.set_state("a:1", state)
    assert picks(balancer, 10, keep=True) == {"b:1": 10}
    balancer.set_state("b:1", state)
    assert balancer.pick(0) is None
    assert balancer.ready_ns(0) is None


def test_concurrency_limit_bounds_what_is_under_way() -> None:
    balancer = Balancer({"a:1": "a:1"})
    balancer.set_state("a:1", TargetState(concurrency_limit=2))
    held = balancer.pick(0)
    assert held is not None
    assert balancer.pick(0) is not None
    assert balancer.pick(0) is None
    balancer.release(held)
    assert balancer.pick(0) is not None


def test_limit_below_what_is_under_way_cuts_nothing() -> None:
    balancer = Balancer({"a:1": "a:1"})
    picks(balancer, 5, keep=True)
    balancer.set_state("a:1", TargetState(concurrency_limit=2))
    assert balancer.targets["a:1"].in_flight == 5
    assert balancer.pick(0) is None


def test_rate_limit_paces_requests() -> None:
    balancer = Balancer({"a:1": "a:1"})
    balancer.set_state("a:1", TargetState(rate_limit_rps=4))
    served, now_ns = [], 0
    while now_ns < 2 * NS_PER_S:
        target = balancer.pick(now_ns)
        if target is not None:
            served.append(now_ns)
            balancer.release(target)
        now_ns += NS_PER_S // 100
    assert served == [n * NS_PER_S // 4 for n in range(8)]
    assert balancer.ready_ns(served[-1]) == served[-1] + NS_PER_S // 4


def test_unreachable_target_is_left_alone_for_a_while() -> None:
    balancer = Balancer(TARGETS)
    balancer.mark_down(balancer.targets["a:1"], 5)
    assert picks(balancer, 4) == {"b:1": 4}
    assert {target.name for target in (balancer.pick(5), balancer.pick(5)) if target} == set(
        TARGETS
    )


def pool(limit: int = 8, timeout_s: float = 5, **state: float) -> Pool:
    balancer = Balancer({"a:1": "a:1"})
    balancer.set_state("a:1", TargetState(**state))  # type: ignore[arg-type]  # floats and ints
    return Pool(balancer, queue_limit=limit, queue_timeout_s=timeout_s)


async def held(subject: Pool, count: int) -> list[asyncio.Task[Target]]:
    """So many requests that ask at once."""
    tasks = [asyncio.create_task(subject.acquire()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_those_that_wait_are_served_in_their_order() -> None:
    subject = pool(concurrency_limit=1)
    tasks = await held(subject, 3)
    for index in range(3):
        target = await tasks[index]
        assert [task.done() for task in tasks] == [n <= index for n in range(3)]
        subject.release(target)
        await asyncio.sleep(0)
    assert subject.waiting == 0


async def test_newcomer_does_not_overtake_the_queue() -> None:
    balancer = Balancer({"a:1": "a:1"})
    balancer.set_state("a:1", TargetState(rate_limit_rps=1))
    now_ns = 0
    subject = Pool(balancer, queue_limit=8, queue_timeout_s=5, clock_ns=lambda: now_ns)
    first, second = await held(subject, 2)
    assert first.done()
    now_ns = NS_PER_S  # the target is free again, and the timer has not fired yet
    (newcomer,) = await held(subject, 1)
    await asyncio.sleep(0)
    assert second.done()
    assert not newcomer.done()
    newcomer.cancel()
    await asyncio.gather(newcomer, return_exceptions=True)


async def test_full_queue_refuses_in_words() -> None:
    subject = pool(limit=1, concurrency_limit=1)
    tasks = await held(subject, 2)
    with pytest.raises(BusyError, match=r"queue is full: 1 requests wait \(a:1 is at most 1") as e:
        await subject.acquire()
    assert (e.value.status, e.value.retry_after_s) == (429, 1)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_wait_is_bounded() -> None:
    subject = pool(timeout_s=0.02, drained=True)
    with pytest.raises(BusyError, match=r"no server became free within 0.02 s.*a:1 is drained"):
        await subject.acquire()
    assert subject.waiting == 0


async def test_one_that_gives_up_as_it_is_served_gives_the_target_back() -> None:
    subject = pool(concurrency_limit=1)
    first, second, third = await held(subject, 3)
    target = await first
    subject.release(target)  # gives it to the second,
    second.cancel()  # which leaves in the same moment
    await asyncio.gather(second, return_exceptions=True)
    assert await third is target
    assert target.in_flight == 1


async def test_end_of_a_limit_wakes_those_that_wait() -> None:
    subject = pool(drained=True)
    (waiting,) = await held(subject, 1)
    assert not waiting.done()
    subject.set_state("a:1", NORMAL)
    assert (await waiting).name == "a:1"


async def test_rate_limit_lets_those_that_wait_go_in_time() -> None:
    subject = pool(rate_limit_rps=50)
    begun = asyncio.get_running_loop().time()
    await asyncio.gather(*(subject.acquire() for _ in range(6)))
    assert 0.09 < asyncio.get_running_loop().time() - begun < 1


async def test_adapter_commands_the_pool_from_another_thread() -> None:
    subject = pool()
    adapter = PoolAdapter(subject, asyncio.get_running_loop())
    limited = TargetState(concurrency_limit=3)
    assert await asyncio.to_thread(adapter.drifted, {"a:1": limited}) == ("a:1",)
    said = await asyncio.to_thread(adapter.apply, "a:1", limited)
    assert said == "proxy: at most 3 requests in flight"
    assert subject.balancer.targets["a:1"].state == limited
    assert await asyncio.to_thread(adapter.drifted, {"a:1": limited}) == ()
    await asyncio.to_thread(adapter.restore, "a:1")
    assert subject.balancer.targets["a:1"].state == NORMAL


def test_adapter_says_so_when_the_event_loop_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("latencyprism.routers.pool.APPLY_TIMEOUT_S", 0.05)
    loop = asyncio.new_event_loop()
    blocked = threading.Event()
    loop.call_soon(blocked.wait)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        with pytest.raises(AdapterError, match="did not answer within"):
            PoolAdapter(pool(), loop).apply("a:1", NORMAL)
    finally:
        blocked.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
