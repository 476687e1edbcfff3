"""Merges the statistics of a step, or of each of several, for each place in the module tree."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from ...recording.arrow.arrays import to_numpy
from ...recording.phase import PHASES, RECOMPUTE
from ...recording.protocols import RecordingData
from ...recording.role import GRAD_OUTPUT, OUTPUT, PARAMETER, PARAMETER_GRAD
from ...recording.statistics.moments import RAW, StatColumns, read_statistics
from ..tables.calls import Calls, iterate_levels, number_calls
from ..tables.columns import Column, Groups, Rows, column_of, keep_rows, number_keys
from ..tables.placement import NOWHERE, Placer
from ..tables.values import PlacedValues
from .value_summary import KINDS, Kind, NonFiniteCount, SlotValues, ValueSummary

_OUTPUT, _RECOMPUTED, _GRADIENT, _PARAMETER, _PARAMETER_GRADIENT = range(len(KINDS))

_KIND_OF_ROLE = {
    OUTPUT: _OUTPUT,
    GRAD_OUTPUT: _GRADIENT,
    PARAMETER: _PARAMETER,
    PARAMETER_GRAD: _PARAMETER_GRADIENT,
}
_NO_KIND = -1
_OF_PARAMETERS = (_PARAMETER, _PARAMETER_GRADIENT)
#: The kinds that a summary has statistics of. A parameter counts as it was first measured.
SUMMARIZED: tuple[Kind, ...] = ("output", "gradient", "parameter", "parameter gradient")
_NO_SLOT = np.iinfo(np.int64).max

#: How many places are summarized together.
_AT_ONCE = 1000
_NO_ROWS: Rows = np.empty(0, np.int64)
_COLUMNS = ["step", "phase", "site_id", "call_id", "op_id", "order"]


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """The measured rows of `values` of one step or several as columns."""

    rows: PlacedValues
    kind: Column  # index of KINDS; _NO_KIND for roles that are not in summaries

    @cached_property
    def stats(self) -> StatColumns:
        """The statistics of each row."""
        return read_statistics(self.rows.table)

    @cached_property
    def measurement(self) -> Rows:
        """A number of the measurement of each row; rows that share the tensor share the number."""
        columns = (column_of(self.rows.table, "step"), self.rows.moment)
        return number_keys(*((column, column[:0]) for column in columns))[0]

    def take_once(self, placed: "_Placed") -> "_Placed":
        """Returns one row for each measurement at a place, in the order of the rows."""
        place, rows = placed
        columns = (place, self.measurement[rows])
        keys, _ = number_keys(*((column, column[:0]) for column in columns))
        ordered = np.sort(keys)
        if (ordered[1:] != ordered[:-1]).all():  # as most, and found in a fifth of the time
            return placed
        first = np.sort(np.unique(keys, return_index=True)[1])
        return place[first], rows[first]


_Placed = tuple[Rows, Rows]  # the numbers of places, and for each a row of values that counts for it


def read_values(data: RecordingData, steps: Column) -> StepValues:
    """Returns the rows of some steps that have statistics, except those of single ops."""
    values = data.table("values")
    table = keep_rows(values.select([*_COLUMNS, *RAW]), np.isin(column_of(values, "step"), steps))
    is_measured = to_numpy(table["count"].is_valid()) & (column_of(table, "op_id") < 0)
    table = keep_rows(table, is_measured)
    of_steps = PlacedValues(data=data, table=table)
    kind = np.array([_KIND_OF_ROLE.get(role, _NO_KIND) for role in of_steps.roles] + [_NO_KIND])[
        of_steps.role
    ]
    is_recomputed = (kind == _OUTPUT) & (of_steps.phase == PHASES.index(RECOMPUTE))
    return StepValues(rows=of_steps, kind=np.where(is_recomputed, _RECOMPUTED, kind))


def summarize_values(values: StepValues, calls: Calls) -> Mapping[int, ValueSummary]:
    """Returns the summary of each place that has values, or that contains a place with values.

    Args:
        values: the measured rows of the step.
        calls: the calls of the step.
    """
    found = find_rows_of_places(values, calls)
    batches = (found.places[first : first + _AT_ONCE] for first in range(0, len(found.places), _AT_ONCE))
    return dict(chain.from_iterable(_summarize(values, found, batch) for batch in batches))


@dataclass(frozen=True, kw_only=True)
class RowsOfPlaces:
    """The rows that places have values from, by the numbers of the places."""

    places: Rows  # the places that have values, or contain a place with values; inner places first
    own: Mapping[int, Groups]  # by index of KINDS
    inside: Mapping[int, Groups]  # of parameters and of their gradients, with those of all places inside
    bad: Mapping[int, Groups]  # those of a place's own that are not finite; empty if all are finite
    bad_inside: Groups

    def of(self, kind: Kind) -> Groups:
        """Returns the rows of a kind; of parameters and their gradients, with those of all places inside."""
        code = KINDS.index(kind)
        return self.inside[code] if code in self.inside else self.own[code]


def find_rows_of_places(values: StepValues, calls: Calls) -> RowsOfPlaces:
    """Returns the rows of each place that has values, or that contains a place with values."""
    placer = calls.placer
    place = values.rows.find_places(calls)
    own = _find_own(values, place, placer)
    above = np.array([tree_place.parent for tree_place in placer.places], np.int64)
    levels, size = list(iterate_levels(above)), len(above)
    number = number_calls(levels, above).number
    has_rows = np.zeros(size, bool)
    for at, _ in own:
        has_rows[at] = True
    for level in reversed(levels[1:]):
        has_rows[above[level[has_rows[level]]]] = True
    upwards = np.concatenate([_NO_ROWS, *reversed(levels)])
    is_bad = values.stats.nonfinite > 0
    bad = [(at[is_bad[rows]], rows[is_bad[rows]]) for at, rows in own]
    at, rows = (np.concatenate(columns) for columns in zip(*bad, strict=True))
    around = _place_around(above[at], rows, above, number)

    def group(placed: _Placed) -> Groups:
        return Groups(*placed, size)

    return RowsOfPlaces(
        places=upwards[has_rows[upwards]],
        own={kind: group(placed) for kind, placed in enumerate(own)},
        inside={
            kind: group(values.take_once(_place_around(*own[kind], above, number))) for kind in _OF_PARAMETERS
        },
        bad={kind: group(placed) for kind, placed in enumerate(bad)} if len(rows) else {},
        bad_inside=group(values.take_once(around)),
    )


def _find_own(values: StepValues, place: Rows, placer: Placer) -> list[_Placed]:
    """Returns the rows of each kind with their places. Rows of parameters are at every place of their module."""
    found = []
    is_alias = [(number, one) for number, one in enumerate(placer.places) if one.is_alias]
    alias = np.array([number for number, _ in is_alias], np.int64)
    main = np.array([placer.place(one.module.module_id, NOWHERE) for _, one in is_alias], np.int64)
    for kind in range(len(KINDS)):
        rows = np.flatnonzero((place >= 0) & (values.kind == kind))
        at = place[rows]
        if kind in _OF_PARAMETERS and len(alias):
            shared, counts = Groups(at, rows, len(placer.places)).take(main)
            kept = ~np.isin(at, alias[counts > 0])
            at = np.concatenate([at[kept], np.repeat(alias, counts)])
            rows = np.concatenate([rows[kept], shared])
        found.append(values.take_once((at, rows)))
    return found


def _place_around(place: Rows, rows: Rows, above: Rows, number: Rows) -> _Placed:
    """Returns rows at their places and at all places around these, in the order of the numbers of their own places."""
    known = place >= 0
    place, rows = place[known], rows[known]
    order = np.argsort(number[place], kind="stable")
    around, at = [place[order]], [np.arange(len(order))]
    while len(around[-1]):
        further = above[around[-1]]
        around.append(further[further >= 0])
        at.append(at[-1][further >= 0])
    position = np.concatenate(at)
    in_order = np.argsort(position, kind="stable")
    return np.concatenate(around)[in_order], rows[order][position[in_order]]


def _summarize(values: StepValues, found: RowsOfPlaces, places: Rows) -> Iterator[tuple[int, ValueSummary]]:
    """Yields the summaries of places, whose rows are merged together."""
    stats, of_kinds = values.stats, [found.of(kind) for kind in SUMMARIZED]
    merged = [stats.merge_groups(*groups.take(places)) for groups in of_kinds]
    outputs, gradients = of_kinds[:2]
    lowest, highest = _find_slots(values, places, (outputs, gradients))
    several = [_split_slots(values, outputs[place], gradients[place]) for place in places[lowest < highest]]
    groups = [rows for slots in several for of_slot in slots.values() for rows in of_slot]
    sizes = np.array([len(rows) for rows in groups], np.int64)
    of_slots = iter(stats.merge_groups(np.concatenate([_NO_ROWS, *groups]), sizes))
    split = iter(several)
    inside, counts = found.bad_inside.take(places)
    nonfinite = np.bincount(np.repeat(np.arange(len(places)), counts), stats.nonfinite[inside], len(places))
    columns = (places.tolist(), lowest.tolist(), highest.tolist(), nonfinite.astype(np.int64).tolist())
    for place, low, high, inside_count, output, gradient, *parameters in zip(*columns, *merged, strict=True):
        if low == high:
            slots = [SlotValues(slot=values.rows.slots[low], output=output, gradient=gradient)]
        else:
            slots = [
                SlotValues(slot=values.rows.slots[code], output=next(of_slots), gradient=next(of_slots))
                for code in (next(split) if low < high else ())
            ]
        yield (
            place,
            ValueSummary(
                output=output,
                gradient=gradient,
                parameters=parameters[0],
                parameter_gradients=parameters[1],
                slots=tuple(slots),
                nonfinite=tuple(_count_nonfinite(stats, found.bad, place)),
                nonfinite_inside=inside_count,
            ),
        )


def _find_slots(values: StepValues, places: Rows, of_kinds: Iterable[Groups]) -> tuple[Rows, Rows]:
    """Returns the lowest and the highest code of a slot at each place; without rows, the lowest is the higher one."""
    lowest, highest = np.full(len(places), _NO_SLOT), np.full(len(places), -2)
    for groups in of_kinds:
        rows, counts = groups.take(places)
        at, codes = np.repeat(np.arange(len(places)), counts), values.rows.slot[rows]
        np.minimum.at(lowest, at, codes)
        np.maximum.at(highest, at, codes)
    return lowest, highest


def _split_slots(values: StepValues, outputs: Rows, gradients: Rows) -> dict[int, tuple[Rows, Rows]]:
    """Returns the rows of outputs and of gradients by the codes of their slots."""
    of_outputs, of_gradients = values.rows.slot[outputs], values.rows.slot[gradients]
    distinct = dict.fromkeys([*of_outputs.tolist(), *of_gradients.tolist()])
    return {code: (outputs[of_outputs == code], gradients[of_gradients == code]) for code in distinct}


def _count_nonfinite(stats: StatColumns, bad: Mapping[int, Groups], place: int) -> Iterator[NonFiniteCount]:
    for kind, groups in bad.items():
        rows = groups[place]
        if len(rows):
            yield NonFiniteCount(
                kind=KINDS[kind],
                nan_count=int(stats.nan_count[rows].sum()),
                inf_count=int(stats.inf_count[rows].sum()),
            )
