-- How large the gradient of all parameters is in each run: the usual norm, the largest, its step, how often it is 5 x the usual or not finite.
-- Needs: stats JOIN sites USING (run, rank, site_id) WHERE role = 'parameter_grad' AND count IS NOT NULL
WITH last_of_step AS (
    SELECT run, rank, step, root, module, slot, global_offset, shape, arg_max(sumsq, nr) AS sumsq
    FROM stats JOIN sites USING (run, rank, site_id)
    WHERE role = 'parameter_grad' AND (placements IS NULL OR placements NOT LIKE '%P(%')
    GROUP BY run, rank, step, root, module, slot, global_offset, shape
), parts AS (
    SELECT run, step, root, module, slot, global_offset, shape, arg_min(sumsq, rank) AS sumsq
    FROM last_of_step
    GROUP BY run, step, root, module, slot, global_offset, shape
), norms AS (
    SELECT run, step, norm, isnan(norm) OR norm = CAST('inf' AS DOUBLE) AS is_not_finite
    FROM (SELECT run, step, sqrt(sum(sumsq)) AS norm FROM parts GROUP BY run, step)
), usual AS (
    SELECT run, median(CASE WHEN is_not_finite THEN NULL ELSE norm END) AS median_norm FROM norms GROUP BY run
), of_runs AS (
    SELECT run, CAST(count(*) AS BIGINT) AS steps, min(median_norm) AS median_norm,
        max({'norm': norm, 'step': -step}) FILTER (WHERE NOT is_not_finite) AS top,
        CAST(count(*) FILTER (WHERE NOT is_not_finite AND norm > 5 * median_norm) AS BIGINT) AS steps_of_5_x,
        CAST(count(*) FILTER (WHERE is_not_finite) AS BIGINT) AS not_finite,
        min(step) FILTER (WHERE is_not_finite) AS not_finite_since
    FROM norms LEFT JOIN usual USING (run)
    GROUP BY run
)
SELECT run, steps, median_norm, top.norm AS largest, -top.step AS largest_in_step, steps_of_5_x, not_finite,
    not_finite_since
FROM of_runs
ORDER BY run
