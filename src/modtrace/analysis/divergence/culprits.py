"""Finds who made a difference: an op of both recordings, or one that only one of them has."""

from collections import deque
from itertools import product
from typing import NamedTuple

import numpy as np

from ...recording.role import OP_OUTPUT
from ..tables.columns import Groups, Rows
from ..tables.measured import read_measured
from ..tables.run import RunTables
from .answer import FIRST, SECOND
from .errors import find_errors
from .pairs import Compared
from .ranking import IS_MADE

#: So many ops without partner are looked at.
_MOST_BEFORE = 8


class Culprit(NamedTuple):
    """The op that made a difference."""

    op: int  # its row; -1: no op is known, and the tensor that was compared stands for it
    run: str  # FIRST or SECOND: whose op it is
    is_alone: bool  # the other recording lacks it


#: What a difference is told apart from others by.
Key = tuple[object, ...]


class Culprits:
    """Finds who made the differences of some pairs."""

    def __init__(self, found: Compared) -> None:
        self._found = found
        self._outputs: dict[str, Groups] = {}  # of each op, by FIRST and SECOND: its rows of `values`

    def find(self, at: int) -> Culprit:
        """Returns who made the difference of a pair.

        Where one recording has an op between what was compared and the other has none, it is that op. Where both have
        some, it is the op behind what is equal, and else the last of the first recording, or the first of it if what
        was compared is in another module. Of several in
        different places that an op reads none is named, as nothing tells which it is.
        """
        found, inherited = self._found, self._found.inherited
        row = int(found.a.rows[at])
        is_op = bool(found.side.values.is_of(OP_OUTPUT, rows=np.array([row]))[0])
        own = Culprit(int(found.side.values.op[row]) if is_op else -1, FIRST, is_alone=False)
        if inherited.is_source[at]:
            return own
        maker, maker_b = int(inherited.maker[at]), int(inherited.maker_b[at])
        op = maker if not is_op and found.alone[maker] else self.find_through(at)
        op_b = maker_b if not is_op and found.alone_b[maker_b] else self.find_through(at, SECOND)
        if op < 0 <= op_b:
            return Culprit(op_b, SECOND, is_alone=True)
        if op >= 0 and op_b >= 0:
            noise = IS_MADE * max(float(found.noise.local[at]), float(found.errors.floor[at]))
            if (behind := self._find_behind_equal(own, noise)) is not None:
                return behind
            made, made_b = self._rows_of(FIRST, op), self._rows_of(SECOND, op_b)
            if self._are_equal(made, made_b, noise):
                return own
            if self._are_equal(made, self._rows_read(SECOND, op_b), noise):
                return Culprit(op_b, SECOND, is_alone=True)
            if self._are_equal(self._rows_read(FIRST, op), made_b, noise):
                return Culprit(op, FIRST, is_alone=True)
        if op >= 0 and op_b >= 0 and is_op and _is_inside(found.side, op, int(found.side.values.place[row])):
            nearest = self.find_nearest(FIRST, own.op)
            if len({self._key_of(Culprit(each, FIRST, is_alone=True)) for each in nearest}) > 1:
                return own
            op = nearest[0] if nearest else op
        return Culprit(op, FIRST, is_alone=True) if op >= 0 else own

    def find_through(self, at: int, run: str = FIRST) -> int:
        """Returns the op that one recording alone has, from which what was read comes; -1 for none.

        What an op made may also not have been measured, as that of an op that returns nothing.
        """
        through, alone = (
            (self._found.inherited.through, self._found.alone)
            if run == FIRST
            else (self._found.inherited.through_b, self._found.alone_b)
        )
        return int(through[at]) if alone[through[at]] else -1

    def _find_behind_equal(self, own: Culprit, noise: float) -> Culprit | None:
        """Returns the op behind the last tensors that are equal in both runs, of those that an op has read through.

        It is the op itself if it reads them. None: there are no such tensors, or both runs have ops behind them.
        """
        if own.op < 0 or (op_b := int(self._found.partner[own.op])) < 0:
            return None
        ops, ops_b = self._find_before(FIRST, own.op), self._find_before(SECOND, op_b)
        places = sorted(product(range(len(ops)), range(len(ops_b))), key=lambda pair: (sum(pair), pair))
        for at, there in places:
            if self._are_equal(self._rows_of(FIRST, ops[at]), self._rows_of(SECOND, ops_b[there]), noise):
                if at and there:
                    return None
                if at:
                    return Culprit(ops[at - 1], FIRST, is_alone=True)
                return Culprit(ops_b[there - 1], SECOND, is_alone=True) if there else own
        return None

    def _find_before(self, run: str, op: int) -> list[int]:
        """Returns the ops without partner through which an op reads, the nearest ones first."""
        found, waiting = list[int](), deque([op])
        while waiting and len(found) < _MOST_BEFORE:
            nearest = [each for each in self.find_nearest(run, waiting.popleft()) if each not in found]
            found += nearest
            waiting += nearest
        return found

    def find_nearest(self, run: str, op: int) -> list[int]:
        """Returns the ops without partner that made what an op reads, also through views, in the order of arguments."""
        side, alone = self._side(run), self._found.alone if run == FIRST else self._found.alone_b
        found, waiting, seen = list[int](), deque([op]), {-1}
        while waiting:
            for _, tensor in side.flow.reads_by_op.get(waiting.popleft(), ()):
                maker = int(side.flow.tensors.producer[tensor])
                if maker in seen:
                    continue
                seen.add(maker)
                if alone[maker]:
                    found.append(maker)
                elif side.ops.is_plain[maker]:
                    waiting.append(maker)
        return found

    def _rows_of(self, run: str, op: int) -> Rows:
        """Returns the rows of `values` of what an op returned."""
        if run not in self._outputs:
            side = self._side(run)
            rows = np.flatnonzero(side.values.is_of(OP_OUTPUT))
            self._outputs[run] = Groups(side.values.op[rows], rows, len(side.ops.name))
        return self._outputs[run][op]

    def _rows_read(self, run: str, op: int) -> Rows:
        """Returns the rows of `values` of what the ops returned that made what an op reads."""
        flow = self._side(run).flow
        begin, end = np.searchsorted(flow.reader, [op, op + 1])
        makers = flow.tensors.producer[flow.read[begin:end]]
        return np.concatenate(
            [np.empty(0, np.int64), *(self._rows_of(run, each) for each in makers[makers >= 0].tolist())]
        )

    def _are_equal(self, rows: Rows, rows_b: Rows, noise: float) -> bool:
        """Returns whether one of the rows of the first recording is apart from one of the second by noise alone."""
        at, there = np.repeat(rows, len(rows_b)), np.tile(rows_b, len(rows))
        a, b = read_measured(self._found.side.data, at), read_measured(self._found.other.data, there)
        error = find_errors(a, b).error
        return bool(((a.numel == b.numel) & (error <= noise)).any())

    def _side(self, run: str) -> RunTables:
        return self._found.side if run == FIRST else self._found.other

    def find_keys(self, at: int) -> tuple[Key, Key | None]:
        """Returns what is equal for differences of one place, and the same of the forward op of an op of backward."""
        found, culprit = self._found, self.find(at)
        if culprit.op >= 0:
            forward = self.find_forward(culprit)
            of_forward = self._key_of(culprit._replace(op=forward)) if forward >= 0 else None
            return self._key_of(culprit), of_forward
        values, row = found.side.values, int(found.a.rows[at])
        place, phase, role = (int(column[row]) for column in (values.place, values.phase, values.role))
        return (found.recompute_of, place, phase, role), None

    def find_forward(self, culprit: Culprit) -> int:
        """Returns the row of the forward op of an op of backward; -1 for other ops."""
        return int(self.side_of(culprit).ops.forward[culprit.op])

    def side_of(self, culprit: Culprit) -> RunTables:
        """Returns the recording that has the op."""
        return self._side(culprit.run)

    def _key_of(self, culprit: Culprit) -> Key:
        side, op = self.side_of(culprit), culprit.op
        place = _place_of(side, op)
        return self._found.recompute_of, culprit.run, place, int(side.ops.phase[op]), int(side.ops.name[op])


def _place_of(side: RunTables, op: int) -> int:
    call = int(side.ops.call[op])
    return int(side.calls.place[call]) if call >= 0 else -1


def _is_inside(side: RunTables, op: int, place: int) -> bool:
    """Returns whether an op ran in the module of a place, or in a module inside of that."""
    own = _place_of(side, op)
    while own != place and own >= 0:
        own = side.places.places[own].parent
    return own == place
