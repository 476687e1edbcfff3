"""How large each update of a parameter is, beside the parameter that it was made to."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...recording.role import PARAMETER, UPDATE
from ...recording.statistics.moments import read_statistics
from ..step.calls import RowFinder, Rows, column_of

#: Optimizer steps of one parameter within one step are counted up to here.
_MOST = 1 << 16


def relative_sizes(values: pa.Table, sites: pa.Table) -> pa.Array:
    """For each row of an update its L2 norm, divided by that of the parameter as the same optimizer step found it.

    Null for other roles, and where the parameter was not measured.
    """
    at = RowFinder(column_of(sites, "site_id"))(column_of(values, "site_id"))
    role = np.array([*sites["role"].to_pylist(), None], object)[at]
    updates = np.flatnonzero(role == UPDATE)
    parameters = np.flatnonzero((role == PARAMETER) & (column_of(values, "op_id") < 0))
    size = np.full(values.num_rows, np.nan)
    known = np.zeros(values.num_rows, bool)
    if len(updates) and len(parameters):
        wanted, there = _keys([updates, parameters], at, values, sites)
        found = RowFinder(there)(wanted)
        l2 = read_statistics(values).l2
        with np.errstate(all="ignore"):
            size[updates] = l2[updates] / l2[parameters][found]
        known[updates] = found >= 0
    return pa.array(size, mask=~known)


def _keys(groups: list[Rows], at: Rows, values: pa.Table, sites: pa.Table) -> list[npt.NDArray[np.int64]]:
    """A number for parameter, step and optimizer step within it, the same in each group of rows."""
    names = [*zip(column_of(sites, "module_id").tolist(), sites["slot"].to_pylist(), strict=True)]
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    parameter = np.array([codes[name] for name in names], np.int64)[at]
    step = column_of(values, "step").astype(np.int64)
    pairs = [(parameter[rows] << 32) + step[rows] for rows in groups]
    _, compact = np.unique(np.concatenate(pairs), return_inverse=True)
    order = column_of(values, "order")
    split = np.split(compact, np.cumsum([len(rows) for rows in groups])[:-1])
    return [pair * _MOST + _count(pair, order[rows]) for pair, rows in zip(split, groups, strict=True)]


def _count(pair: Rows, order: Rows) -> Rows:
    """Returns the index of each row among those of its pair, in the order of measuring."""
    rows = np.lexsort((order, pair))
    new = np.append(True, np.diff(pair[rows]) != 0)
    nth = np.empty(len(rows), np.int64)
    nth[rows] = np.arange(len(rows)) - np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
    return nth
