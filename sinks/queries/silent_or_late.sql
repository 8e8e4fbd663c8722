-- name: silent_or_late
-- question: When did a source fall silent or report late, so that a verdict stands on less?
-- parameter minutes UInt32 = 60: how far back from the newest window, or from `until`
-- parameter until DateTime64(9, 'UTC') = 2100-01-01 00:00:00: look no later than this
-- parameter instance String = : only this server (host:port); empty for all
WITH least({until:DateTime64(9, 'UTC')}, (SELECT max(window_start) FROM batches_raw)) AS stop
SELECT
    instance,
    toStartOfMinute(window_start) AS minute,
    count() AS windows,
    countIf(notEmpty(silent_sources)) AS silent_windows,
    arraySort(groupUniqArrayArray(silent_sources)) AS sources,
    minIf(toNullable(window_start), notEmpty(silent_sources)) AS silent_from,
    maxIf(toNullable(window_end), notEmpty(silent_sources)) AS silent_until,
    sum(late_samples) AS late
FROM batches
WHERE window_start > stop - toIntervalMinute({minutes:UInt32}) AND window_start <= stop
    AND ({instance:String} = '' OR instance = {instance:String})
GROUP BY instance, minute
HAVING silent_windows > 0 OR late > 0
ORDER BY minute, instance
