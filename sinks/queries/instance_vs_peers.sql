-- name: instance_vs_peers
-- question: Is one replica slower than the others of its service under a like load?
-- parameter minutes UInt32 = 15: how far back from the newest window, or from `until`
-- parameter until DateTime64(9, 'UTC') = 2100-01-01 00:00:00: look no later than this
-- parameter service String = : only this service; empty for all
WITH
    least({until:DateTime64(9, 'UTC')}, (SELECT max(window_start) FROM batches_raw)) AS stop,
    replicas AS (
        SELECT
            service,
            instance,
            count() AS windows,
            countIf(verdict = 'fault') / count() AS fault_share,
            quantileExact(0.5)(ttft_ms) AS ttft,
            quantileExact(0.5)(tpot_ms) AS tpot,
            avg(requests_open) AS open
        FROM batches
        WHERE window_start > stop - toIntervalMinute({minutes:UInt32}) AND window_start <= stop
            AND ({service:String} = '' OR service = {service:String})
        GROUP BY service, instance
    )
SELECT
    r.service AS service,
    r.instance AS instance,
    any(r.windows) AS windows,
    count(p.instance) AS peers,
    round(any(r.tpot), 3) AS tpot_ms,
    round(quantileExact(0.5)(p.tpot), 3) AS peers_tpot_ms,
    round(any(r.tpot) / quantileExact(0.5)(p.tpot), 3) AS tpot_ratio,
    round(any(r.ttft), 3) AS ttft_ms,
    round(quantileExact(0.5)(p.ttft), 3) AS peers_ttft_ms,
    round(any(r.ttft) / quantileExact(0.5)(p.ttft), 3) AS ttft_ratio,
    round(any(r.open), 2) AS open_requests,
    round(avg(p.open), 2) AS peers_open_requests,
    round(any(r.fault_share), 4) AS fault_share
FROM replicas AS r
INNER JOIN replicas AS p ON r.service = p.service
WHERE r.instance != p.instance
GROUP BY service, instance
ORDER BY tpot_ratio DESC, service, instance
