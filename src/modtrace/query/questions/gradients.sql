-- How large the gradient of all parameters is in each run: the usual norm, the largest, its step, and how often it is 5 x the usual.
WITH parts AS (
    SELECT run, step, module, slot, global_offset, shape, arg_min(sumsq, rank) AS sumsq
    FROM stats JOIN sites USING (run, rank, site_id)
    WHERE role = 'parameter_grad' AND (placements IS NULL OR placements NOT LIKE '%P(%')
    GROUP BY run, step, module, slot, global_offset, shape
), norms AS (
    SELECT run, step, sqrt(sum(sumsq)) AS norm FROM parts GROUP BY run, step
), usual AS (
    SELECT run, median(norm) AS median_norm FROM norms GROUP BY run
), of_runs AS (
    SELECT run, CAST(count(*) AS BIGINT) AS steps, min(median_norm) AS median_norm,
        max({'norm': norm, 'step': -step}) AS top,
        CAST(count(*) FILTER (WHERE norm > 5 * median_norm) AS BIGINT) AS steps_of_5_x
    FROM norms JOIN usual USING (run)
    GROUP BY run
)
SELECT run, steps, median_norm, top.norm AS largest, -top.step AS largest_in_step, steps_of_5_x
FROM of_runs
ORDER BY run
