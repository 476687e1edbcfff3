-- Which NaN and which infinity came up first in each run: step, rank, module, role, and on how many ranks in that step.
-- Needs: stats WHERE count IS NOT NULL
WITH marked AS (
    SELECT run, rank, site_id, step, 'NaN' AS kind FROM stats WHERE nan_count > 0
    UNION ALL
    SELECT run, rank, site_id, step, 'infinity' AS kind FROM stats WHERE inf_count > 0 AND nan_count = 0
), of_sites AS (
    SELECT run, rank, site_id, kind, min(step) AS step FROM marked GROUP BY run, rank, site_id, kind
), first_steps AS (
    SELECT run, kind, min(step) AS step
    FROM of_sites JOIN sites USING (run, rank, site_id)
    WHERE must_be_finite OR (kind = 'NaN' AND role = 'input')
    GROUP BY run, kind
), in_first_steps AS (
    SELECT run, kind, step, rank, root, module, role, slot, phase, nan_count, inf_count, numel, nr, call_id,
        row_number() OVER (PARTITION BY run, kind, rank ORDER BY nr, length(module) DESC, module, role, slot) AS place,
        dense_rank() OVER (PARTITION BY run, kind ORDER BY rank) AS rank_number
    FROM stats JOIN first_steps USING (run, step) JOIN sites USING (run, rank, site_id)
    WHERE CASE kind WHEN 'NaN' THEN nan_count > 0 ELSE inf_count > 0 AND nan_count = 0 END
        AND (must_be_finite OR (kind = 'NaN' AND role = 'input'))
), of_ranks AS (
    SELECT *, max(rank_number) OVER (PARTITION BY run, kind) AS ranks FROM in_first_steps
), timed AS (
    SELECT of_ranks.*, clock_time_ns + end_ns - clock_perf_counter_ns AS wall_ns
    FROM of_ranks
    LEFT JOIN (SELECT run, rank, call_id, end_ns FROM calls) USING (run, rank, call_id)
    LEFT JOIN (SELECT run, rank, clock_time_ns, clock_perf_counter_ns FROM runs) USING (run, rank)
    WHERE place = 1
)
SELECT run, kind, step, rank, root, module, role, slot, phase, nan_count, inf_count, numel, CAST(ranks AS BIGINT) AS ranks
FROM timed
QUALIFY row_number() OVER (
    PARTITION BY run, kind
    ORDER BY CASE WHEN phase = 'forward' THEN 0 ELSE 1 END, CASE WHEN role = 'input' AND nr > 0 THEN 1 ELSE 0 END,
        wall_ns NULLS LAST, nr, rank
) = 1
ORDER BY run, kind
