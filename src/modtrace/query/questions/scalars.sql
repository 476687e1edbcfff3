-- How each logged number went in each run, as the mean over ranks: first, last, lowest, highest, and since when a rank has no finite one.
-- Needs: scalars
-- What is not finite is picked in the aggregate: engines skip row groups by the statistics of Parquet, which leave NaN out.
WITH of_steps AS (
    SELECT run, step, name, avg(value) AS value,
        min(rank) FILTER (WHERE isnan(value) OR abs(value) = CAST('inf' AS DOUBLE)) AS bad_rank
    FROM scalars
    GROUP BY run, step, name
), of_names AS (
    SELECT run, name, CAST(count(*) AS BIGINT) AS steps, arg_min(value, step) AS first, arg_max(value, step) AS last,
        min({'value': value, 'step': step}) FILTER (WHERE NOT isnan(value)) AS low,
        max(value) FILTER (WHERE NOT isnan(value)) AS highest,
        min({'step': step, 'rank': bad_rank}) FILTER (WHERE bad_rank IS NOT NULL) AS bad
    FROM of_steps
    GROUP BY run, name
)
SELECT run, name, steps, first, last, low.value AS lowest, low.step AS lowest_in_step, highest,
    bad.step AS not_finite_since, bad.rank AS on_rank
FROM of_names
ORDER BY run, name
