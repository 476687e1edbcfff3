"""Builds the `values` table with the names of its sites and with derived columns, such as the size of updates."""

from typing import Any

import numpy as np

from ...recording.arrow.arrays import from_strings, to_numpy
from ...recording.protocols import RecordingData
from ...recording.role import PARAMETER, UPDATE
from ...recording.statistics.moments import DERIVED, RAW
from ...recording.statistics.tier2 import OF_TIER_2, read_tier2
from ..tables.calls import read_all_calls
from ..tables.columns import (
    ArrowTable,
    Column,
    build_table,
    column_of,
    decode,
    number_keys,
    pair_keys,
    rows_in_order,
)
from ..tables.placement import ModuleName, Placer
from ..tables.values import PlacedValues

#: The columns before the statistics: where and when a tensor was seen, and its shape and dtype.
_FRONT = (
    "step", "phase", "root", "path", "call", "type", "role", "slot", "op", "op_nth", "shape", "dtype", "numel",
)  # fmt: skip


def build_value_table(data: RecordingData) -> ArrowTable:
    """Returns all rows of `values`, with further columns; see `Recording.frame`.

    Path and type are those of the place at which the module was called. A derived column is null where nothing was
    measured. Hashes are hexadecimal text.
    """
    values = data.table("values")
    placed = PlacedValues(data=data, table=values)
    columns = {name: values[name] for name in values.column_names}
    columns |= _name_places(placed) | _name_sites(placed) | _derive(values)
    hashes = values["hash"].to_pylist()
    columns["hash"] = from_strings([None if code is None else code.hex() for code in hashes])
    columns["relative"] = relative_sizes(placed)
    order = dict.fromkeys([*_FRONT, *RAW, *DERIVED, *OF_TIER_2, "argmax", "relative", *columns])
    return build_table({name: columns[name] for name in order})


def _name_sites(values: PlacedValues) -> dict[str, Any]:
    copied = {"call": "nth", "role": "role", "slot": "slot", "op": "op", "op_nth": "op_nth"}
    return {name: values.take_sites(column) for name, column in copied.items()}


def _name_places(values: PlacedValues) -> dict[str, Any]:
    """Returns root, path and type of the place of each row as dictionary columns; null for NOWHERE."""
    placer = Placer(values.data)
    placed = values.find_places(read_all_calls(values.data.table("calls"), placer))
    modules = placer.name_modules()
    return {
        name: decode([getattr(module, name) for module in modules], placed) for name in ModuleName._fields
    }


def _derive(values: ArrowTable) -> dict[str, Any]:
    tier2 = read_tier2(values)
    unmeasured = to_numpy(values["count"].is_null())
    columns = {name: np.ma.masked_array(getattr(tier2.stats, name), unmeasured) for name in DERIVED}
    of_tier_2 = {name: np.ma.masked_array(getattr(tier2, name), ~tier2.is_measured) for name in OF_TIER_2}
    return columns | of_tier_2


def relative_sizes(values: PlacedValues) -> Column:
    """Returns the L2 norm of each update divided by that of its parameter before the optimizer's step.

    The value is null for other roles, and if the parameter was not measured.
    """
    is_parameter = values.is_of(PARAMETER) & (column_of(values.table, "op_id") < 0)
    updates, parameters = (
        rows_in_order(kept, values.moment) for kept in (values.is_of(UPDATE), is_parameter)
    )
    columns = (values.module, values.slot, values.step)
    # The n-th update in a step belongs to the optimizer's n-th step in it.
    partner, _ = pair_keys(*number_keys(*((column[updates], column[parameters]) for column in columns)))
    updates, parameters = updates[partner >= 0], parameters[partner[partner >= 0]]
    l2 = values.read_stats().l2
    size, known = np.full(len(l2), np.nan), np.zeros(len(l2), bool)
    known[updates] = True
    with np.errstate(all="ignore"):
        size[updates] = l2[updates] / l2[parameters]
    return np.ma.masked_array(size, ~known)
