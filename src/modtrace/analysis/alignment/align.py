"""Aligns two recordings: steps, modules, calls, ops and measured tensors, in this order."""

from collections.abc import Sequence

import numpy as np

from ...recording.protocols import RecordingData
from ..tables.chosen_step import find_step
from ..tables.columns import Bools, Partners, Rows, to_pairs
from ..tables.run import RunTables, read_run_tables
from .calls import pair_calls, pair_steps, translate
from .contract import Alignment, Joined
from .joins import (
    Batched,
    MicroBatches,
    collect,
    find_batched,
    find_micro_batches,
    join_micro_batches,
    join_splits,
)
from .modules import AUTO, PlacePairs, Rule, pair_places, read_rules
from .ops import pair_ops
from .proposals import propose_rules, read_leaves, unpair_containers
from .unpaired import list_unpaired, pair_recomputed
from .values import find_permutations, number_values, pair_values


def align(
    a: RecordingData,
    b: RecordingData,
    *,
    rules: Sequence[str] = (),
    step: int | str | None = None,
    step_b: int | str | None = None,
) -> Alignment:
    """Returns which rows of two recordings mean the same; see `align_tables`."""
    return align_tables(*read_both(a, b, step=step, step_b=step_b), rules=rules)


def read_both(
    a: RecordingData, b: RecordingData, *, step: int | str | None = None, step_b: int | str | None = None
) -> tuple[RunTables, RunTables, Rows]:
    """Returns two recordings, or the same one twice, and the pairs of their steps.

    Args:
        a: a recording.
        b: another one, or the same.
        step: the only step of `a` to compare, as `find_step` takes it; None: all.
        step_b: that of `b`; None: the same as of `a`.

    Raises:
        ValueError: there is no such step.
    """
    chosen = None if step is None else (find_step(a, step), find_step(b, step if step_b is None else step_b))
    steps, of_a, of_b = pair_steps(a, b, chosen)
    return read_run_tables(a, of_a), read_run_tables(b, of_b), steps


def align_tables(side: RunTables, other: RunTables, steps: Rows, *, rules: Sequence[str] = ()) -> Alignment:
    """Returns which rows of two recordings mean the same.

    Args:
        side: one of them.
        other: the other one.
        steps: pairs of steps.
        rules: `EXPRESSION=PATH`: how modules of the first are called in the second; `AUTO` stands for the rules that
            are proposed.

    Raises:
        ValueError: a rule means no module, or several that are not parts of one.
    """
    places, read, proposed = _pair_by_rules(side, other, rules)
    calls = pair_calls(side, other, places, steps)
    micro = find_micro_batches(side, other, places, steps)
    models = micro.models if micro else (None, None)
    batched = find_batched(side, models[0]), find_batched(other, models[1])
    left = batched[0].leave_out(side), batched[1].leave_out(other)
    ops = pair_ops(*left, places, calls, steps)
    values = pair_values(*left, number_values(*left, places, steps, calls, ops))
    joined = _join_parts(side, other, places, steps, values, micro, batched)
    pairs = to_pairs(values[0], side.values.order)
    permuted, axes = find_permutations(side, other, pairs)
    missing, extra = (
        list_unpaired(
            (side, other)[at],
            (other, side)[at],
            steps[:, [at, 1 - at]],
            (places.partner, places.back)[at],
            calls[at],
            ops[at],
            values[at],
            places.find_split(in_a=at == 0),
            batched[at],
            pair_recomputed((side, other)[at], _find_alone(values[at], joined, in_a=at == 0)),
        )
        for at in (0, 1)
    )
    return Alignment(
        steps=steps,
        modules=tuple(
            (side.names[at], other.names[there])
            for at, there in enumerate(places.partner.tolist())
            if there >= 0
        ),
        calls=to_pairs(calls[0], side.calls.start_ns),
        ops=to_pairs(ops[0], side.ops.order),
        values=pairs,
        permuted=permuted,
        axes=axes,
        joined=joined,
        missing=missing,
        extra=extra,
        rules=tuple(each.text for each in read),
        proposed=tuple(proposed),
    )


def _pair_by_rules(
    side: RunTables, other: RunTables, rules: Sequence[str]
) -> tuple[PlacePairs, Sequence[Rule], Sequence[str]]:
    """Returns the pairs of places, the rules that were used for them, and those that are proposed beyond them."""
    read, leaves = read_rules(rules), read_leaves(side, other)
    places = unpair_containers(side, other, pair_places(side, other, read), leaves, read)
    proposed = propose_rules(side, other, places, leaves)
    if AUTO not in rules:
        return places, read, proposed
    read = (*read, *read_rules(proposed))
    return unpair_containers(side, other, pair_places(side, other, read), leaves, read), read, ()


def _find_alone(partner: Rows, joined: Joined, *, in_a: bool) -> Bools:
    """Returns which rows of `values` of one recording have no partner, and are joined with none."""
    is_alone = partner < 0
    is_alone[np.where(joined.whole_in_a == in_a, joined.whole, joined.part)] = False
    return np.asarray(is_alone)


def _join_parts(
    side: RunTables,
    other: RunTables,
    places: PlacePairs,
    steps: Rows,
    values: Partners,
    micro: MicroBatches | None,
    batched: tuple[Batched, Batched],
) -> Joined:
    """Returns the parts of split modules and of batches, and pairs what the parts and the whole are all given."""
    step = translate(side.values.step, steps)
    found = join_splits(side, other, places.splits, step)
    for each in found:
        at, there = each.pairs[:, 0], each.pairs[:, 1]
        values[0][at], values[1][there] = there, at
    if micro is not None:
        found.append(join_micro_batches(side, other, places, step, micro, batched))
    return collect(found)
