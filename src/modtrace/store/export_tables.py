"""The tables of an export: those of the recording, and one row about the run."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from ..recording.arrow.arrays import from_list, to_numpy
from ..recording.meta import RunMeta
from ..recording.protocols import RecordingData
from ..recording.schema import schemas

#: The table of the run. It is written last: if it has a row, the other tables are complete.
RUNS = "runs"

_MOST_ROWS = 131_072
_MOST_BYTES = 64 * 2**20  # bounds the memory if rows contain long lists
_FEWEST_ROWS = 1024

_RUNS_SCHEMA = pa.schema(
    [
        pa.field("run_id", pa.string()),
        pa.field("created", pa.string()),
        pa.field("modtrace_version", pa.string()),
        pa.field("argv", pa.list_(pa.string())),
        pa.field("versions", pa.string()),
        pa.field("device", pa.string()),
        pa.field("git_commit", pa.string()),
        pa.field("options", pa.string()),
        pa.field("world_size", pa.int64()),
        pa.field("clock_time_ns", pa.int64()),
        pa.field("clock_perf_counter_ns", pa.int64()),
        pa.field("marks", pa.list_(pa.string())),
        pa.field("complete", pa.bool_()),
        pa.field("flags", pa.string()),
    ]
)


def export_names() -> tuple[str, ...]:
    """Returns the names of all tables of an export, `RUNS` last."""
    return (*schemas(), RUNS)


def export_tables(data: RecordingData) -> Iterator[tuple[str, pa.Table]]:
    """Yields all tables in the order of `export_names`. `modules` has each module once."""
    for name in schemas():
        table = data.table(name)
        yield name, _last_of_each_module(table) if name == "modules" else table
    yield RUNS, _run_row(data.meta)


def slices(table: pa.Table) -> Iterator[pa.Table]:
    """Yields the rows in pieces that fit into memory; a single empty piece if there are no rows."""
    if not table.num_rows:
        yield table
    for start in range(0, table.num_rows, _MOST_ROWS):
        piece = table.slice(start, _MOST_ROWS)
        rows = max(_FEWEST_ROWS, piece.num_rows * _MOST_BYTES // max(piece.nbytes, _MOST_BYTES))
        for at in range(0, piece.num_rows, rows):
            yield piece.slice(at, rows)


def _last_of_each_module(modules: pa.Table) -> pa.Table:
    """Returns one row for each module: the last one, because names may be learnt late."""
    backwards = to_numpy(modules.column("module_id"))[::-1]
    _, at = np.unique(backwards, return_index=True)
    return modules.take(from_list((len(backwards) - 1 - at).tolist(), pa.int64()))


def _run_row(meta: RunMeta) -> pa.Table:
    values: dict[str, Any] = meta.to_json()
    texts = [name for name in ("versions", "options", "flags") if values[name] is not None]
    values |= {name: json.dumps(dict(values[name]), default=str) for name in texts}
    return pa.Table.from_pylist([{name: values[name] for name in _RUNS_SCHEMA.names}], schema=_RUNS_SCHEMA)
