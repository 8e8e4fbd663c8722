from pathlib import Path
from typing import Any

import pytest

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

    def __init__(self) -> None:
        self.parser = Parser()
        self.tracker = Tracker("h:1")
        self.now_ns = 0

    def __call__(self, page: str) -> EngineSample:
        self.now_ns += SECOND
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


OPEN = "vllm:num_requests_running {running}\nvllm:generation_tokens_total {tokens}\n"


@pytest.mark.parametrize(
    ("running", "tokens", "cpu", "freshness"),
    [
        (1, 100, "process_cpu_seconds_total 5\n", "stale"),
        (0, 100, "process_cpu_seconds_total 5\n", "fresh"),
        (1, 100, "process_cpu_seconds_total 5.1\n", "fresh"),
        (1, 101, "process_cpu_seconds_total 5\n", "fresh"),
        (1, 100, "", "fresh"),
    ],
)
def test_stale_needs_open_requests_and_everything_frozen(
    running: int, tokens: int, cpu: str, freshness: str
) -> None:
    pages = Pages()
    frozen_cpu = cpu and "process_cpu_seconds_total 5\n"
    pages(OPEN.format(running=1, tokens=100) + frozen_cpu)
    pages(OPEN.format(running=1, tokens=100) + frozen_cpu)
    third = pages(OPEN.format(running=running, tokens=tokens) + cpu)

    assert third.freshness == freshness
    if freshness == "stale":
        assert known(third) == {}
        assert "no counter" in str(third.error) or "neither a counter" in str(third.error)


def test_one_frozen_page_alone_is_not_stale_and_a_moving_one_is_fresh_again() -> None:
    pages = Pages()
    frozen = OPEN.format(running=1, tokens=100) + "process_cpu_seconds_total 5\n"
    freshness = [pages(frozen).freshness for _ in range(4)]
    after = pages(OPEN.format(running=1, tokens=180) + "process_cpu_seconds_total 6\n")

    assert freshness == ["fresh", "fresh", "stale", "stale"]
    # Growth since the last page that was good, the second one.
    assert (after.freshness, after.generation_tokens, after.interval_ns) == (
        "fresh",
        80.0,
        3 * SECOND,
    )


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
