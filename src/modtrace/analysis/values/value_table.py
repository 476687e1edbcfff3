"""Builds the `values` table with the names of its sites and with derived columns, such as the size of updates."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...recording.arrow.arrays import from_strings, to_numpy
from ...recording.protocols import RecordingData
from ...recording.role import PARAMETER, UPDATE
from ...recording.statistics.moments import DERIVED, RAW, read_statistics
from ...recording.statistics.tier2 import OF_TIER_2, read_tier2
from ..tables.calls import read_all_calls
from ..tables.columns import Rows, column_of, count_before, find_rows
from ..tables.placement import NOWHERE, Placer, merge_wrappers, name_roots
from ..tables.values import PlacedValues

#: The columns before the statistics: where and when a tensor was seen, and what it is.
_FRONT = (
    "step", "phase", "root", "path", "call", "type", "role", "slot", "op", "op_nth", "shape", "dtype", "numel",
)  # fmt: skip


def build_value_table(data: RecordingData) -> pa.Table:
    """Returns all rows of `values`, with further columns; see `Recording.frame`.

    Path and type are those of the place at which the module was called. A derived column is null where nothing was
    measured. Hashes are hexadecimal text.
    """
    values = data.table("values")
    placed = PlacedValues(data=data, table=values)
    columns = {name: values[name] for name in values.column_names}
    columns |= _name_places(placed) | _name_sites(placed) | _derive(values)
    hashes = values["hash"].to_pylist()
    columns["hash"] = from_strings([None if each is None else each.hex() for each in hashes])
    columns["relative"] = relative_sizes(placed)
    order = dict.fromkeys([*_FRONT, *RAW, *DERIVED, *OF_TIER_2, "argmax", "relative", *columns])
    return pa.table({name: columns[name] for name in order})


def _name_sites(values: PlacedValues) -> dict[str, Any]:
    indices = pa.array(values.site, mask=values.site < 0)
    copied = {"call": "nth", "role": "role", "slot": "slot", "op": "op", "op_nth": "op_nth"}
    return {name: values.data.table("sites")[of].take(indices) for name, of in copied.items()}


def _name_places(values: PlacedValues) -> dict[str, Any]:
    placer = Placer(merge_wrappers(values.data.table("modules").to_pylist()))
    placed = values.find_places(read_all_calls(values.data.table("calls")), placer)
    places, roots = placer.places, name_roots(placer.places)
    return {
        "root": _encode([roots.get(place.module.root_id, "") for place in places], placed),
        "path": _encode([place.path for place in places], placed),
        "type": _encode([place.module.type for place in places], placed),
    }


def _derive(values: pa.Table) -> dict[str, pa.Array]:
    tier2 = read_tier2(values)
    unmeasured = to_numpy(values["count"].is_null())
    columns = {name: pa.array(getattr(tier2.stats, name), mask=unmeasured) for name in DERIVED}
    return columns | {name: pa.array(getattr(tier2, name), mask=~tier2.is_measured) for name in OF_TIER_2}


def _encode(texts: Sequence[str], placed: Rows) -> pa.DictionaryArray:
    """Returns the text of each row's place as a dictionary column; null for NOWHERE."""
    places = pa.array(placed, mask=placed == NOWHERE)
    return pa.array(texts, pa.string()).dictionary_encode().take(places)


#: Optimizer steps of one parameter within one step are counted up to here.
_MOST = 1 << 16


def relative_sizes(values: PlacedValues) -> pa.Array:
    """Returns the L2 norm of each update, divided by that of the parameter before the same optimizer step.

    It is null for other roles, and if the parameter was not measured.
    """
    updates = np.flatnonzero(values.is_of(UPDATE))
    parameters = np.flatnonzero(values.is_of(PARAMETER) & (column_of(values.table, "op_id") < 0))
    size = np.full(values.table.num_rows, np.nan)
    known = np.zeros(values.table.num_rows, bool)
    if len(updates) and len(parameters):
        wanted, there = _keys([updates, parameters], values)
        found = find_rows(there, wanted)
        l2 = read_statistics(values.table).l2
        with np.errstate(all="ignore"):
            size[updates] = l2[updates] / l2[parameters][found]
        known[updates] = found >= 0
    return pa.array(size, mask=~known)


def _keys(groups: list[Rows], values: PlacedValues) -> list[npt.NDArray[np.int64]]:
    """Returns a key for each row from its parameter, step and optimizer step.

    Keys of different groups can be compared.
    """
    parameter = values.module.astype(np.int64) * len(values.slots) + values.slot
    step = values.step.astype(np.int64)
    pairs = [(parameter[rows] << 32) + step[rows] for rows in groups]
    _, compact = np.unique(np.concatenate(pairs), return_inverse=True)
    order = column_of(values.table, "order")
    split = np.split(compact, np.cumsum([len(rows) for rows in groups])[:-1])
    return [pair * _MOST + count_before(pair, order[rows]) for pair, rows in zip(split, groups, strict=True)]
