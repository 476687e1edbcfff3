"""Compares the arguments of the paired ops: numbers, views, and the tensors that they read."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ...recording.phase import OPTIMIZER, PHASES
from ...recording.role import OP_OUTPUT, PARAMETER_GRAD
from ...recording.suggestions import first_few
from ..tables.arguments import compare_arguments
from ..tables.columns import RowFinder, Rows
from ..tables.measured import read_measured
from ..tables.op_rules import ADDS_AXIS
from ..tables.ops import bare_name
from .answer import FIRST, SECOND
from .errors import find_errors
from .paired_run import PairedRun
from .pairs import ComparedPairs

#: The largest number of listed names that only one run has.
_LISTED = 2

#: Views that change the order of axes.
_TURNING = frozenset({"transpose", "permute", "t"})


class Operands:
    """Compares the arguments of the two ops that returned the tensors of a pair."""

    def __init__(self, pairs: ComparedPairs) -> None:
        self._pairs = pairs
        self._runs = self._a, self._b = pairs.a, pairs.b
        self._find_pair = RowFinder(pairs.a.rows)

    def find_arguments(self, pair: int) -> tuple[str, ...]:
        """Returns which arguments other than tensors differ: `eps 1e-05 against 0.001`.

        The arguments may belong to a view that the op reads, or, in an optimizer, to an op that returns nothing:
        `_foreach_mul_ with scalar 0.9 against 0.8`.
        """
        op, op_b = self._find_ops(pair)
        texts: tuple[str, ...] = ()
        if op >= 0 and op_b >= 0:
            texts = self._compare_arguments(op, op_b) or self._compare_views(op, op_b)
        row, values = self._a.rows[[pair]], self._a.tables.values
        if texts or values.phase[row[0]] != PHASES.index(OPTIMIZER):
            return texts
        if values.is_of(PARAMETER_GRAD, rows=row)[0]:
            return tuple(self._name_unpaired_gradients(pair))
        return self._compare_optimizers(pair)

    def find_turned(self, pair: int) -> str | None:
        """Returns how often axes of the arguments were reordered: `mat1 behind t x1, transpose x1 against t x1`."""
        for slot, tensor, tensor_b in self._pair_reads(*self._find_ops(pair)):
            turns, turns_b = _count_turns(self._a, tensor), _count_turns(self._b, tensor_b)
            if turns != turns_b:
                return f"{slot} behind {turns} against {turns_b}"
        return None

    def find_operands(self, pair: int) -> tuple[str, ...]:
        """Returns which tensors read by the two ops are unlike and differ: `mat2 parameter a.weight against ...`."""
        return tuple(self._compare_reads(*self._find_ops(pair), float(self._pairs.ranking.noise[pair])))

    def find_sizes(self, op: int) -> list[int]:
        """Returns the sizes of all axes of the tensors that an op of the first recording reads."""
        shapes = self._a.tables.flow.tensors.table["shape"]
        return [size for _, tensor in self._a.tables.flow.reads_of(op) for size in shapes[tensor].as_py()]

    def _find_ops(self, pair: int) -> tuple[int, int]:
        """Returns the ops that returned the tensors of a pair; -1 if they are no outputs of ops."""
        return int(self._a.op[pair]), int(self._b.op[pair])

    def _pair_reads(self, op: int, op_b: int) -> Iterator[tuple[str, int, int]]:
        """Yields arguments that both ops read, each with its tensor in both runs, in the order of the first op."""
        reads_b = dict(self._b.tables.flow.reads_of(op_b))
        for slot, tensor in self._a.tables.flow.reads_of(op):
            if slot in reads_b:
                yield slot, tensor, reads_b[slot]

    def _compare_arguments(self, op: int, op_b: int) -> tuple[str, ...]:
        args, args_b = self._a.tables.ops.read_args(op), self._b.tables.ops.read_args(op_b)
        if args == args_b:
            return ()
        return compare_arguments(args, args_b, (_count_axes(self._a, op), _count_axes(self._b, op_b)))

    def _compare_named(self, op: int, op_b: int) -> tuple[str, ...]:
        """Returns the unequal arguments of two ops, with the name of the op: `select with index 0 against 1`."""
        name = self._a.names.short_op(op)
        return tuple(f"{name} with {text}" for text in self._compare_arguments(op, op_b))

    def _compare_views(self, op: int, op_b: int) -> tuple[str, ...]:
        """Returns how the views differ through which the two ops read parts of tensors."""
        for _, tensor, tensor_b in self._pair_reads(op, op_b):
            views = _find_parts(self._a, tensor), _find_parts(self._b, tensor_b)
            for view, view_b in zip(*views, strict=False):
                if view_b == self._pairs.partner[view] and (texts := self._compare_named(view, view_b)):
                    return texts
        return ()

    def _find_steps(self, pair: int) -> list[int]:
        """Returns the step of a pair in each recording."""
        return [int(run.tables.values.step[run.rows[pair]]) for run in self._runs]

    def _compare_optimizers(self, pair: int) -> tuple[str, ...]:
        """Returns how the optimizers of both runs differ in the step of a pair.

        The result names unequal arguments of the first op whose outputs were not measured, or parameters that have a
        gradient in one run only, or ops that only one optimizer ran.
        """
        values, ops, partner = self._a.tables.values, self._a.tables.ops, self._pairs.partner
        is_unmeasured = (ops.phase == PHASES.index(OPTIMIZER)) & (partner >= 0)
        is_unmeasured &= ops.step == self._find_steps(pair)[0]
        is_unmeasured[values.op[values.is_of(OP_OUTPUT) & (values.op >= 0)]] = False
        rows = np.flatnonzero(is_unmeasured)
        for op in rows[np.argsort(ops.order[rows])].tolist():
            if texts := self._compare_named(op, int(partner[op])):
                return texts
        if any(map(len, self._find_unpaired_gradients(pair))):  # other parameters bring other ops
            return tuple(self._name_unpaired_gradients(pair))
        counts, counts_b = (
            _count_unpaired(run, step) for run, step in zip(self._runs, self._find_steps(pair), strict=True)
        )
        return tuple(
            f"only the {name} run has {', '.join(f'{op} x{count}' for op, count in more.items())}"
            for name, more in ((FIRST, counts - counts_b), (SECOND, counts_b - counts))
            if more
        )

    def _name_unpaired_gradients(self, pair: int) -> Iterator[str]:
        """Yields the names of parameters that both runs have, with a gradient in only one of them in a pair's step."""
        modules = {*self._pairs.modules.values()}, {*self._pairs.modules}
        unpaired = self._find_unpaired_gradients(pair)
        for name, in_both, rows in zip((FIRST, SECOND), modules, unpaired, strict=True):
            names = self._pairs.run(name).names
            texts = [names.label_value(row) for row in rows.tolist() if names.place_of_value(row) in in_both]
            if texts:
                yield f"only the {name} run has {first_few(texts, _LISTED)}"

    def _find_unpaired_gradients(self, pair: int) -> list[Rows]:
        """Returns for each run the rows of gradients of parameters, in the step of a pair, that the other run lacks."""
        unpaired = []
        for run, step, resized in zip(self._runs, self._find_steps(pair), self._pairs.resized.T, strict=True):
            values = run.tables.values
            rows = np.flatnonzero(values.is_of(PARAMETER_GRAD) & (values.step == step))
            unpaired.append(rows[~np.isin(rows, np.concatenate([run.rows, resized]))])
        return unpaired

    def _compare_reads(self, op: int, op_b: int, noise: float) -> Iterator[str]:
        for slot, tensor, tensor_b in self._pair_reads(op, op_b):
            rows, name = _find_origin(self._a, op, tensor)
            rows_b, name_b = _find_origin(self._b, op_b, tensor_b)
            pairs = self._find_pair(rows)
            is_pair = np.isin(self._b.rows[pairs[pairs >= 0]], rows_b).any()  # such a pair has its own error
            if not len(rows) or not len(rows_b) or is_pair:
                continue
            a = read_measured(self._a.tables.data, rows[:1])
            b = read_measured(self._b.tables.data, rows_b[:1])
            # If operands have unequal sizes, one of them is read in parts, so the sizes say nothing.
            if a.numel[0] == b.numel[0] and float(find_errors(a, b).error[0]) > noise:
                yield f"{slot} {name} against {name_b}"


def _count_axes(run: PairedRun, op: int) -> int:
    """Returns the number of axes of the argument to which `dim` of an op refers; 0 if the op reads no tensor."""
    shapes, ops = run.tables.flow.tensors.table["shape"], run.tables.ops
    adds_axis = bare_name(ops.names[ops.name[op]]) in ADDS_AXIS
    return next((len(shapes[tensor].as_py()) + adds_axis for _, tensor in run.tables.flow.reads_of(op)), 0)


def _count_unpaired(run: PairedRun, step: int) -> Counter[str]:
    """Returns how many ops of each name the optimizer ran in a step without a partner in the other run."""
    ops = run.tables.ops
    is_wanted = run.is_unpaired[:-1] & (ops.step == step) & (ops.phase == PHASES.index(OPTIMIZER))
    _, first, counts = np.unique(ops.name[is_wanted], return_index=True, return_counts=True)
    rows = np.flatnonzero(is_wanted)[first].tolist()
    return Counter({run.names.short_op(op): count for op, count in zip(rows, counts.tolist(), strict=True)})


def _find_parts(run: PairedRun, tensor: int) -> list[int]:
    """Returns the ops that took a part of a tensor after it was computed, the last one first."""
    tensors = run.tables.flow.tensors
    walked = pairwise(run.tables.walk_views(tensor))
    parts = [view for view, viewed in walked if tensors.numel[view] < tensors.numel[viewed]]
    return [int(tensors.producer[view]) for view in parts]


def _count_turns(run: PairedRun, tensor: int) -> str:
    """Returns how often the axes of a tensor were reordered after it was computed: `t x1`."""
    views = run.tables.walk_views(tensor)[:-1]
    names = (run.names.short_op(int(run.tables.flow.tensors.producer[view])) for view in views)
    counts = Counter(name for name in names if name in _TURNING)
    return ", ".join(f"{name} x{count}" for name, count in sorted(counts.items())) or "none"


def _find_origin(run: PairedRun, op: int, tensor: int) -> tuple[Rows, str]:
    """Returns the rows of `values` of a tensor that an op reads, traced back through views and copies, and its name."""
    tables, values = run.tables, run.tables.values
    origin = tables.walk_views(tensor)[-1]
    producer = int(tables.flow.tensors.producer[origin])
    if producer >= 0:
        return np.flatnonzero(tables.tensor_of_value == origin), run.names.label_op(producer)
    site = int(tables.flow.tensors.site_id[origin])
    rows = np.flatnonzero((values.site_id == site) & (values.step == tables.ops.step[op]) & (site >= 0))
    return rows, run.names.label_value(int(rows[0])) if len(rows) else ""
