-- name: engine_health
-- question: Do the engines answer, do they progress, and how full are they?
-- parameter minutes UInt32 = 15: how far back from the newest scrape, or from `until`
-- parameter until DateTime64(9, 'UTC') = 2100-01-01 00:00:00: look no later than this
-- parameter instance String = : only this server (host:port); empty for all
WITH least({until:DateTime64(9, 'UTC')}, (SELECT max(observed_at) FROM engine_samples_raw)) AS stop
SELECT
    e.instance AS instance,
    argMax(e.engine, e.observed_at) AS engine,
    argMax(e.version, e.observed_at) AS version,
    count() AS scrapes,
    countIf(e.freshness = 'failed') AS failed,
    countIf(e.freshness = 'stale') AS stale,
    round(dateDiff('nanosecond', maxIf(toNullable(e.observed_at), e.freshness = 'fresh'), stop) / 1e9, 3) AS fresh_age_s,
    argMaxIf(e.error, e.observed_at, e.error IS NOT NULL) AS last_error,
    countIf(e.restarted) AS restarts,
    argMax(e.running, e.observed_at) AS running,
    argMax(e.waiting, e.observed_at) AS waiting,
    max(e.waiting) AS waiting_max,
    round(max(e.kv_usage), 4) AS kv_usage_max,
    sum(e.preemptions) AS preempted,
    countIf(e.waiting > 0 AND e.generation_tokens = 0) AS no_progress,
    round(sum(e.generation_tokens) / (sumIf(e.interval_ns, e.generation_tokens IS NOT NULL) / 1e9), 2) AS tokens_per_s,
    round(quantileExact(0.95)(e.scrape_ms), 3) AS scrape_p95_ms
FROM engine_samples AS e
WHERE e.observed_at > stop - toIntervalMinute({minutes:UInt32}) AND e.observed_at <= stop
    AND ({instance:String} = '' OR e.instance = {instance:String})
GROUP BY instance
ORDER BY no_progress DESC, failed DESC, instance
