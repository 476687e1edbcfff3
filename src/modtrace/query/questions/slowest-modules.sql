-- In which modules the time of module calls goes in each run: what they take themselves, without the modules inside them.
-- Needs: calls
WITH timed AS (
    SELECT run, rank, step, call_id, parent_call_id, module_id, phase, end_ns - start_ns - coalesce(overhead_ns, 0) AS ns
    FROM calls
    WHERE module_id IS NOT NULL AND end_ns IS NOT NULL
), inside AS (
    SELECT run, rank, parent_call_id AS call_id, sum(ns) AS inside_ns
    FROM timed WHERE parent_call_id IS NOT NULL
    GROUP BY run, rank, parent_call_id
), own AS (
    SELECT run, rank, step, module_id, sum(ns - coalesce(inside_ns, 0)) AS ns, count(*) AS calls
    FROM timed LEFT JOIN inside USING (run, rank, call_id)
    GROUP BY run, rank, step, module_id
), modules_of_run AS (
    SELECT run, root, module, sum(ns) AS ns, sum(calls) AS calls, median(ns) AS median_ns, max({'ns': ns, 'rank': -rank}) AS top
    FROM own JOIN modules USING (run, rank, module_id)
    GROUP BY run, root, module
)
SELECT run, root, module, CAST(calls AS BIGINT) AS calls, round(median_ns / 1e6, 3) AS median_ms_a_step,
    round(100 * ns / sum(ns) OVER (PARTITION BY run), 2) AS percent_of_modules, -top.rank AS slowest_rank
FROM modules_of_run
ORDER BY run, ns DESC, root, module
