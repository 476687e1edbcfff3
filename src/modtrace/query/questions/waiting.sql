-- Which collectives each run calls, how many bytes they are given, and how long each rank waits for them.
-- Needs: collectives
WITH of_ranks AS (
    SELECT run, name, process_group, rank, CAST(count(*) AS BIGINT) AS calls, CAST(sum(bytes_read) AS BIGINT) AS bytes_read,
        sum(wait_ns) AS wait_ns,
        max({'ns': wait_ns, 'step': -step, 'path': coalesce(path, '')}) FILTER (WHERE wait_ns IS NOT NULL) AS longest
    FROM collectives
    WHERE name <> 'last'
    GROUP BY run, name, process_group, rank
)
SELECT run, name, process_group, rank, calls, bytes_read, round(wait_ns / 1e6, 3) AS wait_ms,
    round(longest.ns / 1e6, 3) AS longest_wait_ms, longest.path AS longest_at, -longest.step AS longest_in_step
FROM of_ranks
ORDER BY run, wait_ms DESC NULLS LAST, name, process_group, rank
