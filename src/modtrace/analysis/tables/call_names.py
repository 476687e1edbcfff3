"""Names the calls of all steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...recording.phase import OPTIMIZER, PHASES
from ...recording.protocols import RecordingData
from .calls import Calls, iterate_levels, read_all_calls
from .columns import Column, Rows, column_of
from .ops import PlaceName, call_name
from .placement import NOWHERE, Placer, merge_wrappers, name_roots, place_calls

_OPTIMIZER_NAME = PlaceName("optimizer")


@dataclass(frozen=True, kw_only=True, eq=False)
class CallNames:
    """The calls of all steps, with their names."""

    calls: Calls
    name: Column  # codes of `names`
    names: tuple[str, ...]  # path, `path@1` for the second call of a module in a step, of a root its name
    place: Rows  # index in `types`, `roots` and `paths`; -1 for an optimizer's step
    types: tuple[str, ...]
    roots: tuple[str, ...]
    paths: tuple[str, ...]  # of the modules; "" for a root


def name_calls(data: RecordingData) -> CallNames:
    """Names all calls of a recording."""
    table = data.table("calls")
    calls = read_all_calls(table)
    placer = Placer(merge_wrappers(data.table("modules").to_pylist()))
    where = place_calls(calls, list(iterate_levels(calls.parent)), placer)
    where[calls.phase == PHASES.index(OPTIMIZER)] = NOWHERE
    names_of_roots = name_roots(placer.places)
    roots = tuple(names_of_roots.get(place.module.root_id, "") for place in placer.places)
    places = [PlaceName(place.path or root) for place, root in zip(placer.places, roots, strict=True)]
    name, names = _code_names(places, where, column_of(table, "nth"))
    return CallNames(
        calls=calls,
        name=name,
        names=names,
        place=where,
        types=tuple(place.module.type for place in placer.places),
        roots=roots,
        paths=tuple(place.path for place in placer.places),
    )


def _code_names(places: Sequence[PlaceName], where: Rows, nth: Column) -> tuple[Column, tuple[str, ...]]:
    """Returns the name of each call as a code, and the names."""
    numbers = int(nth.max(initial=-1)) + 2
    keys, code = np.unique(where * numbers + (nth + 1), return_inverse=True)
    names = [
        call_name(places[place] if place != NOWHERE else _OPTIMIZER_NAME, number - 1)
        for place, number in zip((keys // numbers).tolist(), (keys % numbers).tolist(), strict=True)
    ]
    return code, tuple(names)
