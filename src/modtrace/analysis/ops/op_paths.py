"""Lists the ops of one step in the order in which they ran, each with its module."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ...recording.phase import PHASES
from ...recording.protocols import RecordingData
from ..tables.chosen_step import ShownStep
from ..tables.columns import Column, Rows
from ..tables.ops import PlaceName, StepOps, read_step_ops
from .groups import call_name


class OpPath(NamedTuple):
    """An op, and the call in which it ran."""

    op: str
    op_nth: int  # of its name within the call, from 0
    name: str  # what the call is called: `path`, `path@1`, of a root its name; (outside of modules)
    path: str | None  # of the module, at the place where it was called; None: it ran in no module
    call: int | None  # n-th of its module in the step, from 0; None: not known, or in no module
    root: str | None  # the name of the root; None: it ran in no module
    type: str | None
    phase: str | None  # None outside of all calls
    raised: bool = False  # it ended by an exception


@dataclass(frozen=True, kw_only=True)
class OpPaths:
    """The ops of one step in the order in which they ran."""

    command: tuple[str, ...]
    marks: tuple[str, ...]
    step: ShownStep | None  # None: nothing was recorded
    phase: str | None  # the phase that was asked for; None: all
    recorded: bool  # some step of the recording has ops
    rows: tuple[OpPath, ...]

    def modules(self) -> tuple[str, ...]:
        """Returns the paths of the modules in the order in which their ops ran, without consecutive repeats.

        The path of a root is "". Ops that ran in no module are left out.
        """
        return collapse(row.path for row in self.rows if row.path is not None)


def build_op_paths(data: RecordingData, *, step: int | None = None, phase: str | None = None) -> OpPaths:
    """Returns the ops in the order in which they began, each with its call.

    Args:
        data: the recording.
        step: the number of the step; None chooses as `build_module_tree` does.
        phase: one of `PHASES`, which leaves out all other ops; None for all.

    Raises:
        ValueError: the recording has no such step, or there is no such phase.
    """
    ops = read_step_ops(data, step=step, phase=phase, inside=True)
    return OpPaths(
        command=data.meta.argv,
        marks=data.meta.marks,
        step=ops.step,
        phase=phase,
        recorded=ops.recorded,
        rows=_build_rows(ops),
    )


def collapse(paths: Iterable[str]) -> tuple[str, ...]:
    """Returns the paths without consecutive repeats: `conv1, bn1, bn1, relu` becomes `conv1, bn1, relu`."""
    return tuple(path for path, _ in groupby(paths))


def _build_rows(ops: StepOps) -> tuple[OpPath, ...]:
    order = np.lexsort((ops.op_id, ops.start_ns))
    nth = _call_numbers(ops)
    names = _name_calls(ops, nth)
    columns = (ops.name, ops.nth, ops.where, nth, ops.phase, ops.raised)
    return tuple(
        _to_path(ops, names[where, call], op, op_nth, call, phase)._replace(raised=bool(raised))
        for op, op_nth, where, call, phase, raised in zip(
            *(each[order].tolist() for each in columns), strict=True
        )
    )


def _call_numbers(ops: StepOps) -> Column:
    """Returns, for each op, the number of its forward call in the step; -1 for none."""
    placed = ops.placed
    of_call = placed.column("nth")[placed.origin]
    return np.where(ops.call >= 0, of_call[ops.call], -1) if len(of_call) else ops.call


def _name_calls(ops: StepOps, nth: Rows) -> Mapping[tuple[int, int], tuple[str, PlaceName]]:
    """Returns the name and the place of each call, by the index of the place and the call's number."""
    pairs = np.unique(np.stack([ops.where, nth]), axis=1).T.tolist()
    places = [(where, call, ops.placed.name(where)) for where, call in pairs]
    return {(where, call): (call_name(place, call), place) for where, call, place in places}


def _to_path(
    ops: StepOps, call_place: tuple[str, PlaceName], op: int, op_nth: int, call: int, phase: int
) -> OpPath:
    name, place = call_place
    is_call = place.path is not None and call >= 0
    return OpPath(
        op=ops.names[op],
        op_nth=op_nth,
        name=name,
        path=place.path,
        call=call if is_call else None,
        root=place.root,
        type=place.type,
        phase=PHASES[phase] if phase >= 0 else None,
    )
