"""Signals against their own history, others' load, and causes ranked by both."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from latencyprism.schemas.records import (
    EngineSample,
    Evidence,
    HistogramDelta,
    HostSample,
    ProcessSample,
    XpuSample,
)
from latencyprism.streams.detection.evidence import (
    BY_NAME,
    ENGINE_STAGES,
    OTHERS_SHARE,
    SIGNALS,
    EvidenceBook,
    Ledger,
    is_decisive,
    rank_causes,
)
from latencyprism.streams.observation import FirstTokens, Observation, OpenRequests, Steps

T0 = 1_700_000_000_000_000_000
WINDOW = 250_000_000
FAMILIES = {
    "model",
    "engine",
    "hardware",
    "host",
    "network",
    "workload",
    "neighbour",
    "upstream",
    "client",
}


def observation(window: int = 0, **values: Any) -> Observation:
    start = T0 + window * WINDOW
    return Observation(
        instance="a:1",
        model="m",
        start_ns=start,
        end_ns=start + WINDOW,
        closed_ns=start + WINDOW,
        **values,
    )


def host(**values: Any) -> HostSample:
    worker: dict[str, Any] = {
        "pid": 1,
        "role": "worker",
        "state": "R",
        "cpu_ns": 90_000_000,
        "runqueue_ns": 5_000_000,
    }
    defaults: dict[str, Any] = {"throttled_ns": 0, "cpu_others": 0.05, "psi_cpu_us": 0}
    process = ProcessSample(**worker | values.pop("process", {}))
    return HostSample(
        instance="a:1",
        source="host",
        observed_at_ns=T0,
        host="h",
        interval_ns=100_000_000,
        processes=(process,),
        **defaults | values,
    )


def scrape(window: int, **values: Any) -> EngineSample:
    defaults: dict[str, Any] = {"freshness": "fresh", "scrape_ms": 7.0, "restarted": False}
    return EngineSample(
        instance="a:1",
        source="engine",
        observed_at_ns=T0 + window * WINDOW + WINDOW // 2,
        interval_ns=10**9,
        **defaults | values,
    )


def first_tokens(window: int, prompts: list[float]) -> FirstTokens:
    count = len(prompts)
    return FirstTokens(
        at_ns=np.full(count, T0 + window * WINDOW + 10_000_000),
        ttft_ms=np.full(count, 50.0),
        headers_ms=np.full(count, 2.0),
        upload_ms=np.zeros(count),
        prompt_tokens=np.array(prompts),
        tokens_estimated=np.zeros(count, bool),
        cached_tokens=np.full(count, np.nan),
        request_bytes=np.full(count, np.nan),
        decoding=np.zeros(count, np.int64),
        ahead=np.zeros(count, np.int64),
        ahead_tokens=np.zeros(count),
    )


def surprises(usual: Observation, now: Observation, *, windows: int = 300) -> dict[str, float]:
    """Surprise of each signal of one window after many usual ones."""
    book = EvidenceBook(windows)
    for _ in range(windows):
        book.observe(usual)
        book.learn(book.fresh_values())
    found = book.observe(replace(now, end_ns=now.end_ns + 10**10))
    return {signal.name: float(found[BY_NAME[signal.name]]) for signal in SIGNALS}


def test_the_catalogue_names_each_signal_once_and_only_known_families_and_stages() -> None:
    assert len(BY_NAME) == len(SIGNALS)
    assert {signal.family for signal in SIGNALS} <= FAMILIES
    assert all(set(signal.slows) <= set(ENGINE_STAGES) for signal in SIGNALS)
    assert all(signal.floor > 0 and signal.weight > 0 for signal in SIGNALS)


@pytest.mark.parametrize(
    ("signal", "values"),
    [
        ("host.throttled_ratio", {"throttled_ns": 60_000_000}),
        ("host.runqueue_ratio", {"process": {"runqueue_ns": 120_000_000, "cpu_ns": 50_000_000}}),
        ("host.cpu_others", {"cpu_others": 0.7}),
        ("host.cpu_steal", {"cpu_steal": 0.4}),
        ("host.psi_memory", {"psi_memory_us": 60_000}),
        ("host.major_faults_per_s", {"process": {"major_faults": 90}}),
        ("engine.stopped_share", {"process": {"state": "T"}}),
        ("neighbour.api_cpu_ratio", {"process": {"role": "api", "cpu_ns": 95_000_000}}),
        ("network.retransmits_per_s", {"tcp_retransmits": 40}),
        ("network.log_rtt", {"tcp_rtt_us": 90_000.0}),
    ],
)
def test_what_the_host_shows_is_a_surprise_against_its_own_history(
    signal: str, values: dict[str, Any]
) -> None:
    usual: dict[str, Any] = {
        "cpu_steal": 0.0,
        "psi_memory_us": 0,
        "tcp_retransmits": 0,
        "tcp_rtt_us": 200.0,
        "process": {"major_faults": 0},
    }
    if signal == "neighbour.api_cpu_ratio":
        usual["process"] = {"role": "api", "cpu_ns": 10_000_000}
    before = observation(host=(host(**usual),))
    assert surprises(before, before)[signal] < 1
    assert surprises(before, observation(host=(host(**usual | values),)))[signal] > 3


def test_waiting_while_throttled_is_not_waiting_for_others() -> None:
    usual = observation(host=(host(),))
    throttled = host(throttled_ns=90_000_000, process={"runqueue_ns": 90_000_000})
    found = surprises(usual, observation(host=(throttled,)))
    assert found["host.throttled_ratio"] > 3
    assert found["host.runqueue_ratio"] < 1.5


def test_an_idle_process_that_waits_a_moment_is_no_surprise() -> None:
    usual = observation(host=(host(),))
    idle = observation(host=(host(process={"cpu_ns": 0, "runqueue_ns": 500_000}),))
    assert surprises(usual, idle)["host.runqueue_ratio"] < 1


def test_bunched_chunks_and_late_headers_speak_for_the_network() -> None:
    usual = observation(chunk_gaps_ms=np.full(40, 9.0), first_tokens=first_tokens(0, [100.0]))
    late = replace(first_tokens(0, [100.0]), headers_ms=np.array([80.0]))
    bunched = np.concatenate(([300.0], np.full(39, 0.05)))
    found = surprises(usual, observation(chunk_gaps_ms=bunched, first_tokens=late))
    assert found["network.bunched_share"] > 3
    assert found["network.log_headers_ms"] > 3


def test_streams_that_no_longer_move_together_speak_for_the_network() -> None:
    def steps(batch: int) -> Steps:
        return Steps(
            end_ns=np.arange(8),
            duration_ms=np.full(8, 9.0),
            decode_sequences=np.full(8, batch),
            joined=np.zeros(8, np.int64),
            left=np.zeros(8, np.int64),
            prefill_tokens=np.zeros(8),
            context_tokens=np.zeros(8),
            waiting=np.zeros(8, np.int64),
        )

    four = OpenRequests(decoding=4)
    usual = observation(steps=steps(4), open_requests=four)
    torn = observation(steps=steps(1), open_requests=four)
    assert surprises(usual, torn)["network.desynchrony"] > 3


def test_an_accelerator_that_slows_or_errs_is_hardware() -> None:
    def xpu(**values: Any) -> XpuSample:
        defaults: dict[str, Any] = {
            "core_clock_mhz": 1_950.0,
            "core_clock_max_mhz": 1_980.0,
            "throttle_reasons": ("gpu_idle",),
        }
        return XpuSample(
            instance="a:1",
            source="xpu",
            observed_at_ns=T0,
            host="h",
            vendor="nvidia",
            device="0",
            **defaults | values,
        )

    hot = xpu(core_clock_mhz=900.0, throttle_reasons=("hw_thermal",), xid=79)
    found = surprises(observation(xpu=(xpu(),)), observation(xpu=(hot,)))
    assert min(v for name, v in found.items() if name.startswith("hardware.")) > 3
    lost = xpu(error="lost from the bus", core_clock_mhz=100.0)
    found = surprises(observation(xpu=(xpu(),)), observation(xpu=(lost,)))
    assert found["hardware.errors"] > 3
    assert found["hardware.clock_deficit"] == 0.0
    found = surprises(observation(xpu=(lost,)), observation(xpu=(lost,)))
    assert found["hardware.errors"] == 0.0, "one that never could be read is no news"


def test_what_was_never_seen_before_is_not_yet_a_surprise() -> None:
    book = EvidenceBook(100)
    assert not book.observe(observation(host=(host(throttled_ns=90_000_000),))).any()


def test_a_value_of_a_slow_source_holds_for_a_second_and_no_longer() -> None:
    book = EvidenceBook(100)
    slow = observation(engine=(scrape(0, scrape_ms=400.0),))
    for _ in range(60):
        book.observe(observation(engine=(scrape(0),)))
        book.learn(book.fresh_values())
    place = BY_NAME["neighbour.log_scrape_ms"]
    assert book.observe(slow)[place] > 3
    assert book.observe(observation(4))[place] > 3
    assert book.observe(observation(7))[place] == 0


def test_histories_move_to_another_book() -> None:
    book, other = EvidenceBook(50), EvidenceBook(50)
    for _ in range(50):
        book.observe(observation(host=(host(),)))
        book.learn(book.fresh_values())
    other.restore(book.histories())
    busy = observation(host=(host(cpu_others=0.9),))
    there, here = other.observe(busy), book.observe(busy)
    assert here[BY_NAME["host.cpu_others"]] > 3
    np.testing.assert_allclose(there, here, atol=0.05)


def test_own_prompts_are_not_others() -> None:
    ledger = Ledger()
    ledger.add(observation(0, first_tokens=first_tokens(0, [300.0, 500.0])))
    ledger.add(observation(1, engine=(scrape(1, prompt_tokens=800.0, running=2.0),)))
    assert ledger.share > OTHERS_SHARE
    ledger.add(
        observation(
            2,
            open_requests=OpenRequests(decoding=2),
            engine=(scrape(2, prompt_tokens=800.0, running=2.0),),
        )
    )
    assert ledger.share == 0.0
    assert ledger.values["workload.others_prompt_tokens"] == 0.0


def test_prompts_and_sequences_that_nobody_observed_are_others() -> None:
    ledger = Ledger()
    ledger.add(observation(0, first_tokens=first_tokens(0, [300.0])))
    ledger.add(
        observation(
            1,
            open_requests=OpenRequests(decoding=1),
            engine=(scrape(1, prompt_tokens=2_700.0, running=3.0, waiting=1.0),),
        )
    )
    assert ledger.values["workload.others_prompt_tokens"] == 2_400.0
    assert ledger.values["workload.others_sequences"] == 3.0
    assert ledger.share == pytest.approx(2_400 / 2_700)
    assert ledger.others_ns == ledger.scraped_ns > 0


def test_a_prompt_whose_first_token_is_on_its_way_is_not_others() -> None:
    ledger = Ledger()
    pending = OpenRequests(waiting=1, waiting_ms=np.array([90.0]), waiting_tokens=np.array([700.0]))
    ledger.add(observation(0, open_requests=pending, engine=(scrape(0, prompt_tokens=700.0),)))
    assert ledger.share == 0.0


def test_a_stale_scrape_says_nothing() -> None:
    ledger = Ledger()
    stale = scrape(0, prompt_tokens=9_000.0, freshness="stale")
    ledger.add(observation(0, engine=(stale,)))
    assert (ledger.scraped_ns, ledger.share) == (0, 0.0)


def test_the_engine_s_own_times_show_what_the_way_adds() -> None:
    histograms = (HistogramDelta(stage="ttft", count=2, sum=0.04),)
    ledger = Ledger()
    ledger.add(
        observation(
            0,
            first_tokens=first_tokens(0, [10.0, 10.0]),
            engine=(scrape(0, prompt_tokens=20.0, histograms=histograms),),
        )
    )
    assert ledger.values["network.transit_first_ms"] == pytest.approx(30.0)


def found(signal: str, surprise: float) -> tuple[str, Evidence]:
    family = SIGNALS[BY_NAME[signal]].family
    return signal, Evidence(family=family, signal=signal, observed=1.0, surprise=surprise)


def test_causes_are_ranked_and_sum_to_at_most_one() -> None:
    causes = rank_causes(
        dict(
            [
                found("host.runqueue_ratio", 3.0),
                found("host.cpu_others", 2.0),
                found("network.log_headers_ms", 2.0),
                found("host.psi_io", 1.0),
            ]
        ),
        "decode",
    )
    assert [cause.family for cause in causes] == ["host", "network"]
    assert [item.signal for item in causes[0].evidence] == [
        "host.runqueue_ratio",
        "host.cpu_others",
    ]
    assert 0 < causes[1].score < causes[0].score < 1
    assert sum(cause.score for cause in causes) <= 1


def test_a_cause_seen_at_work_outweighs_its_symptoms() -> None:
    symptoms = [found("host.runqueue_ratio", 4.0), found("neighbour.log_scrape_ms", 4.0)]
    causes = rank_causes(dict([*symptoms, found("engine.stopped_share", 4.0)]), "flow")
    assert causes[0].family == "engine"
    assert is_decisive(found("engine.stopped_share", 4.0)[1])
    assert not is_decisive(found("host.runqueue_ratio", 9.0)[1])


def test_nothing_speaks_when_nothing_is_unusual() -> None:
    assert rank_causes({}, "decode") == ()


def test_evidence_of_another_origin_counts_for_what_it_says() -> None:
    stranger = Evidence(family="host", signal="host.of_another_version", observed=1.0, surprise=9.0)

    (cause,) = rank_causes({stranger.signal: stranger}, "decode")

    assert (cause.family, cause.evidence) == ("host", (stranger,))
