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
    op_nth: int  # the number of the op among those of its name in the call, from 0
    name: str  # the name of the call: `path`, `path@1`, a root's name, or (outside of modules)
    path: str | None  # the path at which the module was called; None outside of modules
    call: int | None  # the number of the call among those of its module in the step; None if not known
    root: str | None  # the name of the root; None outside of modules
    type: str | None
    phase: str | None  # None outside of all calls
    raised: bool = False  # whether the op ended with an exception


@dataclass(frozen=True, kw_only=True)
class OpPaths:
    """The ops of one step in the order in which they ran."""

    command: tuple[str, ...]
    marks: tuple[str, ...]
    step: ShownStep | None  # None if nothing was recorded
    phase: str | None  # the requested phase; None for all
    recorded: bool  # whether any step of the recording has ops
    rows: tuple[OpPath, ...]

    def modules(self) -> tuple[str, ...]:
        """Returns the paths of the modules in the order in which their ops ran, without consecutive repeats.

        The path of a root is "". Ops outside of modules are left out.
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
    # The last element stands for ops outside of calls.
    of_call = np.append(calls.nth[calls.origin], -1)
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
