-- Per-minute summaries, recomputed rather than added to.
--
-- A summary that adds up what is inserted counts a repeated delivery twice. These views run every
-- 10 seconds instead, find the minutes that were written to since they last ran, and compute those
-- minutes anew from the deduplicated views. The newest result of a minute replaces the older one,
-- so repeated deliveries, late parts and replays change nothing but what they should. The quantile
-- states merge over minutes, instances and models. Rows written within 60 seconds before the last
-- run are looked at again, since an insert becomes visible later than its inserted_at.

CREATE TABLE IF NOT EXISTS requests_per_minute_raw
(
    instance LowCardinality(String) COMMENT 'Server that answered, as host:port.',
    model LowCardinality(String) COMMENT 'Model; empty when not known.',
    minute DateTime('UTC') COMMENT 'Minute in which the exchanges arrived.' CODEC(DoubleDelta, ZSTD(1)),
    requests UInt64 COMMENT 'Exchanges that have ended.' CODEC(T64, ZSTD(1)),
    failed UInt64 COMMENT 'Of these, answered with a status of 500 or more, or aborted.' CODEC(T64, ZSTD(1)),
    prompt_tokens UInt64 COMMENT 'Prompt tokens, where told.' CODEC(T64, ZSTD(1)),
    completion_tokens UInt64 COMMENT 'Generated tokens, where told.' CODEC(T64, ZSTD(1)),
    ttft_ms AggregateFunction(quantilesTDigest(0.5, 0.95, 0.99), Nullable(Float64))
        COMMENT 'Time to first token, state of its 50, 95 and 99 % quantiles, ms.',
    tpot_ms AggregateFunction(quantilesTDigest(0.5, 0.95, 0.99), Nullable(Float64))
        COMMENT 'Time per output token, state of the same quantiles, ms.',
    e2e_ms AggregateFunction(quantilesTDigest(0.5, 0.95, 0.99), Nullable(Float64))
        COMMENT 'End-to-end time, state of the same quantiles, ms.',
    computed_at DateTime64(3, 'UTC') COMMENT 'When it was computed; the newest counts.' CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree(computed_at)
PARTITION BY toYYYYMM(minute)
ORDER BY (instance, minute, model)
TTL toDateTime(computed_at) + toIntervalDay(400)
COMMENT 'Exchanges by instance, model and minute; read it through the view requests_per_minute.';

CREATE MATERIALIZED VIEW IF NOT EXISTS requests_per_minute_refresh
REFRESH EVERY 10 SECOND APPEND TO requests_per_minute_raw
AS
WITH
    now64(3) AS started,
    touched AS (
        SELECT DISTINCT toStartOfMinute(arrival) AS minute
        FROM request_parts
        WHERE inserted_at > (SELECT max(computed_at) FROM requests_per_minute_raw) - toIntervalSecond(60)
    )
SELECT
    r.instance AS instance,
    ifNull(r.model, '') AS model,
    toStartOfMinute(r.arrival) AS minute,
    count() AS requests,
    countIf(r.status >= 500 OR r.state = 'aborted') AS failed,
    sum(ifNull(r.prompt_tokens, 0)) AS prompt_tokens,
    sum(ifNull(r.completion_tokens, 0)) AS completion_tokens,
    quantilesTDigestState(0.5, 0.95, 0.99)(r.ttft_ms) AS ttft_ms,
    quantilesTDigestState(0.5, 0.95, 0.99)(r.tpot_ms) AS tpot_ms,
    quantilesTDigestState(0.5, 0.95, 0.99)(r.e2e_ms) AS e2e_ms,
    started AS computed_at
FROM requests AS r
WHERE r.state != 'open'
    AND r.arrival >= (SELECT min(minute) FROM touched)
    AND r.arrival < (SELECT max(minute) FROM touched) + toIntervalMinute(1)
    AND toStartOfMinute(r.arrival) IN touched
GROUP BY instance, model, minute;

CREATE OR REPLACE VIEW requests_per_minute AS
SELECT
    instance,
    model,
    minute,
    requests,
    failed,
    prompt_tokens,
    completion_tokens,
    ttft_ms,
    tpot_ms,
    e2e_ms
FROM requests_per_minute_raw FINAL
COMMENT 'Ended exchanges by instance, model and minute; quantilesTDigestMerge(0.5, 0.95, 0.99)(ttft_ms) gives quantiles over any of them.';

CREATE TABLE IF NOT EXISTS batches_per_minute_raw
(
    service LowCardinality(String) COMMENT 'Group of interchangeable replicas.',
    instance LowCardinality(String) COMMENT 'Server, as host:port.',
    model LowCardinality(String) COMMENT 'Model; empty when not known.',
    minute DateTime('UTC') COMMENT 'Minute in which the windows began.' CODEC(DoubleDelta, ZSTD(1)),
    windows UInt64 COMMENT 'Windows.' CODEC(T64, ZSTD(1)),
    normal UInt64 COMMENT 'Windows as expected.' CODEC(T64, ZSTD(1)),
    workload UInt64 COMMENT 'Windows whose time changed with their work.' CODEC(T64, ZSTD(1)),
    fault UInt64 COMMENT 'Windows slower than their work explains.' CODEC(T64, ZSTD(1)),
    unknown UInt64 COMMENT 'Windows of work that was never seen.' CODEC(T64, ZSTD(1)),
    silent UInt64 COMMENT 'Windows in which a source was silent.' CODEC(T64, ZSTD(1)),
    score_max Nullable(Float64) COMMENT 'Highest score of a window.' CODEC(Gorilla, ZSTD(1)),
    ttft_ms AggregateFunction(quantilesTDigest(0.5, 0.95, 0.99), Nullable(Float64))
        COMMENT 'Windows'' mean time to first token, state of its 50, 95 and 99 % quantiles, ms.',
    tpot_ms AggregateFunction(quantilesTDigest(0.5, 0.95, 0.99), Nullable(Float64))
        COMMENT 'Windows'' mean gap between content events, state of the same quantiles, ms.',
    computed_at DateTime64(3, 'UTC') COMMENT 'When it was computed; the newest counts.' CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree(computed_at)
PARTITION BY toYYYYMM(minute)
ORDER BY (service, instance, minute, model)
TTL toDateTime(computed_at) + toIntervalDay(400)
COMMENT 'Judged windows by service, instance, model and minute; read it through the view batches_per_minute.';

CREATE MATERIALIZED VIEW IF NOT EXISTS batches_per_minute_refresh
REFRESH EVERY 10 SECOND APPEND TO batches_per_minute_raw
AS
WITH
    now64(3) AS started,
    touched AS (
        SELECT DISTINCT toStartOfMinute(window_start) AS minute
        FROM batches_raw
        WHERE inserted_at > (SELECT max(computed_at) FROM batches_per_minute_raw) - toIntervalSecond(60)
    )
SELECT
    b.service AS service,
    b.instance AS instance,
    ifNull(b.model, '') AS model,
    toStartOfMinute(b.window_start) AS minute,
    count() AS windows,
    countIf(b.verdict = 'normal') AS normal,
    countIf(b.verdict = 'workload') AS workload,
    countIf(b.verdict = 'fault') AS fault,
    countIf(b.verdict = 'unknown') AS unknown,
    countIf(notEmpty(b.silent_sources)) AS silent,
    max(b.score) AS score_max,
    quantilesTDigestState(0.5, 0.95, 0.99)(b.ttft_ms) AS ttft_ms,
    quantilesTDigestState(0.5, 0.95, 0.99)(b.tpot_ms) AS tpot_ms,
    started AS computed_at
FROM batches AS b
WHERE b.window_start >= (SELECT min(minute) FROM touched)
    AND b.window_start < (SELECT max(minute) FROM touched) + toIntervalMinute(1)
    AND toStartOfMinute(b.window_start) IN touched
GROUP BY service, instance, model, minute;

CREATE OR REPLACE VIEW batches_per_minute AS
SELECT * EXCEPT (computed_at) FROM batches_per_minute_raw FINAL
COMMENT 'Judged windows by service, instance, model and minute.';
