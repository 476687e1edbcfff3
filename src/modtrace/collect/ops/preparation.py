"""Finds the ops between two steps that prepared what the next step's model is given."""

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

from ..steps.step import Step
from ..tensor_ids.tensor_ids import PRODUCER, ROW_WIDTH, STORAGE
from .batches import OpBatch
from .mode import EVENT_WIDTH, OP, USES


def move_prepared(last: Step, step: Step, given: Mapping[int, int]) -> None:
    """Moves the ops that prepared what a step's first call is given, and all after them, to that step.

    They are among the ops that ran outside of all calls at the end of the step before.

    Args:
        last: the step before, to which the ops belong so far.
        step: a step that has begun with a call.
        given: the numbers of the tensors that the call is given, with those of their storages.
    """
    if last is step or any(batch in last.ops for batch in step.ops):
        return
    between = [*takewhile(OpBatch.is_outside, reversed(last.ops))]
    if not between or (step.ops and step.ops[0].start_ns < between[0].start_ns):
        return
    batches = [*step.ops, *between]
    earliest = min(batch.first_tensor for batch in between)
    # One that was seen before these ops has not been written to since: it would be another tensor.
    wanted = {storage for tensor, storage in given.items() if tensor >= earliest and storage >= 0}
    for batch in reversed(step.ops):
        _find_first_maker(batch, wanted, batches)
    found = [(batch, _find_first_maker(batch, wanted, batches)) for batch in between]
    prepared = [at for at, (batch, first) in enumerate(found) if first < len(batch)]
    if not prepared:
        return
    batch, first = found[prepared[-1]]
    moved = [later for later, _ in reversed(found[: prepared[-1]])]
    last.ops = last.ops[: len(last.ops) - len(moved) - 1]
    if first:
        last.ops.append(batch)
        batch = batch.part_at(first)
    step.ops[:0] = [batch, *moved]
    step.start_ns = min(step.start_ns, batch.start_ns)


def _find_first_maker(batch: OpBatch, wanted: set[int], batches: Sequence[OpBatch]) -> int:
    """Returns the first op that has made what is in these storages, or was read for it; the number of ops if none was.

    Args:
        wanted: the storages. Those of what the ops read that have made them are added.
        batches: those in which the tensors that were read may have been seen first.
    """
    storages = batch.tensors[STORAGE::ROW_WIDTH]
    made: dict[int, set[int]] = {}
    for op, storage in zip(batch.tensors[PRODUCER::ROW_WIDTH], storages, strict=True):
        made.setdefault(op, set()).add(storage)
    first = len(batch)
    for at in range(len(batch) - 1, -1, -1):
        event = at * EVENT_WIDTH
        if wanted.isdisjoint(made.get(batch.events[event + OP], ())):
            continue
        first = at
        begin = batch.events[event - EVENT_WIDTH + USES] if at else 0
        wanted |= _storages_of(batches, batch.used[begin : batch.events[event + USES] : 2])
    return first


def _storages_of(batches: Sequence[OpBatch], tensors: Collection[int]) -> set[int]:
    """Returns the storages of those tensors that were first seen in these batches."""
    found = set()
    for batch in batches:
        rows = {number - batch.first_tensor for number in tensors}
        count = len(batch.tensors) // ROW_WIDTH
        found |= {batch.tensors[row * ROW_WIDTH + STORAGE] for row in rows if 0 <= row < count}
    return found
