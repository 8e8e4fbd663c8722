-- One table a topic, one row a record.
--
-- A record that is delivered again has the same key, so ReplacingMergeTree keeps one row of it once
-- parts are merged and FINAL, which every view uses, shows one row before that. Rows age by the time
-- they were written, so that a replayed recording stays as long as live data; `migrate` sets the
-- age from store.retention_days. A cluster needs ON CLUSTER here, ReplicatedReplacingMergeTree, and
-- Distributed tables over these, sharded by the first column of the key.

CREATE TABLE IF NOT EXISTS request_parts
(
    request_id String
        COMMENT 'Identifies the exchange; the same in all its parts and in every repeated delivery.'
        CODEC(ZSTD(1)),
    part Int32
        COMMENT '0 for the first part of this exchange, then 1, 2, ...'
        CODEC(T64, ZSTD(1)),
    state LowCardinality(String)
        COMMENT 'Open: more parts follow; complete: the answer ended; aborted: the connection ended before the answer did.'
        CODEC(ZSTD(1)),
    instance LowCardinality(String)
        COMMENT 'Server that answered, as host:port.'
        CODEC(ZSTD(1)),
    source LowCardinality(String)
        COMMENT 'Collector that saw it: network, gateway, otlp or import.'
        CODEC(ZSTD(1)),
    observed_at DateTime64(9, 'UTC')
        COMMENT 'When the newest event of this part happened, clock of the observing host (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    endpoint LowCardinality(String)
        COMMENT 'Path of the request without its query.'
        CODEC(ZSTD(1)),
    model LowCardinality(Nullable(String))
        COMMENT 'Model named by the request or the answer; null when neither named one or it was not read.'
        CODEC(ZSTD(1)),
    streaming Nullable(Bool)
        COMMENT 'Whether the answer is an event stream; null until its headers are seen.'
        CODEC(ZSTD(1)),
    status Nullable(Int32)
        COMMENT 'HTTP status; null until the answer begins.'
        CODEC(T64, ZSTD(1)),
    arrival DateTime64(9, 'UTC')
        COMMENT 'First byte of the request (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    request_end Nullable(DateTime64(9, 'UTC'))
        COMMENT 'Last byte of the request; null when not seen yet (UTC, ns precision).'
        CODEC(Delta, ZSTD(1)),
    first_byte Nullable(DateTime64(9, 'UTC'))
        COMMENT 'First byte of the answer (its headers, not a token); null when not seen yet (UTC, ns precision).'
        CODEC(Delta, ZSTD(1)),
    first_token Nullable(DateTime64(9, 'UTC'))
        COMMENT 'First event with content, which is what TTFT is measured to; null when not seen yet (UTC, ns precision).'
        CODEC(Delta, ZSTD(1)),
    end Nullable(DateTime64(9, 'UTC'))
        COMMENT 'Last byte of the answer; null while open (UTC, ns precision).'
        CODEC(Delta, ZSTD(1)),
    chunks_before Int32
        COMMENT 'Content events reported by earlier parts.'
        CODEC(T64, ZSTD(1)),
    chunk_base Nullable(DateTime64(9, 'UTC'))
        COMMENT 'Time of the first content event of this part; null when the part has none (UTC, ns precision).'
        CODEC(Delta, ZSTD(1)),
    chunk_deltas_us Array(Int32)
        COMMENT 'Microseconds from each content event of this part to the next; one fewer than the part has events.'
        CODEC(ZSTD(1)),
    request_bytes Nullable(Int64)
        COMMENT 'Body bytes of the request so far; null when not seen.'
        CODEC(T64, ZSTD(1)),
    response_bytes Nullable(Int64)
        COMMENT 'Body bytes of the answer so far; null when not seen.'
        CODEC(T64, ZSTD(1)),
    prompt_tokens Nullable(Int64)
        COMMENT 'Prompt tokens from the usage block or the request; null when neither told.'
        CODEC(T64, ZSTD(1)),
    cached_tokens Nullable(Int64)
        COMMENT 'Prompt tokens answered from the prefix cache, from the usage block; null when not told.'
        CODEC(T64, ZSTD(1)),
    completion_tokens Nullable(Int64)
        COMMENT 'Generated tokens from the usage block; null when not told (a chunk is not a token).'
        CODEC(T64, ZSTD(1)),
    trace_id Nullable(String)
        COMMENT 'W3C trace id, 32 hex digits, from a traceparent header; null without one.'
        CODEC(ZSTD(1)),
    estimated Array(String)
        COMMENT 'Names of fields that are estimates, such as chunk times read from TLS record sizes.'
        CODEC(ZSTD(1)),
    agent LowCardinality(String)
        COMMENT 'Id of the agent or worker that published it.'
        CODEC(ZSTD(1)),
    inserted_at DateTime64(3, 'UTC') DEFAULT now64(3)
        COMMENT 'When the writer inserted the row; counts for its age.'
        CODEC(Delta, ZSTD(1)),
    INDEX inserted inserted_at TYPE minmax GRANULARITY 1,
    INDEX by_id request_id TYPE bloom_filter(0.01) GRANULARITY 4,
    CONSTRAINT sane_time CHECK arrival >= toDateTime64('2000-01-01 00:00:00', 9, 'UTC')
        AND arrival < toDateTime64('2100-01-01 00:00:00', 9, 'UTC')
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMMDD(arrival)
ORDER BY (instance, arrival, request_id, part)
TTL toDateTime(inserted_at) + toIntervalDay(30)
SETTINGS ttl_only_drop_parts = 1
COMMENT 'Parts of exchanges with inference servers; the view requests has one row an exchange.';

CREATE TABLE IF NOT EXISTS step_batches
(
    instance LowCardinality(String)
        COMMENT 'Server that ran them, as host:port.'
        CODEC(ZSTD(1)),
    source LowCardinality(String)
        COMMENT 'What told them: kernel (frames between the engine''s processes), log or simulator.'
        CODEC(ZSTD(1)),
    observed_at DateTime64(9, 'UTC')
        COMMENT 'End of the last step (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    model LowCardinality(Nullable(String))
        COMMENT 'Model served; null when not known.'
        CODEC(ZSTD(1)),
    start Array(DateTime64(9, 'UTC'))
        COMMENT 'Start of each step (UTC, ns precision).'
        CODEC(ZSTD(1)),
    duration_us Array(Int64)
        COMMENT 'Duration of each step, microseconds.'
        CODEC(ZSTD(1)),
    decode_sequences Array(Int32)
        COMMENT 'Sequences that decoded one token or more in each step.'
        CODEC(ZSTD(1)),
    joined Array(Int32)
        COMMENT 'Sequences whose first token came out of each step.'
        CODEC(ZSTD(1)),
    left Array(Int32)
        COMMENT 'Sequences that ended with each step.'
        CODEC(ZSTD(1)),
    prefill_tokens Array(Int64)
        COMMENT 'Prompt tokens computed in each step; -1 where not known.'
        CODEC(ZSTD(1)),
    context_tokens Array(Int64)
        COMMENT 'Sum of context length over the decoding sequences of each step; -1 where not known.'
        CODEC(ZSTD(1)),
    agent LowCardinality(String)
        COMMENT 'Id of the agent or worker that published it.'
        CODEC(ZSTD(1)),
    inserted_at DateTime64(3, 'UTC') DEFAULT now64(3)
        COMMENT 'When the writer inserted the row; counts for its age.'
        CODEC(Delta, ZSTD(1)),
    CONSTRAINT sane_time CHECK observed_at >= toDateTime64('2000-01-01 00:00:00', 9, 'UTC')
        AND observed_at < toDateTime64('2100-01-01 00:00:00', 9, 'UTC')
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMMDD(observed_at)
ORDER BY (instance, observed_at, source, agent)
TTL toDateTime(inserted_at) + toIntervalDay(30)
SETTINGS ttl_only_drop_parts = 1
COMMENT 'Engine iterations in packs; the view steps has one row a step.';

CREATE TABLE IF NOT EXISTS engine_samples_raw
(
    instance LowCardinality(String)
        COMMENT 'Server scraped, as host:port.'
        CODEC(ZSTD(1)),
    source LowCardinality(String)
        COMMENT 'Always engine, or import for a converted recording.'
        CODEC(ZSTD(1)),
    observed_at DateTime64(9, 'UTC')
        COMMENT 'When the answer was complete (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    engine LowCardinality(Nullable(String))
        COMMENT 'vllm, sglang, tgi, llamacpp, ...; null when not recognised.'
        CODEC(ZSTD(1)),
    version LowCardinality(Nullable(String))
        COMMENT 'Version where the engine tells one; null otherwise.'
        CODEC(ZSTD(1)),
    model LowCardinality(Nullable(String))
        COMMENT 'Model served; null when not told.'
        CODEC(ZSTD(1)),
    freshness LowCardinality(String)
        COMMENT 'Fresh: a whole page was read; stale: the page was read but the engine has not updated it; failed: no page, or one that could not be parsed.'
        CODEC(ZSTD(1)),
    error Nullable(String)
        COMMENT 'Why the scrape failed; null when it did not.'
        CODEC(ZSTD(1)),
    scrape_ms Float64
        COMMENT 'How long the scrape took, ms; a signal of its own.'
        CODEC(Gorilla, ZSTD(1)),
    interval_ns Nullable(Int64)
        COMMENT 'Time since the last good scrape; null for the first, whose counters are null too (ns).'
        CODEC(T64, ZSTD(1)),
    running Nullable(Float64)
        COMMENT 'Requests in the running batch; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    waiting Nullable(Float64)
        COMMENT 'Requests waiting to be scheduled; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    kv_usage Nullable(Float64)
        COMMENT 'Share of the KV cache in use, 0..1; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    prompt_tokens Nullable(Float64)
        COMMENT 'Prompt tokens taken in since the last scrape; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    cached_tokens Nullable(Float64)
        COMMENT 'Of these, tokens answered from the prefix cache; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    generation_tokens Nullable(Float64)
        COMMENT 'Tokens generated since the last scrape; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    finished_requests Nullable(Float64)
        COMMENT 'Requests finished since the last scrape; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    preemptions Nullable(Float64)
        COMMENT 'Sequences preempted since the last scrape; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    iterations Nullable(Float64)
        COMMENT 'Engine steps since the last scrape; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    restarted Bool
        COMMENT 'Whether a counter went back, so the server was restarted between the scrapes.'
        CODEC(ZSTD(1)),
    histograms Array(Tuple(
        stage String,
        count Float64,
        sum Float64,
        bounds Array(Float64),
        counts Array(Float64)))
        COMMENT 'Growth of the engine''s histograms.'
        CODEC(ZSTD(1)),
    agent LowCardinality(String)
        COMMENT 'Id of the agent or worker that published it.'
        CODEC(ZSTD(1)),
    inserted_at DateTime64(3, 'UTC') DEFAULT now64(3)
        COMMENT 'When the writer inserted the row; counts for its age.'
        CODEC(Delta, ZSTD(1)),
    CONSTRAINT sane_time CHECK observed_at >= toDateTime64('2000-01-01 00:00:00', 9, 'UTC')
        AND observed_at < toDateTime64('2100-01-01 00:00:00', 9, 'UTC')
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMMDD(observed_at)
ORDER BY (instance, observed_at, source, agent)
TTL toDateTime(inserted_at) + toIntervalDay(30)
SETTINGS ttl_only_drop_parts = 1
COMMENT 'Scrapes of engines; read it through the view engine_samples.';

CREATE TABLE IF NOT EXISTS host_samples_raw
(
    instance LowCardinality(String)
        COMMENT 'Server watched, as host:port.'
        CODEC(ZSTD(1)),
    source LowCardinality(String)
        COMMENT 'Always host, or import for a converted recording.'
        CODEC(ZSTD(1)),
    observed_at DateTime64(9, 'UTC')
        COMMENT 'End of the interval (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    host LowCardinality(String)
        COMMENT 'Name of the machine.'
        CODEC(ZSTD(1)),
    interval_ns Int64
        COMMENT 'Length of the interval; measured on the monotonic clock (ns).'
        CODEC(T64, ZSTD(1)),
    lateness_us Nullable(Int64)
        COMMENT 'How late the collector itself was woken; large means that the machine or the collector was starved; null when not seen (microseconds).'
        CODEC(T64, ZSTD(1)),
    processes Array(Tuple(
        pid Int32,
        role String,
        state String,
        cpu_ns Nullable(Int64),
        runqueue_ns Nullable(Int64),
        major_faults Nullable(Int64),
        minor_faults Nullable(Int64),
        involuntary_switches Nullable(Int64),
        voluntary_switches Nullable(Int64),
        rss_bytes Nullable(Int64),
        threads Nullable(Int32)))
        COMMENT 'The server''s processes.'
        CODEC(ZSTD(1)),
    throttled_ns Nullable(Int64)
        COMMENT 'Time the server''s control group was throttled by a CPU quota; null when not seen (ns).'
        CODEC(T64, ZSTD(1)),
    throttled_periods Nullable(Int64)
        COMMENT 'Quota periods in which it was throttled; null when not seen.'
        CODEC(T64, ZSTD(1)),
    cpu_busy Nullable(Float64)
        COMMENT 'Share of the machine''s CPU time in use by anybody, 0..1; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    cpu_others Nullable(Float64)
        COMMENT 'Share of the machine''s CPU time used by processes other than the server''s, 0..1; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    cpu_steal Nullable(Float64)
        COMMENT 'Share of CPU time taken by the hypervisor, 0..1; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    runnable Nullable(Int32)
        COMMENT 'Runnable threads on the machine at the end of the interval; null when not seen.'
        CODEC(T64, ZSTD(1)),
    psi_cpu_us Nullable(Int64)
        COMMENT 'Pressure stall: time in which some task waited for a CPU, microseconds; null when not seen.'
        CODEC(T64, ZSTD(1)),
    psi_memory_us Nullable(Int64)
        COMMENT 'Pressure stall for memory, microseconds; null when not seen.'
        CODEC(T64, ZSTD(1)),
    psi_io_us Nullable(Int64)
        COMMENT 'Pressure stall for disk, microseconds; null when not seen.'
        CODEC(T64, ZSTD(1)),
    memory_available_bytes Nullable(Int64)
        COMMENT 'Memory the machine could still hand out; null when not seen (bytes).'
        CODEC(T64, ZSTD(1)),
    disk_read_bytes Nullable(Int64)
        COMMENT 'Bytes read from disks; null when not seen.'
        CODEC(T64, ZSTD(1)),
    disk_write_bytes Nullable(Int64)
        COMMENT 'Bytes written to disks; null when not seen.'
        CODEC(T64, ZSTD(1)),
    net_rx_bytes Nullable(Int64)
        COMMENT 'Bytes received on all interfaces; null when not seen.'
        CODEC(T64, ZSTD(1)),
    net_tx_bytes Nullable(Int64)
        COMMENT 'Bytes sent on all interfaces; null when not seen.'
        CODEC(T64, ZSTD(1)),
    tcp_retransmits Nullable(Int64)
        COMMENT 'TCP segments sent again, whole machine; null when not seen.'
        CODEC(T64, ZSTD(1)),
    tcp_rtt_us Nullable(Float64)
        COMMENT 'Median smoothed round trip of the server''s connections; null when not seen (microseconds).'
        CODEC(Gorilla, ZSTD(1)),
    clock_error_us Nullable(Float64)
        COMMENT 'The kernel''s estimate of its clock''s maximum error; null when not seen (microseconds).'
        CODEC(Gorilla, ZSTD(1)),
    clock_step_ns Nullable(Int64)
        COMMENT 'How far the wall clock moved against the monotonic one in the interval; beyond a few ms the clock was set; null when not seen.'
        CODEC(T64, ZSTD(1)),
    agent LowCardinality(String)
        COMMENT 'Id of the agent or worker that published it.'
        CODEC(ZSTD(1)),
    inserted_at DateTime64(3, 'UTC') DEFAULT now64(3)
        COMMENT 'When the writer inserted the row; counts for its age.'
        CODEC(Delta, ZSTD(1)),
    CONSTRAINT sane_time CHECK observed_at >= toDateTime64('2000-01-01 00:00:00', 9, 'UTC')
        AND observed_at < toDateTime64('2100-01-01 00:00:00', 9, 'UTC')
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMMDD(observed_at)
ORDER BY (instance, observed_at, source, agent)
TTL toDateTime(inserted_at) + toIntervalDay(30)
SETTINGS ttl_only_drop_parts = 1
COMMENT 'Operating system counters; read it through the view host_samples.';

CREATE TABLE IF NOT EXISTS xpu_samples_raw
(
    instance LowCardinality(String)
        COMMENT 'Server that uses it, as host:port; the host''s name when no server is known.'
        CODEC(ZSTD(1)),
    source LowCardinality(String)
        COMMENT 'Always xpu, or import for a converted recording.'
        CODEC(ZSTD(1)),
    observed_at DateTime64(9, 'UTC')
        COMMENT 'When it was read (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    host LowCardinality(String)
        COMMENT 'Name of the machine.'
        CODEC(ZSTD(1)),
    vendor LowCardinality(String)
        COMMENT 'nvidia, amd, intel, google, huawei, ...'
        CODEC(ZSTD(1)),
    device LowCardinality(String)
        COMMENT 'The device''s own stable id (UUID, PCI address).'
        CODEC(ZSTD(1)),
    name LowCardinality(Nullable(String))
        COMMENT 'Product name; null when not seen.'
        CODEC(ZSTD(1)),
    error Nullable(String)
        COMMENT 'Why the device could not be read, such as being lost from the bus; null when it could.'
        CODEC(ZSTD(1)),
    utilisation Nullable(Float64)
        COMMENT 'Share of time with work on it, 0..1; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    memory_utilisation Nullable(Float64)
        COMMENT 'Share of time its memory was busy, 0..1; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    memory_used_bytes Nullable(Int64)
        COMMENT 'Device memory in use; null when not seen (bytes).'
        CODEC(T64, ZSTD(1)),
    memory_total_bytes Nullable(Int64)
        COMMENT 'Device memory installed; null when not seen (bytes).'
        CODEC(T64, ZSTD(1)),
    core_clock_mhz Nullable(Float64)
        COMMENT 'Current core clock; null when not seen (MHz).'
        CODEC(Gorilla, ZSTD(1)),
    core_clock_max_mhz Nullable(Float64)
        COMMENT 'Highest core clock it can run; null when not seen (MHz).'
        CODEC(Gorilla, ZSTD(1)),
    memory_clock_mhz Nullable(Float64)
        COMMENT 'Current memory clock; null when not seen (MHz).'
        CODEC(Gorilla, ZSTD(1)),
    throttle_reasons Array(String)
        COMMENT 'Why clocks are held back (power_cap, thermal, hw_slowdown, ...), empty when they are not; [unknown] when the device does not tell.'
        CODEC(ZSTD(1)),
    temperature_c Nullable(Float64)
        COMMENT 'Core temperature, degrees Celsius; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    power_w Nullable(Float64)
        COMMENT 'Power drawn, watts; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    power_limit_w Nullable(Float64)
        COMMENT 'Power limit in force, watts; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    ecc_corrected Nullable(Int64)
        COMMENT 'Corrected memory errors in the interval; null when not seen.'
        CODEC(T64, ZSTD(1)),
    ecc_uncorrected Nullable(Int64)
        COMMENT 'Uncorrected memory errors in the interval; null when not seen.'
        CODEC(T64, ZSTD(1)),
    xid Nullable(Int32)
        COMMENT 'Last critical error number of the driver in the interval; null when none.'
        CODEC(T64, ZSTD(1)),
    pcie_rx_bytes_s Nullable(Float64)
        COMMENT 'PCIe receive traffic, bytes a second; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    pcie_tx_bytes_s Nullable(Float64)
        COMMENT 'PCIe send traffic, bytes a second; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    link_bytes_s Nullable(Float64)
        COMMENT 'Traffic on links between devices, bytes a second; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    interval_ns Nullable(Int64)
        COMMENT 'Interval of the counters; null for the first reading, whose counters are null too (ns).'
        CODEC(T64, ZSTD(1)),
    agent LowCardinality(String)
        COMMENT 'Id of the agent or worker that published it.'
        CODEC(ZSTD(1)),
    inserted_at DateTime64(3, 'UTC') DEFAULT now64(3)
        COMMENT 'When the writer inserted the row; counts for its age.'
        CODEC(Delta, ZSTD(1)),
    CONSTRAINT sane_time CHECK observed_at >= toDateTime64('2000-01-01 00:00:00', 9, 'UTC')
        AND observed_at < toDateTime64('2100-01-01 00:00:00', 9, 'UTC')
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMMDD(observed_at)
ORDER BY (instance, observed_at, device, source, agent)
TTL toDateTime(inserted_at) + toIntervalDay(30)
SETTINGS ttl_only_drop_parts = 1
COMMENT 'Accelerator readings; read it through the view xpu_samples.';

CREATE TABLE IF NOT EXISTS batches_raw
(
    batch_id String
        COMMENT 'Deterministic: instance, model and start of the window; the same in every repeated delivery.'
        CODEC(ZSTD(1)),
    instance LowCardinality(String)
        COMMENT 'Server, as host:port.'
        CODEC(ZSTD(1)),
    service LowCardinality(String)
        COMMENT 'Group of interchangeable replicas; the model''s name unless configured.'
        CODEC(ZSTD(1)),
    model LowCardinality(Nullable(String))
        COMMENT 'Model served; null when not known.'
        CODEC(ZSTD(1)),
    window_start DateTime64(9, 'UTC')
        COMMENT 'Start of the window, inclusive (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    window_end DateTime64(9, 'UTC')
        COMMENT 'End of the window, exclusive (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    closed_at DateTime64(9, 'UTC')
        COMMENT 'Event time at which the window was closed and judged (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    requests_started Int32
        COMMENT 'Requests that arrived in the window.'
        CODEC(T64, ZSTD(1)),
    requests_finished Int32
        COMMENT 'Requests that ended in the window.'
        CODEC(T64, ZSTD(1)),
    requests_failed Int32
        COMMENT 'Of these, answered with a status of 500 or more, or aborted.'
        CODEC(T64, ZSTD(1)),
    requests_open Int32
        COMMENT 'Requests under way at the end of the window.'
        CODEC(T64, ZSTD(1)),
    chunks Int32
        COMMENT 'Content events in the window.'
        CODEC(T64, ZSTD(1)),
    steps Int32
        COMMENT 'Engine steps that ended in the window.'
        CODEC(T64, ZSTD(1)),
    late_samples Int32
        COMMENT 'Samples that came after their window had closed and are missing in it; counted in the next one.'
        CODEC(T64, ZSTD(1)),
    silent_sources Array(String)
        COMMENT 'Sources that used to report and did not in this window.'
        CODEC(ZSTD(1)),
    features Map(LowCardinality(String), Float64)
        COMMENT 'Workload of the window by name: batch, context_tokens, joined, prompt_tokens, running, waiting, kv_usage, ...'
        CODEC(ZSTD(1)),
    ttft_ms Nullable(Float64)
        COMMENT 'Mean time to first token of the requests whose first token came in this window; null when not seen (ms).'
        CODEC(Gorilla, ZSTD(1)),
    tpot_ms Nullable(Float64)
        COMMENT 'Mean gap between content events of a stream in this window; null when not seen (ms).'
        CODEC(Gorilla, ZSTD(1)),
    e2e_ms Nullable(Float64)
        COMMENT 'Mean end-to-end time of the requests that ended in this window; null when not seen (ms).'
        CODEC(Gorilla, ZSTD(1)),
    stages Array(Tuple(
        stage String,
        mean_ms Nullable(Float64),
        error_ms Nullable(Float64),
        how String))
        COMMENT 'Stages of the requests that ended in this window.'
        CODEC(ZSTD(1)),
    remainder_ms Nullable(Float64)
        COMMENT 'e2e_ms minus the stages; what could not be placed; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    scores Array(Tuple(
        stage String,
        observed_ms Float64,
        expected_ms Nullable(Float64),
        low_ms Nullable(Float64),
        high_ms Nullable(Float64),
        surprise Nullable(Float64),
        score Nullable(Float64),
        threshold Nullable(Float64),
        observations Int32))
        COMMENT 'Every stage that was judged.'
        CODEC(ZSTD(1)),
    stage LowCardinality(Nullable(String))
        COMMENT 'Stage the verdict is about; null when normal.'
        CODEC(ZSTD(1)),
    observed_ms Nullable(Float64)
        COMMENT 'Observed time of that stage; null when not seen (ms).'
        CODEC(Gorilla, ZSTD(1)),
    expected_ms Nullable(Float64)
        COMMENT 'Expected time of that stage; null when not seen (ms).'
        CODEC(Gorilla, ZSTD(1)),
    score Nullable(Float64)
        COMMENT 'Score of that stage; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    threshold Nullable(Float64)
        COMMENT 'Threshold of that stage; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    verdict LowCardinality(String)
        COMMENT 'Normal: as expected; workload: slower (or faster) because the work changed; fault: slower than this work explains; unknown: this work was never seen, so no verdict.'
        CODEC(ZSTD(1)),
    reason String
        COMMENT 'One sentence a person can act on.'
        CODEC(ZSTD(1)),
    evidence Array(Tuple(
        family String,
        signal String,
        observed Float64,
        baseline Nullable(Float64),
        surprise Float64))
        COMMENT 'What spoke for a cause in this window, strongest first.'
        CODEC(ZSTD(1)),
    model_version LowCardinality(String)
        COMMENT 'Version of the detector''s state that judged; changes with every refit.'
        CODEC(ZSTD(1)),
    agent LowCardinality(String)
        COMMENT 'Id of the agent or worker that published it.'
        CODEC(ZSTD(1)),
    inserted_at DateTime64(3, 'UTC') DEFAULT now64(3)
        COMMENT 'When the writer inserted the row; counts for its age.'
        CODEC(Delta, ZSTD(1)),
    INDEX inserted inserted_at TYPE minmax GRANULARITY 1,
    INDEX by_id batch_id TYPE bloom_filter(0.01) GRANULARITY 4,
    CONSTRAINT sane_time CHECK window_start >= toDateTime64('2000-01-01 00:00:00', 9, 'UTC')
        AND window_start < toDateTime64('2100-01-01 00:00:00', 9, 'UTC')
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMMDD(window_start)
ORDER BY (instance, window_start, batch_id)
TTL toDateTime(inserted_at) + toIntervalDay(30)
SETTINGS ttl_only_drop_parts = 1
COMMENT 'Judged windows; read it through the view batches.';

CREATE TABLE IF NOT EXISTS alerts_raw
(
    alert_id String
        COMMENT 'Deterministic: fingerprint, time it fired and state count; the same in every repeated delivery.'
        CODEC(ZSTD(1)),
    fingerprint String
        COMMENT 'Identifies the problem while it lasts and when it comes back.'
        CODEC(ZSTD(1)),
    state LowCardinality(String)
        COMMENT 'Firing: first record of a fingerprint; updated: still on, something changed; resolved: over.'
        CODEC(ZSTD(1)),
    severity LowCardinality(String)
        COMMENT 'Info: seen, no objective at risk; warning: slower than expected; critical: no progress at all, or slower by 3 or more.'
        CODEC(ZSTD(1)),
    verdict LowCardinality(String)
        COMMENT 'Normal: as expected; workload: slower (or faster) because the work changed; fault: slower than this work explains; unknown: this work was never seen, so no verdict.'
        CODEC(ZSTD(1)),
    instance LowCardinality(String)
        COMMENT 'Server concerned, as host:port.'
        CODEC(ZSTD(1)),
    service LowCardinality(String)
        COMMENT 'Group of replicas it belongs to.'
        CODEC(ZSTD(1)),
    model LowCardinality(Nullable(String))
        COMMENT 'Model served; null when not known.'
        CODEC(ZSTD(1)),
    stage LowCardinality(String)
        COMMENT 'Stage that slowed.'
        CODEC(ZSTD(1)),
    fired DateTime64(9, 'UTC')
        COMMENT 'When it fired, event time (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    updated DateTime64(9, 'UTC')
        COMMENT 'When this record was made, event time (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    resolved Nullable(DateTime64(9, 'UTC'))
        COMMENT 'When it resolved; null while on (UTC, ns precision).'
        CODEC(Delta, ZSTD(1)),
    first_batch DateTime64(9, 'UTC')
        COMMENT 'Start of the first window that belongs to it (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    observed_ms Nullable(Float64)
        COMMENT 'Observed time of the stage, worst window so far; null when not seen (ms).'
        CODEC(Gorilla, ZSTD(1)),
    expected_ms Nullable(Float64)
        COMMENT 'Expected time of the stage in that window; null when not seen (ms).'
        CODEC(Gorilla, ZSTD(1)),
    score Float64
        COMMENT 'Score of that window.'
        CODEC(Gorilla, ZSTD(1)),
    threshold Float64
        COMMENT 'Threshold then.'
        CODEC(Gorilla, ZSTD(1)),
    reason String
        COMMENT 'One sentence a person can act on.'
        CODEC(ZSTD(1)),
    causes Array(Tuple(
        family String,
        cause String,
        score Float64,
        evidence Array(Tuple(
            family String,
            signal String,
            observed Float64,
            baseline Nullable(Float64),
            surprise Float64))))
        COMMENT 'Ranked explanations, best first; empty when there is too little evidence.'
        CODEC(ZSTD(1)),
    batches Array(String)
        COMMENT 'batch_id of the windows that belong to it, newest last, at most 64.'
        CODEC(ZSTD(1)),
    peers_affected Int32
        COMMENT 'Replicas of the service with the same trouble at the same time, this one included.'
        CODEC(T64, ZSTD(1)),
    peers_total Int32
        COMMENT 'Replicas of the service seen in the last seconds.'
        CODEC(T64, ZSTD(1)),
    inserted_at DateTime64(3, 'UTC') DEFAULT now64(3)
        COMMENT 'When the writer inserted the row; counts for its age.'
        CODEC(Delta, ZSTD(1)),
    CONSTRAINT sane_time CHECK fired >= toDateTime64('2000-01-01 00:00:00', 9, 'UTC')
        AND fired < toDateTime64('2100-01-01 00:00:00', 9, 'UTC')
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMMDD(fired)
ORDER BY (instance, fired, alert_id)
TTL toDateTime(inserted_at) + toIntervalDay(30)
SETTINGS ttl_only_drop_parts = 1
COMMENT 'Every state of every alert; read it through the views alerts and problems.';

CREATE TABLE IF NOT EXISTS commands_raw
(
    command_id String
        COMMENT 'Identifies the lease; a renewal has the same.'
        CODEC(ZSTD(1)),
    target LowCardinality(String)
        COMMENT 'Instance acted on, as host:port.'
        CODEC(ZSTD(1)),
    service LowCardinality(String)
        COMMENT 'Group of replicas it belongs to.'
        CODEC(ZSTD(1)),
    epoch Int64
        COMMENT 'Grows with every new decision about this target; a router ignores a command with a lower epoch than it has seen.'
        CODEC(T64, ZSTD(1)),
    issued DateTime64(9, 'UTC')
        COMMENT 'When this record was issued (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    lease_ms Int64
        COMMENT 'From issued_ns on; after it the router restores the target by itself (ms).'
        CODEC(T64, ZSTD(1)),
    action LowCardinality(String)
        COMMENT 'Concurrency_limit: at most value requests in flight; rate_limit: at most value requests a second; weight: share of traffic, value in 0..1 of normal; drain: no new requests, those under way finish; restore: back to normal.'
        CODEC(ZSTD(1)),
    value Nullable(Float64)
        COMMENT 'Meaning and unit by action; null for drain and restore.'
        CODEC(Gorilla, ZSTD(1)),
    floor Nullable(Float64)
        COMMENT 'The router must not go below it when it combines commands; same unit as value; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    reason String
        COMMENT 'One sentence a person can read.'
        CODEC(ZSTD(1)),
    alert Nullable(String)
        COMMENT 'Fingerprint of the alert behind it; null for an operator''s command.'
        CODEC(ZSTD(1)),
    dry_run Bool
        COMMENT 'Say in the ack what would be done, and do nothing.'
        CODEC(ZSTD(1)),
    inserted_at DateTime64(3, 'UTC') DEFAULT now64(3)
        COMMENT 'When the writer inserted the row; counts for its age.'
        CODEC(Delta, ZSTD(1)),
    CONSTRAINT sane_time CHECK issued >= toDateTime64('2000-01-01 00:00:00', 9, 'UTC')
        AND issued < toDateTime64('2100-01-01 00:00:00', 9, 'UTC')
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMMDD(issued)
ORDER BY (target, issued, command_id, epoch)
TTL toDateTime(inserted_at) + toIntervalDay(30)
SETTINGS ttl_only_drop_parts = 1
COMMENT 'Leases on routers; read it through the view commands.';

CREATE TABLE IF NOT EXISTS acks_raw
(
    ack_id String
        COMMENT 'Deterministic: command, epoch, router and effect; the same in every repeated delivery.'
        CODEC(ZSTD(1)),
    command_id String
        COMMENT 'Command answered.'
        CODEC(ZSTD(1)),
    target LowCardinality(String)
        COMMENT 'Instance of the command, as host:port.'
        CODEC(ZSTD(1)),
    epoch Int64
        COMMENT 'Epoch of the command.'
        CODEC(T64, ZSTD(1)),
    router LowCardinality(String)
        COMMENT 'Router that answers.'
        CODEC(ZSTD(1)),
    effect LowCardinality(String)
        COMMENT 'Applied: in force; refused: not taken, see detail; expired: the lease ran out and the target is back to normal.'
        CODEC(ZSTD(1)),
    detail Nullable(String)
        COMMENT 'Why it was refused, or what was done in the router''s own words; null when not seen.'
        CODEC(ZSTD(1)),
    dry_run Bool
        COMMENT 'Whether the command was dry.'
        CODEC(ZSTD(1)),
    at DateTime64(9, 'UTC')
        COMMENT 'When it took effect (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    inserted_at DateTime64(3, 'UTC') DEFAULT now64(3)
        COMMENT 'When the writer inserted the row; counts for its age.'
        CODEC(Delta, ZSTD(1)),
    CONSTRAINT sane_time CHECK at >= toDateTime64('2000-01-01 00:00:00', 9, 'UTC')
        AND at < toDateTime64('2100-01-01 00:00:00', 9, 'UTC')
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMMDD(at)
ORDER BY (target, command_id, ack_id)
TTL toDateTime(inserted_at) + toIntervalDay(30)
SETTINGS ttl_only_drop_parts = 1
COMMENT 'Answers of routers; read it through the view acks.';

CREATE TABLE IF NOT EXISTS dead_letters_raw
(
    topic LowCardinality(String)
        COMMENT 'Topic they came on.'
        CODEC(ZSTD(1)),
    partition Int32
        COMMENT 'Partition they came on; -1 when they never reached a broker.'
        CODEC(T64, ZSTD(1)),
    offset Int64
        COMMENT 'Offset they came at; -1 when they never reached a broker.'
        CODEC(T64, ZSTD(1)),
    at DateTime64(9, 'UTC')
        COMMENT 'When they were refused (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    component LowCardinality(String)
        COMMENT 'Who refused them: streams, sinks, routers.'
        CODEC(ZSTD(1)),
    reason LowCardinality(String)
        COMMENT 'Short name of the reason: bad_magic, unknown_schema, truncated, wrong_record, invalid_value, ...'
        CODEC(ZSTD(1)),
    detail String
        COMMENT 'What was wrong and where, in words.'
        CODEC(ZSTD(1)),
    key Nullable(String)
        COMMENT 'Message key as it came; null when there was none.'
        CODEC(ZSTD(1)),
    payload String
        COMMENT 'Message value as it came, at most 900,000 bytes of it.'
        CODEC(ZSTD(1)),
    letter_id String
        COMMENT 'The same for the same refused bytes however often they are delivered.'
        CODEC(ZSTD(1)),
    inserted_at DateTime64(3, 'UTC') DEFAULT now64(3)
        COMMENT 'When the writer inserted the row; counts for its age.'
        CODEC(Delta, ZSTD(1)),
    CONSTRAINT sane_time CHECK at >= toDateTime64('2000-01-01 00:00:00', 9, 'UTC')
        AND at < toDateTime64('2100-01-01 00:00:00', 9, 'UTC')
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMMDD(at)
ORDER BY (topic, partition, offset, letter_id)
TTL toDateTime(inserted_at) + toIntervalDay(30)
SETTINGS ttl_only_drop_parts = 1
COMMENT 'Bytes that could not be taken; read it through the view dead_letters.';
