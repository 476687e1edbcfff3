-- Which NaN or infinity came up first in each run, at which step, on which rank, in which module.
WITH of_sites AS (
    SELECT run, rank, site_id, min(step) AS step
    FROM stats
    WHERE nan_count > 0 OR inf_count > 0
    GROUP BY run, rank, site_id
), first_steps AS (
    SELECT run, min(step) AS step
    FROM of_sites JOIN sites USING (run, rank, site_id)
    WHERE must_be_finite
    GROUP BY run
)
SELECT run, step, rank, module, role, slot, phase, nan_count, inf_count, numel
FROM stats JOIN first_steps USING (run, step) JOIN sites USING (run, rank, site_id)
WHERE (nan_count > 0 OR inf_count > 0) AND must_be_finite
QUALIFY row_number() OVER (PARTITION BY run ORDER BY nr, rank, length(module) DESC, module, role, slot) = 1
ORDER BY run
