-- name: slow_requests
-- question: Which exchanges took longest, where did their time go, and what was said of that moment?
-- parameter minutes UInt32 = 60: how far back from the newest exchange, or from `until`
-- parameter until DateTime64(9, 'UTC') = 2100-01-01 00:00:00: look no later than this
-- parameter instance String = : only this server (host:port); empty for all
-- parameter limit UInt32 = 20: how many exchanges
WITH
    least({until:DateTime64(9, 'UTC')}, (SELECT max(arrival) FROM request_parts)) AS stop,
    slowest AS (
        SELECT *, ifNull(ended, last_chunk) AS seen
        FROM requests
        WHERE arrival > stop - toIntervalMinute({minutes:UInt32}) AND arrival <= stop
            AND ({instance:String} = '' OR instance = {instance:String})
            AND e2e_ms IS NOT NULL
        ORDER BY e2e_ms DESC, request_id
        LIMIT {limit:UInt32}
    )
SELECT
    s.request_id AS request_id,
    s.instance AS instance,
    s.model AS model,
    s.arrival AS arrival,
    s.state AS state,
    s.status AS status,
    round(s.e2e_ms, 3) AS e2e_ms,
    round(s.ttft_ms, 3) AS ttft_ms,
    round(dateDiff('nanosecond', s.first_token, s.last_chunk) / 1e6, 3) AS streaming_ms,
    round(s.tpot_ms, 3) AS tpot_ms,
    s.prompt_tokens AS prompt_tokens,
    s.chunks AS chunks,
    b.verdict AS verdict,
    b.reason AS reason
FROM slowest AS s
ASOF LEFT JOIN batches AS b ON s.instance = b.instance AND s.seen >= b.window_start
ORDER BY e2e_ms DESC, request_id
