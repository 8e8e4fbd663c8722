-- name: stacks_at_alert
-- question: What were the server's functions doing when the alert fired?
-- parameter fingerprint String = : only this problem; empty for all
-- parameter instance String = : only this server (host:port); empty for all
-- parameter limit UInt32 = 20: how many profiles, newest first
SELECT
    observed_at AS time,
    instance,
    role,
    pid,
    fingerprint,
    samples,
    failed,
    arrayMap(s -> concat(s.stage, ' ', toString(round(100 * s.samples / samples)), ' %'), stages) AS stages,
    stacks[1].stack AS most_frequent,
    error
FROM stack_profiles
WHERE ({fingerprint:String} = '' OR fingerprint = {fingerprint:String})
    AND ({instance:String} = '' OR instance = {instance:String})
ORDER BY time DESC, instance, pid
LIMIT {limit:UInt32}
