"""Merges the statistics of a step, or of each of several, for each place in the module tree."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

import numpy as np

from ...recording.arrow.arrays import to_numpy
from ...recording.phase import PHASES, RECOMPUTE
from ...recording.protocols import RecordingData
from ...recording.quick import quick
from ...recording.role import GRAD_OUTPUT, OUTPUT, PARAMETER, PARAMETER_GRAD
from ...recording.statistics.moments import RAW, StatColumns, read_statistics
from ..tables.calls import Calls, iterate_levels
from ..tables.columns import Column, Rows, column_of, keep_rows, number_keys, split_rows
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

#: How many places are summarized together.
_AT_ONCE = 1000
_NO_ROWS: Rows = np.empty(0, np.int64)
_COLUMNS = ["step", "phase", "site_id", "call_id", "op_id", "order"]


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """The measured rows of `values` of one step or several as columns."""

    rows: PlacedValues
    stats: StatColumns
    kind: Column  # index of KINDS; _NO_KIND for roles that are not in summaries

    @cached_property
    def measurement(self) -> Rows:
        """A number of the measurement of each row; rows that share the tensor share the number."""
        columns = (column_of(self.rows.table, "step"), self.rows.moment)
        return number_keys(*((column, column[:0]) for column in columns))[0]

    def take_once(self, rows: Rows) -> Rows:
        """Returns one row for each measurement, in the order of the rows."""
        if len(rows) < 2:
            return rows
        measured = np.sort(self.measurement[rows])
        if (measured[1:] != measured[:-1]).all():  # as most, and found in a fifth of the time
            return rows
        _, first = np.unique(self.measurement[rows], return_index=True)
        return rows[np.sort(first)]

    def join(self, parts: Sequence[Rows]) -> Rows:
        """Returns the rows of all parts, with one row for each measurement."""
        filled = [part for part in parts if len(part)]
        if len(filled) < 2:
            return filled[0] if filled else _NO_ROWS
        return self.take_once(np.concatenate(filled))


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
    return StepValues(
        rows=of_steps, stats=read_statistics(table), kind=np.where(is_recomputed, _RECOMPUTED, kind)
    )


def summarize_values(values: StepValues, calls: Calls) -> Mapping[int, ValueSummary]:
    """Returns the summary of each place that has values, or that contains a place with values.

    Args:
        values: the measured rows of the step.
        calls: the calls of the step.
    """
    places = find_rows_of_places(values, calls)
    batches = iter(lambda: list(islice(places, _AT_ONCE)), [])
    return dict(chain.from_iterable(_summarize(values, batch) for batch in batches))


@dataclass(slots=True)
class PlaceRows:
    """The rows that a place has values from."""

    own: Mapping[int, Rows]  # by index of KINDS
    parameters: Rows  # with those of all places inside it
    parameter_gradients: Rows
    bad: Mapping[int, Rows]  # those of its own that are not finite
    bad_inside: Rows

    def of(self, kind: Kind) -> Rows:
        """Returns the rows of a kind; of parameters and their gradients, with those of all places inside it."""
        inside = {"parameter": self.parameters, "parameter gradient": self.parameter_gradients}
        return inside[kind] if kind in inside else self.own.get(KINDS.index(kind), _NO_ROWS)

    @property
    def of_summary(self) -> tuple[Rows, Rows, Rows, Rows]:
        """The rows of outputs, of gradients, of parameters and of their gradients."""
        outputs, gradients = self.own.get(_OUTPUT, _NO_ROWS), self.own.get(_GRADIENT, _NO_ROWS)
        return outputs, gradients, self.parameters, self.parameter_gradients

    @property
    def all_own(self) -> Rows:
        """The rows of all kinds of its own."""
        return np.concatenate([_NO_ROWS, *self.own.values()])

    @property
    def nonfinite(self) -> Rows:
        """The rows that are not finite, with those of all places inside it."""
        return np.concatenate([self.bad_inside, *self.bad.values()])


def find_rows_of_places(values: StepValues, calls: Calls) -> Iterator[tuple[int, PlaceRows]]:
    """Yields each place that has values, or that contains a place with values, with its rows; inner places first."""
    placer = calls.placer
    own = _group(values, values.rows.find_places(calls), placer)
    is_bad = values.stats.nonfinite > 0
    has_bad = bool(is_bad.any())
    inside: dict[int, list[_Inside]] = {}
    parents = np.array([place.parent for place in placer.places], np.int64)
    parent_of: list[int] = parents.tolist()
    for level in reversed(list(iterate_levels(parents))):
        for place in level.tolist():
            if place in own or place in inside:
                kinds = own.get(place, {})
                bad = _filter(kinds, is_bad) if has_bad else {}
                rows, around = _find_rows(values, kinds, bad, inside.pop(place, []))
                yield place, rows
                inside.setdefault(parent_of[place], []).extend([] if around is _NOTHING_INSIDE else [around])


@dataclass(slots=True)
class _Inside:
    """The rows of a place and of all places inside it, which also count for places around it."""

    parameters: Rows
    parameter_gradients: Rows
    nonfinite: Rows


_NOTHING_INSIDE = _Inside(_NO_ROWS, _NO_ROWS, _NO_ROWS)


def _group(values: StepValues, place: Rows, placer: Placer) -> Mapping[int, Mapping[int, Rows]]:
    """Returns the rows by place and kind. Rows of parameters are at every place of their module."""
    by_place: dict[int, dict[int, Rows]] = {}
    rows = np.flatnonzero((place >= 0) & (values.kind != _NO_KIND))
    for key, group in split_rows(rows, place[rows] * len(KINDS) + values.kind[rows]):
        number, kind = divmod(key, len(KINDS))
        by_place.setdefault(number, {})[kind] = values.take_once(group)
    for number, tree_place in enumerate(placer.places):
        if tree_place.is_alias:
            main = by_place.get(placer.place(tree_place.module.module_id, NOWHERE), {})
            shared = {kind: main[kind] for kind in (_PARAMETER, _PARAMETER_GRADIENT) if kind in main}
            if shared:
                by_place.setdefault(number, {}).update(shared)
    return by_place


def _filter(own: Mapping[int, Rows], is_wanted: Column) -> dict[int, Rows]:
    """Returns the wanted rows of each kind that has some."""
    return {kind: wanted for kind, rows in own.items() if len(wanted := rows[is_wanted[rows]])}


def _find_rows(
    values: StepValues, own: Mapping[int, Rows], bad: Mapping[int, Rows], inside: Sequence[_Inside]
) -> tuple[PlaceRows, _Inside]:
    bad_inside = values.join([part.nonfinite for part in inside])
    around = _NOTHING_INSIDE
    if inside or bad or not own.keys().isdisjoint((_PARAMETER, _PARAMETER_GRADIENT)):
        around = _Inside(
            values.join([own.get(_PARAMETER, _NO_ROWS), *(part.parameters for part in inside)]),
            values.join(
                [own.get(_PARAMETER_GRADIENT, _NO_ROWS), *(part.parameter_gradients for part in inside)]
            ),
            values.join([*bad.values(), bad_inside]),
        )
    return PlaceRows(own, around.parameters, around.parameter_gradients, bad, bad_inside), around


def _summarize(
    values: StepValues, places: Sequence[tuple[int, PlaceRows]]
) -> Iterator[tuple[int, ValueSummary]]:
    """Yields the summaries of places, whose rows are merged together."""
    by_slot = [_split_slots(values, rows) for _, rows in places]
    groups: list[Rows] = []
    for (_, rows), slots in zip(places, by_slot, strict=True):
        groups += chain(rows.of_summary, *(slots.values() if len(slots) > 1 else ()))
    merged = iter(values.stats.merge_groups([group for group in groups if len(group)]))
    known = iter([next(merged) if len(group) else None for group in groups])
    for (place, rows), slots in zip(places, by_slot, strict=True):
        # A parameter counts as it was first measured.
        output, gradient, parameters, parameter_gradients = of_place = tuple(islice(known, 4))
        of_slots = [of_place] if len(slots) == 1 else [(next(known), next(known)) for _ in slots]
        yield (
            place,
            _make_summary(
                output=output,
                gradient=gradient,
                parameters=parameters,
                parameter_gradients=parameter_gradients,
                slots=tuple(
                    [
                        _make_slot(slot=values.rows.slots[code], output=stats[0], gradient=stats[1])
                        for code, stats in zip(slots, of_slots, strict=True)
                    ]
                ),
                nonfinite=_count_nonfinite(values.stats, rows.bad) if rows.bad else (),
                nonfinite_inside=sum(values.stats.nonfinite[rows.bad_inside].tolist()),
            ),
        )


_make_summary, _make_slot = quick(ValueSummary), quick(SlotValues)


def _split_slots(values: StepValues, rows: PlaceRows) -> dict[int, tuple[Rows, Rows]]:
    """Returns the rows of outputs and of gradients by the codes of their slots; of a single slot, all of them."""
    outputs, gradients = rows.of_summary[:2]
    codes = values.rows.slot[np.concatenate([outputs, gradients]) if len(gradients) else outputs]
    distinct = dict.fromkeys(codes.tolist())
    if len(distinct) < 2:
        return dict.fromkeys(distinct, (outputs, gradients))
    of_outputs, of_gradients = codes[: len(outputs)], codes[len(outputs) :]
    return {code: (outputs[of_outputs == code], gradients[of_gradients == code]) for code in distinct}


def _count_nonfinite(stats: StatColumns, bad: Mapping[int, Rows]) -> tuple[NonFiniteCount, ...]:
    return tuple(
        NonFiniteCount(
            kind=KINDS[kind],
            nan_count=int(stats.nan_count[rows].sum()),
            inf_count=int(stats.inf_count[rows].sum()),
        )
        for kind, rows in sorted(bad.items())
    )
