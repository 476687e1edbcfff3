"""Compares what a recording recomputed with its own forward, where the other recording has not recomputed it."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...recording.statistics.moments import Numbers
from ..alignment.contract import ModuleName
from ..tables.columns import Rows
from .cancellation import find_cancellation
from .errors import find_errors
from .inherited import find_inherited, order_by_use
from .measured import read_measured
from .noise import assume_noise, give_noise
from .pairs import Compared, ComparedSide, is_uninitialized
from .ranking import rank


def compare_recomputed(
    run: ComparedSide,
    pairs: Rows,
    recompute_of: str,
    modules: Mapping[ModuleName, ModuleName],
    tolerance: float | None,
) -> tuple[Compared, Numbers]:
    """Returns what is found out of the recomputed tensors, and what every row of `values` has inherited of that.

    Args:
        run: the recording.
        pairs: a row of `values` of a recompute, and that of its forward.
        recompute_of: which of the two recordings it is.
        modules: the names by which modules are told; of those that are not among them it is their own.
        tolerance: the relative error that is noise; None: rounding is assumed.
    """
    side = run.side
    pairs = pairs[~is_uninitialized(run, pairs[:, 0])]
    pairs = pairs[order_by_use(side, pairs[:, 0])]
    rows = pairs[:, 0]
    again, first = read_measured(side.data, rows), read_measured(side.data, pairs[:, 1])
    errors = find_errors(first, again)
    every = np.arange(len(side.values.step))
    every = every[order_by_use(side, every)]
    of_row = np.zeros(len(every))  # all other tensors are themselves
    of_row[rows] = errors.error
    inherited = find_inherited(side, every, of_row[every])
    given = np.empty(len(every))
    given[every] = inherited.error
    place = np.argsort(every)[rows]
    if tolerance is None:
        noise = assume_noise(first, again, find_cancellation(side, rows, again))
    else:
        noise = give_noise(tolerance, len(rows))
    mine = replace(inherited.take(place), through=np.full(len(rows), -1))
    return Compared(
        side=replace(side, names=tuple(modules.get(each, each) for each in side.names)),
        other=side,
        modules={},
        partner=np.full(len(side.ops.name), -1, np.int64),
        alone=(none_alone := np.zeros(len(side.ops.name) + 1, bool)),
        alone_b=none_alone,
        a=again,
        b=first,
        errors=errors,
        inherited=mine,
        noise=noise,
        ranking=rank(errors, mine, noise, np.ones(len(rows), bool)),
        misfits=pairs[:0],
        recompute_of=recompute_of,
    ), given
