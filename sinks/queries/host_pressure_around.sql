-- name: host_pressure_around
-- question: What did the machine do around that moment, beside each window's latency?
-- parameter at DateTime64(9, 'UTC') = 2100-01-01 00:00:00: the moment; if later than all data, the newest fault
-- parameter instance String = : only this server (host:port); empty for all
-- parameter around_s UInt32 = 30: how far before and after, s
WITH
    if(
        {at:DateTime64(9, 'UTC')} <= (SELECT max(window_end) FROM batches_raw),
        {at:DateTime64(9, 'UTC')},
        (
            SELECT max(window_start) FROM batches
            WHERE verdict = 'fault' AND ({instance:String} = '' OR instance = {instance:String})
        )
    ) AS centre,
    windows AS (
        SELECT * FROM batches
        WHERE window_start >= centre - toIntervalSecond({around_s:UInt32})
            AND window_start <= centre + toIntervalSecond({around_s:UInt32})
            AND ({instance:String} = '' OR instance = {instance:String})
    )
SELECT
    w.window_start AS time,
    w.instance AS instance,
    w.verdict AS verdict,
    round(w.tpot_ms, 3) AS tpot_ms,
    round(w.ttft_ms, 3) AS ttft_ms,
    round(w.score, 3) AS score,
    h.host AS host,
    round(dateDiff('nanosecond', h.observed_at, w.window_end) / 1e6, 1) AS host_age_ms,
    round(h.runqueue_share, 4) AS runqueue_share,
    round(h.throttled_share, 4) AS throttled_share,
    round(h.cpu_others, 4) AS cpu_others,
    round(h.cpu_steal, 4) AS cpu_steal,
    round(h.psi_cpu_share, 4) AS psi_cpu_share,
    round(h.psi_memory_share, 4) AS psi_memory_share,
    round(h.psi_io_share, 4) AS psi_io_share,
    h.tcp_retransmits AS tcp_retransmits
FROM windows AS w
ASOF LEFT JOIN host_samples AS h ON w.instance = h.instance AND w.window_end >= h.observed_at
ORDER BY time, instance
SETTINGS join_use_nulls = 1
