"""Sums up the ops of steps by module, by call or by name, by descending time."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...recording.module_path import order_of
from ...recording.protocols import RecordingData
from ..compile.kernels import CompiledInside, find_compiled_before, read_compiled
from ..tables.chosen_step import ShownStep
from ..tables.device_times import has_device_times, steps_on_device
from ..tables.ops import read_ops
from ..tables.placement import PlaceName
from ..tables.quartiles import Outlier, find_median, find_medians, find_outliers
from ..tables.shown_steps import choose_steps
from .groups import Group, GroupedBy, group_ops
from .sums import PhaseSums, sum_in_steps, sum_ops

_NO_PLACE = PlaceName("")


@dataclass(frozen=True, kw_only=True)
class OpRow:
    """The summed costs of ops of a module without its children, of one of its calls, or of one name."""

    name: str  # the name of the row: path, root's name, `path@1`, op, or (optimizer)
    root: str | None  # the name of the root; None for rows by name and outside of modules
    path: str | None  # the path of the module; None as for `root`
    type: str | None  # the type of the module
    call: int | None  # in a table by call: the number of the call in the step
    call_step: int | None  # in a table by call: the step of the forward, maybe an earlier one
    share: float | None  # the share in the time of all rows, or the median share; None if that time is zero
    allocated_bytes: int | None  # allocated by the row's calls without inner calls; None if not known
    busiest: str | None  # in a table by op: the name of the module in which most time was spent
    busiest_root: str | None
    busiest_ns: int  # the time that was spent in `busiest`
    count: int = 1  # for how many modules it stands
    sums: PhaseSums


@dataclass(frozen=True, kw_only=True)
class OpTable:
    """The costs of the ops of one step, or the medians of several."""

    command: tuple[str, ...]
    marks: tuple[str, ...]
    step: ShownStep | None  # None if nothing was recorded
    by: GroupedBy
    phase: str | None  # the requested phase; None for all
    recorded: bool  # whether any step of the recording has ops
    rows: tuple[OpRow, ...]
    sums: PhaseSums  # the sums over all rows
    outliers: tuple[Outlier, ...] = ()  # steps whose ops took at least twice the median
    device_times: bool = False  # whether times are device times
    lacks_device_times: bool = False  # device times were to be recorded, but none is known
    device_step_ns: int | None = None  # the time from the first to the last device time of calls in the step
    compiled: tuple[CompiledInside, ...] | None = None  # ops inside of compiled code, which have no times
    compiled_before: tuple[str, ...] | None = None  # modules whose inner ops are not known


def build_op_table(
    data: RecordingData,
    *,
    step: int | None = None,
    steps: Any = None,
    by: GroupedBy = "module",
    phase: str | None = None,
    fold: bool = False,
) -> OpTable:
    """Returns the costs of the ops of steps in groups, by descending time.

    Ops that ran in no module have rows of their own, without a path.

    Args:
        data: the recording.
        step: the number of a step that is shown alone.
        steps: the range of the steps whose medians are shown; without either they are chosen as by `build_module_tree`.
        by: "module", "call" (a forward with its backward and recompute) or "op" (ops of one name).
        phase: one of `PHASES`, which leaves out all other ops; None for all.
        fold: whether modules that repeat, and run the same ops, are one row.

    Raises:
        TypeError, ValueError: the recording has no such step, or `by` or `phase` has another value.
    """
    ops = read_ops(data, choose_steps(data, step, steps, tables=("calls", "ops")), phase=phase, inside=True)
    number = None if ops.step is None else ops.step.step
    grouping = group_ops(ops, by, fold=fold)
    sums = sum_ops(ops, grouping.of_op, len(grouping.groups))
    [total] = sum_ops(ops, grouping.of_op * 0, 1)
    shape = len(grouping.groups), len(ops.steps.numbers)
    time_ns, has_ops = sum_in_steps(grouping.of_op, ops.in_step, ops.duration_ns, shape)
    all_ns = time_ns.sum(axis=0)
    shares = find_medians(time_ns / np.maximum(all_ns, 1), has_ops & (all_ns > 0)).tolist()
    names = [(group.name, None) for group in grouping.groups]
    rows = [
        _to_row(group, of_group, share if all_ns.any() else None)
        for group, of_group, share in zip(grouping.groups, sums, shares, strict=True)
    ]
    on_clock = steps_on_device(ops.steps, ops.calls)
    return OpTable(
        command=data.meta.argv,
        marks=data.meta.marks,
        step=ops.step,
        by=by,
        phase=phase,
        recorded=ops.recorded,
        device_times=ops.device_times,
        lacks_device_times=bool(data.meta.options.get("device_times")) and not ops.device_times,
        device_step_ns=find_median(on_clock.duration_ns) if has_device_times(ops.calls) else None,
        rows=tuple(sorted(rows, key=_cost)),
        sums=total,
        outliers=find_outliers(ops.steps.numbers, all_ns, time_ns, names),
        compiled_before=find_compiled_before(data, step=number),
        compiled=read_compiled(data, step=number, phase=phase),
    )


def _cost(row: OpRow) -> tuple[object, ...]:
    together = row.sums.together
    return -together.time_ns, -together.ops, row.root or "", order_of(row.name)


def _to_row(group: Group, sums: PhaseSums, share: float | None) -> OpRow:
    place, busiest = group.place or _NO_PLACE, group.busiest or _NO_PLACE
    return OpRow(
        name=group.name,
        root=place.root,
        path=place.path,
        type=place.type,
        call=group.call,
        call_step=group.call_step,
        share=share,
        allocated_bytes=group.allocated_bytes,
        busiest=busiest.name or None,
        busiest_root=busiest.root,
        busiest_ns=group.busiest_ns,
        count=group.count,
        sums=sums,
    )
