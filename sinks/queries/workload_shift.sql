-- name: workload_shift
-- question: Did the work itself change: each workload feature now against the time before?
-- parameter minutes UInt32 = 5: length of now, and of the time before it
-- parameter until DateTime64(9, 'UTC') = 2100-01-01 00:00:00: now ends no later than this
-- parameter instance String = : only this server (host:port); empty for all
WITH
    least({until:DateTime64(9, 'UTC')}, (SELECT max(window_start) FROM batches_raw)) AS stop,
    stop - toIntervalMinute({minutes:UInt32}) AS now_start
SELECT
    instance,
    feature,
    round(avgIf(value, window_start <= now_start), 4) AS before,
    round(avgIf(value, window_start > now_start), 4) AS now,
    round(avgIf(value, window_start > now_start) / avgIf(value, window_start <= now_start), 4) AS ratio
FROM batches
ARRAY JOIN mapKeys(features) AS feature, mapValues(features) AS value
WHERE window_start > stop - toIntervalMinute(2 * {minutes:UInt32}) AND window_start <= stop
    AND ({instance:String} = '' OR instance = {instance:String})
    AND isFinite(value)
GROUP BY instance, feature
HAVING isFinite(before) AND isFinite(now)
ORDER BY instance, abs(log(ratio)) DESC, feature
