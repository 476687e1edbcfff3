"""Compares two recordings: aligns them, measures how far apart they are, and describes who made the difference."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import NothingRecordedError
from ...recording.arrow.arrays import from_numpy
from ...recording.phase import FORWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import OP_OUTPUT, OUTPUT
from ...surface import name_argument
from ..alignment.align import align_tables, read_both
from ..alignment.contract import Alignment
from ..tables.calls import iterate_levels
from ..tables.columns import ArrowTable, Column, Rows, decode, take_of_tables
from ..tables.missing_rows import require_rows
from ..tables.run import RunTables
from .answer import (
    ABSORBED,
    EQUAL,
    FIRST,
    INHERITED,
    NOISE,
    SECOND,
    VERDICTS,
    Comparison,
    Divergence,
    GrowthPoint,
    Reshaped,
)
from .culprits import Key
from .details import Details
from .environment import compare_environments
from .errors import METRICS, NOTHING
from .names import Names, explain_nothing, label, list_unmatched
from .pairs import Compared, ComparedSide, compare_pairs
from .ranking import choose_certain, choose_first, first_of_each, merge_rankings
from .recomputes import MergedPairs, compare_recomputed, put_in_order

#: At most so many places that made a difference are told one by one.
_TOLD = 100

#: Of so many of them the kind of difference is looked for.
_RELATED = 10

#: At most so many places of the chart.
_CHARTED = 10_000


def compare_recordings(
    a: RecordingData,
    b: RecordingData,
    *,
    rules: Sequence[str] = (),
    noise: Sequence[RecordingData] = (),
    tolerance: float | None = None,
    step: int | str | None = None,
    step_b: int | str | None = None,
    allow_missing: bool = False,
) -> Comparison:
    """Returns where two recordings part; see `modtrace.compare`.

    Raises:
        NothingRecordedError: nothing was measured, or the recordings have nothing in common.
        ValueError: there is no such step, a rule means nothing, or the tolerance is not a number from 0 on.
    """
    if tolerance is not None and not 0 <= tolerance < np.inf:
        named = name_argument("tolerance", tolerance)
        raise ValueError(f"{named}: give a relative error such as 1e-5; 0 tolerates none")
    require_rows(a, "values")
    require_rows(b, "values")
    side, other, steps = read_both(a, b, step=step, step_b=step_b)
    alignment = align_tables(side, other, steps, rules=rules)
    if not len(alignment.values) and not len(alignment.joined):
        raise NothingRecordedError(explain_nothing(side, other, alignment))
    parts = _compare_all(side, other, alignment, noise, tolerance)
    if len(parts[0].errors) and np.isnan(parts[0].errors.error).all():
        raise NothingRecordedError(
            f"{len(alignment.values):,} tensors are aligned, and of none of them the same was measured in both. "
            "Record both with values='stats', or the same captures."
        )
    return _tell(alignment, parts, allow_missing)


def _compare_all(
    side: RunTables,
    other: RunTables,
    alignment: Alignment,
    noise: Sequence[RecordingData],
    tolerance: float | None,
) -> list[Compared]:
    """Returns what is found out of the pairs, and then of what one of the recordings alone has recomputed."""
    runs, recomputes = [], []
    for each, unpaired, of in ((side, alignment.missing, FIRST), (other, alignment.extra, SECOND)):
        run = ComparedSide(each, np.zeros(len(each.values.step)))
        if len(unpaired.recomputed):
            modules = {there: here for here, there in alignment.modules} if of == SECOND else {}
            found, given = compare_recomputed(run, unpaired.recomputed, of, modules, tolerance)
            run = run._replace(given=given)
            recomputes.append(found)
        runs.append(run)
    return [compare_pairs(runs[0], runs[1], alignment, noise, tolerance), *recomputes]


def _tell(alignment: Alignment, parts: Sequence[Compared], allow_missing: bool) -> Comparison:
    pairs = parts[0]
    a, b = pairs.side.data, pairs.other.data
    missing = list_unmatched(pairs.side, alignment.missing, pairs.misfits[:, 0])
    extra = list_unmatched(pairs.other, alignment.extra, pairs.misfits[:, 1])
    merged = put_in_order(parts)
    ranking = merge_rankings([each.ranking for each in parts], merged.order)
    details, first = [Details(each) for each in parts], choose_first(ranking)
    are_results = merged.collect([each.are_results for each in parts])
    certain = choose_certain(ranking, are_results) if first is None else None
    if certain is not None:
        first = certain[0]
    verdicts = ranking.find_verdicts(first)

    chosen = _choose_places(merged, details, verdicts, first)

    def tell(at: int) -> Divergence:
        part, place = merged.locate(at)
        found = details[part].tell(place, VERDICTS[verdicts[at]], with_relation=at in chosen[:_RELATED])
        if certain is None or at != first:
            return found
        part, place = merged.locate(certain[1])
        return replace(found, leads_to=details[part].label(place))

    told = None if first is None else tell(first)
    error = merged.collect([each.errors.error for each in parts])
    absorbed = np.flatnonzero(verdicts == VERDICTS.index(ABSORBED))
    of_rows = [(each.side.values, each.a.rows) for each in parts]
    step, phase = (
        merged.collect([getattr(values, name)[rows] for values, rows in of_rows])
        for name in ("step", "phase")
    )
    reshaped, is_void = find_reshaped(pairs)
    return Comparison(
        ok=first is None
        and not ranking.is_beyond.any()
        and not is_void
        and (allow_missing or not (missing or extra)),
        first=told,
        divergences=tuple(map(tell, chosen)),
        firsts=tuple(map(tell, first_of_each(verdicts, step, phase)[:_TOLD].tolist())),
        absorbed_most=tell(int(absorbed[np.argmax(error[absorbed])])) if len(absorbed) else None,
        missing=missing,
        extra=extra,
        reshaped=reshaped,
        environment=compare_environments(a.meta, b.meta, differ=first is not None),
        **_count(parts, verdicts),
        is_void=is_void,
        by_ops=all(each.values.is_of(OP_OUTPUT).any() for each in (pairs.side, pairs.other)),
        noise=pairs.noise.kind,
        noise_text=pairs.noise.text,
        growth=tuple(_chart(pairs, told)),
        steps=tuple((int(one), int(two)) for one, two in alignment.steps),
        rules=alignment.rules,
        proposed=alignment.proposed,
        marks=(*(f"first: {mark}" for mark in a.meta.marks), *(f"second: {mark}" for mark in b.meta.marks)),
        table=_add_verdicts(take_of_tables([each.to_table() for each in details], merged.order), verdicts),
    )


def _count(parts: Sequence[Compared], verdicts: Column) -> dict[str, Any]:
    """Returns the fields of the answer that say how many tensors were compared, and by what."""
    metric = np.concatenate([each.errors.metric for each in parts])
    counts = {name: int((metric == code).sum()) for code, name in enumerate(METRICS)}
    equal, within, absorbed, inherited = (
        int((verdicts == VERDICTS.index(verdict)).sum()) for verdict in (EQUAL, NOISE, ABSORBED, INHERITED)
    )
    compared = len(metric) - counts[NOTHING]
    beyond = compared - equal - within - absorbed
    return {
        "compared": compared,
        "equal": equal,
        "within": within,
        "absorbed": absorbed,
        "beyond": beyond,
        "inherited": inherited,
        "made": beyond - inherited,
        "unmeasured": counts[NOTHING],
        "metrics": tuple((name, count) for name, count in counts.items() if count),
    }


def _choose_places(
    merged: MergedPairs, details: Sequence[Details], verdicts: Column, first: int | None
) -> list[int]:
    """Returns the first pair and then those of other places that made a difference, each in its first step.

    What the backward of an op makes of a difference that the op itself made is of the same place.
    """
    chosen: dict[Key, int] = {}
    found = [] if first is None else [first, *np.flatnonzero(verdicts > VERDICTS.index(INHERITED)).tolist()]
    for at in found:
        part, place = merged.locate(at)
        key, forward = details[part].culprits.find_keys(place)
        if key not in chosen and forward not in chosen:
            chosen[key] = at
        if len(chosen) == _TOLD:
            break
    return list(chosen.values())


def _add_verdicts(table: ArrowTable, verdicts: Column) -> ArrowTable:
    beyond = from_numpy(verdicts >= VERDICTS.index(INHERITED))
    return table.append_column("verdict", decode(VERDICTS, verdicts)).append_column("beyond", beyond)


def _chart(found: Compared, first: Divergence | None) -> list[GrowthPoint]:
    """Returns the outputs of modules in forward of the step of the first difference, or else those of ops."""
    values, rows = found.side.values, found.a.rows
    if not len(rows):
        return []
    step = values.step[rows[0]] if first is None else first.step
    is_shown = (values.step[rows] == step) & (values.phase[rows] == PHASES.index(FORWARD))
    is_shown &= ~found.errors.is_by(NOTHING)
    for role in (OUTPUT, OP_OUTPUT):
        mine = np.flatnonzero(is_shown & values.is_of(role, rows=rows))
        if len(mine):
            return _tell_growth(found, _one_of_each_tensor(found, mine)[:_CHARTED])
    return []


def _one_of_each_tensor(found: Compared, mine: Rows) -> Rows:
    """Returns the first output of each call, and of calls that return the same tensor the innermost."""
    values, rows = found.side.values, found.a.rows[mine]
    order = np.lexsort((values.site[rows], values.call[rows]))
    is_first = np.append(True, np.diff(values.call[rows[order]]) != 0) | (values.call[rows[order]] < 0)
    kept = np.sort(order[is_first])
    _, innermost = np.unique(found.side.values.moment[rows[kept]], return_index=True)
    return mine[kept[innermost]]


def _tell_growth(found: Compared, mine: Rows) -> list[GrowthPoint]:
    names, rows = Names(found.side), found.a.rows
    return [
        GrowthPoint(
            name=label(names.place_of_value(int(rows[at]))),
            step=int(found.side.values.step[rows[at]]),
            error=float(found.errors.error[at]),
            noise=max(float(found.noise.local[at]), float(found.errors.floor[at])),
        )
        for at in mine.tolist()
    ]


_FORWARD = PHASES.index(FORWARD)

#: At most so many of them are told.
_TOLD = 100


def find_reshaped(found: Compared) -> tuple[tuple[Reshaped, ...], bool]:
    """Returns the outputs of modules that have another number of elements in the other run, the outermost first.

    Each output of a module is told once. Returns besides whether what models return, and most of what modules inside of
    them return, was not compared: then the inputs have other shapes, and not a module or two.
    """
    side, other = found.side, found.other
    values, depth = side.values, _find_depths(side)
    is_output = values.is_of(OUTPUT) & (values.phase == _FORWARD) & (values.call >= 0)
    outermost = depth[values.call[is_output & values.kept]].min(initial=len(depth))
    rows_compared = found.a.rows[~found.errors.is_by(NOTHING)]
    compared = rows_compared[is_output[rows_compared]]
    misfits = found.misfits[is_output[found.misfits[:, 0]]]
    of = misfits[:, 0]  # of a call the last to be computed comes first: logits before what a cache keeps
    order = np.lexsort((-values.order[of], values.call[of], depth[values.call[of]]))
    rows, partners = misfits[order].T
    names, told = Names(side), dict[tuple[int, int], Reshaped]()
    for row, partner in zip(rows.tolist(), partners.tolist(), strict=True):
        key = int(values.place[row]), int(values.slot[row])
        if key not in told and len(told) < _TOLD:
            calls, calls_b = _count_calls(side, row), _count_calls(other, partner)
            common = math.gcd(calls, calls_b) or 1
            told[key] = Reshaped(
                name=names.label_value(row),
                step=int(values.step[row]),
                shape=_shape(side, row),
                shape_b=_shape(other, partner),
                calls=calls // common,
                calls_b=calls_b // common,
                outermost=bool(depth[values.call[row]] <= outermost),
            )
    returned, others = (depth[values.call[each]] <= outermost for each in (compared, of))
    return tuple(told.values()), bool(others.any() and not returned.any() and len(of) > len(compared))


def _find_depths(side: RunTables) -> Column:
    """Returns in how many calls each call is."""
    depth = np.zeros(len(side.calls.place), np.int64)
    for number, level in enumerate(iterate_levels(side.calls.calls.parent)):
        depth[level] = number
    return depth


def _shape(side: RunTables, row: int) -> tuple[int, ...]:
    return tuple(size for size in side.values.sizes[row].tolist() if size >= 0)


def _count_calls(side: RunTables, row: int) -> int:
    """Returns how often the module of a row is called in forward, in all compared steps."""
    calls = side.calls
    is_same = calls.kept & (calls.place == side.values.place[row]) & (calls.calls.phase == _FORWARD)
    return int((is_same & (calls.wraps == 0)).sum())
