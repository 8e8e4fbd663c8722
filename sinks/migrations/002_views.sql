-- What people query: one row a thing, whatever was delivered twice.
--
-- FINAL removes repeated deliveries at reading. Conditions on the instance and the time reach the
-- key of the table below, so give both where the data is large.

CREATE OR REPLACE VIEW requests AS
SELECT
    p.request_id AS request_id,
    p.instance AS instance,
    p.arrival AS arrival,
    any(p.source) AS source,
    any(p.endpoint) AS endpoint,
    argMax(p.model, p.part) AS model,
    argMax(p.state, p.part) AS state,
    argMax(p.streaming, p.part) AS streaming,
    argMax(p.status, p.part) AS status,
    max(p.request_end) AS request_end,
    max(p.first_byte) AS first_byte,
    max(p.first_token) AS first_token,
    max(fromUnixTimestamp64Nano(
        toUnixTimestamp64Nano(p.chunk_base) + 1000 * arraySum(p.chunk_deltas_us), 'UTC'
    )) AS last_chunk,
    max(p.`end`) AS ended,
    max(p.chunks_before + if(isNull(p.chunk_base), 0, length(p.chunk_deltas_us) + 1)) AS chunks,
    max(p.request_bytes) AS request_bytes,
    max(p.response_bytes) AS response_bytes,
    max(p.prompt_tokens) AS prompt_tokens,
    max(p.cached_tokens) AS cached_tokens,
    max(p.completion_tokens) AS completion_tokens,
    any(p.trace_id) AS trace_id,
    arraySort(groupUniqArrayArray(p.estimated)) AS estimated,
    count() AS parts,
    max(p.part) + 1 - count() AS parts_missing,
    (toUnixTimestamp64Nano(first_token) - toUnixTimestamp64Nano(arrival)) / 1e6 AS ttft_ms,
    if(completion_tokens > 1, 'tokens', 'chunks') AS tpot_per,
    if(
        if(completion_tokens > 1, completion_tokens, chunks) > 1,
        (toUnixTimestamp64Nano(last_chunk) - toUnixTimestamp64Nano(first_token)) / 1e6
            / (if(completion_tokens > 1, completion_tokens, chunks) - 1),
        NULL
    ) AS tpot_ms,
    (toUnixTimestamp64Nano(ended) - toUnixTimestamp64Nano(arrival)) / 1e6 AS e2e_ms
FROM request_parts AS p FINAL
GROUP BY p.instance, p.arrival, p.request_id
COMMENT 'One row an exchange, joined from its parts; null where nothing was seen. tpot_ms is the mean gap of tokens where their number was told, else of content events; tpot_per says which.';

CREATE OR REPLACE VIEW steps AS
SELECT
    b.instance AS instance,
    b.source AS source,
    b.model AS model,
    step_start AS start,
    duration / 1000 AS duration_ms,
    decode AS decode_sequences,
    join_count AS joined,
    left_count AS left,
    nullIf(prefill, -1) AS prefill_tokens,
    nullIf(context, -1) AS context_tokens
FROM step_batches AS b FINAL
ARRAY JOIN
    b.start AS step_start,
    b.duration_us AS duration,
    b.decode_sequences AS decode,
    b.joined AS join_count,
    b.left AS left_count,
    b.prefill_tokens AS prefill,
    b.context_tokens AS context
COMMENT 'One row an engine step; tokens are null where they are not known.';

CREATE OR REPLACE VIEW engine_samples AS
SELECT * EXCEPT (inserted_at) FROM engine_samples_raw FINAL
COMMENT 'One row a scrape of an engine.';

CREATE OR REPLACE VIEW host_samples AS
SELECT
    * EXCEPT (inserted_at),
    arraySum(p -> ifNull(p.runqueue_ns, 0), processes) / interval_ns AS runqueue_share,
    arraySum(p -> ifNull(p.cpu_ns, 0), processes) / interval_ns AS cpu_cores,
    throttled_ns / interval_ns AS throttled_share,
    1000 * psi_cpu_us / interval_ns AS psi_cpu_share,
    1000 * psi_memory_us / interval_ns AS psi_memory_share,
    1000 * psi_io_us / interval_ns AS psi_io_share
FROM host_samples_raw FINAL
COMMENT 'One row a reading of the operating system. Shares are of the interval: runqueue_share is time the server''s threads waited for a CPU, throttling included, and may pass 1 with several threads.';

CREATE OR REPLACE VIEW xpu_samples AS
SELECT * EXCEPT (inserted_at) FROM xpu_samples_raw FINAL
COMMENT 'One row an accelerator and reading.';

CREATE OR REPLACE VIEW batches AS
SELECT * EXCEPT (inserted_at) FROM batches_raw FINAL
COMMENT 'One row a judged window of an instance.';

CREATE OR REPLACE VIEW alerts AS
SELECT * EXCEPT (inserted_at) FROM alerts_raw FINAL
COMMENT 'One row a state of an alert: firing, updated, resolved.';

CREATE OR REPLACE VIEW problems AS
SELECT * EXCEPT (inserted_at) FROM alerts_raw FINAL
ORDER BY updated DESC, state = 'resolved' DESC, alert_id DESC
LIMIT 1 BY instance, fingerprint, fired
COMMENT 'One row a problem: the last state of each alert that fired.';

CREATE OR REPLACE VIEW commands AS
SELECT * EXCEPT (inserted_at) FROM commands_raw FINAL
COMMENT 'One row a lease given to a router.';

CREATE OR REPLACE VIEW acks AS
SELECT * EXCEPT (inserted_at) FROM acks_raw FINAL
COMMENT 'One row an answer of a router.';

CREATE OR REPLACE VIEW dead_letters AS
SELECT * EXCEPT (inserted_at) FROM dead_letters_raw FINAL
COMMENT 'One row a message or record that could not be taken.';
