"""One of the two recordings: its row of each pair, and what that is of."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...recording.phase import FORWARD, PHASES
from ...recording.role import LEAF, OP_OUTPUT, OUTPUT
from ..alignment.sides import Side
from ..tables.columns import Bools, Rows, take


@dataclass(frozen=True, kw_only=True, eq=False)
class PairedRun:
    """One of the two recordings, and its row of each pair."""

    side: Side
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


def find_alone(side: Side, paired: Rows) -> Bools:
    """Returns which ops of a recording compute something, and are none of those that have a partner; see `alone`."""
    is_alone = np.append(~side.ops.is_plain, False)
    is_alone[paired] = False
    return is_alone
