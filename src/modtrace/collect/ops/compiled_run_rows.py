"""Parts the rows of runs of compiled code from those of ops."""

from collections.abc import Iterable
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...recording.arrow.arrays import from_numpy
from .batches import OpBatch
from .rows import Columns, OpRows

#: Columns of `ops` that a run has too.
_SHARED = ("op_id", "step", "call_id", "phase", "thread", "start_ns")


def part_runs(rows: OpRows, batches: Iterable[OpBatch]) -> dict[str, Columns]:
    """Returns the tables of ops with the runs of compiled code in a table of their own."""
    runs = {run.op: run for batch in batches for run in batch.compiled_runs}
    if not runs:
        return rows.tables
    ops = rows.tables["ops"]
    is_run = np.isin(ops["op_id"], np.array([*runs], np.int64))
    found = [runs[op] for op in ops["op_id"][is_run].tolist()]
    return {
        **rows.tables,
        "ops": {name: _choose(column, ~is_run) for name, column in ops.items()},
        "compiled_runs": {
            **{name: _choose(ops[name], is_run) for name in _SHARED},
            "end_ns": [run.end_ns for run in found],
            "compile_id": [run.graph.compile_id for run in found],
            "given": [run.given for run in found],
            "returned": [run.returned for run in found],
        },
    }


def _choose(column: Any, chosen: npt.NDArray[np.bool_]) -> Any:
    if isinstance(column, list):
        return [*compress(column, chosen)]
    return column.filter(from_numpy(chosen, pa.bool_())) if isinstance(column, pa.Array) else column[chosen]
