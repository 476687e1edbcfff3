"""Tells in what the arguments of an op differ from those of the same op of the other recording."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ...recording.phase import OPTIMIZER, PHASES
from ...recording.role import OP_OUTPUT, PARAMETER_GRAD
from ...recording.suggestions import first_few
from ..graph.parts import forms_of_op
from ..tables.arguments import compare_arguments
from ..tables.columns import Bools, RowFinder, Rows
from ..tables.measured import read_measured
from ..tables.op_rules import ADDS_AXIS
from ..tables.ops import bare_name
from ..tables.run import RunTables
from .answer import FIRST, SECOND
from .errors import find_errors
from .names import Names
from .pairs import Compared

#: So many of what one run has alone are named.
_LISTED = 2

#: So many views and copies in a row are looked through.
_MOST_PASSED = 64


#: Views that put axes in another order.
_TURNING = frozenset({"transpose", "permute", "t"})


class _Origin(NamedTuple):
    """What a tensor was before views and copies of it."""

    rows: Rows  # of `values` that measured it in this step
    name: str


class Operands:
    """Compares what ops were given, of pairs of what they returned."""

    def __init__(self, found: Compared, names: Names, others: Names) -> None:
        self._found = found
        self._runs = (found.side, names), (found.other, others)
        self._find_pair = RowFinder(found.a.rows)

    def find_arguments(self, at: int) -> tuple[str, ...]:
        """Returns which arguments that are no tensors differ: `eps 1e-05 against 0.001`.

        They may be those of a view that the op reads, and in an optimizer of an op that returns nothing:
        `_foreach_mul_ with scalar 0.9 against 0.8`.
        """
        op, op_b = self._ops(at)
        told = (
            self._compare_arguments(op, op_b) or self._find_views(op, op_b) if op >= 0 and op_b >= 0 else ()
        )
        row, values = self._found.a.rows[[at]], self._found.side.values
        if told or values.phase[row[0]] != PHASES.index(OPTIMIZER):
            return told
        if values.is_of(PARAMETER_GRAD, rows=row)[0]:
            return tuple(self._tell_lone_gradients(at))
        return self._find_unmeasured(at)

    def _find_views(self, op: int, op_b: int) -> tuple[str, ...]:
        """Returns in what the views differ that take a part of what the ops read: `select with index 0 against 1`."""
        (side, names), (other, _) = self._runs
        reads, reads_b = _find_reads(side, op), _find_reads(other, op_b)
        for slot in _find_common(reads, reads_b):
            views = _find_views(side, reads[slot]), _find_views(other, reads_b[slot])
            for view, view_b in zip(*views, strict=False):
                if view_b == self._found.partner[view] and (told := self._compare_arguments(view, view_b)):
                    return tuple(f"{forms_of_op(names.op(view))[-1]} with {each}" for each in told)
        return ()

    def find_turned(self, at: int) -> str | None:
        """Returns how often the axes of what an op reads were turned: `mat1 behind t x1, transpose x1 against t x1`."""
        op, op_b = self._ops(at)
        if op < 0 or op_b < 0:
            return None
        (side, names), (other, others) = self._runs
        reads, reads_b = _find_reads(side, op), _find_reads(other, op_b)
        for slot in _find_common(reads, reads_b):
            turns, turns_b = (
                _count_turns(side, names, reads[slot]),
                _count_turns(other, others, reads_b[slot]),
            )
            if turns != turns_b:
                return f"{slot} behind {_join_counts(turns)} against {_join_counts(turns_b)}"
        return None

    def _steps(self, at: int) -> tuple[int, int]:
        """Returns the step of a pair in each recording."""
        rows = self._found.a.rows[at], self._found.b.rows[at]
        step, step_b = (int(side.values.step[row]) for (side, _), row in zip(self._runs, rows, strict=True))
        return step, step_b

    def _find_unmeasured(self, at: int) -> tuple[str, ...]:
        """Returns what else the first op was given of those whose outputs an optimizer's step has left unmeasured."""
        (side, names), partner = self._runs[0], self._found.partner
        is_wanted = (side.ops.step == self._steps(at)[0]) & (side.ops.phase == PHASES.index(OPTIMIZER))
        is_wanted &= partner >= 0
        is_wanted[side.values.op[side.values.is_of(OP_OUTPUT) & (side.values.op >= 0)]] = False
        ops = np.flatnonzero(is_wanted)
        for op in ops[np.argsort(side.ops.order[ops])].tolist():
            if told := self._compare_arguments(op, int(partner[op])):
                return tuple(f"{forms_of_op(names.op(op))[-1]} with {each}" for each in told)
        if any(map(len, self._find_lone_gradients(at))):  # for other parameters an optimizer runs other ops
            return tuple(self._tell_lone_gradients(at))
        return tuple(self._find_own(at))

    def _find_own(self, at: int) -> Iterator[str]:
        """Yields which ops only the optimizer of one run has run in the step of a pair, or more often."""
        alone = self._found.alone, self._found.alone_b
        one, other = (
            self._count_alone(side, names, is_alone[:-1] & (side.ops.step == step))
            for (side, names), is_alone, step in zip(self._runs, alone, self._steps(at), strict=True)
        )
        for run, more in ((FIRST, one - other), (SECOND, other - one)):
            if more:
                yield f"only the {run} run has {', '.join(f'{name} x{count}' for name, count in more.items())}"

    @staticmethod
    def _count_alone(side: RunTables, names: Names, is_asked: Bools) -> Counter[str]:
        is_asked = is_asked & (side.ops.phase == PHASES.index(OPTIMIZER))
        _, first, counts = np.unique(side.ops.name[is_asked], return_index=True, return_counts=True)
        ops = np.flatnonzero(is_asked)[first].tolist()
        return Counter({forms_of_op(names.op(op))[-1]: n for op, n in zip(ops, counts.tolist(), strict=True)})

    def _tell_lone_gradients(self, at: int) -> Iterator[str]:
        """Yields which parameters, of modules of both runs, have a gradient in the step of a pair in one run alone."""
        modules = {*self._found.modules.values()}, {*self._found.modules}
        for number, rows in enumerate(self._find_lone_gradients(at)):
            names = self._runs[number][1]
            told = [
                names.label_value(row)
                for row in rows.tolist()
                if names.place_of_value(row) in modules[number]
            ]
            if told:
                yield f"only the {(FIRST, SECOND)[number]} run has {first_few(told, _LISTED)}"

    def _find_lone_gradients(self, at: int) -> list[Rows]:
        """Returns of each run the rows of gradients of parameters, in the step of a pair, that the other run lacks."""
        found, paired = [], (self._found.a.rows, self._found.b.rows)
        for number, step in enumerate(self._steps(at)):
            values = self._runs[number][0].values
            rows = np.flatnonzero(values.is_of(PARAMETER_GRAD) & (values.step == step))
            known = np.concatenate([paired[number], self._found.misfits[:, number]])
            found.append(rows[~np.isin(rows, known)])
        return found

    def _compare_arguments(self, op: int, op_b: int) -> tuple[str, ...]:
        given, given_b = self._found.side.ops.read_args(op), self._found.other.ops.read_args(op_b)
        if given == given_b:
            return ()
        rank, rank_b = (
            self._count_axes(side, row) for (side, _), row in zip(self._runs, (op, op_b), strict=True)
        )
        return compare_arguments(given, given_b, (rank, rank_b))

    @staticmethod
    def _count_axes(side: RunTables, op: int) -> int:
        """Returns of how many axes the arguments of an op say one, as `dim`; 0 if it reads no tensor."""
        shapes, adds_axis = (
            side.flow.tensors.table["shape"],
            bare_name(side.ops.names[side.ops.name[op]]) in ADDS_AXIS,
        )
        return next((len(shapes[tensor].as_py()) + adds_axis for tensor in _find_reads(side, op).values()), 0)

    def find_operands(self, at: int) -> tuple[str, ...]:
        """Returns which tensors that an op has read are others, and differ: `mat2 parameter a.weight against ...`."""
        op, op_b = self._ops(at)
        if op < 0 or op_b < 0:
            return ()
        noise = max(float(self._found.noise.local[at]), float(self._found.errors.floor[at]))
        return tuple(self._compare_reads(op, op_b, noise))

    def find_sizes(self, op: int) -> list[int]:
        """Returns the sizes of the axes of what an op of the first recording reads."""
        side, _ = self._runs[0]
        shapes = side.flow.tensors.table["shape"]
        return [size for tensor in _find_reads(side, op).values() for size in shapes[tensor].as_py()]

    def _ops(self, at: int) -> tuple[int, int]:
        """Returns the ops of a pair; -1 where it is not of what an op returned."""
        rows = int(self._found.a.rows[at]), int(self._found.b.rows[at])
        op, op_b = (
            int(side.values.op[row]) if side.values.is_of(OP_OUTPUT, rows=np.array([row]))[0] else -1
            for (side, _), row in zip(self._runs, rows, strict=True)
        )
        return op, op_b

    def _compare_reads(self, op: int, op_b: int, noise: float) -> Iterator[str]:
        (side, names), (other, others) = self._runs
        reads, reads_b = _find_reads(side, op), _find_reads(other, op_b)
        for slot in _find_common(reads, reads_b):
            one, two = (
                _find_origin(side, names, op, reads[slot]),
                _find_origin(other, others, op_b, reads_b[slot]),
            )
            if not len(one.rows) or not len(two.rows) or self._are_partners(one.rows, two.rows):
                continue
            a, b = read_measured(side.data, one.rows[:1]), read_measured(other.data, two.rows[:1])
            # Of unequal sizes, one is read in parts.
            if a.numel[0] == b.numel[0] and float(find_errors(a, b).error[0]) > noise:
                yield f"{slot} {one.name} against {two.name}"

    def _are_partners(self, rows: Rows, rows_b: Rows) -> bool:
        """Returns whether one of the rows was compared with one of the others: that tells how far they are apart."""
        pairs = self._find_pair(rows)
        return bool(np.isin(self._found.b.rows[pairs[pairs >= 0]], rows_b).any())


def _find_reads(side: RunTables, op: int) -> dict[str, int]:
    """Returns the tensor of `flow` that an op has read as each argument."""
    begin, end = np.searchsorted(side.flow.reader, [op, op + 1])
    slots = side.flow.slot[begin:end].tolist()
    return {
        side.flow.slots[slot]: tensor
        for slot, tensor in zip(slots, side.flow.read[begin:end].tolist(), strict=True)
    }


def _find_common(reads: Mapping[str, int], reads_b: Mapping[str, int]) -> list[str]:
    """Returns the arguments that both ops read, in the order of the first."""
    return [slot for slot in reads if slot in reads_b]


def _find_views(side: RunTables, tensor: int) -> list[int]:
    """Returns the ops that took a part of a tensor, the last one first, behind what was computed."""
    shapes = side.flow.tensors.table["shape"]
    return [
        op
        for op, before, behind in _walk_views(side, tensor)
        if math.prod(shapes[behind].as_py()) < math.prod(shapes[before].as_py())
    ]


def _count_turns(side: RunTables, names: Names, tensor: int) -> Counter[str]:
    """Returns how often the axes of a tensor were put in another order behind what was computed, by op."""
    ops = (forms_of_op(names.op(op))[-1] for op, _, _ in _walk_views(side, tensor))
    return Counter(op for op in ops if op in _TURNING)


def _join_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x{count}" for name, count in sorted(counts.items())) or "none"


def _walk_views(side: RunTables, tensor: int) -> Iterator[tuple[int, int, int]]:
    """Yields the views and copies behind what was computed, the last one first: op, what it reads, what it returns."""
    for _ in range(_MOST_PASSED):
        producer = int(side.flow.tensors.producer[tensor])
        reads = _find_reads(side, producer) if producer >= 0 and side.ops.is_plain[producer] else {}
        if not reads:
            return
        before = next(iter(reads.values()))
        yield producer, before, tensor
        tensor = before


def _find_origin(side: RunTables, names: Names, op: int, tensor: int) -> _Origin:
    """Returns what a tensor was that an op reads."""
    tensors, values = side.flow.tensors, side.values
    step = int(side.ops.step[op])
    for _ in range(_MOST_PASSED):
        producer = int(tensors.producer[tensor])
        if producer < 0:
            site = int(tensors.site_id[tensor])
            is_of = (values.site_id == site) & (values.step == step) & (site >= 0)
            rows = np.flatnonzero(is_of)
            return _Origin(rows, names.label_value(int(rows[0])) if len(rows) else "")
        reads = _find_reads(side, producer)
        if not side.ops.is_plain[producer] or not reads:
            rows = np.flatnonzero(values.op == producer)
            rows = rows[values.is_of(OP_OUTPUT, rows=rows)]
            return _Origin(rows[side.tensor_of_value[rows] == tensor], names.label_op(producer))
        tensor = next(iter(reads.values()))
    return _Origin(np.empty(0, np.int64), "")
