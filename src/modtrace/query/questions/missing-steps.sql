-- Which steps of a run some ranks have and others lack, and which ranks are missing altogether.
-- Needs: steps
WITH ranks AS (
    SELECT run, CAST(number AS INTEGER) AS rank
    FROM (SELECT run, unnest(range(coalesce(max(world_size), max(rank) + 1))) AS number FROM runs GROUP BY run)
), wanted AS (
    SELECT run, rank, step FROM ranks JOIN (SELECT DISTINCT run, step FROM steps) USING (run)
)
SELECT run, rank, CAST(count(*) AS BIGINT) AS missing, min(step) AS first_missing, max(step) AS last_missing,
    max(latest) AS latest_of_rank
FROM wanted
LEFT JOIN (SELECT run, rank, step, true AS is_there FROM steps) USING (run, rank, step)
LEFT JOIN (SELECT run, rank, max(step) AS latest FROM steps GROUP BY run, rank) USING (run, rank)
WHERE is_there IS NULL
GROUP BY run, rank
ORDER BY run, rank
