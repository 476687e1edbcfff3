"""Compares two recordings: aligns them, measures their differences, and describes what made them."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...errors import NothingRecordedError
from ...recording.arrow.arrays import from_numpy
from ...recording.phase import FORWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import OP_OUTPUT, OUTPUT
from ..alignment.align import align_tables, read_both
from ..alignment.contract import Alignment
from ..tables.calls import iterate_levels
from ..tables.columns import ArrowTable, Bools, Column, Rows, build_table, decode, take_of_tables
from ..tables.meshes import ComparableRuns, make_comparable, pair_ranks
from ..tables.missing_rows import require_rows
from ..tables.ranks import RanksData
from ..tables.run import RunTables
from .answer import (
    ABSORBED,
    EQUAL,
    FIRST,
    INHERITED,
    NOISE,
    NOT_MEASURED,
    SECOND,
    UNLIKE_OPS,
    VERDICTS,
    Comparison,
    Divergence,
    GrowthPoint,
    OneSided,
    Reshaped,
)
from .culprits import Key
from .details import Details
from .environment import compare_environments
from .errors import METRICS, NOTHING
from .excused_backwards import excuse_backwards
from .kept_pairs import pair_runs
from .names import explain_nothing, label, list_unmatched
from .paired_run import records_ops
from .pairs import ComparedPairs, compare_pairs
from .rank_answers import mark_unlike_replicas, merge_answers
from .ranking import Ranking, choose_cancelling, choose_first, find_made_before, first_of_each, merge_rankings
from .recomputes import MergedPairs, compare_recomputed, merge_pairs

#: The largest number of places that are described in full, and of those whose relation is searched for.
_DESCRIBED, _RELATED = 100, 10

#: The largest number of earlier pairs whose arguments are compared, as where an optimizer updates all parameters.
_MOST_BEFORE = 100

#: The largest number of points in the growth chart.
_CHARTED = 10_000

_FORWARD = PHASES.index(FORWARD)


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
        ValueError: there is no such step, a rule matches no module, or the tolerance is not a number from 0 on.
    """
    if tolerance is not None and not 0 <= tolerance < np.inf:
        raise ValueError(f"tolerance={tolerance!r}: give a relative error such as 1e-5; 0 tolerates none")
    answer = partial(
        _compare_runs, rules=rules, tolerance=tolerance, step=step, step_b=step_b, allow_missing=allow_missing
    )
    ranks = pair_ranks([a, b, *noise])
    for run in ranks[0].runs[:2] if ranks else (a, b):
        require_rows(run, "values")
    if not ranks:
        return answer(a, b, make_comparable(a, b, noise))
    answers = {
        rank: answer(one, other, ComparableRuns(one, other, more, None, other_mesh=False))
        for rank, (one, other, *more) in ranks
    }
    return merge_answers(answers, _list_marks(a, b))


def _list_marks(a: RecordingData, b: RecordingData) -> tuple[str, ...]:
    """Returns the marks of both runs; of ranks that are read one by one, without those on merging them."""
    marks = (run.marks if isinstance(run, RanksData) else run.meta.marks for run in (a, b))
    return tuple(
        f"{name}: {mark}" for name, of_run in zip((FIRST, SECOND), marks, strict=True) for mark in of_run
    )


def _compare_runs(
    a: RecordingData,
    b: RecordingData,
    runs: ComparableRuns,
    *,
    rules: Sequence[str],
    tolerance: float | None,
    step: int | str | None,
    step_b: int | str | None,
    allow_missing: bool,
) -> Comparison:
    tables, tables_b, steps = read_both(runs.a, runs.b, step=step, step_b=step_b)
    alignment = align_tables(tables, tables_b, steps, rules=rules)
    if not len(alignment.values) and not len(alignment.joined):
        raise NothingRecordedError(explain_nothing(tables, tables_b, alignment))
    parts = _compare_all(tables, tables_b, alignment, runs.noise, tolerance, runs.other_mesh)
    if len(parts[0].errors) and np.isnan(parts[0].errors.error).all():
        raise NothingRecordedError(
            f"{len(alignment.values):,} tensors are aligned, and of none of them the same was measured in both. "
            "Record both with values='stats', or the same captures."
        )
    found = _build_answer(a, b, alignment, parts, allow_missing)
    environment = found.environment if runs.text is None else (*found.environment, runs.text)
    return replace(found, environment=environment, marks=(*found.marks, *mark_unlike_replicas(a, b)))


def _compare_all(
    a: RunTables,
    b: RunTables,
    alignment: Alignment,
    noise: Sequence[RecordingData],
    tolerance: float | None,
    other_mesh: bool,
) -> list[ComparedPairs]:
    """Returns the compared pairs of the recordings, then those of recomputes that only one of them has."""
    names_in_a = {name_b: name for name, name_b in alignment.modules}
    recompute_errors, recomputes = [], []
    for tables, unpaired, run, names in (
        (a, alignment.missing, FIRST, {}),
        (b, alignment.extra, SECOND, names_in_a),
    ):
        errors = np.zeros(len(tables.values.step))
        if len(unpaired.recomputed):
            pairs, errors = compare_recomputed(tables, unpaired.recomputed, run, names, tolerance)
            recomputes.append(pairs)
        recompute_errors.append(errors)
    both = recompute_errors[0], recompute_errors[1]
    return [compare_pairs(a, b, alignment, noise, tolerance, both, other_mesh), *recomputes]


def _build_answer(
    own: RecordingData,
    other: RecordingData,
    alignment: Alignment,
    parts: Sequence[ComparedPairs],
    allow_missing: bool,
) -> Comparison:
    pairs = parts[0]
    meta, meta_b = (run.tables.data.meta for run in (pairs.a, pairs.b))
    missing, extra = _list_unmatched(pairs, alignment)
    merged = merge_pairs(parts)
    ranking = merge_rankings([part.ranking for part in parts], merged.order)
    details = [Details(part) for part in parts]
    first, shown_by = _choose_first(ranking, merged, details)
    verdicts, are_unexplained = excuse_backwards(merged, ranking.find_verdicts(first), first)
    chosen = _choose_places(merged, details, verdicts, first, are_unexplained)

    def describe(pair: int) -> Divergence:
        part, position = merged.locate(pair)
        verdict, with_relation = VERDICTS[verdicts[pair]], pair in chosen[:_RELATED]
        divergence = details[part].describe(position, verdict, with_relation=with_relation)
        if shown_by is None or pair != first:
            return divergence
        part, position = merged.locate(shown_by)
        return replace(divergence, leads_to=details[part].label(position))

    divergence = None if first is None else describe(first)
    absorbed_most = _find_absorbed_most(merged, verdicts)
    step, phase = (
        merged.collect([getattr(part.a.tables.values, name)[part.a.rows] for part in parts])
        for name in ("step", "phase")
    )
    position = 0 if first is None else int((step[:first] == step[first]).sum())
    reshaped, is_void = _find_reshaped(pairs)
    is_complete = allow_missing or not (missing or extra)
    return Comparison(
        ok=first is None and not ranking.is_beyond.any() and not is_void and is_complete,
        first=divergence,
        divergences=tuple(map(describe, chosen)),
        firsts=tuple(map(describe, first_of_each(verdicts, step, phase)[:_DESCRIBED].tolist())),
        absorbed_most=None if absorbed_most is None else describe(absorbed_most),
        missing=missing,
        extra=extra,
        reshaped=reshaped,
        environment=compare_environments(meta, meta_b, differ=first is not None),
        **_count(parts, verdicts),
        is_void=is_void,
        by_ops=all(run.tables.values.is_of(OP_OUTPUT).any() for run in (pairs.a, pairs.b)),
        without_ops=tuple(name for name in (FIRST, SECOND) if not records_ops(pairs.run(name).tables)),
        noise=pairs.noise.kind,
        noise_text=pairs.noise.text,
        growth=tuple(_chart(pairs, None if first is None else int(step[first]))),
        steps=tuple((int(one), int(two)) for one, two in alignment.steps),
        rules=alignment.rules,
        proposed=alignment.proposed,
        marks=_list_marks(pairs.a.tables.data, pairs.b.tables.data),
        table=_build_table(merged, details, verdicts),
        pair=pair_runs(own, other, alignment, merged, verdicts, position),
    )


def _list_unmatched(pairs: ComparedPairs, alignment: Alignment) -> Iterator[OneSided]:
    """Yields what only the first run has, and what only the second has."""
    unpaired = alignment.missing, alignment.extra
    for run, of_run, resized in zip((pairs.a, pairs.b), unpaired, pairs.resized.T, strict=True):
        yield list_unmatched(run.tables, of_run, resized, other_mesh=pairs.other_mesh)


def _choose_first(
    ranking: Ranking, merged: MergedPairs, details: Sequence[Details]
) -> tuple[int | None, int | None]:
    """Returns the pair at which the runs part, and the result that shows it if it does only as summands cancel.

    An op that reads equal tensors, was given other arguments and returns more than noise has made a difference, however
    far apart the output of an op behind it is.
    """
    first = choose_first(ranking)
    if first is not None:
        for pair in find_made_before(ranking, first)[:_MOST_BEFORE].tolist():
            part, position = merged.locate(pair)
            if details[part].has_other_arguments(position):
                return pair, None
        return first, None
    are_results = merged.collect([part.a.are_results for part in merged.parts])
    return choose_cancelling(ranking, are_results) or (None, None)


def _find_absorbed_most(merged: MergedPairs, verdicts: Column) -> int | None:
    """Returns the pair that differs most of those whose differences are absorbed."""
    error = merged.collect([part.errors.error for part in merged.parts])
    absorbed = np.flatnonzero(verdicts == VERDICTS.index(ABSORBED))
    return int(absorbed[np.argmax(error[absorbed])]) if len(absorbed) else None


def _count(parts: Sequence[ComparedPairs], verdicts: Column) -> dict[str, Any]:
    """Returns the fields of the answer that count compared tensors, by verdict and by metric."""
    metric = np.concatenate([part.errors.metric for part in parts])
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
        "unmeasured_why": tuple(sum(map(_explain_unmeasured, parts), Counter[str]()).most_common()),
        "metrics": tuple((name, count) for name, count in counts.items() if count),
    }


def _explain_unmeasured(part: ComparedPairs) -> Counter[str]:
    """Returns why pairs were not compared, with the number of each reason: a note of either run, or what the op is."""
    pairs = np.flatnonzero(part.errors.is_by(NOTHING))
    why = np.full(len(pairs), UNLIKE_OPS, object)
    for run in (part.b, part.a):
        notes, rows = run.tables.values.table["note"], run.rows[pairs]
        is_missing = ~run.measured.is_measured[pairs]
        found = notes.take(from_numpy(rows[is_missing])).to_pylist()
        why[is_missing] = [note or NOT_MEASURED for note in found]
    return Counter(why.tolist())


def _choose_places(
    merged: MergedPairs,
    details: Sequence[Details],
    verdicts: Column,
    first: int | None,
    are_unexplained: Bools,
) -> list[int]:
    """Returns the first pair to describe, then those of other places that made a difference, each in its first step."""
    if first is None:
        return []
    chosen = dict[Key, int]()
    for pair in [first, *np.flatnonzero(verdicts > VERDICTS.index(INHERITED)).tolist()]:
        part, position = merged.locate(pair)
        key, forward = details[part].culprits.find_keys(position)
        is_own = pair == first or forward not in chosen or are_unexplained[pair]
        if key not in chosen and is_own:
            chosen[key] = pair
        if len(chosen) == _DESCRIBED:
            break
    return list(chosen.values())


def _build_table(merged: MergedPairs, details: Sequence[Details], verdicts: Column) -> ArrowTable:
    table = take_of_tables([part.to_table() for part in details], merged.order)
    columns = {
        **{name: table[name] for name in table.column_names},
        "verdict": decode(VERDICTS, verdicts),
        "beyond": verdicts >= VERDICTS.index(INHERITED),
    }
    return build_table(columns)


def _chart(pairs: ComparedPairs, step: int | None) -> list[GrowthPoint]:
    """Returns the growth chart of a step, or of the first: outputs of modules in forward, or else of ops."""
    values, rows = pairs.a.tables.values, pairs.a.rows
    if not len(rows):
        return []
    if step is None:
        step = int(values.step[rows[0]])
    is_shown = (values.step[rows] == step) & (values.phase[rows] == _FORWARD) & ~pairs.errors.is_by(NOTHING)
    for role in (OUTPUT, OP_OUTPUT):
        outputs = np.flatnonzero(is_shown & values.is_of(role, rows=rows))
        if len(outputs):
            return [
                GrowthPoint(
                    name=label(pairs.a.names.place_of_value(int(rows[pair]))),
                    step=step,
                    error=float(pairs.errors.error[pair]),
                    noise=float(pairs.ranking.noise[pair]),
                )
                for pair in _choose_charted(pairs, outputs)[:_CHARTED].tolist()
            ]
    return []


def _choose_charted(pairs: ComparedPairs, outputs: Rows) -> Rows:
    """Returns which of the outputs become points of the chart: the first output of each call.

    Of nested calls that return the same tensor, only the innermost has a point.
    """
    values, rows = pairs.a.tables.values, pairs.a.rows[outputs]
    order = np.lexsort((values.site[rows], values.call[rows]))
    is_first = np.append(True, np.diff(values.call[rows[order]]) != 0) | (values.call[rows[order]] < 0)
    kept = np.sort(order[is_first])
    _, innermost = np.unique(values.moment[rows[kept]], return_index=True)
    return outputs[kept[innermost]]


def _find_reshaped(pairs: ComparedPairs) -> tuple[tuple[Reshaped, ...], bool]:
    """Returns the outputs of modules with another number of elements in the other run, the outermost first.

    Each output of a module is listed once. The second value is true if outputs of models, and most outputs inside them,
    were not compared: then the inputs have other shapes, rather than a module or two.
    """
    tables, tables_b, values = pairs.a.tables, pairs.b.tables, pairs.a.tables.values
    depth = np.zeros(len(tables.calls.place), np.int64)
    for number, level in enumerate(iterate_levels(tables.calls.parent)):
        depth[level] = number
    is_output = values.is_of(OUTPUT) & (values.phase == _FORWARD) & (values.call >= 0)
    outermost = depth[values.call[is_output & values.kept]].min(initial=len(depth))
    compared = pairs.a.rows[~pairs.errors.is_by(NOTHING)]
    compared = compared[is_output[compared]]
    resized = pairs.resized[is_output[pairs.resized[:, 0]]]
    rows = resized[:, 0]  # the last output of a call comes first, so logits precede what a cache keeps
    order = np.lexsort((-values.order[rows], values.call[rows], depth[values.call[rows]]))
    reshaped = dict[tuple[int, int], Reshaped]()
    for row, row_b in resized[order].tolist():
        key = int(values.place[row]), int(values.slot[row])
        if key not in reshaped and len(reshaped) < _DESCRIBED:
            calls, calls_b = _count_calls(tables, row), _count_calls(tables_b, row_b)
            common = math.gcd(calls, calls_b) or 1
            reshaped[key] = Reshaped(
                name=pairs.a.names.label_value(row),
                step=int(values.step[row]),
                shape=_find_shape(tables, row),
                shape_b=_find_shape(tables_b, row_b),
                calls=calls // common,
                calls_b=calls_b // common,
                outermost=bool(depth[values.call[row]] <= outermost),
            )
    is_returned, is_other = (depth[values.call[some]] <= outermost for some in (compared, rows))
    is_void = is_other.any() and not is_returned.any() and len(rows) > len(compared)
    return tuple(reshaped.values()), bool(is_void)


def _find_shape(tables: RunTables, row: int) -> tuple[int, ...]:
    return tuple(size for size in tables.values.sizes[row].tolist() if size >= 0)


def _count_calls(tables: RunTables, row: int) -> int:
    """Returns how often the module of a row of `values` is called in forward, in all compared steps."""
    calls = tables.calls
    is_same = calls.kept & (calls.place == tables.values.place[row]) & (calls.phase == _FORWARD)
    return int((is_same & (calls.wraps == 0)).sum())
