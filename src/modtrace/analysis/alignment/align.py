"""Aligns two recordings: steps, modules, calls, ops and measured tensors, in this order."""

from collections.abc import Sequence

from ...recording.protocols import RecordingData
from ..step.calls import Rows
from ..step.chosen_step import find_step
from .calls import pair_calls, translate
from .contract import Alignment, Joined
from .joins import collect, join_splits
from .keys import to_pairs
from .modules import PlacePairs, pair_places
from .ops import pair_ops
from .permutations import find_permutations
from .proposals import propose_rules
from .rules import AUTO, read_rules
from .sides import Side, read_side
from .steps import pair_steps
from .unpaired import list_unpaired
from .values import Partners, number_values, pair_values


def align(
    a: RecordingData,
    b: RecordingData,
    *,
    rules: Sequence[str] = (),
    step: int | str | None = None,
    step_b: int | str | None = None,
) -> Alignment:
    """Returns which rows of two recordings mean the same.

    Args:
        a: a recording.
        b: another one, or the same.
        rules: `EXPRESSION=PATH`: how modules of `a` are called in `b`; `AUTO` stands for the rules that are proposed.
        step: the only step of `a` to compare, as `find_step` takes it; None: all.
        step_b: that of `b`; None: the same as of `a`.

    Raises:
        ValueError: there is no such step; a rule means no module, or several that are not parts of one.
    """
    chosen = None if step is None else (find_step(a, step), find_step(b, step if step_b is None else step_b))
    steps, of_a, of_b = pair_steps(a, b, chosen)
    side, other = read_side(a, of_a), read_side(b, of_b)
    read = read_rules(rules)
    places = pair_places(side, other, read)
    proposed = propose_rules(side, other, places)
    if AUTO in rules:
        read, proposed = (*read, *read_rules(proposed)), ()
        places = pair_places(side, other, read)
    calls = pair_calls(side, other, places, steps)
    ops = pair_ops(side, other, calls, steps)
    values = pair_values(side, other, number_values(side, other, places, steps, calls, ops))
    joined = _join(side, other, places, steps, values)
    pairs = to_pairs(values[0], side.values.order)
    permuted, axes = find_permutations(side, other, pairs)
    return Alignment(
        steps=steps,
        modules=tuple(
            (side.names[at], other.names[there])
            for at, there in enumerate(places.partner.tolist())
            if there >= 0
        ),
        calls=to_pairs(calls[0], side.calls.calls.start_ns),
        ops=to_pairs(ops[0], side.ops.order),
        values=pairs,
        permuted=permuted,
        axes=axes,
        joined=joined,
        missing=list_unpaired(
            side, steps[:, 0], places.partner, calls[0], ops[0], values[0], places.find_split(in_a=True)
        ),
        extra=list_unpaired(
            other, steps[:, 1], places.back, calls[1], ops[1], values[1], places.find_split(in_a=False)
        ),
        rules=tuple(each.text for each in read),
        proposed=proposed,
    )


def _join(side: Side, other: Side, places: PlacePairs, steps: Rows, values: Partners) -> Joined:
    """Returns the parts of split modules, and pairs what the parts and the whole are all given."""
    found = join_splits(side, other, places.splits, translate(side.values.step, steps))
    for each in found:
        at, there = each.pairs[:, 0], each.pairs[:, 1]
        values[0][at], values[1][there] = there, at
    return collect(found)
