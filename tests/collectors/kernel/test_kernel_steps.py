"""How the engine's messages become steps."""

from collections import Counter

from kernel_frames import Engine as FakeEngine
from test_kernel_frames import recorded

from latencyprism.collectors.kernel import programs, steps
from latencyprism.collectors.kernel.frames import MAX_STREAMS, V0_32
from latencyprism.collectors.kernel.steps import SETTLE_NS, Engine, Step, batch

MS = 1_000_000
START_NS = 1_000_000_000
OUT, OTHER = 5, 6
"""Descriptors of connections to API servers."""


class Bench:
    """An engine that is told what a fake one sends, at once."""

    def __init__(self) -> None:
        self.fake = FakeEngine(START_NS)
        self.counts: Counter[str] = Counter()
        self.engine = Engine(V0_32, self.counts)

    def after(self, ms: float) -> "Bench":
        self.fake.now_ns += int(ms * MS)
        return self

    def add(self, request: str, prompt: int) -> None:
        self.engine.inbound(self.fake.now_ns, self.fake.add(request, prompt=prompt)[:96])

    def send(self, message: bytes, descriptor: int = OUT) -> None:
        self.engine.outbound(self.fake.now_ns + 50_000, descriptor, message, len(message))

    def steps(self) -> list[Step]:
        return self.engine.take(self.fake.now_ns + 2 * SETTLE_NS)[0]


def test_a_request_joins_decodes_and_leaves() -> None:
    bench = Bench()
    bench.add("a", 100)
    bench.after(30).send(bench.fake.step({"a": 1}, joined={"a": 100}, took_ns=29 * MS))
    bench.after(10).send(bench.fake.step({"a": 1}))
    bench.after(11).send(bench.fake.step({"a": 1}, finished=["a"]))

    first, second, third = bench.steps()

    assert (first.joined, first.prefill_tokens, first.decode_sequences, first.left) == (
        1,
        100,
        0,
        0,
    )
    assert abs(first.end_ns - first.start_ns - 29 * MS) < 1000  # since it was scheduled
    assert (second.decode_sequences, second.context_tokens, second.joined) == (1, 101, 0)
    assert second.start_ns == first.end_ns
    assert (third.decode_sequences, third.context_tokens, third.left) == (1, 102, 1)
    assert bench.counts["steps"] == 3


def test_only_what_is_computed_of_a_prompt_is_prefill() -> None:
    bench = Bench()
    bench.send(bench.fake.step({"a": 1}, joined={"a": 100}, cached=64))
    bench.after(10).send(bench.fake.step({"a": 1}))

    first, second = bench.steps()

    assert first.prefill_tokens == 36
    assert second.context_tokens == 101


def test_after_a_pause_a_step_begins_with_its_request() -> None:
    bench = Bench()
    bench.send(bench.fake.step({"a": 1}, joined={"a": 10}, finished=["a"]))
    bench.after(5000).send(bench.fake.step({"b": 1}, joined={"b": 10}, took_ns=7 * MS))

    _, second = bench.steps()

    assert abs(second.end_ns - second.start_ns - 7 * MS) < 1000


def test_several_tokens_of_one_step_count_once() -> None:
    bench = Bench()
    bench.send(bench.fake.step({"a": 1}, joined={"a": 10}))
    bench.after(10).send(bench.fake.step({"a": 3}))
    bench.after(10).send(bench.fake.step({"a": 1}))

    *_, second, third = bench.steps()

    assert second.decode_sequences == 1
    assert third.context_tokens == 14
    assert bench.counts["tokens"] == 5


def test_messages_to_several_api_servers_are_one_step() -> None:
    bench = Bench()
    bench.send(bench.fake.step({"a": 1}, joined={"a": 10}))
    bench.send(bench.fake.step({"b": 1}, joined={"b": 20}, stats=False), OTHER)
    bench.after(10).send(bench.fake.step({"a": 1}))
    bench.after(0.05).send(bench.fake.step({"b": 1}, stats=False), OTHER)

    first, second = bench.steps()

    assert (first.joined, first.prefill_tokens) == (2, 30)
    assert (second.decode_sequences, second.context_tokens) == (2, 32)


def test_a_step_in_which_nothing_came_out_has_unknown_prefill() -> None:
    bench = Bench()
    bench.send(bench.fake.step({"a": 1}, joined={"a": 10}))
    bench.after(10).send(bench.fake.step({"a": 1}, active=2))
    bench.after(20).send(bench.fake.step({}, active=2))

    *_, third = bench.steps()

    assert (third.prefill_tokens, third.decode_sequences) == (-1, 0)


def test_statistics_alone_are_no_step() -> None:
    bench = Bench()
    bench.send(bench.fake.step({}, active=3), OTHER)  # as to a coordinator, on its own connection
    bench.send(bench.fake.step({"a": 1}, joined={"a": 10}, finished=["a"]))
    bench.after(10).send(bench.fake.step({}, active=0))

    assert len(bench.steps()) == 1


def test_a_client_that_gave_up_leaves_with_the_next_step() -> None:
    bench = Bench()
    bench.add("a", 10)
    bench.add("b", 10)
    bench.send(bench.fake.step({"a": 1, "b": 1}, joined={"a": 10, "b": 10}))
    bench.engine.inbound(bench.fake.now_ns, bench.fake.abort("a", "never heard of"))
    bench.after(10).send(bench.fake.step({"b": 1}))

    first, second = bench.steps()

    assert (first.left, second.left) == (0, 1)
    assert second.context_tokens == 11


def test_requests_from_before_are_counted_with_unknown_context() -> None:
    bench = Bench()
    bench.send(bench.fake.step({"old": 1}))
    bench.after(10).send(bench.fake.step({"old": 1, "new": 1}, joined={"new": 10}))
    bench.after(10).send(bench.fake.step({"old": 1, "new": 1}, finished=["old"]))
    bench.after(10).send(bench.fake.step({"new": 1}))

    found = bench.steps()

    assert [step.context_tokens for step in found] == [-1, -1, 12]
    assert [step.decode_sequences for step in found] == [1, 2, 1]
    assert bench.counts["steps without a beginning"] == 1


def test_after_a_loss_steps_begin_anew() -> None:
    bench = Bench()
    bench.send(bench.fake.step({"a": 1}, joined={"a": 10}))
    bench.after(10).send(bench.fake.step({"a": 1}))
    bench.engine.lose()
    bench.after(500).send(bench.fake.step({"a": 1}))
    bench.after(10).send(bench.fake.step({"a": 1}))

    found = bench.steps()

    assert len(found) == 3
    assert found[-1].end_ns - found[-1].start_ns == found[-1].end_ns - (START_NS + 510 * MS)
    assert found[-1].context_tokens == -1


def test_waits_are_told_by_the_engine_s_own_events() -> None:
    bench = Bench()
    bench.after(1000).send(
        bench.fake.step({"a": 1}, joined={"a": 10}, waited_ns=40 * MS, took_ns=15 * MS)
    )

    _, (wait,) = bench.engine.take(bench.fake.now_ns)

    assert abs(wait.queue_ns - 40 * MS) < 1000
    assert abs(wait.prefill_ns - 15 * MS) < 1000


def test_a_time_of_another_clock_is_not_believed() -> None:
    bench = Bench()
    message = bench.fake.step({"a": 1}, joined={"a": 10})
    bench.engine.inbound(50_000 * MS, FakeEngine(0).add("a", prompt=10)[:96])
    bench.engine.outbound(50_010 * MS, OUT, message, len(message))

    (step,) = bench.engine.take(60_000 * MS)[0]

    assert (step.start_ns, step.end_ns) == (50_000 * MS, 50_010 * MS)


def test_a_step_waits_until_no_more_can_come() -> None:
    bench = Bench()
    bench.send(bench.fake.step({"a": 1}, joined={"a": 10}))

    assert bench.engine.take(bench.fake.now_ns + SETTLE_NS // 2)[0] == []
    assert len(bench.engine.take(bench.fake.now_ns + 2 * SETTLE_NS)[0]) == 1


def test_what_does_not_decode_is_counted() -> None:
    bench = Bench()
    bench.send(b"\x00\x14" + bytes(20))
    bench.engine.inbound(START_NS, b"\x01\x01\x00\x00\x05\x93abc")
    bench.engine.inbound(START_NS, b"\x00\x01\x00")

    assert bench.steps() == []
    assert bench.counts == {"frames not decoded": 1, "requests not decoded": 1}


def test_memory_is_bounded() -> None:
    bench = Bench()
    for number in range(steps.MAX_REQUESTS + 10):
        bench.engine.inbound(START_NS, FakeEngine(0).add(f"r{number}", prompt=1))
    for descriptor in range(MAX_STREAMS + 3):
        bench.send(bench.fake.step({}, active=0), descriptor)

    assert bench.counts["requests forgotten"] == 10
    assert bench.counts["connections not followed"] == 3


def test_the_recorded_engine_s_steps_agree_with_its_own_counters() -> None:
    counts: Counter[str] = Counter()
    engine = Engine(V0_32, counts)
    for at_ns, descriptor, length, direction, data in recorded():
        if direction == programs.OUTBOUND:
            engine.outbound(at_ns, descriptor, data, length)
        else:
            engine.inbound(at_ns, data)

    found, waits = engine.take(1 << 62)

    assert counts["tokens"] == 592
    assert sum(step.prefill_tokens for step in found) == 1222 - 592
    assert sum(step.decode_sequences + step.joined for step in found) == 592
    assert len(found) == 225
    assert sum(step.joined for step in found) == sum(step.left for step in found) == 11
    assert len(waits) == 11
    assert all(step.context_tokens >= 0 for step in found)
    assert all(step.start_ns < step.end_ns for step in found)
    record = batch(found, instance="a:1", source="kernel", model=None, offset_ns=0)
    assert "cmpl" not in repr(record)


def test_a_batch_holds_times_of_the_epoch() -> None:
    step = Step(
        start_ns=1000 * MS, end_ns=1012 * MS, decode_sequences=3, joined=1, left=0,
        prefill_tokens=-1, context_tokens=70,
    )  # fmt: skip

    record = batch([step], instance="a:1", source="kernel", model=None, offset_ns=10**18)

    assert record is not None
    assert record.start_ns == (10**18 + 1000 * MS,)
    assert record.observed_at_ns == 10**18 + 1012 * MS
    assert record.duration_us == (12_000,)
    assert (record.decode_sequences, record.joined, record.left) == ((3,), (1,), (0,))
    assert (record.prefill_tokens, record.context_tokens) == ((-1,), (70,))
    assert batch([], instance="a:1", source="kernel", model=None, offset_ns=0) is None
