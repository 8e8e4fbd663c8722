"""The records that cross a process, frozen and typed; the ``.avsc`` of the same name is the source.

Field documentation (unit, what null means) stands in the Avro files, and
``tests/schemas/test_records.py`` proves that both agree in names, order, types and defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["normal", "workload", "fault", "unknown"]
How = Literal["measured", "inferred", "unknown"]
RequestState = Literal["open", "complete", "aborted"]
Freshness = Literal["fresh", "stale", "failed"]
AlertState = Literal["firing", "updated", "resolved"]
Severity = Literal["info", "warning", "critical"]
Action = Literal["concurrency_limit", "rate_limit", "weight", "drain", "restore"]
Effect = Literal["applied", "refused", "expired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """One part of one HTTP exchange with an inference server, as seen from outside. A short
    exchange has one part; a long stream is reported in several while it is still open, so that a
    stall shows before the stream ends. Prompts and completions are never carried, only sizes,
    counts and times.
    """

    request_id: str
    part: int
    state: RequestState
    instance: str
    source: str
    observed_at_ns: int
    endpoint: str
    model: str | None = None
    streaming: bool | None = None
    status: int | None = None
    arrival_ns: int
    request_end_ns: int | None = None
    first_byte_ns: int | None = None
    first_token_ns: int | None = None
    end_ns: int | None = None
    chunks_before: int
    chunk_base_ns: int | None = None
    chunk_deltas_us: tuple[int, ...] = ()
    request_bytes: int | None = None
    response_bytes: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    trace_id: str | None = None
    estimated: tuple[str, ...] = ()
    method: str | None = None
    max_tokens: int | None = None
    proxy_queue_us: int | None = None
    queue_us: int | None = None
    prefill_us: int | None = None
    decode_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Engine iterations (steps) of one instance, newest last; parallel arrays, one element a step.
    Steps read from the engine's own frames; steps recovered from chunk times stay inside the
    stream workers.
    """

    instance: str
    source: str
    observed_at_ns: int
    model: str | None = None
    start_ns: tuple[int, ...] = ()
    duration_us: tuple[int, ...] = ()
    decode_sequences: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    prefill_tokens: tuple[int, ...] = ()
    context_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramDelta:
    """Growth of one cumulative histogram of the engine between two scrapes."""

    stage: str
    count: float
    sum: float
    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """One scrape of an inference server's own metrics under one set of names for all engines.
    Counters are growth since the last good scrape; a counter that went back (restart) starts
    from 0. What an engine or version does not tell is null.
    """

    instance: str
    source: str
    observed_at_ns: int
    engine: str | None = None
    version: str | None = None
    model: str | None = None
    freshness: Freshness
    error: str | None = None
    scrape_ms: float
    interval_ns: int | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    prompt_tokens: float | None = None
    cached_tokens: float | None = None
    generation_tokens: float | None = None
    finished_requests: float | None = None
    preemptions: float | None = None
    iterations: float | None = None
    restarted: bool
    histograms: tuple[HistogramDelta, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """One process of an inference server over the interval of its HostSample."""

    pid: int
    role: str
    state: str
    cpu_ns: int | None = None
    runqueue_ns: int | None = None
    major_faults: int | None = None
    minor_faults: int | None = None
    involuntary_switches: int | None = None
    voluntary_switches: int | None = None
    rss_bytes: int | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadSample:
    """One busy thread over the interval in which threads were read."""

    pid: int
    tid: int
    name: str
    cpu_ns: int
    runqueue_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """What the operating system counted for one inference server and its machine."""

    instance: str
    source: str
    observed_at_ns: int
    host: str
    interval_ns: int
    lateness_us: int | None = None
    processes: tuple[ProcessSample, ...] = ()
    throttled_ns: int | None = None
    throttled_periods: int | None = None
    cpu_busy: float | None = None
    cpu_others: float | None = None
    cpu_steal: float | None = None
    runnable: int | None = None
    psi_cpu_us: int | None = None
    psi_memory_us: int | None = None
    psi_io_us: int | None = None
    memory_available_bytes: int | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    net_rx_bytes: int | None = None
    net_tx_bytes: int | None = None
    tcp_retransmits: int | None = None
    tcp_rtt_us: float | None = None
    clock_error_us: float | None = None
    clock_step_ns: int | None = None
    hot_threads: tuple[ThreadSample, ...] = ()
    numa_misses: int | None = None
    numa_remote_share: float | None = None
    server_retransmits: int | None = None
    connections: int | None = None
    client_limited_us: int | None = None
    accept_queue: int | None = None
    disk_busy: float | None = None
    cgroup_memory_bytes: int | None = None
    cgroup_memory_limit_bytes: int | None = None
    oom_kills: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class XpuSample:
    """One accelerator at one moment; counters are growth over the interval."""

    instance: str
    source: str
    observed_at_ns: int
    host: str
    vendor: str
    device: str
    name: str | None = None
    error: str | None = None
    utilisation: float | None = None
    memory_utilisation: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    core_clock_mhz: float | None = None
    core_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    xid: int | None = None
    pcie_rx_bytes_s: float | None = None
    pcie_tx_bytes_s: float | None = None
    link_bytes_s: float | None = None
    interval_ns: int | None = None
    parent: str | None = None
    memory_temperature_c: float | None = None
    link_errors: int | None = None
    pcie_replays: int | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSample:
    """Times that the kernel saw for one inference server, by probes that are always limited to its
    processes.
    """

    instance: str
    source: str
    observed_at_ns: int
    host: str
    interval_ns: int
    histograms: tuple[HistogramDelta, ...] = ()
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """Samples that fell into one stage."""

    stage: str
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackCount:
    """Samples with one call stack."""

    stack: str
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackProfile:
    """Where a process of an inference server spent a few seconds, by its sampled call stacks. Names
    of functions and files only; never an argument or a variable.
    """

    instance: str
    source: str
    observed_at_ns: int
    host: str
    alert_id: str | None = None
    fingerprint: str | None = None
    pid: int
    role: str
    duration_ms: float
    rate_hz: float
    samples: int
    failed: int
    stages: tuple[StageShare, ...] = ()
    stacks: tuple[StackCount, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHealth:
    """How one source does."""

    name: str
    state: str
    failures: int
    error: str | None = None
    cpu_pct: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSample:
    """How a collector agent does, and what it costs the machine that it watches."""

    instance: str
    source: str
    observed_at_ns: int
    host: str
    boot_ns: int
    uptime_s: float
    cpu_pct: float | None = None
    rss_mb: float | None = None
    published_bytes_s: float | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    sources: tuple[SourceHealth, ...] = ()
    settings_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Share of one stage in the time of a window's requests."""

    stage: str
    mean_ms: float | None = None
    error_ms: float | None = None
    how: How


@dataclass(frozen=True, slots=True, kw_only=True)
class StageScore:
    """How one stage of one window compares with what its workload explains."""

    stage: str
    observed_ms: float
    expected_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    surprise: float | None = None
    score: float | None = None
    threshold: float | None = None
    observations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One measured fact that speaks for a cause, compared with its own baseline."""

    family: str
    signal: str
    observed: float
    baseline: float | None = None
    surprise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProfile:
    """One window of one instance: the work it did, where the time went, what was expected and the
    verdict.
    """

    batch_id: str
    instance: str
    service: str
    model: str | None = None
    window_start_ns: int
    window_end_ns: int
    closed_at_ns: int
    requests_started: int
    requests_finished: int
    requests_failed: int
    requests_open: int
    chunks: int
    steps: int
    late_samples: int
    silent_sources: tuple[str, ...] = ()
    features: Mapping[str, float] = field(default_factory=dict)
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    stages: tuple[StageTime, ...] = ()
    remainder_ms: float | None = None
    scores: tuple[StageScore, ...] = ()
    stage: str | None = None
    observed_ms: float | None = None
    expected_ms: float | None = None
    score: float | None = None
    threshold: float | None = None
    verdict: Verdict
    reason: str
    evidence: tuple[Evidence, ...] = ()
    model_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One ranked explanation of an alert."""

    family: str
    cause: str
    score: float
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """State of one problem; the fingerprint is one per instance, stage and kind, and every record
    carries the whole state.
    """

    alert_id: str
    fingerprint: str
    state: AlertState
    severity: Severity
    verdict: Verdict
    instance: str
    service: str
    model: str | None = None
    stage: str
    fired_ns: int
    updated_ns: int
    resolved_ns: int | None = None
    first_batch_ns: int
    observed_ms: float | None = None
    expected_ms: float | None = None
    score: float
    threshold: float
    reason: str
    causes: tuple[Cause, ...] = ()
    batches: tuple[str, ...] = ()
    peers_affected: int
    peers_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A lease on a router: do this to this target until the lease ends or is renewed."""

    command_id: str
    target: str
    service: str
    epoch: int
    issued_ns: int
    lease_ms: int
    action: Action
    value: float | None = None
    floor: float | None = None
    reason: str
    alert: str | None = None
    dry_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """What a router did with a command."""

    ack_id: str
    command_id: str
    target: str
    epoch: int
    router: str
    effect: Effect
    detail: str | None = None
    dry_run: bool
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """State of one instance's detector, so that another worker goes on where this one ended."""

    instance: str
    model: str | None = None
    version: str
    taken_ns: int
    format: int
    state: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """Bytes that could not be taken, as they came."""

    topic: str
    partition: int
    offset: int
    at_ns: int
    component: str
    reason: str
    detail: str
    key: bytes | None = None
    payload: bytes
