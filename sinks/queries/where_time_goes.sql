-- name: where_time_goes
-- question: Which share of the time of requests does each stage take, by instance over time?
-- parameter minutes UInt32 = 60: how far back from the newest window, or from `until`
-- parameter until DateTime64(9, 'UTC') = 2100-01-01 00:00:00: look no later than this
-- parameter instance String = : only this server (host:port); empty for all
-- parameter bucket_s UInt32 = 60: length of a row's time, s
WITH
    least({until:DateTime64(9, 'UTC')}, (SELECT max(window_start) FROM batches_raw)) AS stop,
    spent AS (
        SELECT
            toStartOfInterval(window_start, toIntervalSecond({bucket_s:UInt32})) AS time,
            instance,
            requests_finished AS weight,
            arrayJoin(arrayConcat(
                arrayMap(s -> (s.stage, s.mean_ms, s.how), stages),
                [('remainder', remainder_ms, 'measured')]
            )) AS spent_in
        FROM batches
        WHERE window_start > stop - toIntervalMinute({minutes:UInt32}) AND window_start <= stop
            AND ({instance:String} = '' OR instance = {instance:String})
            AND requests_finished > 0
    )
SELECT
    time,
    instance,
    spent_in.1 AS stage,
    round(sum(weight * spent_in.2) / sumIf(weight, spent_in.2 IS NOT NULL), 3) AS mean_ms,
    round(
        sum(weight * spent_in.2) / sum(sum(weight * spent_in.2)) OVER (PARTITION BY time, instance), 4
    ) AS share,
    round(sumIf(weight, spent_in.3 = 'measured') / sum(weight), 4) AS measured_share
FROM spent
GROUP BY time, instance, stage
HAVING mean_ms IS NOT NULL
ORDER BY time, instance, share DESC
