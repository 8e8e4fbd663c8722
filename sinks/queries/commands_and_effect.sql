-- name: commands_and_effect
-- question: What were routers told, what did they do, and what became of the service's latency?
-- parameter minutes UInt32 = 1440: how far back from the newest command, or from `until`
-- parameter until DateTime64(9, 'UTC') = 2100-01-01 00:00:00: look no later than this
-- parameter service String = : only this service; empty for all
-- parameter around_s UInt32 = 10: how long before and after the lease to look, s
WITH
    least({until:DateTime64(9, 'UTC')}, (SELECT max(issued) FROM commands_raw)) AS stop,
    answered AS (
        SELECT
            c.*,
            a.routers AS routers,
            a.effect AS effect,
            a.applied AS applied,
            ifNull(a.applied, c.issued) AS lease_start,
            ifNull(a.applied, c.issued) + toIntervalMillisecond(c.lease_ms) AS lease_end
        FROM commands AS c
        LEFT JOIN (
            SELECT
                command_id,
                epoch,
                uniqExact(router) AS routers,
                arrayStringConcat(arraySort(groupUniqArray(toString(k.effect))), ', ') AS effect,
                minIf(toNullable(k.at), k.effect = 'applied') AS applied
            FROM acks AS k
            GROUP BY command_id, epoch
        ) AS a ON c.command_id = a.command_id AND c.epoch = a.epoch
        WHERE c.issued > stop - toIntervalMinute({minutes:UInt32}) AND c.issued <= stop
            AND ({service:String} = '' OR c.service = {service:String})
    )
SELECT
    w.issued AS issued,
    w.target AS target,
    w.action AS action,
    w.value AS value,
    w.dry_run AS dry_run,
    w.lease_ms AS lease_ms,
    if(w.routers = 0, 'no answer', w.effect) AS answer,
    round(dateDiff('nanosecond', w.issued, w.applied) / 1e6, 3) AS applied_after_ms,
    round(avgIf(b.tpot_ms, b.window_start < w.lease_start), 3) AS tpot_before_ms,
    round(avgIf(b.tpot_ms, b.window_start >= w.lease_start AND b.window_start < w.lease_end), 3) AS tpot_during_ms,
    round(avgIf(b.tpot_ms, b.window_start >= w.lease_end), 3) AS tpot_after_ms,
    round(avgIf(b.ttft_ms, b.window_start < w.lease_start), 3) AS ttft_before_ms,
    round(avgIf(b.ttft_ms, b.window_start >= w.lease_start AND b.window_start < w.lease_end), 3) AS ttft_during_ms,
    round(avgIf(b.ttft_ms, b.window_start >= w.lease_end), 3) AS ttft_after_ms,
    w.reason AS reason,
    w.alert AS alert,
    w.command_id AS command_id,
    w.epoch AS epoch
FROM answered AS w
LEFT JOIN batches AS b ON w.service = b.service
    AND b.window_start >= w.lease_start - toIntervalSecond({around_s:UInt32})
    AND b.window_start < w.lease_end + toIntervalSecond({around_s:UInt32})
GROUP BY ALL
ORDER BY issued, target, command_id, epoch
