"""One of the two recordings: its row of each pair, the tensors that these are of, and the errors of what ops read."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASES
from ...recording.role import BUFFER, LEAF, OP_OUTPUT, OUTPUT, PARAMETER
from ...recording.statistics.moments import Numbers
from ..tables.calls import iterate_levels
from ..tables.columns import Bools, Rows, find_rows, number_keys, take
from ..tables.op_flow import OpFlow
from ..tables.op_rules import ADDS_PRODUCT, OVERWRITES
from ..tables.run import RunTables
from ..tables.tensors import number_sizes


@dataclass(frozen=True, kw_only=True, eq=False)
class PairedRun:
    """One of the two recordings, and its row of each pair."""

    side: RunTables
    rows: Rows  # of `values`
    alone: Bools  # of each op: it computes something, and the other recording lacks it; the last stands for no op

    @cached_property
    def op(self) -> Rows:
        """The op that returned the tensor, where a row is of that; -1 elsewhere."""
        values = self.side.values
        return np.where(values.is_of(OP_OUTPUT, rows=self.rows), values.op[self.rows], -1)

    @cached_property
    def maker(self) -> Rows:
        """The op that returned the tensor, whatever a row is of; -1 for a leaf, -2 where no such op was measured."""
        values = self.side.values
        maker = np.full(int(values.group.max(initial=-1)) + 1, -2, np.int64)
        leaves = np.flatnonzero(values.is_of(LEAF))
        outputs = np.flatnonzero(values.is_of(OP_OUTPUT) & (values.op >= 0))
        maker[values.group[leaves]], maker[values.group[outputs]] = -1, values.op[outputs]
        return np.asarray(maker[values.group[self.rows]])

    @cached_property
    def are_results(self) -> Bools:
        """Which rows are of what outermost calls returned in forward."""
        values, call = self.side.values, self.side.values.call[self.rows]
        is_output = values.is_of(OUTPUT, rows=self.rows) & (call >= 0)
        is_output &= values.phase[self.rows] == PHASES.index(FORWARD)
        return np.asarray(is_output & (take(self.side.calls.outermost, call) == call))

    @cached_property
    def is_passed_on(self) -> Bools:
        """Which rows are outputs of modules that computed nothing: an op outside of the call returned the tensor.

        Where that is not known, as no op that returned it was measured, a module has computed what it returned. Where
        only one recording has the op, the output shows what that has made.
        """
        values, calls, op = self.side.values, self.side.calls.calls, np.maximum(self.maker, -1)
        own, around = values.call[self.rows], take(self.side.ops.call, op)
        is_passed_on = values.is_of(OUTPUT, rows=self.rows) & (own >= 0) & ~values.is_of_op[self.rows]
        is_passed_on &= (self.maker >= -1) & ~self.alone[op]
        while (is_passed_on & (around >= 0)).any():
            is_passed_on &= around != own
            around = take(calls.parent, around)
        return np.asarray(is_passed_on)


def find_alone(side: RunTables, paired: Rows) -> Bools:
    """Returns which ops of a recording compute something, and are none of those that have a partner; see `alone`."""
    is_alone = np.append(~side.ops.is_plain, False)
    is_alone[paired] = False
    return is_alone


class SharedMemory:
    """Which tensors of a run show the same memory."""

    def __init__(self, side: RunTables) -> None:
        tensors = side.flow.tensors
        self._storage, self._version = tensors.storage, tensors.version
        numel = self._numel = tensors.numel
        _, memory = np.unique(self._storage, return_inverse=True)
        self._memory = memory
        largest, last = np.zeros(len(memory) + 1, np.int64), np.zeros(len(memory) + 1, np.int64)
        np.maximum.at(largest, memory, numel)
        np.maximum.at(last, memory, self._version)
        self._is_part = numel < largest[memory]
        #: What is left in memory that outlives the step: no op has made it, or an optimizer writes to it.
        self.stays = (self._storage >= 0) & (self._version == last[memory]) & (self._version > 0)
        phase = take(side.ops.phase, tensors.producer)
        outlives = np.zeros(len(memory) + 1, bool)
        outlives[memory[(tensors.producer < 0) | (phase == PHASES.index(OPTIMIZER))]] = True
        self.stays &= outlives[memory]

    def find_kept_gradients(self, side: RunTables) -> Bools:
        """Returns what backward has made last, the program reads by ops, and no optimizer reads."""
        flow, of_maker = side.flow, take(side.ops.phase, side.flow.tensors.producer)
        read_in = np.zeros((len(PHASES) + 1, len(flow.tensors)), bool)  # the last for ops outside of phases
        read_in[side.ops.phase[flow.reader], flow.read] = True
        in_backward, in_optimizer = PHASES.index(BACKWARD), PHASES.index(OPTIMIZER)
        is_read = np.delete(read_in, in_backward, axis=0).any(axis=0) & ~read_in[in_optimizer]
        is_changed = ~np.append(side.ops.are_named(OVERWRITES), False)[flow.tensors.producer]
        memory = self._memory
        last = np.full(len(memory) + 1, -1, np.int64)
        np.maximum.at(last, memory[is_changed], self._version[is_changed])
        return np.asarray(is_read & (of_maker == in_backward) & is_changed & (self._version == last[memory]))

    def is_single(self, one: int, other: int | None = None) -> bool:
        """Returns whether a tensor has one element, and another one has several."""
        return bool(self._numel[one] <= 1 and (other is None or self._numel[other] > 1))

    def ratio(self, one: int, other: int) -> float:
        """Returns how many times as many elements one tensor has as the other."""
        return float(self._numel[one] / max(self._numel[other], 1))

    def is_part_written(self, read: int, made: int) -> bool:
        """Returns whether an op in place that has read a tensor wrote to less than all memory of that."""
        is_same = self._storage[read] == self._storage[made] >= 0
        return bool(is_same and self._version[made] > self._version[read] and self._is_part[made])


def find_norms(side: RunTables) -> Numbers:
    """Returns the L2 norm of each tensor as an op returned it, or of a leaf as it was met first; NaN for none."""
    values, tensors = side.values, side.flow.tensors
    norm = values.stats.l2
    found = np.full(len(tensors), np.nan)
    leaves = np.flatnonzero(~values.is_of(OP_OUTPUT) & ((values.op >= 0) | values.is_of(PARAMETER, BUFFER)))
    row = take(leaves, find_rows(values.site_id[leaves], tensors.site_id))
    is_leaf = (row >= 0) & (tensors.site_id >= 0)
    found[is_leaf] = norm[row[is_leaf]]
    outputs = np.flatnonzero(values.is_of(OP_OUTPUT))
    made = side.tensor_of_value[outputs]
    found[made[made >= 0]] = norm[outputs[made >= 0]]
    return found


def find_kept(side: RunTables, rows: Rows, tensor: Rows, is_over: Bools) -> Rows:
    """Returns the tensors that differ where modules return them, and that no op outside of the module reads in forward.

    Args:
        side: the recording.
        rows: its row of `values` of each pair.
        tensor: what an op returned there; -1 where none is known.
        is_over: which pairs differ by more than noise.
    """
    values, calls, flow = side.values, side.calls.calls, side.flow
    at = np.flatnonzero(is_over & (tensor >= 0) & values.is_of(OUTPUT, rows=rows) & (values.call[rows] >= 0))
    last_inside = np.full(len(calls.parent) + 1, -1, np.int64)
    np.maximum.at(last_inside, side.ops.call, side.ops.order)
    for level in reversed([*iterate_levels(calls.parent)]):
        np.maximum.at(last_inside, calls.parent[level], last_inside[level])
    in_backward = side.ops.phase[flow.reader] == PHASES.index(BACKWARD)
    last_read = np.full(len(flow.tensors), -1, np.int64)
    np.maximum.at(last_read, flow.read[~in_backward], side.ops.order[flow.reader[~in_backward]])
    return np.asarray(tensor[at[last_read[tensor[at]] <= last_inside[values.call[rows[at]]]]])


def find_module_outputs(side: RunTables, rows: Rows) -> Rows:
    """Returns the tensors that the modules of some rows of `values` returned, and that ops made."""
    values = side.values
    outputs = np.flatnonzero(values.is_of(OP_OUTPUT))
    is_theirs = np.isin(values.place, values.place[rows]) & (values.place >= 0)
    returned = values.group[values.is_of(OUTPUT) & (values.call >= 0) & is_theirs]
    tensors = side.tensor_of_value[outputs[np.isin(values.group[outputs], returned)]]
    return tensors[tensors >= 0]


def find_summands(side: RunTables) -> Rows:
    """Returns the tensor that each op adds to what it computes of others, as a bias; -1 for none."""
    flow = side.flow
    is_bias = np.array([*(slot == "bias" for slot in flow.slots), False])[flow.slot]
    is_self = np.array([*(slot == "self" for slot in flow.slots), False])[flow.slot]
    is_backward = np.array([*("backward" in name for name in side.ops.names), False])[side.ops.name]
    is_summand = is_bias & ~is_backward[flow.reader] | (
        is_self & side.ops.are_named(ADDS_PRODUCT)[flow.reader]
    )
    found = np.full(len(flow.op_id), -1, np.int64)
    found[flow.reader[is_summand]] = flow.read[is_summand]
    return found


def find_tensors(side: RunTables, rows: Rows, wanted: Bools) -> Rows:
    """Returns the tensor of each of some rows of `values` that an op, or an outermost call, returned; -1 for others.

    Args:
        side: the recording.
        rows: rows of `values`.
        wanted: which of them are looked up, too, if they are of a module that returns a view.
    """
    values = side.values
    outputs = np.flatnonzero(values.is_of(OP_OUTPUT))
    of_group = np.full(int(values.group.max(initial=-1)) + 1, -1, np.int64)
    of_group[values.group[outputs]] = side.tensor_of_value[outputs]
    found = of_group[values.group[rows]]
    found = np.where(found < 0, _find_model_outputs(side, rows), found)
    at = np.flatnonzero(wanted & (found < 0) & values.is_of(OUTPUT, rows=rows) & (values.call[rows] >= 0))
    found[at] = _find_returned_views(side, rows[at])
    return found


def _find_model_outputs(side: RunTables, rows: Rows) -> Rows:
    """Returns the tensor that an outermost call returned at the slot of each row; -1 for other rows."""
    values, flow = side.values, side.flow
    codes = {
        name.removeprefix("output"): code for code, name in enumerate(flow.slots) if name.startswith("output")
    }
    slot = np.array([*(codes.get(name, -1) for name in values.slots), -1])[values.slot[rows]]
    width = len(flow.slots)
    at = find_rows(flow.returned.call * width + flow.returned.slot, values.call[rows] * width + slot)
    is_result = values.is_of(OUTPUT, rows=rows) & (values.call[rows] >= 0) & (slot >= 0)
    return np.where(is_result, take(flow.returned.tensor, at), -1)


def _find_returned_views(side: RunTables, rows: Rows) -> Rows:
    """Returns the only view of its shape that the call of each row has left to others; -1 for none, or several."""
    values, flow, producer = side.values, side.flow, side.flow.tensors.producer
    call = take(side.ops.call, producer)
    is_left = np.append(side.ops.is_view, False)[producer] & (call >= 0)
    is_left[flow.read[side.ops.call[flow.reader] == call[flow.read]]] = False
    views = np.flatnonzero(is_left)
    shape, own_shape = number_sizes(flow.tensors.sizes[views], values.sizes[rows])
    keys, wanted = number_keys((call[views], values.call[rows]), (shape, own_shape))
    distinct, first, counts = np.unique(keys, return_index=True, return_counts=True)
    where = find_rows(distinct, wanted)
    where = np.where(take(counts, where) == 1, where, -1)
    return take(views, take(first, where))


def find_unread_aliases(flow: OpFlow) -> Bools:
    """Returns the tensors that no op reads, while their op returned the same memory in another form that is read.

    An op in place returns what it was given, and the whole tensor of which that is a part.
    """
    is_read = np.zeros(len(flow.tensors), bool)
    is_read[np.concatenate([flow.read, flow.returned.tensor])] = True
    _, output = np.unique(flow.output, return_inverse=True)
    has_read = np.zeros(len(flow.tensors) + 1, bool)
    has_read[output[is_read]] = True
    return np.asarray(~is_read & has_read[output] & (flow.output >= 0))


#: Errors pass through so many ops in a row of which all that they read is known, and through so many others.
_MOST_PASSED = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class OpInputs:
    """What the ops of a recording read."""

    error: Numbers  # of each op: the largest error of what it read; NaN where nothing is known of that
    is_known: Bools  # all that it read was compared, or was computed from what was
    is_partial: Bools  # some of that was computed from what was not compared, too
    through: (
        Rows  # the row of an op that only this recording has, through which it read something; -1 for none
    )


def find_inputs(
    flow: OpFlow, is_told: Bools, of_tensor: Numbers, of_read: Numbers, among: Bools | None = None
) -> OpInputs:
    """Returns how far apart what each op read is.

    Args:
        flow: the ops.
        is_told: the ops that `through` may name.
        of_tensor: the error of each tensor; NaN where it was not compared.
        of_read: the error of what each use reads where that is no op's output; NaN where it was not compared.
        among: the ops that are asked about; None for all.
    """
    producer = flow.tensors.producer
    known, is_partial = of_tensor.copy(), np.zeros(len(of_tensor), bool)
    through = np.full(len(known), -1, np.int64)
    found = OpInputs(
        error=np.full(len(flow.op_id), np.nan),
        is_known=np.ones(len(flow.op_id), bool),
        is_partial=np.zeros(len(flow.op_id), bool),
        through=np.full(len(flow.op_id), -1, np.int64),
    )
    # All reads of the ops that read what is known since the last round, in order.
    is_asked = np.ones(len(flow.op_id), bool) if among is None else among.copy()
    is_asked[producer[np.isnan(known) & (producer >= 0)]] = True
    reads = every = np.flatnonzero(is_asked[flow.reader])
    rounds, others = 0, 0
    while len(reads) and others < _MOST_PASSED:
        tensor = flow.read[reads]
        error = np.where(np.isnan(of_read[reads]), known[tensor], of_read[reads])
        starts = np.flatnonzero(np.append(True, np.diff(flow.reader[reads]) != 0))
        at = flow.reader[reads[starts]]
        is_unknown = np.isnan(error)
        found.error[at] = np.fmax.reduceat(error, starts)
        found.is_known[at] = ~np.logical_or.reduceat(is_unknown, starts)
        found.is_partial[at] = np.logical_or.reduceat(is_unknown | is_partial[tensor], starts)
        found.through[at] = np.maximum.reduceat(through[tensor], starts)
        waiting = np.flatnonzero(np.isnan(known) & (producer >= 0))
        waiting = waiting[~np.isnan(found.error[producer[waiting]])]
        if not len(waiting):
            break
        # Ops that read something unknown come last: it may become known.
        whole = waiting[found.is_known[producer[waiting]]]
        if len(whole) and rounds < _MOST_PASSED:
            rounds, waiting = rounds + 1, whole
        else:
            others += 1
        passed = producer[waiting]
        known[waiting], is_partial[waiting] = found.error[passed], found.is_partial[passed]
        is_first = (found.through[passed] < 0) & is_told[passed]
        through[waiting] = np.where(is_first, passed, found.through[passed])
        reads = _reads_beside(flow, waiting, every)
    return found


def _reads_beside(flow: OpFlow, tensors: Rows, reads: Rows) -> Rows:
    """Returns those of some reads that are of ops that read one of these tensors."""
    is_one = np.zeros(len(flow.tensors), bool)
    is_one[tensors] = True
    reads_one = np.zeros(len(flow.op_id), bool)
    reads_one[flow.reader[reads][is_one[flow.read[reads]]]] = True
    return reads[reads_one[flow.reader[reads]]]
