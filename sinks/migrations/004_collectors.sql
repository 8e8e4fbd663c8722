-- What the further collectors see: more columns, and the tables of kernel times, sampled stacks and
-- the agents themselves.

ALTER TABLE request_parts
    ADD COLUMN IF NOT EXISTS method LowCardinality(Nullable(String))
        COMMENT 'HTTP method of the request; null when not seen.'
        CODEC(ZSTD(1)) AFTER estimated,
    ADD COLUMN IF NOT EXISTS max_tokens Nullable(Int64)
        COMMENT 'Most tokens that the request allows to be generated; null when it names no limit or was not read.'
        CODEC(T64, ZSTD(1)) AFTER method,
    ADD COLUMN IF NOT EXISTS proxy_queue_us Nullable(Int64)
        COMMENT 'Time the request waited in a gateway''s own queue before it was sent to a server, microseconds; null when not seen.'
        CODEC(T64, ZSTD(1)) AFTER max_tokens,
    ADD COLUMN IF NOT EXISTS queue_us Nullable(Int64)
        COMMENT 'Time in the engine''s queue as the engine itself told it, microseconds; null when it did not.'
        CODEC(T64, ZSTD(1)) AFTER proxy_queue_us,
    ADD COLUMN IF NOT EXISTS prefill_us Nullable(Int64)
        COMMENT 'Prefill time as the engine itself told it, microseconds; null when it did not.'
        CODEC(T64, ZSTD(1)) AFTER queue_us,
    ADD COLUMN IF NOT EXISTS decode_us Nullable(Int64)
        COMMENT 'Decode time as the engine itself told it, microseconds; null when it did not.'
        CODEC(T64, ZSTD(1)) AFTER prefill_us;

ALTER TABLE host_samples_raw
    ADD COLUMN IF NOT EXISTS hot_threads Array(Tuple(
        pid Int32,
        tid Int32,
        name String,
        cpu_ns Int64,
        runqueue_ns Int64))
        COMMENT 'The server''s busiest threads since they were last read, busiest first, at most 8; empty when not read in this interval.'
        CODEC(ZSTD(1)) AFTER clock_step_ns,
    ADD COLUMN IF NOT EXISTS numa_misses Nullable(Int64)
        COMMENT 'Memory pages that had to be taken from another NUMA node than wished, whole machine, since they were last told; null when not seen.'
        CODEC(T64, ZSTD(1)) AFTER hot_threads,
    ADD COLUMN IF NOT EXISTS numa_remote_share Nullable(Float64)
        COMMENT 'Share of the server''s memory on NUMA nodes where none of its threads ran, 0..1; null when not seen.'
        CODEC(Gorilla, ZSTD(1)) AFTER numa_misses,
    ADD COLUMN IF NOT EXISTS server_retransmits Nullable(Int64)
        COMMENT 'TCP segments sent again on the server''s own connections since they were last told; null when not seen.'
        CODEC(T64, ZSTD(1)) AFTER numa_remote_share,
    ADD COLUMN IF NOT EXISTS connections Nullable(Int32)
        COMMENT 'Established connections to the server''s port; null when not seen.'
        CODEC(T64, ZSTD(1)) AFTER server_retransmits,
    ADD COLUMN IF NOT EXISTS client_limited_us Nullable(Int64)
        COMMENT 'Time in which the server''s connections could not send because the client''s receive window was full, summed over connections, since it was last told, microseconds; null when not seen.'
        CODEC(T64, ZSTD(1)) AFTER connections,
    ADD COLUMN IF NOT EXISTS accept_queue Nullable(Int32)
        COMMENT 'Connections that wait to be accepted by the server; null when not seen.'
        CODEC(T64, ZSTD(1)) AFTER client_limited_us,
    ADD COLUMN IF NOT EXISTS disk_busy Nullable(Float64)
        COMMENT 'Share of the time since it was last told in which the busiest disk had work, 0..1; null when not seen.'
        CODEC(Gorilla, ZSTD(1)) AFTER accept_queue,
    ADD COLUMN IF NOT EXISTS cgroup_memory_bytes Nullable(Int64)
        COMMENT 'Memory in use by the server''s control group; null when not seen (bytes).'
        CODEC(T64, ZSTD(1)) AFTER disk_busy,
    ADD COLUMN IF NOT EXISTS cgroup_memory_limit_bytes Nullable(Int64)
        COMMENT 'Memory limit of the server''s control group; null also without a limit; null when not seen (bytes).'
        CODEC(T64, ZSTD(1)) AFTER cgroup_memory_bytes,
    ADD COLUMN IF NOT EXISTS oom_kills Nullable(Int64)
        COMMENT 'Processes of the server''s control group killed for want of memory since they were last told; null when not seen.'
        CODEC(T64, ZSTD(1)) AFTER cgroup_memory_limit_bytes;

ALTER TABLE xpu_samples_raw
    ADD COLUMN IF NOT EXISTS parent LowCardinality(Nullable(String))
        COMMENT 'Device that this one is a slice of (MIG); null when it is whole.'
        CODEC(ZSTD(1)) AFTER interval_ns,
    ADD COLUMN IF NOT EXISTS memory_temperature_c Nullable(Float64)
        COMMENT 'Memory temperature, degrees Celsius; null when not seen.'
        CODEC(Gorilla, ZSTD(1)) AFTER parent,
    ADD COLUMN IF NOT EXISTS link_errors Nullable(Int64)
        COMMENT 'Errors on links between devices (CRC, replay, recovery) in the interval; null when not seen.'
        CODEC(T64, ZSTD(1)) AFTER memory_temperature_c,
    ADD COLUMN IF NOT EXISTS pcie_replays Nullable(Int64)
        COMMENT 'PCIe packets sent again in the interval; null when not seen.'
        CODEC(T64, ZSTD(1)) AFTER link_errors,
    ADD COLUMN IF NOT EXISTS pcie_gen Nullable(Int32)
        COMMENT 'Generation that the PCIe link runs at now; null when not seen.'
        CODEC(T64, ZSTD(1)) AFTER pcie_replays,
    ADD COLUMN IF NOT EXISTS pcie_width Nullable(Int32)
        COMMENT 'Lanes that the PCIe link runs at now; null when not seen.'
        CODEC(T64, ZSTD(1)) AFTER pcie_gen;

CREATE TABLE IF NOT EXISTS kernel_samples_raw
(
    instance LowCardinality(String)
        COMMENT 'Server watched, as host:port.'
        CODEC(ZSTD(1)),
    source LowCardinality(String)
        COMMENT 'Always kernel.'
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
    histograms Array(Tuple(
        stage String,
        count Float64,
        sum Float64,
        bounds Array(Float64),
        counts Array(Float64)))
        COMMENT 'What was timed in the interval.'
        CODEC(ZSTD(1)),
    lost Int64
        COMMENT 'Events in the interval that the kernel''s buffers could not hold.'
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
COMMENT 'Times that the kernel saw; read it through the view kernel_samples.';

CREATE TABLE IF NOT EXISTS stack_profiles_raw
(
    instance LowCardinality(String)
        COMMENT 'Server whose process was looked into, as host:port.'
        CODEC(ZSTD(1)),
    source LowCardinality(String)
        COMMENT 'Always stacks.'
        CODEC(ZSTD(1)),
    observed_at DateTime64(9, 'UTC')
        COMMENT 'When the last stack was taken (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    host LowCardinality(String)
        COMMENT 'Name of the machine.'
        CODEC(ZSTD(1)),
    alert_id Nullable(String)
        COMMENT 'Alert that asked for it; null when a person did.'
        CODEC(ZSTD(1)),
    fingerprint Nullable(String)
        COMMENT 'Problem of that alert; null when a person asked.'
        CODEC(ZSTD(1)),
    pid Int32
        COMMENT 'Process id.'
        CODEC(T64, ZSTD(1)),
    role LowCardinality(String)
        COMMENT 'What the process is to the server: api, engine, worker, ...'
        CODEC(ZSTD(1)),
    duration_ms Float64
        COMMENT 'How long it was sampled.'
        CODEC(Gorilla, ZSTD(1)),
    rate_hz Float64
        COMMENT 'How often a second.'
        CODEC(Gorilla, ZSTD(1)),
    samples Int32
        COMMENT 'Stacks taken.'
        CODEC(T64, ZSTD(1)),
    failed Int32
        COMMENT 'Stacks that could not be taken.'
        CODEC(T64, ZSTD(1)),
    stages Array(Tuple(
        stage String,
        samples Int32))
        COMMENT 'The stacks by stage, most samples first.'
        CODEC(ZSTD(1)),
    stacks Array(Tuple(
        stack String,
        samples Int32))
        COMMENT 'The most frequent stacks, at most 50.'
        CODEC(ZSTD(1)),
    error Nullable(String)
        COMMENT 'Why no stack could be taken; null when one could.'
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
ORDER BY (instance, observed_at, pid, source, agent)
TTL toDateTime(inserted_at) + toIntervalDay(30)
SETTINGS ttl_only_drop_parts = 1
COMMENT 'Sampled call stacks; read it through the view stack_profiles.';

CREATE TABLE IF NOT EXISTS agent_samples_raw
(
    instance LowCardinality(String)
        COMMENT 'Name of the agent.'
        CODEC(ZSTD(1)),
    source LowCardinality(String)
        COMMENT 'Always agent.'
        CODEC(ZSTD(1)),
    observed_at DateTime64(9, 'UTC')
        COMMENT 'When it was measured (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    host LowCardinality(String)
        COMMENT 'Name of the machine.'
        CODEC(ZSTD(1)),
    boot DateTime64(9, 'UTC')
        COMMENT 'When this run of the agent began (UTC, ns precision).'
        CODEC(DoubleDelta, ZSTD(1)),
    uptime_s Float64
        COMMENT 'Time since then, seconds.'
        CODEC(Gorilla, ZSTD(1)),
    cpu_pct Nullable(Float64)
        COMMENT 'CPU time of the agent over the last second, % of one core; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    rss_mb Nullable(Float64)
        COMMENT 'Resident memory of the agent, 10^6 bytes; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    published_bytes_s Nullable(Float64)
        COMMENT 'Bytes a second that the broker took from it; null when not seen.'
        CODEC(Gorilla, ZSTD(1)),
    dropped Map(String, Int64)
        COMMENT 'Samples dropped since the start, by topic and reason.'
        CODEC(ZSTD(1)),
    sources Array(Tuple(
        name String,
        state String,
        failures Int64,
        error Nullable(String),
        cpu_pct Nullable(Float64),
        counts Map(String, Int64)))
        COMMENT 'Its sources.'
        CODEC(ZSTD(1)),
    settings_error Nullable(String)
        COMMENT 'Why the settings last given were refused, so that older ones are in force; null when they were not.'
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
ORDER BY (instance, observed_at, boot, source, agent)
TTL toDateTime(inserted_at) + toIntervalDay(30)
SETTINGS ttl_only_drop_parts = 1
COMMENT 'How the agents do; read it through the view agent_samples.';

-- A request that a network source, a gateway and a span tell of is one request: the best source of an
-- instance and minute counts, as it does for the verdicts.

CREATE TABLE IF NOT EXISTS request_sources
(
    instance LowCardinality(String) COMMENT 'Server that answered, as host:port.' CODEC(ZSTD(1)),
    minute DateTime('UTC') COMMENT 'Minute in which exchanges arrived.' CODEC(DoubleDelta, ZSTD(1)),
    source LowCardinality(String) COMMENT 'Collector that told of them.' CODEC(ZSTD(1)),
    inserted_at DateTime('UTC') DEFAULT now() COMMENT 'When it was noted; counts for its age.' CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(minute)
ORDER BY (instance, minute, source)
TTL toDateTime(inserted_at) + toIntervalDay(30)
COMMENT 'Which sources told of an instance, minute by minute.';

CREATE MATERIALIZED VIEW IF NOT EXISTS request_sources_note TO request_sources AS
SELECT DISTINCT instance, toDateTime(toStartOfMinute(arrival), 'UTC') AS minute, source
FROM request_parts;

CREATE OR REPLACE VIEW request_sources_outdone AS
SELECT
    instance,
    minute,
    arrayJoin(arrayFilter(
        s -> indexOf(['gateway', 'otlp'], s) > arrayMin(s -> indexOf(['gateway', 'otlp'], s), sources),
        sources
    )) AS source
FROM (
    SELECT instance, minute, groupUniqArray(source) AS sources
    FROM request_sources
    GROUP BY instance, minute
    HAVING length(sources) > 1
)
COMMENT 'Sources whose account of an instance and minute does not count, since a better one told of it.';

CREATE OR REPLACE VIEW requests AS
SELECT
    p.request_id AS request_id,
    p.instance AS instance,
    p.arrival AS arrival,
    any(p.source) AS source,
    any(p.endpoint) AS endpoint,
    argMax(p.model, p.part) AS model,
    argMax(p.state, p.part) AS state,
    argMax(p.streaming, p.part) AS streaming,
    argMax(p.status, p.part) AS status,
    max(p.request_end) AS request_end,
    max(p.first_byte) AS first_byte,
    max(p.first_token) AS first_token,
    max(fromUnixTimestamp64Nano(
        toUnixTimestamp64Nano(p.chunk_base) + 1000 * arraySum(p.chunk_deltas_us), 'UTC'
    )) AS last_chunk,
    max(p.`end`) AS ended,
    max(p.chunks_before + if(isNull(p.chunk_base), 0, length(p.chunk_deltas_us) + 1)) AS chunks,
    max(p.request_bytes) AS request_bytes,
    max(p.response_bytes) AS response_bytes,
    max(p.prompt_tokens) AS prompt_tokens,
    max(p.cached_tokens) AS cached_tokens,
    max(p.completion_tokens) AS completion_tokens,
    any(p.trace_id) AS trace_id,
    any(p.method) AS method,
    max(p.max_tokens) AS max_tokens,
    max(p.proxy_queue_us) AS proxy_queue_us,
    max(p.queue_us) AS queue_us,
    max(p.prefill_us) AS prefill_us,
    max(p.decode_us) AS decode_us,
    arraySort(groupUniqArrayArray(p.estimated)) AS estimated,
    count() AS parts,
    max(p.part) + 1 - count() AS parts_missing,
    (toUnixTimestamp64Nano(first_token) - toUnixTimestamp64Nano(arrival)) / 1e6 AS ttft_ms,
    if(completion_tokens > 1, 'tokens', 'chunks') AS tpot_per,
    if(
        if(completion_tokens > 1, completion_tokens, chunks) > 1,
        (toUnixTimestamp64Nano(last_chunk) - toUnixTimestamp64Nano(first_token)) / 1e6
            / (if(completion_tokens > 1, completion_tokens, chunks) - 1),
        NULL
    ) AS tpot_ms,
    (toUnixTimestamp64Nano(ended) - toUnixTimestamp64Nano(arrival)) / 1e6 AS e2e_ms
FROM request_parts AS p FINAL
WHERE (p.instance, toStartOfMinute(p.arrival), p.source) NOT IN (
    SELECT instance, minute, source FROM request_sources_outdone
)
GROUP BY p.instance, p.arrival, p.request_id
COMMENT 'One row an exchange, joined from its parts; null where nothing was seen. tpot_ms is the mean gap of tokens where their number was told, else of content events; tpot_per says which. Where several sources told of an instance in a minute, only the best one counts: request_parts holds all.';

CREATE OR REPLACE VIEW host_samples AS
SELECT
    * EXCEPT (inserted_at),
    arraySum(p -> ifNull(p.runqueue_ns, 0), processes) / interval_ns AS runqueue_share,
    arraySum(p -> ifNull(p.cpu_ns, 0), processes) / interval_ns AS cpu_cores,
    throttled_ns / interval_ns AS throttled_share,
    1000 * psi_cpu_us / interval_ns AS psi_cpu_share,
    1000 * psi_memory_us / interval_ns AS psi_memory_share,
    1000 * psi_io_us / interval_ns AS psi_io_share
FROM host_samples_raw FINAL
COMMENT 'One row a reading of the operating system. Shares are of the interval: runqueue_share is time the server''s threads waited for a CPU, throttling included, and may pass 1 with several threads.';

CREATE OR REPLACE VIEW xpu_samples AS
SELECT * EXCEPT (inserted_at) FROM xpu_samples_raw FINAL
COMMENT 'One row an accelerator and reading.';

CREATE OR REPLACE VIEW kernel_samples AS
SELECT
    instance,
    observed_at,
    source,
    host,
    agent,
    interval_ns,
    lost,
    histogram.stage AS stage,
    histogram.count AS count,
    1000 * histogram.sum / nullIf(histogram.count, 0) AS mean_ms,
    histogram.bounds AS bounds_s,
    histogram.counts AS counts
FROM kernel_samples_raw FINAL
ARRAY JOIN histograms AS histogram
COMMENT 'One row an interval and thing timed by the kernel.';

CREATE OR REPLACE VIEW stack_profiles AS
SELECT * EXCEPT (inserted_at) FROM stack_profiles_raw FINAL
COMMENT 'One row a process whose call stacks were sampled; alert_id tells which alert asked.';

CREATE OR REPLACE VIEW agent_samples AS
SELECT * EXCEPT (inserted_at) FROM agent_samples_raw FINAL
COMMENT 'One row a reading of an agent''s own cost, drops and sources.';
