"""Pairs each op of a recompute with the op of the forward that it repeats."""

from collections import defaultdict

import numpy as np

from ...recording.phase import BACKWARD, FORWARD, PHASES, RECOMPUTE
from ..alignment.sequences import align_sequences
from ..tables.op_rules import UNINITIALIZED
from .step_flow import StepFlow

_FORWARD, _BACKWARD, _RECOMPUTE = (PHASES.index(each) for each in (FORWARD, BACKWARD, RECOMPUTE))

#: They may run in one of the two alone: `detach` for what is saved, a cast that autocast has kept from before.
UNPAIRED = UNINITIALIZED | {"detach", "to_copy", "alias"}


def pair_ops(flow: StepFlow) -> dict[int, int]:
    """Returns the forward op of each op of a recompute that has one.

    The forward may have more ops: a recompute ends as soon as all that backward needs is there.
    """
    forwards, runs = _split_by_call(flow)
    pairs: dict[int, int] = {}
    for origin, is_call, number in sorted(runs, key=lambda run: not run[1]):
        pairs |= _align(flow, forwards.get(origin, []), runs[origin, is_call, number], pairs, is_call)
    return pairs


Run = tuple[int, bool, int]  # the forward call; whether the call itself was recomputed; a number


def _split_by_call(flow: StepFlow) -> tuple[dict[int, list[int]], dict[Run, list[int]]]:
    """Returns the ops of each forward call, and of each time that some of them were recomputed.

    A function that is recomputed inside of a module is no call of its own: it ends where backward goes on.
    """
    ops, placed = flow.ops, flow.ops.placed
    forwards: dict[int, list[int]] = defaultdict(list)
    runs: dict[Run, list[int]] = defaultdict(list)
    backwards = 0
    for op in flow.order:
        call, phase = int(ops.call[op]), int(ops.phase[op])
        if phase == _BACKWARD:
            backwards += 1
        elif flow.bare_names[op] in UNPAIRED:
            continue
        elif phase == _RECOMPUTE:
            origin = int(placed.origin[call]) if call >= 0 else -1
            is_call = call != origin
            runs[origin, is_call, call if is_call else backwards].append(op)
        elif phase == _FORWARD or call < 0:
            forwards[call].append(op)
    return forwards, runs


def _align(
    flow: StepFlow, forward: list[int], run: list[int], known: dict[int, int], is_call: bool
) -> dict[int, int]:
    """Pairs the ops of one run with the forward ops of the same names whose inputs agree best."""
    names, wanted = ([int(flow.ops.name[op]) for op in ops] for ops in (forward, run))
    starts = [at for at in range(len(names)) if names[at : at + len(wanted)] == wanted]
    if starts:
        is_whole = is_call and not starts[0]
        at = 0 if is_whole else max(starts, key=lambda at: _count_agreeing(flow, forward[at:], run, known))
        return dict(zip(run, forward[at:], strict=False))
    pairs = align_sequences((np.array(names, np.int64), np.array(wanted, np.int64)))
    return {run[there]: forward[at] for at, there in pairs.tolist()}


def _count_agreeing(flow: StepFlow, forward: list[int], run: list[int], known: dict[int, int]) -> int:
    """Returns how many ops read what their pair reads: memory that was saved, or what a pair of ops has returned."""
    pairs = zip(forward, run, strict=False)
    return sum(bool(_origins(flow, one, {}) & _origins(flow, other, known)) for one, other in pairs)


def _origins(flow: StepFlow, op: int, known: dict[int, int]) -> set[tuple[str, int]]:
    """Returns where the inputs of an op come from: memory, and the op that wrote it, of a recompute its pair."""
    read = [tensor for _, tensor in flow.reads.get(op, ())]
    memory = {
        ("storage", storage) for tensor in read if (storage := flow.regions[tensor].storage) is not None
    }
    writers = (int(flow.tensors.producer[tensor]) for tensor in read)
    return memory | {("op", known.get(writer, writer)) for writer in writers if writer >= 0}
