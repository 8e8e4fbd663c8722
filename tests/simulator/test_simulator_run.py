"""Runs in virtual time: reproducible, true to the engine, and telemetry as collectors make it."""

from itertools import pairwise

import numpy as np
import pytest

from latencyprism.schemas.codec import Codec
from latencyprism.schemas.records import EngineSample, RequestTiming, StepBatch
from latencyprism.schemas.topics import TELEMETRY_ENGINE, TELEMETRY_REQUESTS, TELEMETRY_STEPS
from latencyprism.simulator.config import A100_LIKE, EngineConfig
from latencyprism.simulator.run import Arrived, Run, Scraped, Stepped, simulate
from latencyprism.simulator.telemetry import packs, records
from latencyprism.simulator.workload import Phase

S = 10**9
START_NS = 1_800_000_000 * S


def phase(duration_s: float = 20, **more: object) -> Phase:
    return Phase(
        **{"duration_s": duration_s, "rate_rps": 3, "prompt_scale": 0.1, "output_scale": 0.1} | more  # type: ignore[arg-type]  # a mapping of mixed values
    )


def run(*phases: Phase, seed: int = 1, **more: object) -> Run:
    return simulate(instance="a:1", phases=phases or (phase(),), seed=seed, **more)  # type: ignore[arg-type]


def steps(of: Run) -> list[Stepped]:
    return [moment for moment in of.moments() if isinstance(moment, Stepped)]


def step_ms(of: Run, from_s: float, until_s: float) -> float:
    """Median ratio of real to ideal duration of the steps in a stretch."""
    ratios = [
        (s.completed.step.end_ns - s.completed.step.start_ns) / 1e6 / s.completed.step.ideal_ms
        for s in steps(of)
        if from_s <= (s.completed.step.start_ns - START_NS) / S < until_s
    ]
    return float(np.median(ratios))


def queue_ms(of: Run) -> dict[str, float]:
    return {
        served.request.request_id: (served.scheduled_ns - served.request.arrival_ns) / 1e6
        for moment in steps(of)
        for served in moment.completed.served
    }


def test_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    assert list(run().moments()) == list(run().moments())
    assert list(run().moments()) != list(run(seed=2).moments())


def test_moments_come_in_order_and_everything_that_arrives_is_served() -> None:
    moments = list(run().moments())
    assert all(a.at_ns <= b.at_ns for a, b in pairwise(moments))
    arrived = {m.request.request_id for m in moments if isinstance(m, Arrived)}
    assert len(arrived) > 30
    assert arrived == set(queue_ms(run()))


def test_fault_changes_no_request_of_an_open_phase() -> None:
    def arrivals(of: Run) -> list[Arrived]:
        return [m for m in of.moments() if isinstance(m, Arrived)]

    assert arrivals(run()) == arrivals(run(faults=[("slowdown", 5, 15, 2.0)]))


def test_slowdown_is_seen_in_its_window_only() -> None:
    slowed = run(faults=[("slowdown", 5, 15, 2.0)])
    assert step_ms(slowed, 0, 5) == pytest.approx(1.0, abs=0.1)
    assert step_ms(slowed, 5, 15) == pytest.approx(2.0, abs=0.2)
    assert step_ms(slowed, 15, 20) == pytest.approx(1.0, abs=0.1)


def test_burst_raises_the_time_in_the_queue() -> None:
    calm = queue_ms(run(phase()))
    burst = queue_ms(run(phase(10), phase(10, mode="burst", requests=60)))
    assert max(calm.values()) < 400
    assert max(burst.values()) > 1000


def test_closed_phase_keeps_its_number_of_callers_and_ends() -> None:
    open_requests, most = 0, 0
    for moment in run(phase(10, mode="closed", concurrency=3, think_s=0.05)).moments():
        if isinstance(moment, Arrived):
            open_requests += 1
            assert moment.at_ns < START_NS + 10 * S
        if isinstance(moment, Stepped):
            open_requests -= len(moment.completed.served)
        most = max(most, open_requests)
    assert (most, open_requests) == (3, 0)


def test_hang_shows_nothing_but_idle_gauges_and_then_goes_on() -> None:
    hung = run(faults=[("hang", 5, 9, 0.0)])
    ends_s = [(s.at_ns - START_NS) / S for s in steps(hung)]
    assert not [end for end in ends_s if 5.5 < end < 9]
    assert [end for end in ends_s if end > 9]
    scraped = [m for m in hung.moments() if isinstance(m, Scraped)]
    assert [m.gauges.running for m in scraped[5:8]] == [0, 0, 0]
    assert scraped[6].totals.generated_tokens == scraped[7].totals.generated_tokens


def test_network_delay_moves_the_output_and_not_the_steps() -> None:
    delayed, normal = run(faults=[("network_delay", 5, 10, 80.0)]), run()
    assert [s.completed.step.end_ns for s in steps(delayed)] == [
        s.completed.step.end_ns for s in steps(normal)
    ]
    held = {
        (s.sent_ns - s.at_ns) / 1e6 for s in steps(delayed) if 5 <= (s.at_ns - START_NS) / S < 10
    }
    assert held == {80.0}
    assert all(a.sent_ns <= b.sent_ns for a, b in pairwise(steps(delayed)))


def test_a_big_model_decodes_as_slowly_as_its_measurements() -> None:
    big = run(phase(60, rate_rps=1), config=EngineConfig(coefficients=A100_LIKE))
    decodes = [
        (s.completed.step.end_ns - s.completed.step.start_ns) / 1e6
        for s in steps(big)
        if not s.completed.step.prefill_tokens
    ]
    assert 43 < float(np.median(decodes)) < 47


def test_records_are_in_order_and_fit_their_schemas() -> None:
    codec = Codec()
    made = list(records(run(faults=[("network_delay", 5, 10, 80.0)]), truth=True))
    assert all(a[1].observed_at_ns <= b[1].observed_at_ns for a, b in pairwise(made))
    counts = {topic.name: 0 for topic in (TELEMETRY_REQUESTS, TELEMETRY_ENGINE, TELEMETRY_STEPS)}
    of = run(faults=[("network_delay", 5, 10, 80.0)])
    marks: dict[str, int] = {}
    for topic, pack in packs(of, iter(made)):
        assert codec.decode(topic, codec.encode(topic, pack)) == pack
        assert all(s.observed_at_ns >= marks.get(topic.name, 0) for s in pack.samples)
        assert pack.watermark_ns > marks.get(topic.name, START_NS)
        marks[topic.name] = pack.watermark_ns
        counts[topic.name] += len(pack.samples)
    assert sum(counts.values()) == len(made)
    assert counts["telemetry.engine"] == 20


def test_parts_of_a_request_add_up_to_its_truth() -> None:
    of = run()
    sent = {
        (token.request_id, token.index): moment.sent_ns
        for moment in steps(of)
        for token in moment.completed.tokens
    }
    parts: dict[str, list[RequestTiming]] = {}
    for _, record in records(of):
        if isinstance(record, RequestTiming):
            parts.setdefault(record.request_id, []).append(record)
    for request_id, reported in parts.items():
        assert [part.part for part in reported] == list(range(len(reported)))
        assert [part.state for part in reported] == ["open"] * (len(reported) - 1) + ["complete"]
        seen = 0
        for part in reported:
            assert part.chunks_before == seen
            at_ns = part.chunk_base_ns
            for delta_us in (0, *part.chunk_deltas_us) if at_ns is not None else ():
                assert at_ns is not None
                at_ns += delta_us * 1000
                assert abs(at_ns - sent[request_id, seen]) < 1000 * (seen + 2)
                seen += 1
            assert part.observed_at_ns - part.arrival_ns >= 0
        last = reported[-1]
        assert last.completion_tokens == seen
        assert last.first_token_ns == sent[request_id, 0]
        assert last.end_ns == sent[request_id, seen - 1]


def test_open_stream_is_reported_every_100_ms() -> None:
    one = run(phase(5, mode="burst", requests=1, output_scale=10.0))
    ends = [r.observed_at_ns for t, r in records(one) if t is TELEMETRY_REQUESTS]
    assert len(ends) > 20
    assert max(b - a for a, b in pairwise(ends)) < 0.3 * S


def test_scrapes_add_up_to_the_counters() -> None:
    of = run()
    samples = [r for _, r in records(of) if isinstance(r, EngineSample)]
    last = [m for m in of.moments() if isinstance(m, Scraped)][-1]
    first = next(m for m in of.moments() if isinstance(m, Scraped))
    assert samples[0].interval_ns is None
    assert samples[0].generation_tokens is None
    grown = last.totals.generated_tokens - first.totals.generated_tokens
    assert sum(s.generation_tokens or 0 for s in samples) == grown
    ttft = [h for s in samples for h in s.histograms if h.stage == "ttft"]
    assert all(sum(h.counts) == h.count for h in ttft)
    assert len(ttft[0].counts) == len(ttft[0].bounds) + 1


def test_truth_tells_every_step() -> None:
    told = [r for _, r in records(run(), truth=True) if isinstance(r, StepBatch)]
    assert sum(len(batch.start_ns) for batch in told) == len(steps(run()))
    assert sum(sum(batch.left) for batch in told) == len(queue_ms(run()))
