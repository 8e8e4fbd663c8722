"""The /metrics page of a simulated engine, with names, labels and buckets of vLLM 0.32."""

import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from latencyprism.simulator.config import EngineConfig
from latencyprism.simulator.engine import Gauges, Totals
from latencyprism.simulator.stats import EngineStats, Histogram

_STARTED_S = time.time()

_HISTOGRAMS = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "tpot": "request_time_per_output_token_seconds",
    "e2e": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
    "decode": "request_decode_time_seconds",
    "inference": "request_inference_time_seconds",
    "iteration_tokens": "iteration_tokens_total",
    "prompt_tokens": "request_prompt_tokens",
    "generation_tokens": "request_generation_tokens",
}


def render(
    *, model: str, config: EngineConfig, gauges: Gauges, totals: Totals, stats: EngineStats
) -> str:
    """The page in Prometheus' text format."""
    labels = f'engine="0",model_name="{model}"'
    return "\n".join((*_process(), *_engine(labels, config, gauges, totals, stats), ""))


def _engine(
    labels: str, config: EngineConfig, gauges: Gauges, totals: Totals, stats: EngineStats
) -> Iterator[str]:
    yield from _gauge("num_requests_running", "Requests in the running batch.", labels,
                      {"": gauges.running})  # fmt: skip
    yield from _gauge("num_requests_waiting", "Requests waiting to be scheduled.", labels,
                      {"": gauges.waiting})  # fmt: skip
    yield from _gauge("num_requests_waiting_by_reason", "Waiting requests by reason.", labels,
                      {'reason="capacity"': gauges.waiting, 'reason="deferred"': 0})  # fmt: skip
    yield from _gauge("engine_sleep_state", "Whether the engine is awake.", labels,
                      {'sleep_state="awake"': 1, 'sleep_state="weights_offloaded"': 0,
                       'sleep_state="discard_all"': 0})  # fmt: skip
    yield from _gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", labels,
                      {"": gauges.kv_usage})  # fmt: skip
    computed = totals.prompt_tokens - totals.cached_tokens
    for name, words, values in (
        ("prefix_cache_queries", "Prompt tokens looked up.", {"": totals.prompt_tokens}),
        ("prefix_cache_hits", "Prompt tokens found.", {"": totals.cached_tokens}),
        ("external_prefix_cache_queries", "Prompt tokens looked up elsewhere.", {"": 0}),
        ("external_prefix_cache_hits", "Prompt tokens found elsewhere.", {"": 0}),
        ("num_preemptions", "Sequences preempted.", {"": totals.preemptions}),
        ("prompt_tokens", "Prompt tokens taken in.", {"": totals.prompt_tokens}),
        (
            "prompt_tokens_by_source",
            "Prompt tokens by where their KV came from.",
            {
                'source="local_compute"': computed,
                'source="local_cache_hit"': totals.cached_tokens,
                'source="external_kv_transfer"': 0,
            },
        ),
        ("prompt_tokens_cached", "Prompt tokens from a cache.", {"": totals.cached_tokens}),
        ("generation_tokens", "Tokens generated.", {"": totals.generated_tokens}),
        (
            "request_success",
            "Requests that ended, by how.",
            {
                'finished_reason="stop"': 0,
                'finished_reason="length"': totals.finished,
                'finished_reason="abort"': totals.aborted,
                'finished_reason="error"': 0,
            },
        ),
    ):
        yield from _counter(name, words, labels, values)
    for stage, histogram in stats.histograms.items():
        yield from _histogram(_HISTOGRAMS[stage], labels, histogram)
    blocks = config.kv_tokens // config.block_tokens
    yield from _gauge("cache_config_info", "The cache's configuration.", 'engine="0"',
                      {f'block_size="{config.block_tokens}",enable_prefix_caching="True",'
                       f'num_gpu_blocks="{blocks}"': 1})  # fmt: skip


def _process() -> Iterator[str]:
    pages = [int(n) for n in Path("/proc/self/statm").read_text().split()[:2]]
    page = resource.getpagesize()
    for kind, name, value in (
        ("gauge", "virtual_memory_bytes", pages[0] * page),
        ("gauge", "resident_memory_bytes", pages[1] * page),
        ("gauge", "start_time_seconds", round(_STARTED_S, 2)),
        ("counter", "cpu_seconds_total", round(time.process_time(), 2)),
        ("gauge", "open_fds", sum(1 for _ in Path("/proc/self/fd").iterdir())),
    ):
        yield f"# HELP process_{name} Of the server's process."
        yield f"# TYPE process_{name} {kind}"
        yield f"process_{name} {value}"


def _gauge(name: str, words: str, labels: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP vllm:{name} {words}"
    yield f"# TYPE vllm:{name} gauge"
    for label, value in values.items():
        yield f"vllm:{name}{{{_join(labels, label)}}} {float(value)}"


def _counter(name: str, words: str, labels: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP vllm:{name}_total {words}"
    yield f"# TYPE vllm:{name}_total counter"
    for label, value in values.items():
        yield f"vllm:{name}_total{{{_join(labels, label)}}} {float(value)}"


def _histogram(name: str, labels: str, histogram: Histogram) -> Iterator[str]:
    yield f"# HELP vllm:{name} As vLLM's histogram of the same name."
    yield f"# TYPE vllm:{name} histogram"
    below = 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        below += count
        yield f'vllm:{name}_bucket{{{labels},le="{bound}"}} {float(below)}'
    yield f"vllm:{name}_count{{{labels}}} {float(histogram.count)}"
    yield f"vllm:{name}_sum{{{labels}}} {histogram.sum}"


def _join(*labels: str) -> str:
    return ",".join(label for label in labels if label)
