"""Pairs each op of a recompute with the op of the forward that it repeats."""

from collections import defaultdict

import numpy as np

from ...recording.phase import BACKWARD, FORWARD, PHASES, RECOMPUTE
from ..alignment.sequences import align_sequences
from ..tables.one_step import OneStep
from ..tables.op_rules import UNINITIALIZED

_FORWARD, _BACKWARD, _RECOMPUTE = (PHASES.index(phase) for phase in (FORWARD, BACKWARD, RECOMPUTE))

#: Ops that may run in only one of the two: `detach` for saved tensors, a cast whose result autocast has cached.
UNPAIRED = UNINITIALIZED | {"detach", "to_copy", "alias"}


def pair_ops(step: OneStep) -> dict[int, int]:
    """Returns for each op of a recompute the forward op that it repeats; ops without one are left out.

    The forward may have more ops, as a recompute ends as soon as everything that backward needs is there. A function
    recomputed inside of a module is no call of its own: it ends where backward goes on.
    """
    ops, calls = step.ops, step.calls
    forwards: dict[int, list[int]] = defaultdict(list)  # by call, its forward ops
    #: Recomputed ops by forward call, whether the call itself was recomputed, and a number of the recompute.
    runs: dict[tuple[int, bool, int], list[int]] = defaultdict(list)
    backwards = 0
    for op in step.order.tolist():
        call, phase = int(ops.call[op]), int(ops.phase[op])
        if phase == _BACKWARD:
            backwards += 1
        elif step.bare_names[op] in UNPAIRED:
            continue
        elif phase == _RECOMPUTE:
            origin = int(calls.origin[call]) if call >= 0 else -1
            is_call = call != origin
            runs[origin, is_call, call if is_call else backwards].append(op)
        elif phase == _FORWARD or call < 0:
            forwards[call].append(op)
    pairs: dict[int, int] = {}
    for (origin, is_call, _), run in sorted(runs.items(), key=lambda item: not item[0][1]):
        pairs |= _align(step, forwards.get(origin, []), run, pairs, is_call)
    return pairs


def _align(
    step: OneStep, forward: list[int], run: list[int], known: dict[int, int], is_call: bool
) -> dict[int, int]:
    """Pairs the ops of one recompute with the forward ops of the same names whose inputs agree best."""
    names, wanted = ([int(step.ops.name[op]) for op in ops] for ops in (forward, run))
    starts = [start for start in range(len(names)) if names[start : start + len(wanted)] == wanted]
    if not starts:
        pairs = align_sequences((np.array(names, np.int64), np.array(wanted, np.int64)))
        return {run[row]: forward[forward_row] for forward_row, row in pairs.tolist()}

    def count_agreeing(start: int) -> int:
        """Returns how many ops, paired from `start` on, read what their partners read: memory or paired outputs."""
        pairs = zip(forward[start:], run, strict=False)
        return sum(
            not _origins(step, one, {}).isdisjoint(_origins(step, other, known)) for one, other in pairs
        )

    start = 0 if is_call and not starts[0] else max(starts, key=count_agreeing)
    return dict(zip(run, forward[start:], strict=False))


def _origins(step: OneStep, op: int, known: dict[int, int]) -> set[tuple[str, int]]:
    """Returns the memory and the writing op of each input; for an op of a recompute, its pair counts as the writer."""
    origins = set()
    for _, tensor in step.reads[op]:
        storage, writer = step.regions[tensor].storage, int(step.tensors.producer[tensor])
        if storage is not None:
            origins.add(("storage", storage))
        if writer >= 0:
            origins.add(("op", known.get(writer, writer)))
    return origins
