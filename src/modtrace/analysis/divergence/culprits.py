"""Finds what made a difference: an op of both recordings, or an op that only one of them has."""

from collections import deque
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from ..tables.columns import Rows
from ..tables.measured import read_measured
from ..tables.op_rules import CASTS
from ..tables.run import RunTables
from .answer import FIRST, SECOND
from .errors import find_errors
from .paired_run import PairedRun
from .pairs import ComparedPairs
from .ranking import IS_MADE

#: The largest number of unpaired ops that are traced back.
_MOST_BEFORE = 8


class Culprit(NamedTuple):
    """The op that made a difference, or the compared tensor where no op is known."""

    op: int  # the row of the op; -1 if no op is known
    run: str  # the recording, FIRST or SECOND, to which the op belongs
    is_unpaired: bool  # whether the other recording lacks the op


#: A key that is equal for differences of one place.
Key = tuple[object, ...]


class Culprits:
    """Finds what made the differences of pairs."""

    def __init__(self, pairs: ComparedPairs) -> None:
        self._pairs = pairs

    def find(self, pair: int) -> Culprit:
        """Returns what made the difference of a pair.

        If only one recording has an unpaired op in front of the compared tensor, that op is returned. If both have
        some, it is the one behind equal tensors; else the last one of the first recording, or the first one if the
        tensor is in another module. If an op reads from unpaired ops at several places, none is returned, as nothing
        shows which one it is.
        """
        a, b, inputs = self._pairs.a, self._pairs.b, self._pairs.inputs
        own = Culprit(int(a.op[pair]), FIRST, is_unpaired=False)
        if inputs.is_source[pair]:
            return own
        op, op_b = int(inputs.through[pair]), int(inputs.through_b[pair])
        if own.op < 0:
            op, op_b = _find_unpaired_maker(a, pair, op), _find_unpaired_maker(b, pair, op_b)
        if op < 0:
            if op_b < 0:
                return self._find_cast(own, IS_MADE * float(self._pairs.ranking.noise[pair])) or own
            return Culprit(op_b, SECOND, is_unpaired=True)
        if op_b >= 0:
            noise = IS_MADE * float(self._pairs.ranking.noise[pair])
            if (behind := self._find_behind_equal(own, noise)) is not None:
                return behind
            if self._are_equal(a.outputs[op], b.outputs[op_b], noise):
                return own
            if self._are_equal(a.outputs[op], _find_rows_read(b, op_b), noise):
                return Culprit(op_b, SECOND, is_unpaired=True)
            if self._are_equal(_find_rows_read(a, op), b.outputs[op_b], noise):
                return Culprit(op, FIRST, is_unpaired=True)
            if own.op >= 0 and _is_inside(a.tables, op, int(a.tables.values.place[a.rows[pair]])):
                nearest = find_unpaired_read(a, own.op)
                if len({self._key_of(own._replace(op=read)) for read in nearest}) > 1:
                    return own
                op = nearest[0] if nearest else op
        return Culprit(op, FIRST, is_unpaired=True)

    def find_forward(self, culprit: Culprit) -> int:
        """Returns the row of the forward op that belongs to an op of backward; -1 for other ops."""
        return int(self._pairs.run(culprit.run).tables.ops.forward[culprit.op])

    def find_keys(self, pair: int) -> tuple[Key, Key | None]:
        """Returns the key of a pair's place, and that of the place of the forward op for an op of backward."""
        culprit = self.find(pair)
        if culprit.op >= 0:
            forward = self.find_forward(culprit)
            of_forward = self._key_of(culprit._replace(op=forward)) if forward >= 0 else None
            return self._key_of(culprit), of_forward
        values, row = self._pairs.a.tables.values, int(self._pairs.a.rows[pair])
        place, phase, role = (int(column[row]) for column in (values.place, values.phase, values.role))
        return (self._pairs.recompute_of, place, phase, role), None

    def _key_of(self, culprit: Culprit) -> Key:
        tables, op = self._pairs.run(culprit.run).tables, culprit.op
        phase, name = int(tables.ops.phase[op]), int(tables.ops.name[op])
        return self._pairs.recompute_of, culprit.run, _find_place(tables, op), phase, name

    def _find_behind_equal(self, own: Culprit, noise: float) -> Culprit | None:
        """Returns the unpaired op behind the last equal tensors among those from which a culprit was computed.

        It is the culprit's op itself if that reads them. None if there are no equal tensors, or both runs have such an
        op.
        """
        if own.op < 0 or (op_b := int(self._pairs.partner[own.op])) < 0:
            return None
        a, b = self._pairs.a, self._pairs.b
        ops, ops_b = find_unpaired_before(a, own.op), find_unpaired_before(b, op_b)
        numbers = product(range(len(ops)), range(len(ops_b)))
        for number, number_b in sorted(numbers, key=lambda pair: (sum(pair), pair)):
            if self._are_equal(a.outputs[ops[number]], b.outputs[ops_b[number_b]], noise):
                if number and number_b:
                    return None
                if number:
                    return Culprit(ops[number - 1], FIRST, is_unpaired=True)
                return Culprit(ops_b[number_b - 1], SECOND, is_unpaired=True) if number_b else own
        return None

    def _find_cast(self, own: Culprit, noise: float) -> Culprit | None:
        """Returns the cast in front of a culprit by which only one run has rounded a tensor; None if there is none."""
        partner = self._pairs.partner
        if own.op < 0 or (op_b := int(partner[own.op])) < 0:
            return None
        for run, name, op in ((self._pairs.b, SECOND, op_b), (self._pairs.a, FIRST, own.op)):
            is_of_both = partner if name == SECOND else np.flatnonzero(partner >= 0)
            for cast, rows, rows_read in _find_casts(run, op):
                if not np.isin(cast, is_of_both) and not _are_near(run, rows, run, rows_read, noise):
                    return Culprit(cast, name, is_unpaired=True)
        return None

    def _are_equal(self, rows: Rows, rows_b: Rows, noise: float) -> bool:
        """Returns whether rows of the first and of the second recording hold tensors that differ by noise at most."""
        return _are_near(self._pairs.a, rows, self._pairs.b, rows_b, noise)


def _are_near(run: PairedRun, rows: Rows, other: PairedRun, others: Rows, noise: float) -> bool:
    """Returns whether some tensor of `rows` differs by noise at most from one of `others` in the other recording."""
    a = read_measured(run.tables.data, np.repeat(rows, len(others)))
    b = read_measured(other.tables.data, np.tile(others, len(rows)))
    return bool(((a.numel == b.numel) & (find_errors(a, b).error <= noise)).any())


def _find_casts(run: PairedRun, op: int) -> Iterator[tuple[int, Rows, Rows]]:
    """Yields the casts through which an op reads what other ops computed, in the order in which they ran.

    With each come the rows of `values` of its output, and those of the tensor that was computed.
    """
    tables = run.tables
    is_cast = tables.ops.are_named(CASTS)
    for _, tensor in tables.flow.reads_of(op):
        *walked, computed = tables.walk_views(tensor)
        rows = tables.value_of_tensor[[computed]]
        for made in reversed(walked):
            cast, row = int(tables.flow.tensors.producer[made]), tables.value_of_tensor[[made]]
            if is_cast[cast] and rows[0] >= 0 and row[0] >= 0:
                yield cast, row, rows


def _find_unpaired_maker(run: PairedRun, pair: int, through: int) -> int:
    """Returns the op that made a pair's tensor if that is unpaired, else the op `through` which the tensor comes."""
    maker = int(run.maker[pair])
    return maker if maker >= 0 and run.is_unpaired[maker] else through


def find_unpaired_read(run: PairedRun, op: int) -> list[int]:
    """Returns the unpaired ops whose outputs an op reads, ordered by the number of views between."""
    walks = sorted((run.tables.walk_views(tensor) for _, tensor in run.tables.flow.reads_of(op)), key=len)
    makers = (int(run.tables.flow.tensors.producer[walk[-1]]) for walk in walks)
    return [maker for maker in dict.fromkeys(makers) if run.is_unpaired[maker]]


def find_unpaired_before(run: PairedRun, op: int) -> list[int]:
    """Returns the unpaired ops from whose outputs an op's arguments are computed, the nearest first."""
    ops, waiting = list[int](), deque([op])
    while waiting and len(ops) < _MOST_BEFORE:
        nearest = [maker for maker in find_unpaired_read(run, waiting.popleft()) if maker not in ops]
        ops += nearest
        waiting += nearest
    return ops


def _find_rows_read(run: PairedRun, op: int) -> Rows:
    """Returns the rows of `values` that hold the outputs of the ops from which an op reads."""
    flow = run.tables.flow
    makers = {int(flow.tensors.producer[tensor]) for _, tensor in run.tables.flow.reads_of(op)}
    return np.concatenate([np.empty(0, np.int64), *(run.outputs[maker] for maker in makers if maker >= 0)])


def _find_place(tables: RunTables, op: int) -> int:
    call = int(tables.ops.call[op])
    return int(tables.calls.place[call]) if call >= 0 else -1


def _is_inside(tables: RunTables, op: int, place: int) -> bool:
    """Returns whether an op ran in the module at a place, or in a module inside it."""
    own = _find_place(tables, op)
    while own != place and own >= 0:
        own = tables.places.places[own].parent
    return own == place
