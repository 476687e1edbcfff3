"""The views of a dataset: the tables of recordings, with names that SQL does not reserve."""

from collections.abc import Mapping

import pyarrow as pa

from ..recording.options.schedule import StepRange
from ..recording.role import FINITE_ROLES
from ..recording.schema import schemas
from ..store.export import RUNS, RUNS_SCHEMA
from ..store.parquet import STEPS_OF_A_BLOCK

#: Names of tables and columns that are words of SQL, or functions, with those that they have in views.
RENAMED = {
    "values": "stats",
    "order": "nr",
    "group": "process_group",
    "user": "user_json",
    "offset": "first_element",
}

#: The columns that readers take from the names of folders.
PARTITIONS = {"run": pa.string(), "rank": pa.int32()}
BLOCK = {"block": pa.int32()}

#: What the views `modules` and `sites` have besides their own columns. Both have names of the module and of its root.
_MORE = {
    "modules": "CASE WHEN path = '' THEN coalesce(name, type) ELSE path END AS module",
    "sites": f"role IN ({', '.join(map(repr, FINITE_ROLES))}) AS must_be_finite",
}
_JOINED = {
    "modules": "LEFT JOIN (SELECT run, rank, module_id AS root_id, module AS root FROM ({text})) "
    "USING (run, rank, root_id)",
    "sites": "LEFT JOIN (SELECT run, rank, module_id, root, module FROM modules) USING (run, rank, module_id)",
}


def tables() -> dict[str, pa.Schema]:
    """Returns the columns in the files of each table of a dataset, without those of the names of folders."""
    return {**schemas(), RUNS: RUNS_SCHEMA}


def partitions(table: str) -> dict[str, pa.DataType]:
    """Returns the columns that the names of a table's folders have, in the order of the folders."""
    return PARTITIONS | (BLOCK if "step" in tables()[table].names else {})


def view_name(name: str) -> str:
    """Returns the name that a table or a column has in the views."""
    return RENAMED.get(name, name)


def view_text(
    table: str,
    source: str,
    *,
    run: str | None = None,
    steps: StepRange | None = None,
    left_out: Mapping[str, set[int]],
) -> str:
    """Returns the query of the view of a table, in DuckDB's dialect.

    Args:
        table: a table of a recording, or `runs`.
        source: the name under which the engine has the table's files, with all columns of `tables` and `partitions`.
        run: the run to which the view is limited.
        steps: the steps to which it is limited, where the table has steps.
        left_out: ranks that the view does not have, by run.
    """
    columns = [*partitions(table), *tables()[table].names]
    named = [
        f'"{name}"' + (f" AS {view_name(name)}" if name in RENAMED else "")
        for name in columns
        if name != "block"
    ]
    named += [_MORE[table]] if table in _MORE else []
    where = [] if run is None else [f"run = {quoted(run)}"]
    if steps is not None and "step" in columns:
        where += _limits(steps)
    where += [
        f"NOT (run = {quoted(of)} AND rank IN ({', '.join(map(str, sorted(ranks)))}))"
        for of, ranks in left_out.items()
    ]
    text = f"SELECT {', '.join(named)} FROM {source}" + (f" WHERE {' AND '.join(where)}" if where else "")
    return f"SELECT * FROM ({text}) {_JOINED[table].format(text=text)}" if table in _JOINED else text


def quoted(text: str) -> str:
    """Returns a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def _limits(steps: StepRange) -> list[str]:
    """Returns the conditions for steps, and those for their blocks, by which readers skip whole folders."""
    limits = [f"step >= {steps.start}", f"block >= {steps.start // STEPS_OF_A_BLOCK}"] if steps.start else []
    if steps.stop is not None:
        limits += [f"step < {steps.stop}", f"block <= {(steps.stop - 1) // STEPS_OF_A_BLOCK}"]
    return limits + ([f"(step - {steps.start}) % {steps.every} = 0"] if steps.every > 1 else [])
