"""Names the calls of all steps, and finds notes on their values."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.phase import BACKWARD, OPTIMIZER, PHASES
from ..ops.groups import call_name
from ..tables.calls import Calls, iterate_levels, read_all_calls
from ..tables.columns import Column, Rows, column_of, dictionary_codes, find_rows, phase_codes
from ..tables.ops import PlaceName
from ..tables.placement import NOWHERE, Placer, merge_wrappers, name_roots, place_calls

_OPTIMIZER_NAME = PlaceName("optimizer")


@dataclass(frozen=True, kw_only=True, eq=False)
class CallNames:
    """The calls of all steps, with their names."""

    calls: Calls
    name: Column  # codes of `names`
    names: tuple[str, ...]  # path, `path@1` for the second call of a module in a step, of a root its name
    place: Rows  # index in `types` and `roots`; -1 for an optimizer's step
    types: tuple[str, ...]
    roots: tuple[str, ...]
    paths: tuple[str, ...]  # of the modules; "" for a root


def name_calls(modules: pa.Table, table: pa.Table) -> CallNames:
    """Names all calls.

    Args:
        modules: the table of modules.
        table: the table of calls.
    """
    calls = read_all_calls(table)
    placer = Placer(merge_wrappers(modules.to_pylist()))
    where = place_calls(calls, list(iterate_levels(calls.parent)), placer)
    where[calls.phase == PHASES.index(OPTIMIZER)] = NOWHERE
    roots = name_roots(placer.places)
    root_names = tuple(roots.get(each.module.root_id, "") for each in placer.places)
    places = [PlaceName(each.path or root) for each, root in zip(placer.places, root_names, strict=True)]
    name, names = _name_each(places, where, column_of(table, "nth"))
    return CallNames(
        calls=calls,
        name=name,
        names=names,
        place=where,
        types=tuple(each.module.type for each in placer.places),
        roots=root_names,
        paths=tuple(each.path for each in placer.places),
    )


def _name_each(places: Sequence[PlaceName], where: Rows, nth: Column) -> tuple[Column, tuple[str, ...]]:
    """Returns the name of each call as a code, and the names."""
    numbers = int(nth.max(initial=-1)) + 2
    keys, code = np.unique(where * numbers + (nth + 1), return_inverse=True)
    names = [
        call_name(places[place] if place != NOWHERE else _OPTIMIZER_NAME, number - 1)
        for place, number in zip((keys // numbers).tolist(), (keys % numbers).tolist(), strict=True)
    ]
    return code, tuple(names)


def find_notes(values: pa.Table, call_ids: Column) -> tuple[Column, tuple[str, ...]]:
    """Returns the first note on the outputs of each call, as codes and their dictionary; -1 for none."""
    values = values.select(["call_id", "op_id", "phase", "note"])
    noted = to_numpy(values["note"].is_valid()) & to_numpy(values["op_id"].is_null())
    values = values.filter(from_numpy(noted))
    values = values.filter(from_numpy(phase_codes(values["phase"]) != PHASES.index(BACKWARD)))
    codes, texts = dictionary_codes(values["note"])
    row = find_rows(call_ids, column_of(values, "call_id"))
    found = np.full(len(call_ids), -1, np.int64)
    known = np.flatnonzero(row >= 0)[::-1]  # of several for one call the first is written last
    found[row[known]] = codes[known]
    return found, texts
