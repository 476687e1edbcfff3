"""Merges the statistics of one step for every place in the module tree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from ...recording.arrow.arrays import from_numpy
from ...recording.phase import PHASES, RECOMPUTE
from ...recording.protocols import RecordingData
from ...recording.role import GRAD_OUTPUT, OUTPUT, PARAMETER, PARAMETER_GRAD
from ...recording.statistics.moments import RAW, StatColumns, Stats, read_statistics
from ..tables.calls import Calls, iterate_levels
from ..tables.columns import Column, Rows, column_of, split_rows
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
_NO_ROWS: Rows = np.empty(0, np.int64)
_COLUMNS = ["phase", "site_id", "call_id", "op_id", "order"]


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """The measured rows of `values` of one step as columns."""

    rows: PlacedValues
    stats: StatColumns
    order: Column
    kind: Column  # index of KINDS; _NO_KIND for roles that are not summed up


def read_values(data: RecordingData, step: int | None) -> StepValues:
    """Returns the rows of a step that have statistics, except those of single ops."""
    values = data.table("values")
    kept = column_of(values, "step") == step if step is not None else np.zeros(values.num_rows, bool)
    table = values.select([*_COLUMNS, *RAW]).filter(from_numpy(kept))
    table = table.filter(pc.and_(pc.is_valid(table["count"]), pc.is_null(table["op_id"])))
    of_step = PlacedValues(data=data, table=table)
    kind = np.array([_KIND_OF_ROLE.get(role, _NO_KIND) for role in of_step.roles] + [_NO_KIND])[of_step.role]
    is_recomputed = (kind == _OUTPUT) & (of_step.phase == PHASES.index(RECOMPUTE))
    return StepValues(
        rows=of_step,
        stats=read_statistics(table),
        order=column_of(table, "order"),
        kind=np.where(is_recomputed, _RECOMPUTED, kind),
    )


def summarize_values(
    values: StepValues, calls: Calls, placed: Rows, placer: Placer
) -> Mapping[int, ValueSummary]:
    """Returns, by place, the summaries of the places that have values or contain a place that has values.

    Args:
        values: the measured rows of the step.
        calls: the calls of the step.
        placed: the place of each of `calls`.
        placer: finds places.
    """
    own = _group(values, values.rows.find_places(calls, placer, placed=placed), placer)
    summaries: dict[int, ValueSummary] = {}
    inside: dict[int, list[_Inside]] = {}
    parents = np.array([place.parent for place in placer.places], np.int64)
    for level in reversed(list(iterate_levels(parents))):
        for index in level.tolist():
            summary, around = _summarize(values, own.get(index, {}), inside.pop(index, []))
            if summary is not None:
                summaries[index] = summary
                inside.setdefault(int(parents[index]), []).append(around)
    return summaries


@dataclass(frozen=True)
class _Inside:
    """The rows of a place and of all places inside it. They also count for the places around it."""

    parameters: Rows
    parameter_gradients: Rows
    nonfinite: Rows


def _group(values: StepValues, place: Rows, placer: Placer) -> Mapping[int, Mapping[int, Rows]]:
    """Returns the rows by place and kind. Rows of parameters are at every place of their module."""
    of_calls: dict[int, dict[int, Rows]] = {}
    rows = np.flatnonzero((place >= 0) & (values.kind != _NO_KIND))
    keys = place[rows] * len(KINDS) + values.kind[rows]
    for key, group in split_rows(rows, keys):
        index, kind = divmod(key, len(KINDS))
        of_calls.setdefault(index, {})[kind] = _distinct(group, values)
    for index, each in enumerate(placer.places):
        if each.is_alias:
            main = of_calls.get(placer.place(each.module.module_id, NOWHERE), {})
            shared = {kind: main[kind] for kind in (_PARAMETER, _PARAMETER_GRADIENT) if kind in main}
            if shared:
                of_calls.setdefault(index, {}).update(shared)
    return of_calls


def _distinct(rows: Rows, values: StepValues) -> Rows:
    """Returns one row of each measurement, in the order of the rows."""
    _, first = np.unique(values.order[rows], return_index=True)
    return rows[np.sort(first)]


def _summarize(
    values: StepValues, own: Mapping[int, Rows], inside: Sequence[_Inside]
) -> tuple[ValueSummary | None, _Inside]:
    rows = [own.get(kind, _NO_ROWS) for kind in range(len(KINDS))]
    bad = [each[values.stats.nonfinite[each] > 0] for each in rows]
    bad_inside = _join([each.nonfinite for each in inside], values)
    around = _Inside(
        _join([rows[_PARAMETER], *(each.parameters for each in inside)], values),
        _join([rows[_PARAMETER_GRADIENT], *(each.parameter_gradients for each in inside)], values),
        _join([*bad, bad_inside], values),
    )
    if not own and not inside:
        return None, around
    summary = ValueSummary(
        output=_merge_rows(rows[_OUTPUT], values),
        gradient=_merge_rows(rows[_GRADIENT], values),
        parameters=_merge_rows(around.parameters, values),
        parameter_gradients=_merge_rows(around.parameter_gradients, values),
        slots=_summarize_slots(rows[_OUTPUT], rows[_GRADIENT], values),
        nonfinite=tuple(
            _count(kind, each, values) for kind, each in zip(KINDS, bad, strict=True) if len(each)
        ),
        nonfinite_inside=int(values.stats.nonfinite[bad_inside].sum()),
    )
    return summary, around


def _join(parts: Sequence[Rows], values: StepValues) -> Rows:
    """Joins rows, with one row of each measurement."""
    filled = [each for each in parts if len(each)]
    if len(filled) < 2:
        return filled[0] if filled else _NO_ROWS
    return _distinct(np.concatenate(filled), values)


def _merge_rows(rows: Rows, values: StepValues) -> Stats | None:
    return values.stats.merge(rows) if len(rows) else None


def _count(kind: Kind, rows: Rows, values: StepValues) -> NonFiniteCount:
    stats = values.stats
    return NonFiniteCount(
        kind=kind, nan_count=int(stats.nan_count[rows].sum()), inf_count=int(stats.inf_count[rows].sum())
    )


def _summarize_slots(outputs: Rows, gradients: Rows, values: StepValues) -> tuple[SlotValues, ...]:
    """Returns the slots in the order in which they were first measured."""
    of_output, of_gradient = (dict(split_rows(each, values.rows.slot[each])) for each in (outputs, gradients))
    return tuple(
        SlotValues(
            slot=values.rows.slots[slot],
            output=_merge_rows(of_output.get(slot, _NO_ROWS), values),
            gradient=_merge_rows(of_gradient.get(slot, _NO_ROWS), values),
        )
        for slot in dict.fromkeys(values.rows.slot[np.concatenate([outputs, gradients])].tolist())
    )
