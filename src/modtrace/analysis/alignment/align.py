"""Aligns two recordings: steps, modules, calls, ops and measured tensors, in this order."""

from collections.abc import Sequence

import numpy as np

from ...recording.protocols import RecordingData
from ..tables.chosen_step import find_step, find_step_kinds, no_step
from ..tables.columns import Bools, Partners, Rows, to_pairs
from ..tables.run import RunTables, read_run_tables
from .both import Runs, for_both, translate
from .calls import pair_calls, pair_steps
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
from .unpaired import Paired, list_unpaired, pair_recomputed
from .values import find_permutations, number_values, pair_values


def align(
    a: RecordingData,
    b: RecordingData,
    *,
    rules: Sequence[str] = (),
    step: int | str | None = None,
    step_b: int | str | None = None,
) -> Alignment:
    """Returns which rows of two recordings correspond; see `align_tables`."""
    return align_tables(*read_both(a, b, step=step, step_b=step_b), rules=rules)


def read_both(
    a: RecordingData, b: RecordingData, *, step: int | str | None = None, step_b: int | str | None = None
) -> tuple[RunTables, RunTables, Rows]:
    """Returns two recordings, or the same one twice, and the pairs of their steps.

    Args:
        a: a recording.
        b: another one, or the same.
        step: the only step of `a` to compare, as `find_step` takes it; None for all steps.
        step_b: the step of `b` to compare with it; None for the one of the same number.

    Raises:
        ValueError: there is no such step.
    """
    chosen = None
    if step is not None:
        other = step if step_b is None else step_b
        chosen = _choose_step(a, step, "first"), _choose_step(b, other, "second")
    steps, of_a, of_b = pair_steps(a, b, chosen)
    return read_run_tables(a, of_a), read_run_tables(b, of_b), steps


def _choose_step(data: RecordingData, asked: int | str, which: str) -> int:
    try:
        number, known = find_step(data, asked), sorted(find_step_kinds(data))
        if number not in known:
            raise no_step(asked, known)
    except ValueError as error:
        raise ValueError(f"step={asked!r} of the {which} recording: {error}") from None
    return number


def align_tables(side: RunTables, other: RunTables, steps: Rows, *, rules: Sequence[str] = ()) -> Alignment:
    """Returns which rows of two recordings correspond.

    Args:
        side: the tables of one recording.
        other: the tables of the other recording.
        steps: pairs of steps.
        rules: how modules of the first recording are called in the second, as `EXPRESSION=PATH`; `AUTO` stands for the
            proposed rules.

    Raises:
        ValueError: a rule matches no module, or several modules that are not parts of one.
    """
    runs = side, other
    places, read, proposed = _pair_by_rules(runs, rules)
    calls = pair_calls(runs, places, steps)
    micro = find_micro_batches(runs, places, steps)
    batched = for_both(find_batched, runs, micro.models if micro else (None, None))
    left = for_both(Batched.leave_out, batched, runs)
    ops = pair_ops(left, places, calls, steps)
    values = pair_values(left, number_values(left, places, steps, calls, ops))
    joined = _join_parts(runs, places, steps, values, micro, batched)
    pairs = to_pairs(values[0], side.values.order)
    permuted, axes = find_permutations(runs, pairs)
    sides = for_both(
        Paired,
        runs,
        runs[::-1],
        (steps, steps[:, ::-1]),
        (places.partner, places.back),
        calls,
        ops,
        values,
        (places.find_split(in_a=True), places.find_split(in_a=False)),
        batched,
    )
    alone = for_both(lambda partner, in_a: _find_alone(partner, joined, in_a=in_a), values, (True, False))
    missing, extra = for_both(list_unpaired, sides, for_both(pair_recomputed, runs, alone))
    return Alignment(
        steps=steps,
        modules=tuple(
            (side.names[place], other.names[partner])
            for place, partner in enumerate(places.partner.tolist())
            if partner >= 0
        ),
        calls=to_pairs(calls[0], side.calls.start_ns),
        ops=to_pairs(ops[0], side.ops.order),
        values=pairs,
        permuted=permuted,
        axes=axes,
        joined=joined,
        missing=missing,
        extra=extra,
        rules=tuple(rule.text for rule in read),
        proposed=tuple(proposed),
    )


def _pair_by_rules(runs: Runs, rules: Sequence[str]) -> tuple[PlacePairs, Sequence[Rule], Sequence[str]]:
    """Returns the pairs of places, the rules that were applied to find them, and the rules that are only proposed."""
    read, leaves = read_rules(rules), read_leaves(runs)
    places = unpair_containers(runs, pair_places(runs, read), leaves, read)
    proposed = propose_rules(runs, places, leaves)
    if AUTO not in rules:
        return places, read, proposed
    read = (*read, *read_rules(proposed))
    return unpair_containers(runs, pair_places(runs, read), leaves, read), read, ()


def _find_alone(partner: Rows, joined: Joined, *, in_a: bool) -> Bools:
    """Returns which rows of `values` of one recording have no partner and are not joined with a row of the other."""
    is_alone = partner < 0
    is_alone[np.where(joined.whole_in_a == in_a, joined.whole, joined.part)] = False
    return np.asarray(is_alone)


def _join_parts(
    runs: Runs,
    places: PlacePairs,
    steps: Rows,
    values: Partners,
    micro: MicroBatches | None,
    batched: tuple[Batched, Batched],
) -> Joined:
    """Returns the parts of split modules and batches, and pairs the tensors that a whole and its parts are given."""
    step = translate(runs[0].values.step, steps), runs[1].values.step
    groups = []
    for joined, pairs in join_splits(runs, places.splits, step):
        rows, partners = pairs.T
        values[0][rows], values[1][partners] = partners, rows
        groups.append(joined)
    if micro is not None:
        groups.append(join_micro_batches(runs, places, step, micro, batched)[0])
    return collect(groups)
