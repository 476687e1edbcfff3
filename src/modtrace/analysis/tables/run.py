"""Reads the calls, ops and values of all steps of one recording as columns."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...recording.phase import BACKWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import BUFFER, INPUT, LOSS, OP_OUTPUT, OP_ROLES, PARAMETER
from .calls import Calls, read_all_calls
from .columns import (
    ArrowTable,
    Bools,
    Column,
    Rows,
    column_of,
    count_before,
    dictionary_codes,
    find_rows,
    number_keys,
    phase_codes,
    take,
)
from .inside import with_all_inside
from .op_flow import FIRST_SLOTS, OpFlow, read_op_flow
from .op_rules import GATHERS, OVERWRITES, PLAIN, UNINITIALIZED
from .ops import bare_name
from .placement import NOWHERE, ModuleName, Placer
from .tensors import Sizes, read_sizes
from .values import PlacedValues

#: The largest number of consecutive views and copies that are traced back.
_MOST_VIEWS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class RunCalls(Calls):
    """The calls of a recording; a call is its row in the table `calls`."""

    kept: Column  # whether the call is in a compared step

    @cached_property
    def step(self) -> Column:
        """The step of each call."""
        return self.column("step")

    @property
    def wraps(self) -> Rows:
        """The number of wrapped calls inside each wrapper's call; 0 for a call of a module itself."""
        return self._wrapped[0]

    @cached_property
    def unwrapped(self) -> Rows:
        """For each call, the forward call of the module itself, without its wrappers, to which it belongs."""
        return self._wrapped[1][self.origin]

    @cached_property
    def outermost(self) -> Rows:
        """For each call, the outermost forward call around `unwrapped`."""
        outermost = np.arange(len(self))
        for level in self.levels[1:]:
            outermost[level] = outermost[self.parent[level]]
        return outermost[self.unwrapped]

    @cached_property
    def outer(self) -> Rows:
        """For each call, the number of earlier calls in the step of the same module as its `outermost`."""
        rows, which = np.unique(self.outermost, return_inverse=True)
        return self._number(rows, self.step[rows])[which.reshape(-1)]

    @cached_property
    def inner(self) -> Rows:
        """For each call, the number of earlier calls at the same place inside the same outermost call."""
        rows, first, which = np.unique(self.unwrapped, return_index=True, return_inverse=True)
        return self._number(rows, self.outermost[first])[which.reshape(-1)]

    def _number(self, rows: Rows, within: Column) -> Rows:
        """Returns for each row how many rows of the same place and the same key in `within` started before it."""
        key, _ = number_keys((within, within[:0]), (self.place[rows], within[:0]))
        return count_before(key, np.lexsort((rows, self.start_ns[rows])).argsort())

    @cached_property
    def _wrapped(self) -> tuple[Rows, Rows]:
        """For each call, the number of wrapped calls inside, and the innermost of these."""
        wraps, innermost = np.zeros(len(self), np.int64), np.arange(len(self))
        for level in reversed(self.levels[1:]):
            above = self.parent[level]
            is_wrapped = (self.place[level] == self.place[above]) & (self.module[level] != self.module[above])
            rows = level[is_wrapped & (self.place[level] != NOWHERE)]
            wraps[self.parent[rows]] = wraps[rows] + 1
            innermost[self.parent[rows]] = innermost[rows]
        return wraps, innermost


@dataclass(frozen=True, kw_only=True, eq=False)
class RunOps:
    """The ops of a recording; an op is its row in the table `ops`."""

    table: ArrowTable
    kept: Column
    step: Column
    phase: Column  # codes of PHASES; -1 for ops outside of phases
    call: Rows  # rows of `calls`; -1 for ops outside of calls
    order: Rows  # the position of each op in the order in which ops began
    is_view: Column
    name: Column  # codes of `names`
    names: tuple[str, ...]
    nth: Column  # the number of earlier ops with this name in the same call
    forward: Rows  # the op whose autograd node a backward op belongs to; -1 for other ops
    #: Whether the op ran outside of modules before the step's first call, as those that build models or load batches
    #: do.
    is_preparing: Bools

    @cached_property
    def is_plain(self) -> Bools:
        """A mask of the ops that compute nothing: views, copies, gathers, and casts, as these change only the dtype."""
        return self.is_view | self.are_named(PLAIN | GATHERS)

    def read_args(self, op: int) -> str | None:
        """Returns the template of the arguments of an op."""
        args: str | None = self.table["args"][op].as_py()
        return args

    def read_source(self, op: int) -> str | None:
        """Returns the line of the program that ran an op, if it was recorded."""
        source: str | None = self.table["source"][op].as_py()
        return source

    def are_named(self, wanted: Collection[str]) -> Bools:
        """Returns which ops have one of the wanted bare names."""
        is_wanted = np.array([*(bare_name(name) in wanted for name in self.names), False])
        return np.asarray(is_wanted[self.name])


@dataclass(frozen=True, kw_only=True, eq=False)
class RunValues(PlacedValues):
    """The measured tensors of a recording; a value is its row in the table `values`."""

    #: Losses are left out: a sum may cancel, so its rounding has no bound, and a large one would excuse all gradients.
    kept: Column
    place: Rows
    home: Rows  # the place of the module that the site names
    call: Rows
    op: Rows
    order: Rows  # the position of each row in the order of measurement
    sizes: Sizes  # the shapes of the tensors
    has_regions: bool  # whether compiled code ran in the recording

    @cached_property
    def is_of_op(self) -> Bools:
        """A mask of the rows that belong to an op: its outputs, and constants that it read first."""
        return (self.op >= 0) & self.is_of(*OP_ROLES)

    @cached_property
    def group(self) -> Rows:
        """A number for each measurement that is unique over all steps, while `moment` is unique only within a step."""
        keys = self.step.astype(np.int64) << 40 | np.maximum(self.moment, 0)
        _, group = np.unique(keys, return_inverse=True)
        return np.asarray(group.reshape(-1))

    @property
    def is_first(self) -> Bools:
        """A mask of the rows that are of the first or only tensor that an op or a call takes or returns."""
        return np.array([*(name in FIRST_SLOTS for name in self.slots), False])[self.slot]

    @property
    def is_read_first(self) -> Bools:
        """A mask of the rows of inputs, parameters and buffers that were measured when an op first read them."""
        return (self.op >= 0) & (self.home >= 0) & self.is_of(INPUT, PARAMETER, BUFFER)

    @cached_property
    def is_inside(self) -> Bools:
        """A mask of the rows that are of modules inside of compiled code, whose calls have no rows."""
        return np.asarray(
            self.has_regions & (self.call < 0) & (self.nth >= 0) & (self.place >= 0) & ~self.is_of_op
        )

    def is_at(self, places: Column) -> Bools:
        """Returns which rows are of calls of the modules at these places."""
        return np.asarray(np.isin(self.place, places) & (self.nth >= 0) & ~self.is_of_op)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunTables:
    """The tables of one recording, joined for a comparison with another."""

    data: RecordingData  # ops of compiled code that ran one by one are in calls of their modules
    #: For each call, whether kernels in it went unrecorded or a compiler reordered its backward. The ops of such a call
    #: are aligned only with those of another such call.
    is_apart: Bools
    places: Placer
    names: tuple[ModuleName, ...]  # the module of each place in the module tree
    calls: RunCalls
    ops: RunOps
    flow: OpFlow  # which tensors the ops read and return
    values: RunValues

    @cached_property
    def sites(self) -> list[dict[str, Any]]:
        """The rows of `sites`, to which `RunValues.site` refers."""
        rows: list[dict[str, Any]] = self.data.table("sites").to_pylist()
        return rows

    @cached_property
    def is_internal(self) -> Bools:
        """A mask of the tensors of `flow` that only the backward of their op reads; see `OpFlow.find_internal`."""
        return self.flow.find_internal(self.ops.forward)

    @cached_property
    def adds_nothing(self) -> Bools:
        """A mask of the ops that change no numbers.

        They are the plain ones, but for those that write to a part of a tensor, and those that only take memory.
        """
        return (self.ops.is_plain & ~self.flow.writes_part) | self.ops.are_named(UNINITIALIZED)

    @cached_property
    def tensor_of_value(self) -> Rows:
        """For each row of `values`, the tensor in `flow` if an op returned it; -1 for other rows."""
        values = self.values
        op = np.where(values.is_of(OP_OUTPUT), values.op, -1)
        return self.flow.find_output(op, values.slot, values.slots)

    @cached_property
    def value_of_tensor(self) -> Rows:
        """For each tensor of `flow`, the row of `values` that measured it as an op's output; -1 for none."""
        found, rows = np.full(len(self.flow.tensors), -1, np.int64), np.flatnonzero(self.tensor_of_value >= 0)
        found[self.tensor_of_value[rows]] = rows
        return found

    @cached_property
    def view_of(self) -> Rows:
        """For each tensor of `flow`, the tensor of which it is a view or a copy; -1 for none."""
        flow = self.flow
        first_read = np.full(len(flow.op_id), -1, np.int64)
        reads = np.flatnonzero(flow.find_reads_of_values(self.ops.are_named(OVERWRITES)))[::-1]
        first_read[flow.reader[reads]] = flow.read[reads]
        first_read[~self.ops.is_plain] = -1
        return take(first_read, flow.tensors.producer)

    def walk_views(self, tensor: int) -> list[int]:
        """Returns a tensor, the tensor of which it is a view or a copy, and so on up to one that was computed."""
        walked = [tensor]
        while (viewed := int(self.view_of[walked[-1]])) >= 0 and len(walked) <= _MOST_VIEWS:
            walked.append(viewed)
        return walked

    @cached_property
    def origin_of_read(self) -> Rows:
        """For each read of `flow`, the tensor at the end of `walk_views`."""
        origin = np.where(self.view_of >= 0, self.view_of, np.arange(len(self.view_of)))
        for _ in range(_MOST_VIEWS.bit_length() - 1):  # each doubles how far back it goes
            origin = origin[origin]
        return np.asarray(origin[self.flow.read])

    def find_unread(self, among: Bools | None = None) -> Bools:
        """Returns which ops, or which of those `among`, have results that nothing uses; see `OpFlow.find_unread`."""
        return self.flow.find_unread(self.ops.are_named(OVERWRITES), among)


def read_run_tables(data: RecordingData, steps: Collection[int]) -> RunTables:
    """Returns the tables of one recording, in which `steps` are the compared ones."""
    wanted = np.array(sorted(steps), np.int64)
    data, unseen = with_all_inside(data)
    table = data.table("calls")
    known = read_all_calls(table, Placer(data))
    calls = RunCalls(**vars(known), kept=np.isin(column_of(table, "step"), wanted))
    is_backward = calls.phase == PHASES.index(BACKWARD)
    values = _read_values(data, wanted, calls)
    return RunTables(
        data=data,
        is_apart=np.isin(calls.call_id, [*unseen.calls])
        | (is_backward & column_of(table, "compiled").astype(bool)),
        places=calls.placer,
        names=calls.placer.name_modules(),
        calls=calls,
        ops=_read_ops(data.table("ops"), wanted, calls),
        flow=read_op_flow(data),
        values=values,
    )


def _read_ops(table: ArrowTable, steps: Column, calls: RunCalls) -> RunOps:
    step, op_id, start_ns = (column_of(table, name) for name in ("step", "op_id", "start_ns"))
    phase, call = phase_codes(table["phase"]), find_rows(calls.call_id, column_of(table, "call_id"))
    name, names = dictionary_codes(table["name"])
    return RunOps(
        table=table,
        kept=np.isin(step, steps),
        step=step,
        phase=phase,
        call=call,
        order=np.lexsort((op_id, start_ns)).argsort(),
        is_view=column_of(table, "is_view").astype(bool),
        name=name,
        names=names,
        nth=column_of(table, "nth"),
        forward=find_rows(op_id, column_of(table, "forward_op_id")),
        is_preparing=(call < 0) & (phase < 0) & (start_ns < _find_first_calls(calls, step)),
    )


def _find_first_calls(calls: RunCalls, step: Column) -> Column:
    """Returns for each step the time at which its first call began; the smallest integer for a step without calls."""
    steps, which = np.unique(calls.step, return_inverse=True)
    first = np.full(len(steps) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, which.reshape(-1), calls.start_ns)
    first[-1] = np.iinfo(np.int64).min
    return first[find_rows(steps, step)]


def _read_values(data: RecordingData, steps: Column, calls: RunCalls) -> RunValues:
    values, ops = PlacedValues(data=data, table=data.table("values")), data.table("ops")
    op = find_rows(column_of(ops, "op_id"), column_of(values.table, "op_id"))
    call_id = np.where(op >= 0, take(column_of(ops, "call_id"), op), values.call_id)
    return RunValues(
        data=data,
        table=values.table,
        kept=np.isin(values.step, steps) & ~values.is_of(LOSS),
        place=values.find_places(calls, call_id=call_id),
        home=values.find_own_places(calls.placer),
        call=find_rows(calls.call_id, call_id),
        op=op,
        order=np.lexsort((values.moment, values.step)).argsort(),
        sizes=read_sizes(values.table["shape"]),
        has_regions=bool(column_of(data.table("calls"), "compiled").any()),
    )
