-- Which parameters, gradients, buffers and optimizer states differ between ranks that hold the same one, and since when.
-- Needs: stats WHERE hash IS NOT NULL
WITH last_of_step AS (
    SELECT run, rank, step, root, module, role, slot, shape, global_offset, arg_max(hash, nr) AS hash, min(nr) AS nr
    FROM stats JOIN sites USING (run, rank, site_id)
    WHERE hash IS NOT NULL
        AND role IN ('parameter', 'parameter_grad', 'buffer', 'optimizer_state')
        AND (placements IS NULL OR placements NOT LIKE '%P(%')
    GROUP BY run, rank, step, root, module, role, slot, shape, global_offset
), copies AS (
    SELECT run, step, root, module, role, slot, shape, global_offset, hash, count(*) AS ranks, min(rank) AS first_rank,
        min(nr) AS nr
    FROM last_of_step
    GROUP BY run, step, root, module, role, slot, shape, global_offset, hash
), differing AS (
    SELECT run, step, root, module, role, slot, min(nr) AS nr, count(*) AS versions, sum(ranks) AS ranks,
        arg_min(first_rank, ranks * 100000 + first_rank) AS odd_rank, min(ranks) AS odd_ranks
    FROM copies
    GROUP BY run, step, root, module, role, slot, shape, global_offset
    HAVING count(*) > 1
), since AS (
    SELECT run, root, module, role, slot, min(step) AS step FROM differing GROUP BY run, root, module, role, slot
), begun AS (
    SELECT run, root, module, role, slot, min(step) AS first_step
    FROM copies GROUP BY run, root, module, role, slot
)
SELECT run, step, root, module, role, slot, CAST(versions AS BIGINT) AS versions, CAST(ranks AS BIGINT) AS ranks,
    CASE WHEN odd_ranks = 1 AND versions = 2 AND ranks > 2 THEN odd_rank END AS rank_alone,
    step > first_step AS agreed_before
FROM differing JOIN since USING (run, root, module, role, slot, step) JOIN begun USING (run, root, module, role, slot)
ORDER BY agreed_before DESC, run, step, nr, root, module, role, slot
