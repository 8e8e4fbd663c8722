-- name: tail_by_model
-- question: How long do the slow ones take: 50, 95 and 99 % of TTFT, TPOT and E2E, by model and minute?
-- parameter minutes UInt32 = 60: how far back from the newest minute, or from `until`
-- parameter until DateTime64(9, 'UTC') = 2100-01-01 00:00:00: look no later than this
-- parameter model String = : only this model; empty for all
WITH least({until:DateTime64(9, 'UTC')}, (SELECT max(minute) FROM requests_per_minute_raw)) AS stop
SELECT
    model,
    minute,
    sum(requests) AS exchanges,
    sum(failed) AS failures,
    arrayMap(q -> round(q, 3), quantilesTDigestMerge(0.5, 0.95, 0.99)(ttft_ms)) AS ttft_p50_p95_p99_ms,
    arrayMap(q -> round(q, 3), quantilesTDigestMerge(0.5, 0.95, 0.99)(tpot_ms)) AS tpot_p50_p95_p99_ms,
    arrayMap(q -> round(q, 3), quantilesTDigestMerge(0.5, 0.95, 0.99)(e2e_ms)) AS e2e_p50_p95_p99_ms
FROM requests_per_minute
WHERE minute > stop - toIntervalMinute({minutes:UInt32}) AND minute <= stop
    AND ({model:String} = '' OR model = {model:String})
GROUP BY model, minute
ORDER BY model, minute
