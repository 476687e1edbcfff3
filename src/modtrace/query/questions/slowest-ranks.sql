-- How long the steps of each rank take without waiting for other ranks, and in how many it was the slowest.
WITH waited AS (
    SELECT run, rank, step, sum(wait_ns) AS wait_ns FROM collectives GROUP BY run, rank, step
), busy AS (
    SELECT run, rank, step,
        (end_ns - start_ns - coalesce(overhead_ns, 0) - coalesce(wait_ns, 0)) / 1e6 AS ms,
        coalesce(wait_ns, 0) / 1e6 AS wait_ms
    FROM steps LEFT JOIN waited USING (run, rank, step)
    WHERE kind = 'train'
), placed AS (
    SELECT run, rank, step, ms, wait_ms, median(ms) OVER (PARTITION BY run, step) AS usual,
        row_number() OVER (PARTITION BY run, step ORDER BY ms DESC, rank) AS place
    FROM busy
)
SELECT run, rank, CAST(count(*) AS BIGINT) AS steps, CAST(count(*) FILTER (WHERE place = 1) AS BIGINT) AS slowest_in,
    round(median(ms), 3) AS median_ms, round(median(ms - usual), 3) AS behind_ms, round(median(wait_ms), 3) AS wait_ms
FROM placed
GROUP BY run, rank
ORDER BY run, slowest_in DESC, rank
