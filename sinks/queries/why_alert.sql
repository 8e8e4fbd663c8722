-- name: why_alert
-- question: Why did this alert fire: which causes, on what evidence, in which windows?
-- parameter alert String = : alert_id or fingerprint; empty for the newest problem
WITH
    chosen AS (
        SELECT * FROM alerts
        WHERE {alert:String} = '' OR alert_id = {alert:String} OR fingerprint = {alert:String}
        ORDER BY fired DESC, updated DESC, alert_id DESC
        LIMIT 1
    ),
    windows AS (
        SELECT
            count() AS windows,
            min(window_start) AS first_window,
            max(window_end) AS last_window,
            round(max(score), 3) AS worst_score
        FROM batches
        WHERE batch_id IN (SELECT arrayJoin(batches) FROM chosen)
    )
SELECT
    c.instance AS instance,
    c.stage AS stage,
    c.state AS state,
    c.reason AS reason,
    round(c.observed_ms, 3) AS observed_ms,
    round(c.expected_ms, 3) AS expected_ms,
    rank,
    ranked.family AS family,
    ranked.cause AS cause,
    round(ranked.score, 4) AS cause_score,
    arrayMap(
        e -> concat(
            e.signal, ' ', toString(round(e.observed, 4)),
            if(e.baseline IS NULL, ' (no history)', concat(' (usually ', toString(round(e.baseline, 4)), ')'))
        ),
        ranked.evidence
    ) AS evidence,
    w.windows AS windows,
    w.first_window AS first_window,
    w.last_window AS last_window,
    w.worst_score AS worst_score
FROM chosen AS c
CROSS JOIN windows AS w
LEFT ARRAY JOIN c.causes AS ranked, arrayEnumerate(c.causes) AS rank
ORDER BY rank
