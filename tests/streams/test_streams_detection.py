"""The judge on simulated engines of known faults and loads, and what it keeps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from latencyprism.schemas.records import (
    BatchProfile,
    EngineSample,
    HostSample,
    ProcessSample,
    Verdict,
)
from latencyprism.simulator.run import simulate
from latencyprism.simulator.telemetry import packs, records
from latencyprism.simulator.workload import Phase
from latencyprism.streams.config import StreamsConfig
from latencyprism.streams.detection.config import DetectionConfig
from latencyprism.streams.detection.evidence import SIGNALS
from latencyprism.streams.detection.judge import MixtureJudge
from latencyprism.streams.detection.workload import FEATURES, StepMemory, stage_rows
from latencyprism.streams.judge import Judgement
from latencyprism.streams.observation import Observation, OpenRequests
from latencyprism.streams.shard import InstanceShard

STEADY = Phase(
    duration_s=1.0, rate_rps=3.0, prompt_scale=0.08, output_scale=0.16, max_prompt_tokens=600
)
WARM_S = 40.0
LEARNED_WINDOWS = 120
Change = Callable[[Observation, float], Observation]


class KeepingJudge:
    """Keeps what the pipeline shows it."""

    version = "keeping"

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def judge(self, observation: Observation) -> Judgement:
        self.seen.append(observation)
        return Judgement(verdict="normal", reason="", version=self.version)

    def refit(self) -> None:
        return None

    def state(self) -> bytes:
        return b""

    def restore(self, state: bytes) -> None:
        raise AssertionError(f"nobody restores it from {state!r}")


@cache
def simulated(kind: str, value: float, seed: int = 0) -> tuple[Observation, ...]:
    """40 s of steady load, then 12 s of the fault, or of the burst, then 10 s of steady load."""
    burst = replace(STEADY, duration_s=12.0, rate_rps=6.5, prompt_scale=0.16)
    phases = [
        replace(STEADY, duration_s=WARM_S),
        burst if kind == "burst" else replace(STEADY, duration_s=12.0),
        replace(STEADY, duration_s=10.0),
    ]
    faults: list[Any] = [] if kind in ("burst", "none") else [(kind, WARM_S, WARM_S + 12, value)]
    run = simulate(instance="a:1", phases=phases, faults=faults, seed=seed)
    keeping = KeepingJudge()
    shard: InstanceShard[None] = InstanceShard(
        StreamsConfig(clock="event"), judge=lambda _: keeping
    )
    for topic, pack in packs(run, records(run)):
        shard.add(topic, "a:1", pack, pack.watermark_ns)
        shard.drain()
    return tuple(keeping.seen)


@dataclass(frozen=True, kw_only=True)
class Told:
    """A window's place in the run, s after its start, and what the judge said."""

    at_s: float
    said: Judgement


def judged(
    observations: tuple[Observation, ...],
    judge: MixtureJudge | None = None,
    change: Change | None = None,
    *,
    first: int = 0,
) -> list[Told]:
    """What the judge says of the windows from the ``first`` on; refits are done at once."""
    judge = judge or MixtureJudge()
    told = []
    for observation in observations[first:]:
        at_s = (observation.start_ns - observations[0].start_ns) / 1e9
        seen = change(observation, at_s) if change else observation
        told.append(Told(at_s=at_s, said=judge.judge(seen)))
        work = judge.refit()
        if work is not None:
            work()()
    return told


@cache
def learned(seed: int, host: bool = False) -> bytes:
    """State after 30 s of the steady load that every run begins with."""
    judge = MixtureJudge()
    steady = simulated("none", 0.0, seed)[:LEARNED_WINDOWS]
    judged(steady, judge, with_host() if host else None)
    return judge.state()


def judged_warm(
    kind: str, value: float, seed: int = 0, change: Change | None = None, *, host: bool = False
) -> list[Told]:
    """The rest of a run, by a judge that learned its beginning."""
    judge = MixtureJudge()
    judge.restore(learned(seed, host))
    return judged(simulated(kind, value, seed), judge, change, first=LEARNED_WINDOWS)


def verdicts(told: list[Told], from_s: float, until_s: float) -> set[Verdict]:
    return {one.said.verdict for one in told if from_s <= one.at_s < until_s}


def first_fault(told: list[Told]) -> Told:
    return next(one for one in told if one.said.verdict == "fault")


@pytest.mark.parametrize("seed", [0, 1])
def test_steady_load_is_normal_once_it_is_known(seed: int) -> None:
    told = judged(simulated("none", 0.0, seed))
    assert "fault" not in verdicts(told, 0, 100)
    later = [one.said.verdict for one in told if one.at_s > 20]
    assert later.count("normal") > 0.85 * len(later)


def test_before_the_first_fit_there_is_no_verdict_and_the_reason_says_what_is_missing() -> None:
    judge = MixtureJudge()
    first = judged(simulated("none", 0.0)[:6], judge)
    assert {one.said.verdict for one in first} == {"unknown"}
    assert "more steps until the first verdict" in first[-1].said.reason
    assert judge.version == "mixture-0"
    assert "normal" in verdicts(judged(simulated("none", 0.0)), 8, 15)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("value", [1.8, 3.0])
def test_a_slow_engine_is_a_fault_within_two_seconds(value: float, seed: int) -> None:
    told = judged_warm("slowdown", value, seed)
    found = first_fault(told)
    assert WARM_S < found.at_s < WARM_S + 2
    assert found.said.stage == "decode"
    assert found.said.observed_ms is not None
    assert found.said.expected_ms is not None
    assert found.said.observed_ms > 1.3 * found.said.expected_ms
    assert found.said.score is not None
    assert found.said.threshold is not None
    assert found.said.score >= found.said.threshold
    assert "fault" not in verdicts(told, WARM_S + 17, 100)


@pytest.mark.parametrize("seed", [0, 1, 6])
def test_a_burst_of_more_and_longer_prompts_is_workload(seed: int) -> None:
    told = judged_warm("burst", 0.0, seed)
    during = verdicts(told, WARM_S, WARM_S + 12)
    assert "workload" in during
    assert "fault" not in verdicts(told, 0, 100)
    reason = next(one.said.reason for one in told if one.said.verdict == "workload")
    assert "explains" in reason or "clients ask" in reason


def test_a_hung_engine_is_a_stall_in_about_two_seconds() -> None:
    told = judged_warm("hang", 0.0)
    stalled = next(one for one in told if one.said.reason.startswith("stalled"))
    assert stalled.at_s < WARM_S + 3
    assert stalled.said.stage == "flow"
    assert stalled.said.verdict == "fault"


def test_a_delay_on_the_way_is_no_slow_step() -> None:
    told = judged_warm("network_delay", 120.0)
    assert first_fault(told).said.stage in ("ingress", "prefill")


def test_scores_and_features_tell_what_was_judged() -> None:
    told = judged_warm("none", 0.0)
    said = next(
        one.said
        for one in reversed(told)
        if {score.stage for score in one.said.scores} >= {"decode", "flow"}
    )
    decode = next(score for score in said.scores if score.stage == "decode")
    assert decode.observations > 0
    assert decode.low_ms is not None
    assert decode.expected_ms is not None
    assert decode.high_ms is not None
    assert decode.low_ms < decode.expected_ms < decode.high_ms
    assert decode.surprise is not None
    assert decode.surprise >= 0
    assert {"batch", "decoding", "waiting"} <= set(said.features)


def others(observation: Observation, at_s: float) -> Observation:
    """Slow steps, and an engine that tells of prompts nobody observed."""
    if not WARM_S <= at_s < WARM_S + 12:
        return observation
    steps = replace(observation.steps, duration_ms=observation.steps.duration_ms * 3)
    engine = tuple(
        replace(sample, prompt_tokens=(sample.prompt_tokens or 0) + 3_000, running=12.0)
        for sample in observation.engine
    )
    last: EngineSample | None = engine[-1] if engine else observation.last_engine
    return replace(observation, steps=steps, engine=engine, last_engine=last)


def test_slow_steps_that_unobserved_clients_explain_are_workload() -> None:
    told = judged_warm("none", 0.0, change=others)
    during = verdicts(told, WARM_S, WARM_S + 12)
    assert "fault" not in during
    reasons = [one.said.reason for one in told if one.said.verdict == "workload"]
    assert any("not observed" in reason for reason in reasons)


def with_host(state: str = "R", throttled_ns: int = 0) -> Change:
    """A host that shows the cause of the slowness for its time."""

    def change(observation: Observation, at_s: float) -> Observation:
        on = WARM_S <= at_s < WARM_S + 12
        process = ProcessSample(
            pid=1,
            role="worker",
            state=state if on else "R",
            cpu_ns=200_000_000,
            runqueue_ns=1_000_000,
        )
        sample = HostSample(
            instance="a:1",
            source="host",
            observed_at_ns=observation.end_ns - 1,
            host="h",
            interval_ns=250_000_000,
            processes=(process,),
            throttled_ns=throttled_ns if on else 0,
        )
        return replace(observation, host=(sample,))

    return change


@pytest.mark.parametrize(
    ("change", "signal"),
    [
        (with_host(throttled_ns=120_000_000), "host.throttled_ratio"),
        (with_host(state="T"), "engine.stopped_share"),
    ],
)
def test_a_cause_seen_at_work_makes_the_fault_certain_sooner(change: Change, signal: str) -> None:
    alone = first_fault(judged_warm("slowdown", 1.8))
    together = first_fault(judged_warm("slowdown", 1.8, change=change, host=True))
    assert together.at_s < alone.at_s
    assert together.said.evidence[0].signal == signal


def test_requests_without_token_times_are_not_judged_and_silence_is() -> None:
    judge = MixtureJudge()
    judge.restore(learned(0))
    last = simulated("none", 0.0)[LEARNED_WINDOWS]
    judge.judge(replace(last, chunks=3))

    def said(windows: int, **values: Any) -> list[Judgement]:
        return [
            judge.judge(
                Observation(
                    instance="a:1",
                    model=None,
                    start_ns=(start := last.end_ns + number * 250_000_000),
                    end_ns=start + 250_000_000,
                    closed_ns=start + 250_000_000,
                    **values,
                )
            )
            for number in range(windows)
        ]

    assert {one.verdict for one in said(80)} == {"normal"}, "nobody asks for anything"
    ended = said(80, requests_started=1, requests_finished=1)
    assert {one.verdict for one in ended[:30]} == {"normal"}
    assert ended[-1].verdict == "unknown"
    assert "none of their tokens" in ended[-1].reason


def test_evidence_tells_the_value_that_surprised_also_when_it_is_over() -> None:
    usual, stopped = with_host(), with_host(state="T")

    def pulse(observation: Observation, at_s: float) -> Observation:
        only = WARM_S + 1 <= at_s < WARM_S + 1.25
        return stopped(observation, at_s) if only else usual(observation, at_s)

    told = judged_warm("none", 0.0, change=pulse, host=True)
    seen = [e for one in told for e in one.said.evidence if e.signal == "engine.stopped_share"]
    assert len(seen) > 1, "a window and those in which it may still be at work"
    assert {evidence.observed for evidence in seen} == {1.0}


def test_a_cause_without_any_effect_is_no_fault() -> None:
    told = judged_warm("none", 0.0, change=with_host(throttled_ns=120_000_000), host=True)
    assert "fault" not in verdicts(told, 0, 100)


def test_a_long_fault_teaches_nothing() -> None:
    judge = MixtureJudge()
    judge.restore(learned(0))
    slow = [o for o in simulated("slowdown", 3.0) if o.steps.duration_ms.size][-85:-45]
    told = judged(tuple(slow) * 12, judge)
    assert [one.said.verdict for one in told[-100:]].count("fault") >= 95


def test_state_moves_to_another_judge_which_goes_on_the_same() -> None:
    first = MixtureJudge()
    judged(simulated("none", 0.0)[:LEARNED_WINDOWS], first)
    state = first.state()
    assert len(state) < 2_000_000
    second = MixtureJudge()
    second.restore(state)
    assert second.version == first.version
    assert second.state() == state
    told = judged(simulated("slowdown", 2.0), second, first=LEARNED_WINDOWS)
    assert "unknown" not in {one.said.verdict for one in told[:10]}
    assert first_fault(told).said.stage == "decode"


def test_state_stays_within_its_bound_however_long_it_learns() -> None:
    judge = MixtureJudge(DetectionConfig(history_windows=400, reservoir_rows=400, recent_rows=100))
    sizes = []
    for _ in range(8):
        for observation in simulated("none", 0.0):
            judge.judge(observation)
        sizes.append(len(judge.state()))
    assert max(sizes[4:]) < 1.05 * sizes[4]
    full = MixtureJudge(DetectionConfig())
    config = full.config
    rows = sum(len(names) + 1 for names in FEATURES.values())
    most = 4 * rows * (config.reservoir_rows + config.recent_rows)
    most += 4 * config.history_windows * (len(SIGNALS) + 2 * len(FEATURES))
    assert most < 2_000_000


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04", b"nothing of ours"])
def test_a_damaged_state_is_refused(damage: bytes) -> None:
    with pytest.raises(ValueError, match="can't be read"):
        MixtureJudge().restore(damage)


def test_a_torn_or_foreign_state_is_refused_and_leaves_the_judge_as_it_was() -> None:
    judge = MixtureJudge()
    judge.restore(learned(0))
    state = judge.state()
    for torn in (state[: len(state) // 2], state[:-200]):
        with pytest.raises(ValueError, match="can't be read"):
            judge.restore(torn)
    assert judge.state() == state


def test_a_refit_is_due_once_and_is_installed_when_it_is_done() -> None:
    judge = MixtureJudge()
    works = []
    for observation in simulated("none", 0.0)[:80]:
        judge.judge(observation)
        work = judge.refit()
        if work is not None:
            works.append(work)
    assert len(works) == 1
    assert judge.version == "mixture-0"
    install = works[0]()
    assert judge.version == "mixture-0"
    install()
    assert judge.version == "mixture-1"


def test_an_idle_or_blind_window_is_judged_too() -> None:
    judge = MixtureJudge()
    judge.restore(learned(0))
    start = simulated("none", 0.0)[100].start_ns
    empty = Observation(
        instance="a:1", model=None, start_ns=start, end_ns=start + 1, closed_ns=start + 1
    )
    said = judge.judge(empty)
    assert (said.verdict, said.scores) == ("normal", ())


def windows_with(stage: str) -> Iterator[Observation]:
    for observation in simulated("none", 0.0):
        if stage in stage_rows(observation, StepMemory()):
            yield observation


@pytest.mark.parametrize("stage", FEATURES)
def test_every_stage_makes_rows_of_its_features_and_finite_ones(stage: str) -> None:
    rows = stage_rows(next(windows_with(stage)), StepMemory())[stage]
    assert rows.features.shape == (len(rows), len(FEATURES[stage]))
    assert np.isfinite(rows.features).all()
    assert np.isfinite(rows.log_latency).all()


def test_unknown_tokens_are_taken_as_none_and_unknown_times_left_out() -> None:
    observation = next(windows_with("prefill"))
    first = observation.first_tokens
    blind = replace(
        first,
        prompt_tokens=np.full_like(first.prompt_tokens, np.nan),
        headers_ms=np.full_like(first.headers_ms, np.nan),
    )
    rows = stage_rows(replace(observation, first_tokens=blind), StepMemory())
    assert "ingress" not in rows
    assert (rows["prefill"].features[:, 0] == 0).all()


def test_silence_is_counted_from_the_last_step_or_the_arrival_at_an_idle_server() -> None:
    memory = StepMemory()
    base = simulated("none", 0.0)[0]
    plain = Observation(
        instance="a:1",
        model=None,
        start_ns=base.start_ns,
        end_ns=base.start_ns + 250_000_000,
        closed_ns=base.start_ns + 250_000_000,
    )
    assert "flow" not in stage_rows(plain, memory)
    waiting = OpenRequests(
        waiting=1, waiting_ms=np.array([40.0]), waiting_tokens=np.array([np.nan])
    )
    then = replace(plain, end_ns=plain.end_ns + 250_000_000, open_requests=waiting)
    rows = stage_rows(then, memory)["flow"]
    assert np.exp(rows.log_latency) == pytest.approx([40.0])


def test_profiles_of_the_pipeline_carry_the_judge_s_words() -> None:
    run = simulate(instance="a:1", phases=[replace(STEADY, duration_s=20.0)], seed=1)
    shard: InstanceShard[None] = InstanceShard(StreamsConfig(clock="event"))
    profiles: list[BatchProfile] = []
    for topic, pack in packs(run, records(run)):
        shard.add(topic, "a:1", pack, pack.watermark_ns)
        profiles += shard.drain().profiles
    assert profiles[0].verdict == "unknown"
    assert profiles[-1].model_version.startswith("mixture-")
    assert {score.stage for one in profiles for score in one.scores} <= set(FEATURES)
