"""What each engine calls the things of an :class:`EngineSample`, version by version.

A row lists alternatives, newest name first; the first one on the page is taken, because versions
between two names show both. A name missing from a page means null. Where an engine keeps a total
only in parts, the parts of one alternative are added up. A name is that of a metric, or of those
series of it that have one label value, written ``name{label="value"}``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Names of a histogram, or of a sum and a count that were never one histogram."""

    sum: str
    count: str
    bucket: str | None = None
    unit: float = 1.0
    """What one of the sum is in seconds, or tokens."""


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
    pulse: Names = ()
    """Totals that move with the steps of the engine, so that they stand still when it hangs."""
    model_label: str = "model_name"
    anchor: str | None = None
    """A metric that only the models have which do the work; of other metrics, the series of these
    models count, and not those of the steps around them."""
    version_path: str | None = None
    """Path of a JSON answer that tells the version, None where asking costs the engine work."""
    version_key: str = "version"

    def names(self) -> Iterator[str]:
        """All names of the table, buckets last."""
        for named in (self.gauges, self.shares):
            for alternatives in named.values():
                yield from alternatives
        for totals in self.counters.values():
            for parts in totals:
                yield from parts
        for distributions in self.histograms.values():
            for distribution in distributions:
                yield from (distribution.sum, distribution.count)
                if distribution.bucket:
                    yield distribution.bucket


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
    pulse=("vllm:generation_tokens_total",),
    version_path="/version",
)


def _in_ray(name: str) -> str:
    """Ray allows no colon and puts its own name first."""
    return "ray_" + name.replace(":", "_")


def _distribution_in_ray(names: Distribution) -> Distribution:
    bucket = _in_ray(names.bucket) if names.bucket else None
    return replace(names, sum=_in_ray(names.sum), count=_in_ray(names.count), bucket=bucket)


RAY_VLLM = replace(
    VLLM,
    gauges={key: tuple(map(_in_ray, names)) for key, names in VLLM.gauges.items()},
    shares={key: tuple(map(_in_ray, names)) for key, names in VLLM.shares.items()},
    counters={
        key: tuple(tuple(map(_in_ray, parts)) for parts in totals)
        for key, totals in VLLM.counters.items()
    },
    histograms={
        stage: tuple(map(_distribution_in_ray, alternatives))
        for stage, alternatives in VLLM.histograms.items()
    },
    # Ray passes values on every few seconds, ten unless told otherwise.
    pulse=(),
    version_path=None,
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
        # sglang:time_per_output_token_seconds of 0.4 held a mean up to each token, not TPOT.
        "tpot": (histogram("sglang:request_time_per_output_token_seconds"),),
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
    pulse=("tgi_batch_inference_count",),
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
    # It renders the page between two steps, so when it hangs no page comes at all.
    pulse=("llamacpp:n_decode_total",),
    version_path="/props",
    version_key="build_info",
)

LMDEPLOY = Engine(
    name="lmdeploy",
    gauges={
        "running": ("lmdeploy:num_requests_running",),
        "waiting": ("lmdeploy:num_requests_waiting",),
    },
    shares={"kv_usage": ("lmdeploy:gpu_cache_usage_perc",)},
    counters={
        "prompt_tokens": (("lmdeploy:prompt_tokens_total",),),
        "cached_tokens": (("lmdeploy:cached_tokens_total",),),
        "generation_tokens": (("lmdeploy:generation_tokens_total",),),
        "finished_requests": (("lmdeploy:request_success_total",),),
        "iterations": (("lmdeploy:iteration_tokens_total_count",),),
    },
    histograms={
        "ttft": (histogram("lmdeploy:time_to_first_token_seconds"),),
        "itl": (histogram("lmdeploy:iter_token_latency"),),
        "e2e": (histogram("lmdeploy:e2e_request_latency_seconds"),),
        "queue": (histogram("lmdeploy:request_queue_time_seconds"),),
        "prefill": (histogram("lmdeploy:request_prefill_time_seconds"),),
        "decode": (histogram("lmdeploy:request_decode_time_seconds"),),
        "inference": (histogram("lmdeploy:request_inference_time_seconds"),),
        "iteration_tokens": (histogram("lmdeploy:iteration_tokens_total"),),
        "prompt_tokens": (histogram("lmdeploy:request_prompt_tokens"),),
        "generation_tokens": (histogram("lmdeploy:request_generation_tokens"),),
    },
    pulse=("lmdeploy:generation_tokens_total",),
)

TENSORRT_LLM = Engine(
    name="tensorrt_llm",
    gauges={
        "running": ("trtllm_num_requests_running",),
        "waiting": ("trtllm_num_requests_waiting",),
    },
    shares={"kv_usage": ("trtllm_kv_cache_utilization",)},
    counters={
        "prompt_tokens": (("trtllm_prompt_tokens_total",),),
        "generation_tokens": (("trtllm_generation_tokens_total",),),
        "finished_requests": (("trtllm_request_success_total",),),
    },
    histograms={
        "ttft": (histogram("trtllm_time_to_first_token_seconds"),),
        "tpot": (histogram("trtllm_time_per_output_token_seconds"),),
        "e2e": (histogram("trtllm_e2e_request_latency_seconds"),),
        "queue": (histogram("trtllm_request_queue_time_seconds"),),
        "prefill": (histogram("trtllm_request_prefill_time_seconds"),),
        "decode": (histogram("trtllm_request_decode_time_seconds"),),
        "inference": (histogram("trtllm_request_inference_time_seconds"),),
    },
    version_path="/version",
)

_REQUESTS = 'nv_trt_llm_request_metrics{{request_type="{}"}}'.format
_TRITON_TIME = 1e-6


def _triton_time(name: str) -> tuple[Distribution, ...]:
    count = "nv_inference_request_success"
    return (Distribution(sum=name, count=count, unit=_TRITON_TIME),)


TRITON = Engine(
    name="triton",
    gauges={
        "running": (_REQUESTS("scheduled"),),
        "waiting": (_REQUESTS("waiting"), "nv_inference_pending_request_count"),
    },
    shares={"kv_usage": ('nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}',)},
    counters={
        "finished_requests": (("nv_inference_request_success",),),
        "iterations": (('nv_trt_llm_general_metrics{general_type="iteration_counter"}',),),
    },
    histograms={
        "e2e": _triton_time("nv_inference_request_duration_us"),
        "queue": _triton_time("nv_inference_queue_duration_us"),
        "inference": _triton_time("nv_inference_compute_infer_duration_us"),
    },
    model_label="model",
    anchor="nv_trt_llm_request_metrics",
)

DYNAMO = Engine(
    name="dynamo",
    # Its gauges are of requests before the first token and before the last one, which is neither
    # running nor waiting.
    gauges={},
    shares={},
    counters={
        "prompt_tokens": (("dynamo_frontend_input_sequence_tokens_sum",),),
        "generation_tokens": (
            ("dynamo_frontend_output_tokens_total",),
            ("dynamo_frontend_output_sequence_tokens_sum",),
        ),
        "finished_requests": (("dynamo_frontend_requests_total",),),
    },
    histograms={
        "ttft": (histogram("dynamo_frontend_time_to_first_token_seconds"),),
        "itl": (histogram("dynamo_frontend_inter_token_latency_seconds"),),
        "e2e": (histogram("dynamo_frontend_request_duration_seconds"),),
        "prompt_tokens": (histogram("dynamo_frontend_input_sequence_tokens"),),
        "generation_tokens": (histogram("dynamo_frontend_output_sequence_tokens"),),
    },
    model_label="model",
)

OLLAMA = Engine(
    name="ollama",
    gauges={},
    shares={},
    counters={},
    histograms={},
    version_path="/api/version",
)
"""Has no metrics; that it answers, its version and the models it has loaded are all it tells."""

ENGINES = (VLLM, RAY_VLLM, SGLANG, TGI, LLAMACPP, LMDEPLOY, TENSORRT_LLM, TRITON, DYNAMO)
"""Those that have a metrics page."""

SELECTED = {
    name.partition("{")[0]: name.partition("{")[2].partition("=")[0]
    for engine in ENGINES
    for name in engine.names()
    if "{" in name
}
"""Label by whose values a metric is told apart, of those that are."""

CPU_SECONDS = "process_cpu_seconds_total"
"""CPU time of the process that answers; moves with every page that it really renders."""
START_SECONDS = "process_start_time_seconds"
"""When that process began."""
TOGETHER_LABELS = ("tp_rank", "pp_rank", "moe_ep_rank")
"""Ranks that compute the same requests together; only the first one's values are counted."""
APART_LABELS = ("engine", "dp_rank", "ReplicaId", "WorkerId")
"""Ranks that compute requests of their own; each can be restarted while the others go on."""
PRIORITY_LABEL = "priority"
"""Where a gauge has it, the series without a value of it is the total of the others."""

WANTED = frozenset(
    {name.partition("{")[0] for engine in ENGINES for name in engine.names()}
    | {engine.anchor for engine in ENGINES if engine.anchor}
    | {CPU_SECONDS, START_SECONDS}
)
"""Names of all metrics that are read from a page."""
