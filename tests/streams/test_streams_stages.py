"""Where the time of a request went."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from emulated_engine import INSTANCE, MS, T0, Stream, parts_of, run_engine, timing
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.schemas.records import EngineSample, HistogramDelta, RequestTiming
from latencyprism.streams.config import StreamsConfig
from latencyprism.streams.observation import Steps
from latencyprism.streams.stages import STAGES, StageEstimator, StageSummary
from latencyprism.streams.steps import StepRecovery
from latencyprism.streams.tracking import Exchange, RequestTracker

WINDOW_NS = 250 * MS


def steps(*rows: tuple[int, float, int]) -> Steps:
    """Steps of (end in ms, duration in ms, joined)."""
    ends, durations, joined = zip(*rows, strict=True)
    zeros = np.zeros(len(rows), np.int64)
    return Steps(
        end_ns=T0 + np.array(ends, np.int64) * MS,
        duration_ms=np.array(durations, np.float64),
        decode_sequences=zeros,
        joined=np.array(joined, np.int64),
        left=zeros,
        prefill_tokens=np.zeros(len(rows)),
        context_tokens=np.zeros(len(rows)),
        waiting=zeros,
    )


def exchange(**times_ms: float) -> Exchange:
    """An exchange whose times are given in ms."""
    names = {name: T0 + round(at * MS) for name, at in times_ms.items()}
    arrival_ns = names.pop("arrival")
    made = Exchange(request_id="r", arrival_ns=arrival_ns, state="complete")
    for name, at_ns in names.items():
        setattr(made, f"{name}_ns", at_ns)
    return made


def broken_down(parts: Sequence[RequestTiming], windows: int = 8) -> list[StageSummary]:
    """Stages of each window."""
    tracker, recovery, stages = RequestTracker(StreamsConfig()), StepRecovery(), StageEstimator()
    for part in parts:
        tracker.add(part)
    found = []
    for k in range(windows):
        end_ns = T0 + (k + 1) * WINDOW_NS
        traffic = tracker.close(end_ns)
        recovered = recovery.recover(
            traffic.chunks, traffic.chunk_gaps_ms, traffic.occupancy, end_ns
        )
        stages.learn(recovered, traffic.first, tracker)
        found.append(stages.summary(traffic.ended))
    return found


def means(summary: StageSummary) -> dict[str, float | None]:
    return {stage.stage: stage.mean_ms for stage in summary.stages}


def test_a_request_that_joins_a_busy_engine() -> None:
    """It arrives at 104, waits for the step that runs until 110, and is computed until 130."""
    streams = [
        Stream(name="busy", arrival=0, tokens=100, prompt_tokens=0),
        Stream(name="joins", arrival=104, tokens=5, prompt_tokens=100),
    ]
    run_engine(streams, spread_ms=0)
    summaries = broken_down([part for stream in streams for part in parts_of(stream)])
    found = next(summary for summary in summaries if summary.stages)
    assert means(found) == pytest.approx(
        {"ingress": 0, "queue": 6, "prefill": 20, "decode": 40, "egress": 0.1}
    )
    assert found.e2e_ms == pytest.approx(66.1)
    assert found.remainder_ms == pytest.approx(0)
    assert [stage.how for stage in found.stages] == [
        "measured",
        "inferred",
        "inferred",
        "measured",
        "measured",
    ]
    assert [stage.error_ms for stage in found.stages] == pytest.approx([0, 5, 5, 0, 0])


def test_the_head_of_an_answer_ends_ingress_where_it_comes_before_the_work() -> None:
    early = exchange(arrival=0, request_end=2, first_byte=8, first_token=50, end=60)
    together = exchange(arrival=0, request_end=2, first_byte=49.9, first_token=50, end=60)
    stages = StageEstimator()
    assert stages.breakdown(early).stages_ms[0] == 8
    assert stages.breakdown(together).stages_ms[0] == 2


def test_an_answer_that_is_no_stream_is_remainder() -> None:
    found = StageEstimator().breakdown(exchange(arrival=0, request_end=3, end=60))
    assert found.stages_ms[0] == 3
    assert all(math.isnan(ms) for ms in found.stages_ms[1:])
    assert found.remainder_ms == 57


def test_a_request_without_a_step_leaves_queue_and_prefill_open() -> None:
    found = StageEstimator().summary(
        [exchange(arrival=0, request_end=1, first_token=40, last_chunk=70, end=72)]
    )
    by_name = {stage.stage: stage for stage in found.stages}
    assert (by_name["queue"].how, by_name["queue"].mean_ms) == ("unknown", None)
    assert by_name["decode"].mean_ms == 30
    assert found.remainder_ms == 39


def test_long_steps_before_carry_pieces_of_a_long_prompt() -> None:
    stages, tracker = StageEstimator(), RequestTracker(StreamsConfig())
    request = exchange(arrival=85, request_end=85, first_token=320, end=330)
    plain = [(at, 10.0, 0) for at in range(10, 100, 10)]
    stages.learn(
        steps(*plain, (190, 100.0, 0), (290, 100.0, 0), (320, 30.0, 1)), [request], tracker
    )
    found = stages.breakdown(request)
    assert found.stages_ms[1:3] == (5, 230)


def test_a_long_step_before_the_request_came_is_not_its_own() -> None:
    stages, tracker = StageEstimator(), RequestTracker(StreamsConfig())
    request = exchange(arrival=185, request_end=185, first_token=220, end=230)
    plain = [(at, 10.0, 0) for at in range(10, 100, 10)]
    stages.learn(steps(*plain, (190, 100.0, 0), (220, 30.0, 1)), [request], tracker)
    assert stages.breakdown(request).stages_ms[1:3] == (5, 30)


def test_a_step_reported_a_window_later_is_still_found() -> None:
    stages, tracker = StageEstimator(), RequestTracker(StreamsConfig())
    request = exchange(arrival=0, request_end=0, first_token=249, end=300)
    stages.learn(steps((200, 10.0, 0)), [request], tracker)
    assert request.prefill_ms is None
    stages.learn(steps((249, 49.0, 1)), [], tracker)
    assert request.prefill_ms == 49


def test_without_a_step_the_length_of_the_prompt_tells() -> None:
    stages, tracker = StageEstimator(), RequestTracker(StreamsConfig())
    for k in range(40):
        known = exchange(arrival=k * 1_000, request_end=k * 1_000, first_token=k * 1_000 + 5 + k)
        known.prompt_tokens = 10 * k
        stages.learn(steps((k * 1_000 + 5 + k, 5.0 + k, 1)), [known], tracker)
    lost = exchange(arrival=50_000, request_end=50_000, first_token=50_100, end=50_200)
    lost.prompt_tokens = 200
    stages.learn(Steps(), [lost], tracker)
    stages.learn(Steps(), [], tracker)
    queue_ms, prefill_ms = stages.breakdown(lost).stages_ms[1:3]
    assert prefill_ms == pytest.approx(25, rel=0.05)
    assert queue_ms + prefill_ms == pytest.approx(100)
    assert stages.breakdown(lost).border_error_ms < 5


def scrape(*, at_ms: float, count: float, seconds: float) -> EngineSample:
    return EngineSample(
        instance=INSTANCE,
        source="engine",
        observed_at_ns=T0 + round(at_ms * MS),
        freshness="fresh",
        scrape_ms=3,
        interval_ns=1_000 * MS,
        restarted=False,
        histograms=(HistogramDelta(stage="prefill", count=count, sum=seconds),),
    )


def test_the_engines_own_prefill_times_give_the_error() -> None:
    stages, tracker = StageEstimator(), RequestTracker(StreamsConfig())
    for k in range(10):
        at = k * 1_000
        request = exchange(arrival=at, request_end=at, first_token=at + 50, end=at + 100)
        stages.learn(steps((at + 10, 10.0, 0), (at + 50, 40.0, 1)), [request], tracker)
        stages.summary([request])
        stages.compare([scrape(at_ms=at + 900, count=1, seconds=0.037)])
    assert stages.breakdown(request).border_error_ms == pytest.approx(3)


def test_the_head_of_llamacpp_begins_prefill() -> None:
    stages, tracker = StageEstimator(), RequestTracker(StreamsConfig())
    stages.compare([replace(scrape(at_ms=0, count=0, seconds=0), engine="llamacpp")])
    request = exchange(arrival=0, request_end=1, first_byte=31, first_token=90, end=100)
    stages.learn(Steps(), [request], tracker)
    found = stages.breakdown(request)
    assert found.stages_ms[:3] == (1, 30, 59)
    assert found.border_error_ms == 0


def test_scrapes_of_other_requests_too_tell_nothing() -> None:
    stages, tracker = StageEstimator(), RequestTracker(StreamsConfig())
    request = exchange(arrival=0, request_end=0, first_token=50, end=100)
    stages.learn(steps((10, 10.0, 0), (50, 40.0, 1)), [request], tracker)
    stages.summary([request])
    stages.compare([scrape(at_ms=900, count=2, seconds=3)])
    assert not stages.differences_ms


def test_what_is_unknown_of_some_widens_the_error() -> None:
    known = exchange(arrival=0, request_end=0, first_token=50, last_chunk=90, end=100)
    plain = exchange(arrival=0, request_end=0, end=80)
    found = StageEstimator().summary([known, plain])
    decode = found.stages[STAGES.index("decode")]
    assert decode.mean_ms == 20
    assert decode.how == "inferred"
    assert decode.error_ms == 40


def test_no_request_no_stages() -> None:
    assert StageEstimator().summary([]) == StageSummary()


moments = st.one_of(st.none(), st.integers(-100, 1_000))


@given(
    request_end=moments,
    first_byte=moments,
    first_token=moments,
    last_chunk=moments,
    end=st.integers(-100, 1_000),
    prefill=st.one_of(st.none(), st.floats(0, 1_000)),
)
def test_stages_are_never_negative_and_sum_to_the_whole(
    request_end: int | None,
    first_byte: int | None,
    first_token: int | None,
    last_chunk: int | None,
    end: int,
    prefill: float | None,
) -> None:
    times = {
        "request_end": request_end,
        "first_byte": first_byte,
        "first_token": first_token,
        "last_chunk": last_chunk,
        "end": end,
    }
    made = exchange(arrival=0, **{name: at for name, at in times.items() if at is not None})
    made.prefill_ms = prefill
    stages = StageEstimator()
    part = stages.breakdown(made)
    known = [ms for ms in part.stages_ms if not math.isnan(ms)]
    assert all(ms >= 0 for ms in known)
    assert sum(known) + part.remainder_ms == pytest.approx(part.e2e_ms)
    summary = stages.summary([made, exchange(arrival=0, request_end=1, end=10)])
    total = sum(stage.mean_ms for stage in summary.stages if stage.mean_ms is not None)
    assert summary.e2e_ms is not None
    assert summary.remainder_ms is not None
    assert total + summary.remainder_ms == pytest.approx(summary.e2e_ms)


def test_forgetting_keeps_what_was_learned() -> None:
    stages, tracker = StageEstimator(), RequestTracker(StreamsConfig())
    stages.learn(steps((10, 10.0, 1)), [], tracker)
    stages.differences_ms.append(1.0)
    stages.forget()
    request = timing(chunk_base_ns=T0 + 10 * MS, observed_at_ns=T0 + 10 * MS)
    tracker.add(request)
    stages.learn(Steps(), tracker.close(T0 + WINDOW_NS).first, tracker)
    assert list(stages.differences_ms) == [1.0]
