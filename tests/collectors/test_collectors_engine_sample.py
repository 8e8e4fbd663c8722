import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from latencyprism.collectors.engine.aliases import ENGINES, OLLAMA, WANTED
from latencyprism.collectors.engine.exposition import Parser
from latencyprism.collectors.engine.sample import Tracker
from latencyprism.schemas.records import EngineSample, HistogramDelta

DATA = Path(__file__).parent / "data"
SECOND = 1_000_000_000
SCALARS = (
    "running",
    "waiting",
    "kv_usage",
    "prompt_tokens",
    "cached_tokens",
    "generation_tokens",
    "finished_requests",
    "preemptions",
    "iterations",
)


class Pages:
    """Feeds pages to a tracker, one second apart."""

    def __init__(self, max_series: int = 1000) -> None:
        self.parser = Parser(WANTED, max_series)
        self.tracker = Tracker("h:1")
        self.now_ns = 0

    def __call__(self, page: str, after_s: int = 1) -> EngineSample:
        self.now_ns += after_s * SECOND
        return self.tracker.page(
            self.parser.parse(page.encode()),
            observed_at_ns=10**18 + self.now_ns,
            monotonic_ns=self.now_ns,
            scrape_ms=4.0,
        )

    def failed(self) -> EngineSample:
        self.now_ns += SECOND
        return self.tracker.failed("gone", observed_at_ns=10**18 + self.now_ns, scrape_ms=1.0)


def two(name: str) -> tuple[EngineSample, EngineSample]:
    pages = Pages()
    first = pages((DATA / f"{name}-1.prom").read_text())
    return first, pages((DATA / f"{name}-2.prom").read_text())


def known(sample: EngineSample) -> dict[str, Any]:
    """The measured scalars of a sample that are not null."""
    return {n: v for n in SCALARS if (v := getattr(sample, n)) is not None}


def stages(sample: EngineSample) -> dict[str, HistogramDelta]:
    return {histogram.stage: histogram for histogram in sample.histograms}


def test_first_page_has_gauges_but_no_counters() -> None:
    first, _ = two("vllm-0.32")

    assert known(first) == {"running": 1.0, "waiting": 0.0, "kv_usage": 0.003910068426197455}
    assert (first.engine, first.model, first.freshness) == ("vllm", "small", "fresh")
    assert (first.interval_ns, first.histograms, first.restarted) == (None, (), False)


def test_vllm_growth_between_two_real_pages() -> None:
    _, second = two("vllm-0.32")

    assert second.interval_ns == SECOND
    assert not second.restarted
    assert known(second) == {
        "running": 1.0,
        "waiting": 0.0,
        "kv_usage": 0.003910068426197455,
        "prompt_tokens": 540.0,
        "cached_tokens": 0.0,
        "generation_tokens": 115.0,
        "finished_requests": 1.0,
        "preemptions": 0.0,
        "iterations": 83.0,
    }
    histograms = stages(second)
    assert set(histograms) == {
        "ttft",
        "itl",
        "tpot",
        "e2e",
        "queue",
        "prefill",
        "decode",
        "inference",
        "iteration_tokens",
        "prompt_tokens",
        "generation_tokens",
    }
    for histogram in histograms.values():
        if histogram.count:
            assert len(histogram.counts) == len(histogram.bounds) + 1
            assert sum(histogram.counts) == histogram.count
            assert min(histogram.counts) >= 0
        else:
            assert (histogram.bounds, histogram.counts) == ((), ())
    assert histograms["ttft"].count == 1
    assert histograms["iteration_tokens"].count == second.iterations


def test_names_before_the_renames_mean_the_same() -> None:
    _, second = two("vllm-0.6")

    assert (second.engine, second.model) == ("vllm", "facebook/opt-125m")
    assert known(second) == {
        "running": 2.0,
        "waiting": 1.0,
        "kv_usage": 0.125,
        "prompt_tokens": 50.0,
        "generation_tokens": 20.0,
        "finished_requests": 1.0,
        "preemptions": 0.0,
    }
    assert stages(second)["itl"] == HistogramDelta(
        stage="itl", count=19.0, sum=0.25, bounds=(0.01, 0.1), counts=(0.0, 19.0, 0.0)
    )
    assert set(stages(second)) == {"ttft", "itl", "e2e"}


def test_new_name_wins_where_a_page_has_both() -> None:
    pages = Pages()
    page = "vllm:gpu_cache_usage_perc 0.5\nvllm:kv_cache_usage_perc 0.25\n"

    assert pages(page).kv_usage == 0.25


def test_sglang_sums_data_parallel_ranks_and_counts_tensor_parallel_ones_once() -> None:
    _, second = two("sglang")

    assert (second.engine, second.model) == ("sglang", "meta/m-8b")
    assert known(second) == {
        "running": 8.0,
        "waiting": 2.0,
        "kv_usage": 0.5,
        "prompt_tokens": 200.0,
        "cached_tokens": 42.0,
        "generation_tokens": 60.0,
        "finished_requests": 2.0,
        "preemptions": 1.0,
        "iterations": 42.0,
    }
    assert stages(second)["queue"] == HistogramDelta(
        stage="queue", count=2.0, sum=0.125, bounds=(0.0, 0.1, 1.0), counts=(0.0, 2.0, 0.0, 0.0)
    )


def test_tgi_takes_token_counts_from_its_histograms() -> None:
    _, second = two("tgi")

    assert (second.engine, second.model) == ("tgi", None)
    assert known(second) == {
        "running": 4.0,
        "waiting": 1.0,
        "prompt_tokens": 512.0,
        "generation_tokens": 135.0,
        "finished_requests": 3.0,
        "iterations": 47.0,
    }
    assert stages(second)["queue"] == HistogramDelta(
        stage="queue", count=3.0, sum=0.25, bounds=(0.01, 0.1), counts=(1.0, 2.0, 0.0)
    )


def test_llamacpp_has_no_histograms_but_a_mean_gap_between_tokens() -> None:
    _, second = two("llamacpp")

    assert (second.engine, second.model) == ("llamacpp", None)
    assert known(second) == {
        "running": 0.0,
        "waiting": 0.0,
        "prompt_tokens": 279.0,
        "cached_tokens": 0.0,
        "generation_tokens": 314.0,
        "iterations": 132.0,
    }
    (itl,) = second.histograms
    assert (itl.stage, itl.count, itl.bounds) == ("itl", 314.0, ())
    assert itl.sum == pytest.approx(3.5269)


def test_data_parallel_engines_of_one_server_are_added_up() -> None:
    pages = Pages()
    page = (
        'vllm:num_requests_running{{engine="0",model_name="m"}} 2\n'
        'vllm:num_requests_running{{engine="1",model_name="m"}} 3\n'
        'vllm:generation_tokens_total{{engine="0",model_name="m"}} {}\n'
        'vllm:generation_tokens_total{{engine="1",model_name="m"}} {}\n'
    )
    pages(page.format(10, 20))
    second = pages(page.format(15, 27))

    assert (second.running, second.generation_tokens, second.model) == (5.0, 12.0, "m")


def test_two_models_on_a_page_are_both_named() -> None:
    page = (
        'vllm:num_requests_running{model_name="b"} 2\nvllm:num_requests_running{model_name="a"} 2\n'
    )

    assert Pages()(page).model == "a,b"


def test_counter_that_went_back_is_a_restart_and_counts_from_zero() -> None:
    pages = Pages()
    pages("vllm:generation_tokens_total 100\nvllm:prompt_tokens_total 50\n")
    pages.tracker.version = "1.0"
    second = pages("vllm:generation_tokens_total 7\nvllm:prompt_tokens_total 60\n")

    assert second.restarted
    assert (second.generation_tokens, second.prompt_tokens) == (7.0, 60.0)
    assert second.version is None
    third = pages("vllm:generation_tokens_total 9\nvllm:prompt_tokens_total 60\n")
    assert (third.restarted, third.generation_tokens) == (False, 2.0)


def test_new_start_time_is_a_restart_even_when_counters_overtook() -> None:
    pages = Pages()
    pages("process_start_time_seconds 100\nvllm:generation_tokens_total 5\n")
    second = pages("process_start_time_seconds 200\nvllm:generation_tokens_total 8\n")

    assert (second.restarted, second.generation_tokens) == (True, 8.0)


def test_failed_scrape_has_no_values_and_the_next_good_one_spans_it() -> None:
    pages = Pages()
    pages('vllm:num_requests_running{model_name="m"} 3\nvllm:generation_tokens_total 100\n')
    failed = pages.failed()
    after = pages('vllm:num_requests_running{model_name="m"} 3\nvllm:generation_tokens_total 130\n')

    assert (failed.freshness, failed.error, known(failed)) == ("failed", "gone", {})
    assert (failed.engine, failed.model) == ("vllm", "m")
    assert (after.generation_tokens, after.interval_ns) == (30.0, 2 * SECOND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is told of a page whose gauges are 0.25 and whose totals grew by 8."""

    engine: str
    gauges: str = "running waiting kv_usage"
    counters: str
    stages: str


REGISTERED = {
    "vllm-0.6.3": Expected(
        engine="vllm",
        counters="prompt_tokens generation_tokens finished_requests preemptions",
        stages="ttft itl e2e prompt_tokens generation_tokens",
    ),
    "vllm-0.8.5-v0": Expected(
        engine="vllm",
        counters="prompt_tokens generation_tokens finished_requests preemptions iterations",
        stages="ttft itl e2e queue prefill decode inference iteration_tokens prompt_tokens "
        "generation_tokens",
    ),
    "vllm-0.8.5": Expected(
        engine="vllm",
        counters="prompt_tokens generation_tokens finished_requests preemptions iterations",
        stages="ttft itl e2e queue prefill decode inference iteration_tokens prompt_tokens "
        "generation_tokens",
    ),
    "vllm-0.10.0": Expected(
        engine="vllm",
        counters="prompt_tokens cached_tokens generation_tokens finished_requests preemptions "
        "iterations",
        stages="ttft itl e2e queue prefill decode inference iteration_tokens prompt_tokens "
        "generation_tokens",
    ),
    "sglang-0.4.1": Expected(
        engine="sglang", counters="prompt_tokens generation_tokens", stages="ttft e2e"
    ),
    "sglang-0.4.6": Expected(
        engine="sglang",
        counters="prompt_tokens cached_tokens generation_tokens finished_requests",
        stages="ttft itl e2e",
    ),
    "sglang-0.5.3": Expected(
        engine="sglang",
        counters="prompt_tokens cached_tokens generation_tokens finished_requests",
        stages="ttft itl e2e queue",
    ),
    "sglang-0.5.23": Expected(
        engine="sglang",
        counters="prompt_tokens cached_tokens generation_tokens finished_requests preemptions "
        "iterations",
        stages="ttft itl tpot e2e queue prompt_tokens generation_tokens",
    ),
    "lmdeploy-0.16": Expected(
        engine="lmdeploy",
        counters="prompt_tokens cached_tokens generation_tokens finished_requests iterations",
        stages="ttft itl e2e queue prefill decode inference iteration_tokens prompt_tokens "
        "generation_tokens",
    ),
    "tensorrt-llm-1.3": Expected(
        engine="tensorrt_llm",
        counters="prompt_tokens generation_tokens finished_requests",
        stages="ttft tpot e2e queue prefill decode inference",
    ),
    "dynamo-1.0": Expected(
        engine="dynamo",
        gauges="",
        counters="prompt_tokens generation_tokens finished_requests",
        stages="ttft itl e2e prompt_tokens generation_tokens",
    ),
}


def grown(page: str) -> str:
    """The page with every total 8 higher."""
    lines = []
    kind = ""
    for line in page.splitlines():
        if line.startswith("# TYPE"):
            kind = line.split()[-1]
        elif kind in ("counter", "histogram"):
            text, _, value = line.rpartition(" ")
            line = f"{text} {float(value) + 8}"  # noqa: PLW2901 - the line as it becomes
        lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", REGISTERED)
def test_names_of_each_engine_and_version(name: str) -> None:
    expected = REGISTERED[name]
    page = (DATA / f"{name}.prom").read_text()
    pages = Pages()
    first, second = pages(page), pages(grown(page))

    assert (first.engine, first.model) == (expected.engine, "m")
    assert known(first) == dict.fromkeys(expected.gauges.split(), 0.25)
    assert known(second) == known(first) | dict.fromkeys(expected.counters.split(), 8.0)
    assert set(stages(second)) == set(expected.stages.split())
    for histogram in stages(second).values():
        assert (histogram.count, histogram.sum) == (8.0, 8.0)
        assert len(histogram.counts) == len(histogram.bounds) + 1 > 2
        assert sum(histogram.counts) == 8.0


def test_triton_tells_of_the_model_that_does_the_work_not_of_the_steps_around_it() -> None:
    page = (DATA / "triton-trtllm.prom").read_text()
    pages = Pages()
    first = pages(page)
    second = pages(
        grown(page).replace(
            '"iteration_counter",version="1"} 100', '"iteration_counter",version="1"} 140'
        )
    )

    assert (first.engine, first.model) == ("triton", "tensorrt_llm")
    assert known(second) == {
        "running": 5.0,
        "waiting": 2.0,
        "kv_usage": 0.25,
        "finished_requests": 8.0,
        "iterations": 40.0,
    }
    assert stages(second)["queue"] == HistogramDelta(stage="queue", count=8.0, sum=8e-6)
    assert set(stages(second)) == {"e2e", "queue", "inference"}


def test_vllm_in_ray_is_told_under_the_names_that_ray_gives_it() -> None:
    def in_ray(number: int) -> str:
        page = (DATA / f"vllm-0.32-{number}.prom").read_text().replace("vllm:", "ray_vllm_")
        return page.replace("process_", "ray_process_")

    pages = Pages()
    pages(in_ray(1))
    second = pages(in_ray(2))
    _, plain = two("vllm-0.32")

    assert (second.engine, second.model) == ("vllm", "small")
    assert known(second) == known(plain)
    assert second.histograms == plain.histograms


def test_every_engine_has_names_of_its_own() -> None:
    names = [name for engine in ENGINES for name in set(engine.names())]

    assert len(names) == len(set(names))


def test_an_engine_without_a_page_is_fresh_and_all_of_it_null() -> None:
    tracker = Tracker("h:1")
    sample = tracker.answered(OLLAMA, "qwen3:8b", observed_at_ns=5, scrape_ms=1.0)

    assert (sample.engine, sample.model, sample.freshness) == ("ollama", "qwen3:8b", "fresh")
    assert known(sample) == {}


def test_a_priority_total_is_not_added_to_its_parts() -> None:
    page = (
        'sglang:num_running_reqs{priority=""} 5\n'
        'sglang:num_running_reqs{priority="1"} 2\n'
        'sglang:num_running_reqs{priority="2"} 3\n'
        'sglang:generation_tokens_total{priority="1"} 10\n'
        'sglang:generation_tokens_total{priority="2"} 20\n'
    )
    pages = Pages()
    pages(page)
    second = pages(page.replace("} 10", "} 11").replace("} 20", "} 22"))

    assert (second.running, second.generation_tokens) == (5.0, 3.0)


VLLM = "vllm:num_requests_running {running}\nvllm:generation_tokens_total {tokens}\n"
SGLANG = "sglang:num_running_reqs {running}\nsglang:generation_tokens_total {tokens}\n"
CPU = "process_cpu_seconds_total {cpu}\n"


def follow(pages: Pages, page: str, **values: list[float]) -> list[str]:
    """Freshness of pages, one second apart, whose values are the next of each list."""
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return [pages(page.format(**row)).freshness for row in rows]


STILL = [1.0] * 8
MOVING = [float(number) for number in range(8)]
FRESH = ["fresh"] * 8


@pytest.mark.parametrize(
    ("page", "running", "tokens", "cpu", "freshness"),
    [
        (VLLM + CPU, STILL, STILL, MOVING, [*FRESH[:5], "stale", "stale", "stale"]),
        (VLLM + CPU, STILL, STILL, STILL, [*FRESH[:5], "stale", "stale", "stale"]),
        (VLLM + CPU, STILL, [*STILL[:4], 2, 2, 2, 2], STILL, FRESH),
        (VLLM + CPU, [0.0] * 8, STILL, STILL, FRESH),
        (VLLM, STILL, MOVING, STILL, FRESH),
        (SGLANG + CPU, STILL, STILL, MOVING, FRESH),
        (SGLANG + CPU, STILL, STILL, STILL, [*FRESH[:5], "stale", "stale", "stale"]),
        (SGLANG, STILL, STILL, STILL, FRESH),
    ],
    ids=[
        "hung",
        "old page",
        "slow",
        "idle",
        "busy",
        "between requests",
        "old page of an engine that counts no steps",
        "nothing to tell by",
    ],
)
def test_stale_is_a_page_on_which_nothing_moves_while_requests_are_open(
    page: str, running: list[float], tokens: list[float], cpu: list[float], freshness: list[str]
) -> None:
    assert follow(Pages(), page, running=running, tokens=tokens, cpu=cpu) == freshness


def test_a_hung_vllm_behind_its_live_web_server_is_told() -> None:
    before = (DATA / "vllm-0.32-live-2.prom").read_text()
    hung = (DATA / "vllm-0.32-hung.prom").read_text()
    (cpu,) = re.findall(r"\nprocess_cpu_seconds_total (\S+)", hung)
    pages = Pages()
    pages((DATA / "vllm-0.32-live-1.prom").read_text())
    samples = [pages(before)]
    samples += [pages(hung.replace(cpu, str(float(cpu) + second / 100))) for second in range(6)]

    assert [sample.freshness for sample in samples] == [*FRESH[:5], "stale", "stale"]
    assert samples[0].iterations == 4.0
    assert samples[-1].error == (
        "4 requests are open, but nothing moved for 6.0 s: the engine hangs, waits, or takes one "
        "step that long"
    )
    assert known(samples[-1]) == {}
    assert (samples[-1].engine, samples[-1].model) == ("vllm", "small")


def test_a_page_that_moves_again_is_fresh_and_counts_from_the_last_good_one() -> None:
    pages = Pages()
    page = (VLLM + CPU).format(running=1, tokens=100, cpu=5)
    freshness = [pages(page).freshness for _ in range(7)]
    after = pages((VLLM + CPU).format(running=1, tokens=180, cpu=6))

    assert freshness == [*FRESH[:5], "stale", "stale"]
    assert (after.freshness, after.generation_tokens, after.interval_ns) == (
        "fresh",
        80.0,
        3 * SECOND,
    )


@pytest.mark.parametrize(
    "page",
    [
        # The second chunk of a long prompt: no token comes, but the cache fills.
        VLLM + "vllm:kv_cache_usage_perc 0.{kv:.0f}\n",
        # No step has been counted yet.
        "tgi_batch_current_size {running}\ntgi_queue_size {kv}\n",
        # An older build, which counts tokens when a request is over and no steps.
        "llamacpp:requests_processing {running}\nllamacpp:tokens_predicted_total {tokens}\n",
    ],
    ids=["prefill", "first step", "no pulse"],
)
def test_an_engine_that_is_at_work_on_something_else_is_not_stale(page: str) -> None:
    assert follow(Pages(), page, running=STILL, tokens=STILL, kv=MOVING) == FRESH


def test_stillness_counts_through_failed_scrapes() -> None:
    pages = Pages()
    pages(VLLM.format(running=1, tokens=5))
    for _ in range(6):
        pages.failed()

    assert pages(VLLM.format(running=1, tokens=5)).freshness == "stale"


RANKS = (
    'vllm:num_requests_running{{engine="0"}} 1\nvllm:num_requests_running{{engine="1"}} 1\n'
    'vllm:generation_tokens_total{{engine="0"}} {a}\n'
    'vllm:generation_tokens_total{{engine="1"}} {b}\n'
    'vllm:prompt_tokens_total{{engine="0"}} {c}\n'
    'vllm:prompt_tokens_total{{engine="1"}} {d}\n'
)


def test_a_rank_that_was_restarted_counts_from_zero_while_the_others_go_on() -> None:
    pages = Pages()
    pages(RANKS.format(a=1000, b=2000, c=10, d=20))
    second = pages(RANKS.format(a=1010, b=7, c=11, d=30))
    third = pages(RANKS.format(a=1011, b=9, c=11, d=30))

    # All of rank 1 began anew, what overtook its old value too.
    assert (second.restarted, second.generation_tokens, second.prompt_tokens) == (True, 17.0, 31.0)
    assert (third.restarted, third.generation_tokens, third.prompt_tokens) == (False, 3.0, 0.0)


def test_series_that_come_and_go_are_no_restart() -> None:
    pages = Pages()
    one = 'vllm:request_success_total{finished_reason="stop"} 50\n'
    other = 'vllm:request_success_total{finished_reason="length"} 3\n'
    pages(one)
    came = pages(one + other)
    gone = pages(one)
    again = pages(one + other)

    assert [s.restarted for s in (came, gone, again)] == [False] * 3
    assert [s.finished_requests for s in (came, gone, again)] == [3.0, 0.0, 3.0]


def test_series_that_a_restart_took_away_and_that_return_are_no_second_restart() -> None:
    pages = Pages()
    pages("vllm:generation_tokens_total 100\nvllm:num_preemptions_total 40\n")
    assert pages("vllm:generation_tokens_total 5\n").restarted
    third = pages("vllm:generation_tokens_total 9\nvllm:num_preemptions_total 1\n")

    assert (third.restarted, third.generation_tokens, third.preemptions) == (False, 4.0, 1.0)


def test_a_start_time_that_wanders_by_a_fraction_is_no_restart() -> None:
    pages = Pages()
    pages("process_start_time_seconds 100.5\nvllm:generation_tokens_total 50\n")
    second = pages("process_start_time_seconds 100.1\nvllm:generation_tokens_total 58\n")

    assert (second.restarted, second.generation_tokens) == (False, 8.0)


@pytest.mark.parametrize("value", ["+Inf", "-Inf", "NaN"])
def test_numbers_that_are_none_give_null_and_neither_growth_nor_a_restart(value: str) -> None:
    family = "vllm:e2e_request_latency_seconds"
    page = (
        "vllm:num_requests_running {0}\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc {0}\n"
        "vllm:generation_tokens_total {0}\nvllm:prompt_tokens_total {1}\n"
        f'{family}_bucket{{{{le="1"}}}} {{0}}\n{family}_count {{0}}\n{family}_sum {{0}}\n'
    )
    pages = Pages()
    pages(page.format(5, 1))
    second = pages(page.format(value, 2))
    third = pages(page.format(9, 3))
    fourth = pages(page.format(10, 4))

    assert known(second) == {"waiting": 1.0, "prompt_tokens": 1.0}
    assert second.histograms == ()
    assert (third.generation_tokens, third.prompt_tokens, third.restarted) == (None, 1.0, False)
    assert (fourth.generation_tokens, fourth.restarted) == (1.0, False)
    assert [s.freshness for s in (second, third, fourth)] == ["fresh"] * 3


def test_bucket_bounds_that_are_no_number_leave_the_bucket_out() -> None:
    family = "vllm:time_to_first_token_seconds"
    page = f'{family}_bucket{{{{le="x"}}}} {{0}}\n{family}_count {{0}}\n{family}_sum {{0}}\n'
    page += "vllm:num_requests_running 0\n"
    pages = Pages()
    pages(page.format(1))

    assert pages(page.format(3)).histograms == (HistogramDelta(stage="ttft", count=2.0, sum=2.0),)


def test_a_torn_page_gives_no_negative_buckets() -> None:
    family = "vllm:time_to_first_token_seconds"
    page = f'{family}_bucket{{{{le="1"}}}} {{}}\n{family}_count {{}}\n{family}_sum 3\n'
    page += "vllm:num_requests_running 0\n"
    pages = Pages()
    pages(page.format(1, 1))

    # The bucket was read a moment after the count.
    assert pages(page.format(3, 2)).histograms == (
        HistogramDelta(stage="ttft", count=1.0, sum=0.0),
    )


def test_ranks_with_other_buckets_are_told_without_any() -> None:
    family = "vllm:time_to_first_token_seconds"
    page = "vllm:num_requests_running 0\n" + "".join(
        f'{family}_bucket{{{{engine="{rank}",le="{bound}"}}}} {{0}}\n'
        f'{family}_count{{{{engine="{rank}"}}}} {{0}}\n{family}_sum{{{{engine="{rank}"}}}} {{0}}\n'
        for rank, bound in ((0, 1), (1, 2))
    )
    pages = Pages()
    pages(page.format(1))

    assert pages(page.format(2)).histograms == (HistogramDelta(stage="ttft", count=2.0, sum=2.0),)


def test_a_table_that_began_anew_gives_no_growth_once() -> None:
    pages = Pages(max_series=4)
    page = 'vllm:num_requests_running 1\nvllm:generation_tokens_total{{adapter="{}"}} {}\n'
    pages(page.format("a", 10))
    for adapter in "bcdef":
        sample = pages(page.format(adapter, 10))
        if sample.interval_ns is None:
            break

    assert sample.generation_tokens is None
    after = pages(page.format(adapter, 12))
    assert (after.generation_tokens, after.restarted) == (2.0, False)


def test_nan_and_unknown_pages_give_null() -> None:
    pages = Pages()
    assert known(pages("node_load1 0.5\n")) == {}
    unknown = pages("node_load1 0.5\n")
    assert (unknown.engine, unknown.freshness, known(unknown)) == (None, "fresh", {})
    assert known(pages("vllm:num_requests_running NaN\nvllm:num_requests_waiting 1\n")) == {
        "waiting": 1.0
    }


def test_engine_that_vanishes_from_a_page_does_not_restart_its_counters() -> None:
    pages = Pages()
    pages("vllm:generation_tokens_total 100\n")
    pages("python_info 1\n")
    after = pages("vllm:generation_tokens_total 104\n")

    assert (after.restarted, after.generation_tokens) == (False, 4.0)


def test_changed_buckets_are_left_out() -> None:
    pages = Pages()
    family = "vllm:time_to_first_token_seconds"
    page = f'vllm:num_requests_running 0\n{family}_bucket{{{{le="{{}}"}}}} 3\n'
    page += f"{family}_sum {{}}\n{family}_count {{}}\n"
    pages(page.format(1, 2, 4))
    second = pages(page.format(2, 3, 6))

    assert second.histograms == (HistogramDelta(stage="ttft", count=2.0, sum=1.0),)
