"""The `values` table with the names of its sites and what is derived from its statistics."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..recording.protocols import RecordingData
from ..recording.statistics import read_statistics
from .calls import RowFinder, Rows, column_of, read_all_calls
from .placement import NOWHERE, Placer, merge_wrappers, name_roots
from .value_places import place_values

#: What is derived stands behind the raw statistics that it is derived from.
_LAST_RAW = "inf_count"
_DERIVED = ("mean", "std", "rms", "l2", "abs_max", "nonfinite")


def build_value_table(data: RecordingData) -> pa.Table:
    """All rows of `values`, with further columns.

    In front: `root`, `path`, `call` (n-th of its module in the step), `type` of the module, `role` and `slot`.
    Behind `inf_count`: `mean`, `std`, `rms`, `l2`, `abs_max` and `nonfinite` (NaN and infinite together),
    null where nothing was measured. Path and type are those of the place where the module was called.
    """
    values = data.table("values")
    columns = _name_sites(data, values)
    for name in values.column_names:
        columns[name] = values[name]
        if name == _LAST_RAW:
            columns.update(_derive(values))
    return pa.table(columns)


def _name_sites(data: RecordingData, values: pa.Table) -> dict[str, Any]:
    sites = data.table("sites")
    site = RowFinder(column_of(sites, "site_id"))(column_of(values, "site_id"))
    names = _name_places(data, _take(sites, "module_id", site), column_of(values, "call_id"))
    return {
        "root": names["root"],
        "path": names["path"],
        "call": sites["nth"].take(_indices(site)),
        "type": names["type"],
        "role": sites["role"].take(_indices(site)),
        "slot": sites["slot"].take(_indices(site)),
    }


def _name_places(data: RecordingData, module: npt.NDArray[Any], call_id: npt.NDArray[Any]) -> dict[str, Any]:
    placer = Placer(merge_wrappers(data.table("modules").to_pylist()))
    placed = place_values(module, call_id, read_all_calls(data.table("calls")), placer)
    places, roots = placer.places, name_roots(placer.places)
    return {
        "root": _words([roots.get(each.module.root_id, "") for each in places], placed),
        "path": _words([each.path for each in places], placed),
        "type": _words([each.module.type for each in places], placed),
    }


def _derive(values: pa.Table) -> dict[str, pa.Array]:
    stats = read_statistics(values)
    unmeasured = np.asarray(values["count"].is_null())
    return {name: pa.array(getattr(stats, name), mask=unmeasured) for name in _DERIVED}


def _take(table: pa.Table, name: str, rows: Rows) -> npt.NDArray[Any]:
    column = column_of(table, name)
    return np.where(rows >= 0, column[rows], -1) if len(column) else rows


def _indices(rows: Rows) -> pa.Array:
    return pa.array(rows, mask=rows < 0)


def _words(words: Sequence[str], placed: Rows) -> pa.DictionaryArray:
    """The word of each row's place; null for NOWHERE."""
    distinct = {word: code for code, word in enumerate(dict.fromkeys(words))}
    codes = np.array([distinct[word] for word in words], np.int32)
    indices = codes[placed] if len(codes) else np.zeros(len(placed), np.int32)
    return pa.DictionaryArray.from_arrays(
        pa.array(indices, mask=placed == NOWHERE), pa.array(list(distinct), pa.string())
    )
