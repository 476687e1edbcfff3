"""Compares two recordings: aligns them, measures how far apart they are, and tells who made the difference."""

from collections.abc import Sequence

import numpy as np

from ...errors import NothingRecordedError
from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import OP_OUTPUT, OUTPUT
from ...recording.statistics.moments import Numbers
from ...surface import name_argument
from ..alignment.align import align
from ..alignment.contract import Alignment
from ..alignment.sides import Side, read_side
from ..provenance.op_rules import UNINITIALIZED
from ..step.calls import Rows, column_of
from ..step.missing_rows import require_rows
from ..step.ops import bare_name
from .answer import Comparison, GrowthPoint
from .cancellation import find_cancellation
from .details import Compared, Details
from .environment import compare_environments
from .errors import METRICS, NOTHING, Errors, find_errors
from .inherited import OF_PARAMETERS, Inherited, add_second, find_inherited, is_of, order_by_use, read_order
from .joined_errors import find_joined_errors
from .measured import Bools, read_measured
from .names import Names, label, list_unmatched
from .no_common import explain_nothing
from .noise import assume_noise, give_noise, measure_noise
from .ranking import choose_first, first_of_each, rank

#: At most so many places that made a difference are told one by one.
_TOLD = 100

_LATER = [PHASES.index(each) for each in (BACKWARD, OPTIMIZER)]

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
    alignment = align(a, b, rules=rules, step=step, step_b=step_b)
    if not len(alignment.values) and not len(alignment.joined):
        raise NothingRecordedError(explain_nothing(a, b, alignment))
    found = _compare_pairs(a, b, alignment, noise, tolerance)
    if len(found.errors.error) and np.isnan(found.errors.error).all():
        raise NothingRecordedError(
            f"{len(alignment.values):,} tensors are aligned, and of none of them the same was measured in both. "
            "Record both with values='stats', or the same captures."
        )
    return _tell(a, b, found, allow_missing)


def _compare_pairs(
    a: RecordingData,
    b: RecordingData,
    alignment: Alignment,
    runs: Sequence[RecordingData],
    tolerance: float | None,
) -> Compared:
    side, other = (
        read_side(data, np.unique(alignment.steps[:, at]).tolist()) for at, data in enumerate((a, b))
    )
    kept = ~_is_uninitialized(side, alignment.values[:, 0])
    kept &= ~_are_misfits(alignment.values, a, b)
    pairs, joined = alignment.values[kept], find_joined_errors(a, b, alignment)
    every = np.concatenate([pairs[:, 0], joined.rows_a])
    order = order_by_use(side, every)
    rows, rows_b = every[order], np.concatenate([pairs[:, 1], joined.rows_b])[order]
    permuted = np.concatenate([alignment.permuted[kept], np.full(len(joined.rows_a), -1)])[order]
    measured, measured_b = read_measured(a, rows), read_measured(b, rows_b)
    errors = find_errors(measured, measured_b, permuted, alignment.axes, _may_be_turned(side, rows))
    errors.take_over(np.argsort(order)[len(pairs) :], joined.error, joined.floor, joined.metric)
    inherited = _find_inherited(side, other, rows, rows_b, errors, alignment)
    if tolerance is not None:
        noise = give_noise(tolerance, len(rows))
    else:
        ones = find_cancellation(side, rows, measured)
        others = find_cancellation(other, rows_b, measured_b)
        # What cancels in one recording alone is a difference; in a part, and not in the whole, it is none.
        cancellation = np.where(order < len(pairs), np.minimum(ones, others), np.maximum(ones, others))
        if runs:
            noise = measure_noise([_find_levels(a, run, rows) for run in runs], cancellation)
        else:
            noise = assume_noise(measured, measured_b, cancellation)
    return Compared(
        alignment=alignment,
        side=side,
        other=other,
        a=measured,
        b=measured_b,
        errors=errors,
        inherited=inherited,
        noise=noise,
        ranking=rank(errors, inherited, noise, _are_judged(side, other, rows, alignment)),
    )


def _find_inherited(
    side: Side, other: Side, rows: Rows, rows_b: Rows, errors: Errors, alignment: Alignment
) -> Inherited:
    found = find_inherited(side, rows, errors.error)
    if not len(alignment.extra.ops):
        return found
    return add_second(found, find_inherited(other, rows_b, errors.error), is_of(side, rows, OP_OUTPUT))


def _are_misfits(pairs: Rows, a: RecordingData, b: RecordingData) -> Bools:
    """Returns which pairs have different numbers of elements: they are not the same tensor."""
    numel, numel_b = (column_of(data.table("values"), "numel") for data in (a, b))
    return np.asarray(numel[pairs[:, 0]] != numel_b[pairs[:, 1]])


def _may_be_turned(side: Side, rows: Rows) -> Bools:
    """Returns which rows are of weights, and of what ops of backward and optimizers make of these."""
    values = side.values
    is_later = (values.op[rows] >= 0) & np.isin(values.phase[rows], _LATER)
    return np.asarray(is_later | is_of(side, rows, *OF_PARAMETERS))


def _are_judged(side: Side, other: Side, rows: Rows, alignment: Alignment) -> Bools:
    """Returns which rows may be blamed: of an optimizer that runs other ops in the other recording, its ops may not."""
    in_optimizer = PHASES.index(OPTIMIZER)
    unpaired = ((side, alignment.missing.ops), (other, alignment.extra.ops))
    is_other = any((each.ops.phase[ops.rows] == in_optimizer).any() for each, ops in unpaired)
    is_op = (side.values.op[rows] >= 0) & (side.values.phase[rows] == in_optimizer)
    return np.asarray(~(is_op & is_other))


def _is_uninitialized(side: Side, rows: Rows) -> Bools:
    """Returns which rows are of memory that an op has made and nobody written, as that of `empty`."""
    codes = [code for code, name in enumerate(side.ops.names) if bare_name(name) in UNINITIALIZED]
    op = side.values.op[rows]
    is_output = np.isin(
        side.values.role[rows], [side.values.roles.index(OP_OUTPUT)] if OP_OUTPUT in side.values.roles else []
    )
    name = np.append(side.ops.name, -1)[op]
    return np.asarray(is_output & (op >= 0) & np.isin(name, codes))


def _find_levels(a: RecordingData, run: RecordingData, rows: Rows) -> Numbers:
    """Returns the error of each row of `a` against a further run of the same; NaN where that has no such tensor."""
    alignment = align(a, run)
    pairs = alignment.values
    if not len(pairs):
        raise NothingRecordedError(explain_nothing(a, run, alignment))
    errors = find_errors(read_measured(a, pairs[:, 0]), read_measured(run, pairs[:, 1]))
    of_row = np.full(a.table("values").num_rows, np.nan)
    of_row[pairs[:, 0]] = errors.error
    return of_row[rows]


def _tell(a: RecordingData, b: RecordingData, found: Compared, allow_missing: bool) -> Comparison:
    ranking, errors = found.ranking, found.errors
    pairs = found.alignment.values
    misfits = pairs[_are_misfits(pairs, a, b)]
    missing = list_unmatched(found.side, found.alignment.missing, misfits[:, 0])
    extra = list_unmatched(found.other, found.alignment.extra, misfits[:, 1])
    details, first = Details(found), choose_first(ranking)
    known = ~errors.is_by(NOTHING)
    is_equal = known & (errors.error == 0) & ~errors.is_unequal
    beyond = int(ranking.is_beyond.sum())
    is_complete = allow_missing or not (missing or extra)
    return Comparison(
        ok=not beyond and is_complete,
        first=None if first is None else details.tell(first),
        divergences=tuple(details.tell(at) for at in _made(found, first)),
        firsts=tuple(details.tell(at) for at in _firsts(found).tolist()),
        missing=missing,
        extra=extra,
        environment=compare_environments(a.meta, b.meta),
        compared=int(known.sum()),
        equal=int(is_equal.sum()),
        within=int((known & ~is_equal & ~ranking.is_beyond).sum()),
        beyond=beyond,
        unmeasured=int((~known).sum()),
        metrics=tuple((name, int(errors.is_by(name).sum())) for name in METRICS if errors.is_by(name).any()),
        noise=found.noise.kind,
        noise_text=found.noise.text,
        growth=tuple(_chart(found, first)),
        steps=tuple((int(one), int(two)) for one, two in found.alignment.steps),
        rules=found.alignment.rules,
        proposed=found.alignment.proposed,
        marks=(*(f"first: {mark}" for mark in a.meta.marks), *(f"second: {mark}" for mark in b.meta.marks)),
        table=details.to_table(),
    )


def _made(found: Compared, first: int | None) -> list[int]:
    """Returns the first pair and then those of other places that made a difference, each in its first step."""
    if first is None:
        return []
    others = np.flatnonzero(found.ranking.stands_out()).tolist()
    values, rows = found.side.values, found.a.rows
    places: dict[tuple[int, ...], int] = {}
    for at in [first, *others]:
        row = int(rows[at])
        op = int(values.op[row])
        name = int(found.side.ops.name[op]) if op >= 0 else -1
        places.setdefault((int(values.place[row]), int(values.phase[row]), name, int(values.role[row])), at)
        if len(places) == _TOLD:
            break
    return list(places.values())


def _firsts(found: Compared) -> Rows:
    rows = found.alignment.values[:0, 0]
    if found.ranking.is_beyond.any():
        values = found.side.values
        rows = first_of_each(found.ranking, values.step[found.a.rows], values.phase[found.a.rows])
    return rows[:_TOLD]


def _chart(found: Compared, first: int | None) -> list[GrowthPoint]:
    """Returns the outputs of modules in forward of the step of the first difference, or else those of ops."""
    values, rows = found.side.values, found.a.rows
    if not len(rows):
        return []
    step = values.step[rows[0 if first is None else first]]
    is_shown = (values.step[rows] == step) & (values.phase[rows] == PHASES.index(FORWARD))
    is_shown &= ~found.errors.is_by(NOTHING)
    for role in (OUTPUT, OP_OUTPUT):
        code = values.roles.index(role) if role in values.roles else -2
        mine = np.flatnonzero(is_shown & (values.role[rows] == code))
        if len(mine):
            return _tell_growth(found, _one_of_each_tensor(found, mine)[:_CHARTED])
    return []


def _one_of_each_tensor(found: Compared, mine: Rows) -> Rows:
    """Returns the first output of each call, and of calls that return the same tensor the innermost."""
    values, rows = found.side.values, found.a.rows[mine]
    order = np.lexsort((values.site[rows], values.call[rows]))
    is_first = np.append(True, np.diff(values.call[rows[order]]) != 0) | (values.call[rows[order]] < 0)
    kept = np.sort(order[is_first])
    _, innermost = np.unique(read_order(found.side)[rows[kept]], return_index=True)
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
