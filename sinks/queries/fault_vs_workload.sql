-- name: fault_vs_workload
-- question: How much of the slowness of each instance is fault, how much is its workload?
-- parameter minutes UInt32 = 60: how far back from the newest window, or from `until`
-- parameter until DateTime64(9, 'UTC') = 2100-01-01 00:00:00: look no later than this
-- parameter service String = : only this service; empty for all
WITH least({until:DateTime64(9, 'UTC')}, (SELECT max(window_start) FROM batches_raw)) AS stop
SELECT
    service,
    instance,
    count() AS windows,
    countIf(verdict = 'normal') AS normal,
    countIf(verdict = 'workload') AS workload,
    countIf(verdict = 'fault') AS fault,
    countIf(verdict = 'unknown') AS unknown,
    round(countIf(verdict = 'fault') / count(), 4) AS fault_share,
    topKIf(1)(ifNull(stage, ''), verdict = 'fault')[1] AS fault_stage,
    argMaxIf(reason, score, verdict = 'fault') AS worst_fault
FROM batches
WHERE window_start > stop - toIntervalMinute({minutes:UInt32}) AND window_start <= stop
    AND ({service:String} = '' OR service = {service:String})
GROUP BY service, instance
ORDER BY fault DESC, service, instance
