"""Sums up the ops of one step by module, by call or by name, by descending time."""

from dataclasses import dataclass

from ...recording.protocols import RecordingData
from ..compile.kernels import CompiledInside, find_compiled_before, read_compiled
from ..tables.chosen_step import ShownStep
from ..tables.device_times import has_device_times, step_on_device
from ..tables.ops import read_step_ops
from ..tables.placement import PlaceName
from .groups import Group, GroupedBy, group_ops
from .sums import PhaseSums, sum_ops

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
    share: float | None  # the share in the time of all rows; None if that time is zero
    allocated_bytes: int | None  # allocated by the row's calls without inner calls; None if not known
    busiest: str | None  # in a table by op: the name of the module in which most time was spent
    busiest_root: str | None
    busiest_ns: int  # the time that was spent in `busiest`
    sums: PhaseSums


@dataclass(frozen=True, kw_only=True)
class OpTable:
    """The costs of the ops of one step."""

    command: tuple[str, ...]
    marks: tuple[str, ...]
    step: ShownStep | None  # None if nothing was recorded
    by: GroupedBy
    phase: str | None  # the requested phase; None for all
    recorded: bool  # whether any step of the recording has ops
    rows: tuple[OpRow, ...]
    sums: PhaseSums  # the sums over all rows
    device_times: bool = False  # whether times are device times
    lacks_device_times: bool = False  # device times were to be recorded, but none is known
    device_step_ns: int | None = None  # the time from the first to the last device time of calls in the step
    compiled: tuple[CompiledInside, ...] | None = None  # ops inside of compiled code, which have no times
    compiled_before: tuple[str, ...] | None = None  # modules whose inner ops are not known


def build_op_table(
    data: RecordingData, *, step: int | None = None, by: GroupedBy = "module", phase: str | None = None
) -> OpTable:
    """Returns the costs of a step's ops in groups, by descending time.

    Ops that ran in no module have rows of their own, without a path.

    Args:
        data: the recording.
        step: the number of the step; None chooses as `build_module_tree` does.
        by: "module", "call" (a forward with its backward and recompute) or "op" (ops of one name).
        phase: one of `PHASES`, which leaves out all other ops; None for all.

    Raises:
        ValueError: the recording has no such step, or `by` or `phase` has another value.
    """
    ops = read_step_ops(data, step=step, phase=phase, inside=True)
    number = None if ops.step is None else ops.step.step
    grouping = group_ops(ops, by)
    sums = sum_ops(ops, grouping.of_op, len(grouping.groups))
    [total] = sum_ops(ops, grouping.of_op * 0, 1)
    all_ns = total.together.time_ns
    rows = [_to_row(group, of_group, all_ns) for group, of_group in zip(grouping.groups, sums, strict=True)]
    calls = ops.calls
    on_clock = step_on_device(ops.step, calls) if has_device_times(calls) else None
    return OpTable(
        command=data.meta.argv,
        marks=data.meta.marks,
        step=ops.step,
        by=by,
        phase=phase,
        recorded=ops.recorded,
        device_times=ops.device_times,
        lacks_device_times=bool(data.meta.options.get("device_times")) and not ops.device_times,
        device_step_ns=None if on_clock is None else on_clock.duration_ns,
        rows=tuple(sorted(rows, key=_cost)),
        sums=total,
        compiled_before=find_compiled_before(data, step=number),
        compiled=read_compiled(data, step=number, phase=phase),
    )


def _cost(row: OpRow) -> tuple[int, int, str, str]:
    together = row.sums.together
    return -together.time_ns, -together.ops, row.root or "", row.name


def _to_row(group: Group, sums: PhaseSums, all_ns: int) -> OpRow:
    place, busiest = group.place or _NO_PLACE, group.busiest or _NO_PLACE
    return OpRow(
        name=group.name,
        root=place.root,
        path=place.path,
        type=place.type,
        call=group.call,
        call_step=group.call_step,
        share=sums.together.time_ns / all_ns if all_ns else None,
        allocated_bytes=group.allocated_bytes,
        busiest=busiest.name or None,
        busiest_root=busiest.root,
        busiest_ns=group.busiest_ns,
        sums=sums,
    )
