"""What each engine calls the things of an :class:`EngineSample`, version by version.

A row lists alternatives, newest name first; the first one on the page is taken, because versions
between two names show both. A name missing from a page means null. Where an engine keeps a total
only in parts, the parts of one alternative are added up.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Names of a histogram, or of a sum and a count that were never one histogram."""

    sum: str
    count: str
    bucket: str | None = None


def histogram(name: str) -> Distribution:
    """A histogram as Prometheus clients show it."""
    return Distribution(sum=f"{name}_sum", count=f"{name}_count", bucket=f"{name}_bucket")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How one engine names its metrics."""

    name: str
    gauges: Mapping[str, Names]
    """Field of the sample → alternatives, added up over the data-parallel ranks."""
    shares: Mapping[str, Names]
    """Field of the sample → alternatives, averaged over the data-parallel ranks."""
    counters: Mapping[str, tuple[Names, ...]]
    """Field of the sample → alternatives, each the parts of one total."""
    histograms: Mapping[str, tuple[Distribution, ...]]
    """Stage → alternatives."""
    version_path: str | None = None
    """Path of a JSON answer that tells the version, None where asking costs the engine work."""
    version_key: str = "version"


VLLM = Engine(
    name="vllm",
    gauges={
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
    },
    shares={
        # The older name is that of the time when every cache was a GPU's.
        "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    },
    counters={
        "prompt_tokens": (("vllm:prompt_tokens_total",),),
        # vllm:gpu_prefix_cache_hits of 0.8 and 0.9 counted blocks, so it is no alternative.
        "cached_tokens": (("vllm:prompt_tokens_cached_total",), ("vllm:prefix_cache_hits_total",)),
        "generation_tokens": (("vllm:generation_tokens_total",),),
        "finished_requests": (("vllm:request_success_total",),),
        "preemptions": (("vllm:num_preemptions_total",),),
        "iterations": (("vllm:iteration_tokens_total_count",),),
    },
    histograms={
        "ttft": (histogram("vllm:time_to_first_token_seconds"),),
        # The older name is misleading: it holds gaps between tokens, not means of requests.
        "itl": (
            histogram("vllm:inter_token_latency_seconds"),
            histogram("vllm:time_per_output_token_seconds"),
        ),
        "tpot": (histogram("vllm:request_time_per_output_token_seconds"),),
        "e2e": (histogram("vllm:e2e_request_latency_seconds"),),
        "queue": (
            histogram("vllm:request_queue_time_seconds"),
            histogram("vllm:time_in_queue_requests"),
        ),
        "prefill": (histogram("vllm:request_prefill_time_seconds"),),
        "decode": (histogram("vllm:request_decode_time_seconds"),),
        "inference": (histogram("vllm:request_inference_time_seconds"),),
        "iteration_tokens": (histogram("vllm:iteration_tokens_total"),),
        "prompt_tokens": (histogram("vllm:request_prompt_tokens"),),
        "generation_tokens": (histogram("vllm:request_generation_tokens"),),
    },
    version_path="/version",
)

SGLANG = Engine(
    name="sglang",
    gauges={
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
    },
    shares={"kv_usage": ("sglang:token_usage",)},
    counters={
        "prompt_tokens": (("sglang:prompt_tokens_total",),),
        "cached_tokens": (("sglang:cached_tokens_total",),),
        "generation_tokens": (("sglang:generation_tokens_total",),),
        "finished_requests": (("sglang:num_requests_total",),),
        "preemptions": (("sglang:num_retracted_requests_total",),),
        "iterations": (("sglang:cuda_graph_passes_total",),),
    },
    histograms={
        "ttft": (histogram("sglang:time_to_first_token_seconds"),),
        "itl": (histogram("sglang:inter_token_latency_seconds"),),
        "tpot": (histogram("sglang:time_per_output_token_seconds"),),
        "e2e": (histogram("sglang:e2e_request_latency_seconds"),),
        "queue": (histogram("sglang:queue_time_seconds"),),
        "prompt_tokens": (histogram("sglang:prompt_tokens_histogram"),),
        "generation_tokens": (histogram("sglang:generation_tokens_histogram"),),
    },
)

TGI = Engine(
    name="tgi",
    gauges={
        "running": ("tgi_batch_current_size",),
        "waiting": ("tgi_queue_size",),
    },
    shares={},
    counters={
        "prompt_tokens": (("tgi_request_input_length_sum",),),
        "generation_tokens": (("tgi_request_generated_tokens_sum",),),
        "finished_requests": (("tgi_request_success",),),
        "iterations": (("tgi_batch_inference_count",),),
    },
    histograms={
        "tpot": (histogram("tgi_request_mean_time_per_token_duration"),),
        "e2e": (histogram("tgi_request_duration"),),
        "queue": (histogram("tgi_request_queue_duration"),),
        "inference": (histogram("tgi_request_inference_duration"),),
        "prompt_tokens": (histogram("tgi_request_input_length"),),
        "generation_tokens": (histogram("tgi_request_generated_tokens"),),
    },
    version_path="/info",
)

LLAMACPP = Engine(
    name="llamacpp",
    gauges={
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
    },
    # Newer versions do not tell it.
    shares={"kv_usage": ("llamacpp:kv_cache_usage_ratio",)},
    counters={
        # Its prompt tokens leave the cached ones out, those of the others do not.
        "prompt_tokens": (("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"),),
        "cached_tokens": (("llamacpp:prompt_tokens_cached_total",),),
        "generation_tokens": (("llamacpp:tokens_predicted_total",),),
        "iterations": (("llamacpp:n_decode_total",),),
    },
    histograms={
        "itl": (
            Distribution(
                sum="llamacpp:tokens_predicted_seconds_total",
                count="llamacpp:tokens_predicted_total",
            ),
        ),
    },
    version_path="/props",
    version_key="build_info",
)

ENGINES = (VLLM, SGLANG, TGI, LLAMACPP)

CPU_SECONDS = "process_cpu_seconds_total"
"""CPU time of the process that answers; moves with every page that it really renders."""
START_SECONDS = "process_start_time_seconds"
"""When that process began."""
RANK_LABELS = ("tp_rank", "pp_rank", "moe_ep_rank")
"""Ranks that compute the same requests together; only the first one's values are counted."""
MODEL_LABEL = "model_name"
