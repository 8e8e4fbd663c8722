-- name: alert_timeline
-- question: What fired, changed and resolved, in order, and how long after its first window?
-- parameter minutes UInt32 = 1440: how far back from the newest alert, or from `until`
-- parameter until DateTime64(9, 'UTC') = 2100-01-01 00:00:00: look no later than this
-- parameter service String = : only this service; empty for all
WITH least({until:DateTime64(9, 'UTC')}, (SELECT max(updated) FROM alerts_raw)) AS stop
SELECT
    updated AS time,
    state,
    severity,
    service,
    instance,
    stage,
    verdict,
    round(observed_ms, 3) AS observed_ms,
    round(expected_ms, 3) AS expected_ms,
    round(dateDiff('nanosecond', first_batch, fired) / 1e6, 1) AS fired_after_ms,
    round(dateDiff('nanosecond', fired, resolved) / 1e9, 3) AS lasted_s,
    concat(toString(peers_affected), ' of ', toString(peers_total)) AS peers,
    reason,
    alert_id
FROM alerts
WHERE updated > stop - toIntervalMinute({minutes:UInt32}) AND updated <= stop
    AND ({service:String} = '' OR service = {service:String})
ORDER BY time, alert_id
