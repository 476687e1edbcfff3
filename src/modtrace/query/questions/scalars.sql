-- How each logged number went in each run: first, last, lowest, highest, and the first step at which it is no number.
WITH logged AS (
    SELECT run, step, name, arg_min(value, rank) AS value FROM scalars GROUP BY run, step, name
), of_names AS (
    SELECT run, name, CAST(count(*) AS BIGINT) AS steps, arg_min(value, step) AS first, arg_max(value, step) AS last,
        min({'value': value, 'step': step}) FILTER (WHERE NOT isnan(value)) AS low,
        max(value) FILTER (WHERE NOT isnan(value)) AS highest,
        min(step) FILTER (WHERE isnan(value) OR abs(value) = CAST('inf' AS DOUBLE)) AS not_finite_since
    FROM logged
    GROUP BY run, name
)
SELECT run, name, steps, first, last, low.value AS lowest, low.step AS lowest_in_step, highest, not_finite_since
FROM of_names
ORDER BY run, name
