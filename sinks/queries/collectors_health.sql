-- name: collectors_health
-- question: How do the agents do: what do they cost, which source fails, what was dropped?
-- parameter minutes UInt32 = 10: how far back from each agent's newest reading
SELECT
    instance AS agent,
    newest.host AS host,
    newest.seen AS seen,
    round(avgOrNull(cpu_pct), 2) AS cpu_pct,
    round(maxOrNull(rss_mb), 1) AS rss_mb,
    round(avgOrNull(published_bytes_s), 0) AS bytes_s,
    newest.dropped_total AS dropped,
    newest.failing AS failing,
    newest.settings_error AS settings_error
FROM agent_samples AS s
INNER JOIN
(
    SELECT
        instance,
        argMax(host, observed_at) AS host,
        max(observed_at) AS seen,
        argMax(arraySum(mapValues(dropped)), observed_at) AS dropped_total,
        argMax(
            arrayMap(
                f -> concat(f.name, ' ', f.state, ': ', ifNull(f.error, 'no reason told')),
                arrayFilter(f -> f.state IN ('backoff', 'shed', 'unavailable'), sources)
            ),
            observed_at
        ) AS failing,
        argMax(tuple(settings_error), observed_at).1 AS settings_error
    FROM agent_samples
    GROUP BY instance
) AS newest ON s.instance = newest.instance
WHERE s.observed_at > newest.seen - toIntervalMinute({minutes:UInt32})
GROUP BY instance, host, seen, dropped, failing, settings_error
ORDER BY agent
