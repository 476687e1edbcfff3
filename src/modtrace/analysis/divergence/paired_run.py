"""Joins one of two compared recordings with its row of each pair, and finds what its ops read and return."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASES
from ...recording.role import BUFFER, LEAF, OP_OUTPUT, OUTPUT, PARAMETER
from ...recording.statistics.moments import Numbers
from ..tables.calls import iterate_levels
from ..tables.columns import Bools, Groups, Rows, dictionary_codes, find_rows, number_keys, take
from ..tables.measured import ComparedRows, read_measured
from ..tables.op_flow import OpFlow
from ..tables.op_rules import ADDS_PRODUCT, OVERWRITES, UNINITIALIZED
from ..tables.placement import NOWHERE, ModuleName
from ..tables.run import RunTables
from ..tables.tensors import number_sizes
from .names import Names


@dataclass(frozen=True, kw_only=True, eq=False)
class PairedRun:
    """One of the two recordings, with its row of `values` in each pair."""

    tables: RunTables
    rows: Rows  # the row of `values` in each pair
    #: For each op, whether it computes something and the other recording lacks it; a last element stands for no op.
    is_unpaired: Bools
    #: Whether both recordings have ops: those of one alone do not show what the other computed from what.
    have_ops: bool = True

    @cached_property
    def names(self) -> Names:
        """Gives names to modules, ops and tensors of the recording."""
        return Names(self.tables)

    @cached_property
    def measured(self) -> ComparedRows:
        """The measurements of the row in each pair."""
        return read_measured(self.tables.data, self.rows)

    @cached_property
    def op(self) -> Rows:
        """The op whose output each row is; -1 for rows that are no outputs of ops."""
        values = self.tables.values
        return np.where(values.is_of(OP_OUTPUT, rows=self.rows), values.op[self.rows], -1)

    @cached_property
    def maker(self) -> Rows:
        """The op that returned each row's tensor, whatever its role; -1 for a leaf, -2 if no such op was compared."""
        values = self.tables.values
        maker = np.full(int(values.group.max(initial=-1)) + 1, -2, np.int64)
        if not self.have_ops:
            return np.asarray(maker[values.group[self.rows]])
        leaves = np.flatnonzero(values.is_of(LEAF))
        outputs = np.flatnonzero(values.is_of(OP_OUTPUT) & (values.op >= 0))
        maker[values.group[leaves]], maker[values.group[outputs]] = -1, values.op[outputs]
        return np.asarray(maker[values.group[self.rows]])

    @cached_property
    def outputs(self) -> Groups:
        """For each op, the rows of `values` of its outputs."""
        values = self.tables.values
        rows = np.flatnonzero(values.is_of(OP_OUTPUT))
        return Groups(values.op[rows], rows, len(self.tables.ops.name))

    @cached_property
    def are_results(self) -> Bools:
        """A mask of the rows that are outputs of outermost calls in forward."""
        values, call = self.tables.values, self.tables.values.call[self.rows]
        is_output = values.is_of(OUTPUT, rows=self.rows) & (call >= 0)
        is_output &= values.phase[self.rows] == PHASES.index(FORWARD)
        return np.asarray(is_output & (take(self.tables.calls.outermost, call) == call))

    @cached_property
    def is_passed_on(self) -> Bools:
        """A mask of outputs of modules that computed nothing, as an op outside of the call returned the tensor.

        If the op that returned the tensor was not measured, the module counts as having computed it. The same holds if
        only one recording has the op, because then the output shows what the op computed.
        """
        values, calls, op = self.tables.values, self.tables.calls, np.maximum(self.maker, -1)
        own, around = values.call[self.rows], take(self.tables.ops.call, op)
        is_passed_on = values.is_of(OUTPUT, rows=self.rows) & (own >= 0) & ~values.is_of_op[self.rows]
        is_passed_on &= (self.maker >= -1) & ~self.is_unpaired[op]
        while (is_passed_on & (around >= 0)).any():
            is_passed_on &= around != own
            around = take(calls.parent, around)
        return np.asarray(is_passed_on)


def records_ops(tables: RunTables) -> bool:
    """Returns whether a recording has ops, or would have them if any had run."""
    return bool(tables.data.meta.options.get("ops")) or bool(len(tables.ops.step))


def find_unpaired_ops(tables: RunTables, paired_ops: Rows, unpaired: Collection[ModuleName]) -> Bools:
    """Returns for each op, then for no op, whether it computes something and has no partner.

    What makes the parameters of an unpaired module before the step's first call belongs to that module, and is no
    place of its own at which runs part.

    Args:
        tables: the tables of a recording.
        paired_ops: its ops that have a partner.
        unpaired: its modules that the other recording lacks.
    """
    is_unpaired = np.append(~tables.adds_nothing, False)
    is_unpaired[paired_ops] = False
    if not unpaired or not len(tables.ops.step):
        return is_unpaired
    owned = [
        site for site in tables.sites if site["role"] in (PARAMETER, BUFFER) and site["module_id"] is not None
    ]
    modules = np.array([site["module_id"] for site in owned], np.int64)
    places = tables.places.place_all(modules, np.full(len(owned), NOWHERE, np.int64)).tolist()
    named = dict(enumerate(tables.names))
    of_unpaired = [
        site["site_id"] for site, place in zip(owned, places, strict=True) if named.get(place) in unpaired
    ]
    tensors = tables.flow.tensors
    storages = tensors.storage[np.isin(tensors.site_id, of_unpaired) & (tensors.storage >= 0)]
    makers = tensors.producer[np.isin(tensors.storage, storages) & (tensors.producer >= 0)]
    is_unpaired[_add_what_leads_to(tables, makers[tables.ops.is_preparing[makers]])] = False
    return is_unpaired


def _add_what_leads_to(tables: RunTables, makers: Rows) -> Rows:
    """Returns ops that ran before the first call, with all ops before it that lead to them and to no other op.

    An op leads to none if it is read by none, or by such ops alone: a check of what was drawn, say.
    """
    flow, ops = tables.flow, tables.ops
    producer = flow.tensors.producer[flow.read]
    is_led = np.append(ops.is_preparing, False)[producer]
    readers = defaultdict[int, set[int]](set)
    for op, reader in zip(producer[is_led].tolist(), flow.reader[is_led].tolist(), strict=True):
        readers[op].add(reader)
    are_makers = {*makers.tolist()}
    are_unread = {*np.flatnonzero(ops.is_preparing).tolist()} - readers.keys() - are_makers
    for op in sorted(readers, reverse=True):  # what reads an op runs later
        read_by = readers[op] - are_unread - {op}
        if not read_by and op not in are_makers:
            are_unread.add(op)
        elif read_by <= are_makers:
            are_makers.add(op)
    return np.array(sorted(are_makers), np.int64)


def is_uninitialized(tables: RunTables, rows: Rows) -> Bools:
    """Returns which rows are of memory to which nothing need have been written.

    An op such as `empty` returned it, or an op keeps it as bytes for its own backward, as an LSTM its workspace.
    """
    op = tables.values.op[rows]
    is_output = (op >= 0) & tables.values.is_of(OP_OUTPUT, rows=rows)
    codes, dtypes = dictionary_codes(tables.values.table["dtype"])
    are_bytes = np.array([dtype == "uint8" for dtype in dtypes] + [False])[codes[rows]]
    is_workspace = are_bytes & np.append(tables.is_internal, False)[tables.tensor_of_value[rows]]
    return np.asarray(is_output & (np.append(tables.ops.are_named(UNINITIALIZED), False)[op] | is_workspace))


class SharedMemory:
    """Finds which tensors of a run share memory."""

    def __init__(self, tables: RunTables) -> None:
        tensors = tables.flow.tensors
        self._storage, self._version, self._numel = tensors.storage, tensors.version, tensors.numel
        _, memory = np.unique(self._storage, return_inverse=True)
        self._memory = memory
        largest, last = np.zeros(len(memory) + 1, np.int64), np.zeros(len(memory) + 1, np.int64)
        np.maximum.at(largest, memory, self._numel)
        np.maximum.at(last, memory, self._version)
        self._is_part = self._numel < largest[memory]
        #: Whether a tensor is the last version in memory that outlives the step: of a leaf, or written by an optimizer.
        self.stays = (self._storage >= 0) & (self._version == last[memory]) & (self._version > 0)
        phase = take(tables.ops.phase, tensors.producer)
        outlives = np.zeros(len(memory) + 1, bool)
        outlives[memory[(tensors.producer < 0) | (phase == PHASES.index(OPTIMIZER))]] = True
        self.stays &= outlives[memory]

    def find_kept_gradients(self, tables: RunTables) -> Bools:
        """Returns which tensors backward wrote last, and ops outside of backward read, but none of optimizers."""
        flow, of_maker = tables.flow, take(tables.ops.phase, tables.flow.tensors.producer)
        # The last row is for ops outside of phases.
        read_in = np.zeros((len(PHASES) + 1, len(flow.tensors)), bool)
        read_in[tables.ops.phase[flow.reader], flow.read] = True
        in_backward, in_optimizer = PHASES.index(BACKWARD), PHASES.index(OPTIMIZER)
        is_read = np.delete(read_in, in_backward, axis=0).any(axis=0) & ~read_in[in_optimizer]
        is_changed = ~np.append(tables.ops.are_named(OVERWRITES), False)[flow.tensors.producer]
        memory = self._memory
        last = np.full(len(memory) + 1, -1, np.int64)
        np.maximum.at(last, memory[is_changed], self._version[is_changed])
        return np.asarray(is_read & (of_maker == in_backward) & is_changed & (self._version == last[memory]))

    def is_single(self, one: int, other: int | None = None) -> bool:
        """Returns whether a tensor has one element at most, while `other`, if it is given, has several."""
        return bool(self._numel[one] <= 1 and (other is None or self._numel[other] > 1))

    def ratio(self, one: int, other: int) -> float:
        """Returns the number of elements of one tensor divided by that of another."""
        return float(self._numel[one] / max(self._numel[other], 1))

    def is_part_written(self, read: int, made: int) -> bool:
        """Returns whether an op wrote in place to less than all of the memory of a tensor that it read."""
        is_same = self._storage[read] == self._storage[made] >= 0
        return bool(is_same and self._version[made] > self._version[read] and self._is_part[made])


def find_norms(tables: RunTables) -> Numbers:
    """Returns the L2 norm of each tensor as an op returned it, or as a leaf was first read; NaN if not measured."""
    values, tensors = tables.values, tables.flow.tensors
    norm = values.read_stats().l2
    of_tensor = np.full(len(tensors), np.nan)
    leaves = np.flatnonzero(~values.is_of(OP_OUTPUT) & ((values.op >= 0) | values.is_of(PARAMETER, BUFFER)))
    row = take(leaves, find_rows(values.site_id[leaves], tensors.site_id))
    is_leaf = (row >= 0) & (tensors.site_id >= 0)
    of_tensor[is_leaf] = norm[row[is_leaf]]
    outputs = np.flatnonzero(tables.tensor_of_value >= 0)
    of_tensor[tables.tensor_of_value[outputs]] = norm[outputs]
    return of_tensor


def find_kept(run: PairedRun, tensor: Rows, differs: Bools) -> Rows:
    """Returns the unequal tensors that modules return and that no op outside of the module reads in forward.

    Args:
        run: the tables of one recording, with its rows.
        tensor: for each pair, the tensor of the op's output; -1 where it is not known.
        differs: which pairs differ by more than noise.
    """
    tables, rows = run.tables, run.rows
    values, calls, flow = tables.values, tables.calls, tables.flow
    pairs = np.flatnonzero(
        differs & (tensor >= 0) & values.is_of(OUTPUT, rows=rows) & (values.call[rows] >= 0)
    )
    last_inside = np.full(len(calls.parent) + 1, -1, np.int64)
    np.maximum.at(last_inside, tables.ops.call, tables.ops.order)
    for level in reversed([*iterate_levels(calls.parent)]):
        np.maximum.at(last_inside, calls.parent[level], last_inside[level])
    in_backward = tables.ops.phase[flow.reader] == PHASES.index(BACKWARD)
    last_read = np.full(len(flow.tensors), -1, np.int64)
    np.maximum.at(last_read, flow.read[~in_backward], tables.ops.order[flow.reader[~in_backward]])
    is_kept = last_read[tensor[pairs]] <= last_inside[values.call[rows[pairs]]]
    return np.asarray(tensor[pairs[is_kept]])


def find_module_outputs(tables: RunTables, rows: Rows) -> Rows:
    """Returns the tensors in some rows of `values` that an op returned and then a module."""
    values = tables.values
    outputs = np.flatnonzero(values.is_of(OP_OUTPUT))
    is_of_module = np.isin(values.place, values.place[rows]) & (values.place >= 0)
    returned = values.group[values.is_of(OUTPUT) & (values.call >= 0) & is_of_module]
    tensors = tables.tensor_of_value[outputs[np.isin(values.group[outputs], returned)]]
    return tensors[tensors >= 0]


def find_summands(tables: RunTables) -> Rows:
    """Returns for each op the tensor that it adds to its result, such as a bias; -1 for none."""
    flow = tables.flow
    is_bias = np.array([*(slot == "bias" for slot in flow.slots), False])[flow.slot]
    is_self = np.array([*(slot == "self" for slot in flow.slots), False])[flow.slot]
    is_backward = np.array([*("backward" in name for name in tables.ops.names), False])[tables.ops.name]
    is_summand = is_bias & ~is_backward[flow.reader] | (
        is_self & tables.ops.are_named(ADDS_PRODUCT)[flow.reader]
    )
    summand = np.full(len(flow.op_id), -1, np.int64)
    summand[flow.reader[is_summand]] = flow.read[is_summand]
    return summand


def find_tensors(tables: RunTables, rows: Rows, wanted: Bools) -> Rows:
    """Returns for each of the `rows` the number of its tensor in the op flow; -1 if no op or root call returned it.

    For `wanted` rows, the tensor is also found if a module returned a view of it.
    """
    values = tables.values
    outputs = np.flatnonzero(values.is_of(OP_OUTPUT))
    of_group = np.full(int(values.group.max(initial=-1)) + 1, -1, np.int64)
    of_group[values.group[outputs]] = tables.tensor_of_value[outputs]
    tensor = of_group[values.group[rows]]
    tensor = np.where(tensor < 0, _find_model_outputs(tables, rows), tensor)
    views = np.flatnonzero(wanted & (tensor < 0) & values.is_of(OUTPUT, rows=rows) & (values.call[rows] >= 0))
    tensor[views] = _find_returned_views(tables, rows[views])
    return tensor


def _find_model_outputs(tables: RunTables, rows: Rows) -> Rows:
    """Returns the tensor that an outermost call returned at the slot of each row; -1 for other rows."""
    values, flow = tables.values, tables.flow
    codes = {
        name.removeprefix("output"): code for code, name in enumerate(flow.slots) if name.startswith("output")
    }
    slot = np.array([*(codes.get(name, -1) for name in values.slots), -1])[values.slot[rows]]
    width = len(flow.slots)
    row = find_rows(flow.returned.call * width + flow.returned.slot, values.call[rows] * width + slot)
    is_result = values.is_of(OUTPUT, rows=rows) & (values.call[rows] >= 0) & (slot >= 0)
    return np.where(is_result, take(flow.returned.tensor, row), -1)


def _find_returned_views(tables: RunTables, rows: Rows) -> Rows:
    """Returns for each row the only view of its shape that its call made and did not read; -1 for none or several."""
    values, flow, producer = tables.values, tables.flow, tables.flow.tensors.producer
    call = take(tables.ops.call, producer)
    is_left = np.append(tables.ops.is_view, False)[producer] & (call >= 0)
    is_left[flow.read[tables.ops.call[flow.reader] == call[flow.read]]] = False
    views = np.flatnonzero(is_left)
    shape, own_shape = number_sizes(flow.tensors.read_sizes()[views], values.sizes[rows])
    keys, wanted = number_keys((call[views], values.call[rows]), (shape, own_shape))
    distinct, first, counts = np.unique(keys, return_index=True, return_counts=True)
    where = find_rows(distinct, wanted)
    where = np.where(take(counts, where) == 1, where, -1)
    return take(views, take(first, where))


def find_unread_aliases(flow: OpFlow) -> Bools:
    """Returns which tensors no op reads, although another form of the same output is read.

    An op that writes in place to a view returns both the view and the whole tensor behind it.
    """
    is_read = np.zeros(len(flow.tensors), bool)
    is_read[np.concatenate([flow.read, flow.returned.tensor])] = True
    _, output = np.unique(flow.output, return_inverse=True)
    has_read = np.zeros(len(flow.tensors) + 1, bool)
    has_read[output[is_read]] = True
    return np.asarray(~is_read & has_read[output] & (flow.output >= 0))
