-- name: kernel_times
-- question: What did the kernel time on the server, such as waits for a CPU, minute by minute?
-- parameter minutes UInt32 = 60: how far back from the newest reading
-- parameter instance String = : only this server (host:port); empty for all
WITH (SELECT max(observed_at) FROM kernel_samples_raw) AS newest
SELECT
    instance,
    stage,
    toStartOfMinute(observed_at) AS minute,
    sum(count) AS times,
    round(sum(k.mean_ms * k.count) / nullIf(sum(k.count), 0), 4) AS mean_ms,
    round(1000 * arrayElement(
        arrayConcat(any(bounds_s), [inf]),
        arrayFirstIndex(
            c -> c >= 0.99 * arraySum(sumForEach(counts)), arrayCumSum(sumForEach(counts))
        )
    ), 4) AS p99_below_ms,
    sum(lost) AS lost
FROM kernel_samples AS k
WHERE observed_at > newest - toIntervalMinute({minutes:UInt32})
    AND ({instance:String} = '' OR instance = {instance:String})
GROUP BY instance, stage, minute
ORDER BY minute, instance, stage
