"""The engine model: what it promises for any load, and what each fault does to it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latencyprism.simulator.config import Coefficients, EngineConfig
from latencyprism.simulator.engine import Completed, Engine, Request, TooLongError, rng
from latencyprism.simulator.faults import Fault, FaultKind

MS = 1_000_000
EXACT = Coefficients(
    base_ms=5.0,
    per_sequence_ms=0.5,
    per_context_token_ms=0.001,
    per_prefill_token_ms=0.1,
    noise_sigma=0.0,
    spike_share=0.0,
)
CONFIG = EngineConfig(
    coefficients=EXACT,
    max_num_seqs=4,
    max_batched_tokens=64,
    max_model_len=200,
    kv_tokens=400,
    block_tokens=16,
)


def request(
    number: int = 0, *, prompt: int = 10, output: int = 5, blocks: tuple[int, ...] = ()
) -> Request:
    return Request(
        request_id=f"r{number}",
        arrival_ns=0,
        prompt_tokens=prompt,
        output_tokens=output,
        blocks=blocks,
    )


def engine(config: EngineConfig = CONFIG, *faults: Fault) -> Engine:
    return Engine(config=config, rng=rng(1), faults=list(faults))


def fault(kind: FaultKind, value: float = 0, *, from_ms: int = 0, until_ms: int = 10**6) -> Fault:
    return Fault(kind=kind, value=value, from_ns=from_ms * MS, until_ns=until_ms * MS, every_ms=100)


def drain(served_by: Engine, now_ns: int = 0) -> list[Completed]:
    """Step until nothing is left."""
    done = []
    while (step := served_by.begin(now_ns)) is not None:
        now_ns = step.end_ns
        done.append(served_by.complete())
    return done


def durations_ms(done: list[Completed]) -> list[float]:
    return [(c.step.end_ns - c.step.start_ns) / MS for c in done]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 50)), min_size=1, max_size=25),
    shared=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_request_gets_its_tokens_in_order_within_every_limit(
    lengths: list[tuple[int, int]], shared: bool
) -> None:
    subject = engine()
    for number, (prompt, output) in enumerate(lengths):
        blocks = tuple(range(prompt // 16)) if shared else ()
        subject.submit(request(number, prompt=prompt, output=output, blocks=blocks))
    tokens: dict[str, list[int]] = {}
    now_ns = 0
    while (step := subject.begin(now_ns)) is not None:
        assert step.end_ns > step.start_ns == now_ns
        assert step.running <= CONFIG.max_num_seqs
        assert step.decode_sequences + step.prefill_tokens <= CONFIG.max_batched_tokens
        assert step.decode_sequences + step.prefill_tokens > 0
        now_ns = step.end_ns
        for token in subject.complete().tokens:
            tokens.setdefault(token.request_id, []).append(token.index)
        assert 0 <= subject.gauges(now_ns).kv_usage <= 1
    assert tokens == {f"r{n}": list(range(output)) for n, (_, output) in enumerate(lengths)}
    assert subject.idle
    assert subject.gauges(now_ns).kv_usage == 0
    assert subject.totals.finished == len(lengths)
    assert subject.totals.generated_tokens == sum(output for _, output in lengths)
    assert subject.totals.prompt_tokens == sum(prompt for prompt, _ in lengths)


def test_duration_of_a_step_is_the_formula() -> None:
    subject = engine()
    subject.submit(request(prompt=30, output=3))
    prefill, first, second = drain(subject)
    assert durations_ms([prefill]) == [5 + 0.1 * 30]
    assert durations_ms([first]) == [pytest.approx(5 + 0.5 + 0.001 * 31)]
    assert durations_ms([second]) == [pytest.approx(5 + 0.5 + 0.001 * 32)]
    assert (prefill.step.prefill_tokens, prefill.step.decode_sequences) == (30, 0)
    assert (second.step.context_tokens, second.step.decode_sequences) == (32, 1)


def test_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    subject = engine()
    subject.submit(request(0, prompt=10, output=10))
    drained = subject.begin(0)
    assert drained is not None
    subject.complete()
    subject.submit(request(1, prompt=150, output=2))
    done = drain(subject, drained.end_ns)
    assert [c.step.prefill_tokens for c in done[:4]] == [63, 63, 24, 0]
    assert all(c.tokens[0].request_id == "r0" for c in done[:4])
    assert [t.request_id for t in done[2].tokens] == ["r0", "r1"]


def test_requests_beyond_the_batch_wait_their_turn() -> None:
    subject = engine()
    for number in range(6):
        subject.submit(request(number, prompt=8, output=3))
    done = drain(subject)
    assert (done[0].step.running, done[0].step.waiting) == (4, 2)
    served = {s.request.request_id: s for c in done for s in c.served}
    assert served["r3"].scheduled_ns == 0
    assert served["r4"].scheduled_ns == served["r3"].finished_ns


def test_full_cache_preempts_the_newest_and_everything_is_still_served() -> None:
    subject = engine(replace(CONFIG, kv_tokens=200))
    for number in range(3):
        subject.submit(request(number, prompt=60, output=40))
    subject.submit(request(3, prompt=25, output=1))
    done = drain(subject)
    served = {s.request.request_id: s for c in done for s in c.served}
    assert [served[f"r{n}"].preemptions > 0 for n in range(3)] == [False, False, True]
    # Who was preempted comes back before one that never ran, short as it is.
    assert next(iter(served)) == "r0"


def test_shared_prefix_is_computed_once_until_the_cache_is_reset() -> None:
    subject = engine()
    blocks = (101, 102, 103)

    def prefilled() -> int:
        subject.submit(request(prompt=50, output=1, blocks=blocks))
        return sum(c.step.prefill_tokens for c in drain(subject))

    assert [prefilled(), prefilled()] == [50, 50 - 48]
    assert subject.totals.cached_tokens == 48
    subject.reset_prefix_cache()
    assert prefilled() == 50


def test_prompt_that_is_cached_whole_still_computes_its_last_block() -> None:
    subject = engine()
    for _ in range(2):
        subject.submit(request(prompt=32, output=1, blocks=(1, 2)))
        done = drain(subject)
    assert done[0].step.prefill_tokens == 16


@pytest.mark.parametrize(("prompt", "output"), [(0, 5), (5, 0), (150, 51)])
def test_request_that_never_fits_is_refused_in_words(prompt: int, output: int) -> None:
    with pytest.raises(TooLongError, match=f"{prompt} prompt and {output} output tokens"):
        engine().submit(request(prompt=prompt, output=output))


def test_model_longer_than_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit kv_tokens"):
        EngineConfig(max_model_len=100, kv_tokens=99)


def test_aborted_request_frees_its_place_even_in_the_middle_of_a_step() -> None:
    subject = engine()
    subject.submit(request(0))
    subject.submit(request(1))
    assert subject.begin(0) is not None
    assert subject.abort("r0")
    assert [token.request_id for token in subject.complete().tokens] == ["r1"]
    assert not subject.abort("r0")
    drain(subject)
    assert subject.gauges(0).kv_usage == 0
    assert (subject.totals.finished, subject.totals.aborted) == (1, 1)


def served_with(*faults: Fault, prompt: int = 20, output: int = 10) -> list[float]:
    subject = engine(CONFIG, *faults)
    subject.submit(request(prompt=prompt, output=output))
    return durations_ms(drain(subject))


def test_slowdown_multiplies_every_step() -> None:
    slowed = served_with(fault("slowdown", 3))
    assert slowed == pytest.approx([3 * d for d in served_with()], abs=1e-5)


def test_added_time_is_the_same_on_every_step() -> None:
    slowed = served_with(fault("added", 30.8))
    assert slowed == pytest.approx([30.8 + d for d in served_with()], abs=1e-5)


def test_prefill_slowdown_leaves_decodes_alone() -> None:
    slowed, normal = served_with(fault("prefill_slowdown", 4)), served_with()
    assert slowed[0] == pytest.approx(5 + 4 * (normal[0] - 5))
    assert slowed[1:] == normal[1:]


def test_pause_stops_the_engine_once_a_period() -> None:
    paused = served_with(fault("pause", 40), prompt=20, output=60)
    normal = served_with(prompt=20, output=60)
    stretched = [p - n for p, n in zip(paused, normal, strict=True)]
    assert [round(s) for s in stretched if s > 0.001] == [40] * 6
    assert sum(paused) == pytest.approx(sum(normal) + 240, abs=0.01)


@given(start=st.integers(0, 1000 * MS), work=st.integers(1, 400 * MS), pause=st.integers(1, 99))
def test_work_through_pauses_is_never_lost(start: int, work: int, pause: int) -> None:
    stalls = fault("pause", pause, from_ms=200, until_ms=700)
    end = stalls.through_pauses(start, work)
    stood = sum(
        max(0, min(end, (begin + pause) * MS) - max(start, begin * MS))
        for begin in range(200, 700, 100)
    )
    assert end - start == work + stood


def test_fault_is_over_when_its_window_is() -> None:
    assert served_with(fault("slowdown", 3, until_ms=20))[2:] == served_with()[2:]
    assert served_with(fault("slowdown", 3, from_ms=10**5)) == served_with()


def test_hung_engine_begins_no_step_and_says_it_is_idle() -> None:
    subject = engine(CONFIG, fault("hang", until_ms=500))
    subject.submit(request())
    assert subject.begin(0) is None
    assert not subject.idle
    gauges = subject.gauges(100 * MS)
    assert (gauges.running, gauges.waiting, gauges.kv_usage) == (0, 0, 0)
    assert subject.hung_until_ns(0) == 500 * MS
    assert subject.begin(500 * MS) is not None
    assert subject.gauges(500 * MS).running == 1


def test_network_delay_holds_back_output_and_touches_no_step() -> None:
    subject = engine(CONFIG, fault("network_delay", 60))
    assert subject.output_delay_ns(0) == 60 * MS
    assert served_with(fault("network_delay", 60)) == served_with()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "slowdown", "value": 0}, "would stop time"),
        ({"kind": "slowdown", "value": float("nan")}, "nan is not in"),
        ({"kind": "added", "value": -1}, "-1 is not in"),
        ({"kind": "pause", "value": 100}, "do not fit into a period"),
        ({"kind": "nonsense"}, "is none of slowdown"),
        ({"kind": "hang", "until_ns": 0}, "ends before it begins"),
    ],
)
def test_fault_that_means_nothing_is_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fault(**{"from_ns": 0, "until_ns": MS, "every_ms": 100, **values})  # type: ignore[arg-type]


def test_same_seed_gives_the_same_noise_and_another_seed_another() -> None:
    noisy = replace(CONFIG, coefficients=replace(EXACT, noise_sigma=0.1, spike_share=0.1))

    def run(seed: int) -> list[float]:
        subject = Engine(config=noisy, rng=rng(seed))
        subject.submit(request(output=150))
        return durations_ms(drain(subject))

    assert run(7) == run(7)
    assert run(7) != run(8)


def test_noise_is_as_wide_as_configured_and_keeps_the_middle() -> None:
    noisy = replace(
        CONFIG,
        coefficients=replace(EXACT, noise_sigma=0.1, noise_memory=0.6),
        max_model_len=5000,
        kv_tokens=5000,
    )
    subject = Engine(config=noisy, rng=rng(3))
    subject.submit(request(output=4000))
    done = drain(subject)
    ratios = sorted(d / c.step.ideal_ms for d, c in zip(durations_ms(done), done, strict=True))
    assert ratios[2000] == pytest.approx(1.0, abs=0.02)
    assert ratios[3200] / ratios[800] == pytest.approx(1.0 / 0.845, abs=0.03)  # ±0.84 sigma
