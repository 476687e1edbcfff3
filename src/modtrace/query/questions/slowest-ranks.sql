-- How long each rank works from one step to the next, without the waiting that was seen, and in how many steps it is the slowest.
-- Needs: steps WHERE kind = 'train'
WITH waited AS (
    SELECT run, rank, step, sum(wait_ns) AS wait_ns FROM collectives GROUP BY run, rank, step
), cycles AS (
    SELECT run, rank, step, kind, coalesce(overhead_ns, 0) AS overhead_ns,
        coalesce(lead(start_ns) OVER (PARTITION BY run, rank ORDER BY step), end_ns) - start_ns AS ns
    FROM steps
), several AS (
    SELECT run FROM steps GROUP BY run HAVING count(DISTINCT rank) > 1
), busy AS (
    SELECT run, rank, step, (ns - overhead_ns - coalesce(wait_ns, 0)) / 1e6 AS ms, wait_ns / 1e6 AS wait_ms
    FROM cycles JOIN several USING (run) LEFT JOIN waited USING (run, rank, step)
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
