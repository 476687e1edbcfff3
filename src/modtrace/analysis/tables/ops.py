"""Reads the ops of one step, or of several, as columns, each with its place in the module tree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.phase import FORWARD, OPTIMIZER, PHASES
from ...recording.protocols import RecordingData
from .calls import Calls, read_calls
from .chosen_step import ChosenSteps, ShownStep, choose_step
from .columns import (
    Bools,
    Column,
    Rows,
    column_of,
    columns_at,
    dictionary_codes,
    find_rows,
    keep_rows,
    phase_codes,
)
from .device_times import durations_on_device
from .inside import with_inside
from .placement import OPTIMIZERS, OUTSIDE, UNRECORDED, Module, Placer

_COLUMNS = (
    "op_id",
    "step",
    "call_id",
    "phase",
    "name",
    "nth",
    "start_ns",
    "end_ns",
    "device_start_ns",
    "device_end_ns",
    "flops",
    "bytes_read",
    "bytes_written",
    "saved_bytes",
    "raised",
)


@dataclass(frozen=True, kw_only=True)
class StepOps:
    """Ops as columns, in the order of the table `ops`; -1 stands for null."""

    steps: ChosenSteps
    recorded: bool  # whether any step of the recording has ops
    only_phase: int | None  # the code of the requested phase; None if all phases were requested
    calls: Calls  # includes the calls of earlier steps to which ops belong
    op_id: Column
    in_step: Rows  # the index of each op's step in `steps`
    call: Rows  # the row of each op's call in `calls`; -1 for none
    where: Rows  # the index of the place in the module tree where each op ran, or a key of NO_PLACE_NAMES
    phase: Column  # codes of PHASES
    name: Column  # codes of `names`
    names: tuple[str, ...]
    nth: Column
    start_ns: Column
    duration_ns: Column  # 0 where the end of the op was not seen
    ended: Column
    device_times: bool  # whether `start_ns` and `duration_ns` are device times
    flops: Column
    bytes_read: Column
    bytes_written: Column
    saved_bytes: Column
    raised: Column

    def __len__(self) -> int:
        return len(self.op_id)

    @property
    def step(self) -> ShownStep | None:
        """The step, or the last of several; None if the recording is empty."""
        return self.steps.shown

    def take(self, rows: Rows) -> "StepOps":
        """Returns a selection of the ops, by their rows."""
        return replace(self, **columns_at(self, rows))


def read_step_ops(
    data: RecordingData, *, step: int | None, phase: str | None = None, inside: bool = False
) -> StepOps:
    """Returns the ops of a step.

    Args:
        data: the recording.
        step: the number of the step; None chooses the one that the module tree shows.
        phase: one of PHASES; None for all ops, including those without a phase.
        inside: whether ops that ran one by one inside of compiled code are put into calls of their modules.

    Raises:
        ValueError: the recording has no such step, or there is no such phase.
    """
    # A recording that was cut off may have lost all rows of a step except those of ops.
    of_ops = [step] if step is not None and step in column_of(data.table("ops"), "step") else []
    shown = choose_step(data.table("steps"), data.table("calls"), step, also=of_ops)
    return read_ops(data, ChosenSteps.single(shown), phase=phase, inside=inside)


def read_ops(
    data: RecordingData, steps: ChosenSteps, *, phase: str | None = None, inside: bool = False
) -> StepOps:
    """Returns the ops of chosen steps; the other arguments are as for `read_step_ops`.

    Raises:
        ValueError: there is no such phase.
    """
    if inside and len(steps.numbers):
        data = with_inside(data, *steps.numbers.tolist(), fused=False)
    recorded, only = data.table("ops"), _to_code(phase)
    table = keep_rows(recorded.select(_COLUMNS), np.isin(column_of(recorded, "step"), steps.numbers))
    if only is not None:
        table = keep_rows(table, phase_codes(table["phase"]) == only)
    calls = _read_calls(data, steps, column_of(table, "call_id"))
    return _to_columns(table, calls, steps=steps, recorded=recorded.num_rows > 0, only_phase=only)


@dataclass(frozen=True, kw_only=True, eq=False)
class OpDetails:
    """Columns of ops that few analyses need."""

    args: Column  # codes of the texts in `argument_texts`; -1 for none
    argument_texts: tuple[str, ...]  # templates of arguments, as JSON
    is_view: Bools
    forward_op_id: Column  # the forward op of each backward op; -1 for none


def read_op_details(data: RecordingData, op_id: Column) -> OpDetails:
    """Returns the columns of ops that `StepOps` leaves out, for the ops with these ids."""
    table = data.table("ops").select(["args", "is_view", "forward_op_id"])
    table = table.take(from_numpy(find_rows(column_of(data.table("ops"), "op_id"), op_id)))
    args, texts = dictionary_codes(table["args"])
    return OpDetails(
        args=args,
        argument_texts=texts,
        is_view=column_of(table, "is_view").astype(bool),
        forward_op_id=column_of(table, "forward_op_id"),
    )


def name_ops(data: RecordingData, op_id: Column) -> list[str | None]:
    """Returns the name of each op by its id, in any step; None if the recording has no such op."""
    ops = data.table("ops")
    rows = find_rows(column_of(ops, "op_id"), op_id)
    names: list[str | None] = ops["name"].take(from_numpy(np.ma.masked_less(rows, 0))).to_pylist()
    return names


def has_ops(data: RecordingData) -> bool:
    """Returns whether any op was recorded."""
    return bool(data.table("ops").num_rows)


def _to_code(phase: str | None) -> int | None:
    if phase is not None and phase not in PHASES:
        raise ValueError(f"no phase {phase!r}; there are: {', '.join(PHASES)}")
    return None if phase is None else PHASES.index(phase)


def _read_calls(data: RecordingData, steps: ChosenSteps, also: Column) -> Calls:
    placer = Placer(data)
    table = _unmark_given_up(data.table("calls"), data.table("compilations").to_pylist(), placer.modules)
    return read_calls(table, placer, steps.numbers, also=also)


def _unmark_given_up(
    table: pa.Table, compilations: Sequence[Mapping[str, Any]], modules: Mapping[int, Module]
) -> pa.Table:
    """Returns the calls, with `compiled` cleared for modules that torch.compile has failed to compile."""
    tried = [row for row in compilations if row["phase"] == FORWARD and row["module_id"] in modules]
    in_vain = {modules[row["module_id"]].module_id for row in tried if row["error"] is not None}
    in_vain -= {modules[row["module_id"]].module_id for row in tried if row["error"] is None}
    if not in_vain:
        return table
    ids = [number for number, module in modules.items() if module.module_id in in_vain]
    at = table.schema.get_field_index("compiled")
    compiled = to_numpy(table["compiled"]) & ~np.isin(column_of(table, "module_id"), ids)
    return table.set_column(at, table.schema.field(at), from_numpy(compiled))


def _to_columns(
    table: pa.Table,
    calls: Calls,
    *,
    steps: ChosenSteps,
    recorded: bool,
    only_phase: int | None,
) -> StepOps:
    call_id, phase = column_of(table, "call_id"), phase_codes(table["phase"])
    call = find_rows(calls.call_id, call_id)
    ended = to_numpy(table["end_ns"].is_valid())
    start_ns = column_of(table, "start_ns")
    of_device = durations_on_device(table)
    duration_ns = np.where(ended, column_of(table, "end_ns") - start_ns, 0)
    name, names = dictionary_codes(table["name"])
    return StepOps(
        steps=steps,
        recorded=recorded,
        only_phase=only_phase,
        calls=calls,
        op_id=column_of(table, "op_id"),
        in_step=find_rows(steps.numbers, column_of(table, "step")),
        call=call,
        where=_find_where(call_id, call, phase, calls),
        phase=phase,
        name=name,
        names=names,
        nth=column_of(table, "nth"),
        start_ns=start_ns,
        duration_ns=duration_ns if of_device is None else of_device[0],
        ended=ended if of_device is None else of_device[1],
        device_times=of_device is not None,
        flops=column_of(table, "flops"),
        bytes_read=column_of(table, "bytes_read"),
        bytes_written=column_of(table, "bytes_written"),
        saved_bytes=column_of(table, "saved_bytes"),
        raised=column_of(table, "raised"),
    )


def _find_where(call_id: Column, call: Rows, phase: Column, calls: Calls) -> Rows:
    alone = np.where(phase == PHASES.index(OPTIMIZER), OPTIMIZERS, OUTSIDE)
    alone = np.where(call_id >= 0, UNRECORDED, alone)
    return np.where(call >= 0, calls.where[call], alone) if len(calls) else alone


def bare_name(op: str) -> str:
    """Returns the name of an operator without namespace, overload and marks: `softmax` for `aten._softmax.default`."""
    parts = op.split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).strip("_").removeprefix("foreach_")
