-- Where each run has its largest finite numbers, by role: module, step, rank, and how many times the median of all such modules that is.
-- Needs: stats WHERE count > 0
WITH measured AS (
    SELECT run, rank, step, root, module, role, slot, greatest(abs(min), abs(max)) AS magnitude
    FROM stats JOIN sites USING (run, rank, site_id)
    WHERE numel > 1 AND count > 0 AND nan_count = 0 AND inf_count = 0
), of_sites AS (
    SELECT run, role, root, module, slot, max({'magnitude': magnitude, 'step': -step, 'rank': -rank}) AS top
    FROM measured
    GROUP BY run, role, root, module, slot
), first_of_each AS (
    SELECT run, role, root, module, slot, top.magnitude AS largest, -top.step AS step, -top.rank AS rank FROM of_sites
), usual AS (
    SELECT run, role, median(largest) AS usual FROM first_of_each GROUP BY run, role
)
SELECT run, role, root, module, slot, largest, step, rank, CASE WHEN usual > 0 THEN round(largest / usual, 2) END AS times_median
FROM first_of_each JOIN usual USING (run, role)
QUALIFY row_number() OVER (PARTITION BY run, role ORDER BY largest DESC, length(module) DESC, root, module, slot) = 1
ORDER BY run, role
