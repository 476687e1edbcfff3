"""Lists the ops of one step in the order in which they ran, each with its module."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ...recording.phase import PHASES
from ...recording.protocols import RecordingData
from ..tables.chosen_step import ShownStep
from ..tables.ops import StepOps, read_step_ops


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
        rows=tuple(_build_rows(ops)),
    )


def collapse(paths: Iterable[str]) -> tuple[str, ...]:
    """Returns the paths without consecutive repeats: `conv1, bn1, bn1, relu` becomes `conv1, bn1, relu`."""
    return tuple(path for path, _ in groupby(paths))


def _build_rows(ops: StepOps) -> Iterator[OpPath]:
    calls = ops.calls
    of_call = np.append(calls.nth[calls.origin], -1)  # the number of its forward call in the step
    call = of_call[ops.call]
    pairs = np.unique(np.stack([ops.where, call]), axis=1).T.tolist()
    places = {(where, nth): calls.name(where) for where, nth in pairs}
    names = {(where, nth): place.name_call(nth) for (where, nth), place in places.items()}
    columns = (ops.name, ops.nth, ops.where, call, ops.phase, ops.raised)
    order = np.lexsort((ops.op_id, ops.start_ns))
    for name, op_nth, where, nth, phase, raised in zip(
        *(column[order].tolist() for column in columns), strict=True
    ):
        place = places[where, nth]
        yield OpPath(
            op=ops.names[name],
            op_nth=op_nth,
            name=names[where, nth],
            path=place.path,
            call=nth if place.path is not None and nth >= 0 else None,
            root=place.root,
            type=place.type,
            phase=PHASES[phase] if phase >= 0 else None,
            raised=bool(raised),
        )
