"""Keeps of a comparison which modules, calls and ops of both recordings correspond, for reports."""

import numpy as np

from ...recording.protocols import RecordingData
from ...recording.role import BUFFER, PARAMETER
from ..alignment.contract import Alignment, Unpaired
from ..tables.columns import Column, Rows, column_of, take
from ..tables.run import RunTables
from .answer import INHERITED, SECOND, VERDICTS
from .errors import NOTHING
from .names import choose_harmful
from .pairs import ComparedPairs
from .recomputes import MergedPairs
from .run_pair import CHANGED, EQUAL, FOLLOWS, RESHAPED, JudgedTensors, RunPair, UnpairedIds


def pair_runs(
    own: RecordingData,
    other: RecordingData,
    alignment: Alignment,
    merged: MergedPairs,
    verdicts: Column,
    position: int,
) -> RunPair:
    """Returns what corresponds in two compared recordings.

    Args:
        own: the first recording.
        other: the second recording.
        alignment: which rows of both correspond.
        merged: the compared pairs.
        verdicts: the code of each pair's verdict.
        position: where the first difference stands among the pairs of its step.
    """
    pairs = merged.parts[0]
    a, b = pairs.a.tables, pairs.b.tables
    return RunPair(
        own=own,
        other=other,
        position=position,
        steps=alignment.steps,
        names=a.names,
        modules=alignment.modules,
        calls=_to_ids(alignment.calls, (a.calls.call_id, b.calls.call_id)),
        ops=_to_ids(alignment.ops, (column_of(a.ops.table, "op_id"), column_of(b.ops.table, "op_id"))),
        missing=_list_unpaired(a, alignment.missing, other_mesh=pairs.other_mesh),
        extra=_list_unpaired(b, alignment.extra, other_mesh=pairs.other_mesh),
        judged=_judge(merged, verdicts),
    )


def _to_ids(pairs: Rows, ids: tuple[Column, Column]) -> Rows:
    return np.stack([of[rows] for of, rows in zip(ids, pairs.T, strict=True)], axis=1)


def _list_unpaired(tables: RunTables, unpaired: Unpaired, *, other_mesh: bool) -> UnpairedIds:
    is_plain = tables.adds_nothing | other_mesh
    calls, _ = choose_harmful(unpaired.calls, np.zeros(len(unpaired.calls), bool))
    ops, _ = choose_harmful(unpaired.ops, is_plain[unpaired.ops.rows])
    return UnpairedIds(
        modules=frozenset((name.root, name.path) for name in unpaired.modules),
        calls=tables.calls.call_id[calls],
        ops=column_of(tables.ops.table, "op_id")[ops],
    )


def _judge(merged: MergedPairs, verdicts: Column) -> JudgedTensors:
    own = np.empty(len(verdicts), np.int8)
    own[merged.order] = verdicts  # in the order of the parts, one after the other
    level = np.where(own > VERDICTS.index(INHERITED), CHANGED, EQUAL)
    level[own == VERDICTS.index(INHERITED)] = FOLLOWS
    ends = np.cumsum([len(part.errors) for part in merged.parts])
    of_parts = zip(merged.parts, np.split(level, ends[:-1]), strict=True)
    judged = [
        _judge_rows(part.a.tables, part.a.rows[kept], of_part[kept])
        for part, of_part in of_parts
        if part.recompute_of != SECOND
        for kept in [~part.errors.is_by(NOTHING)]
    ]
    judged.append(_judge_reshaped(merged.parts[0]))
    return JudgedTensors(
        **{name: np.concatenate([getattr(rows, name) for rows in judged]) for name in vars(judged[0])}
    )


def _judge_reshaped(pairs: ComparedPairs) -> JudgedTensors:
    rows, tables = pairs.resized[:, 0], pairs.a.tables
    rows = rows[~np.append(tables.adds_nothing | pairs.other_mesh, False)[tables.values.op[rows]]]
    return _judge_rows(pairs.a.tables, rows, np.full(len(rows), RESHAPED))


def _judge_rows(tables: RunTables, rows: Rows, level: Column) -> JudgedTensors:
    values = tables.values
    return JudgedTensors(
        step=values.step[rows],
        place=values.place[rows],
        call=take(tables.calls.call_id, values.call[rows]),
        op=take(column_of(tables.ops.table, "op_id"), np.where(values.is_of_op, values.op, -1)[rows]),
        phase=values.phase[rows],
        is_parameter=values.is_of(PARAMETER, BUFFER, rows=rows),
        level=level.astype(np.int8),
    )
