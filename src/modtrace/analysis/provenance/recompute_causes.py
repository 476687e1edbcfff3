"""Finds out why an op of a recompute returned something else than in forward."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from ...recording.role import BUFFER, PARAMETER
from ..tables.arguments import compare_arguments
from ..tables.one_step import OneStep
from ..tables.op_rules import RANDOM, is_attention
from .causes_and_remedies import Cause
from .recompute_pairs import UNPAIRED

Row = Mapping[str, Any]

#: Statistics that agree within this share of the values differ only by rounding (a float32 has 24 bits).
_ROUNDING = 1e-5

#: The cause of a difference that is only in a buffer, and affects no gradient.
UPDATED_TWICE = "buffer updated twice"

_RANDOM = Cause(
    "random numbers",
    "the recompute drew other random numbers than the forward",
    "checkpoint(..., preserve_rng_state=True), which is the default",
)
_SAME_WAY = (
    "let what is recomputed take the same way each time: no choice by chance, a counter or a global state"
)
_AUTOCAST = Cause(
    "autocast",
    "the dtypes differ: an autocast that was on in one of them was off in the other",
    "enter the autocast inside of what is recomputed, or keep it on during the recompute",
)


def find_cause_of_op(
    step: OneStep, op: int, pairs: Mapping[int, int], forward: Row, recompute: Row
) -> Cause | None:
    """Returns the cause of the difference; None if the recording does not show one.

    Args:
        step: the rows of the step.
        op: the op of the recompute.
        pairs: the forward op of each op of a recompute.
        forward: the measurement of the forward op's output.
        recompute: the measurement of the recomputed op's output.
    """
    if _is_random(step, op):
        return _RANDOM
    if forward["dtype"] != recompute["dtype"]:
        return _AUTOCAST
    return (
        _find_other_arguments(step, op, pairs[op])
        or _find_changed(step, op, pairs[op])
        or _find_unpaired(step, op, pairs)
        or _find_another_tensor(step, op, pairs[op])
        or _find_rounding(forward, recompute)
    )


def find_cause_of_module(type_: str | None, forward: Row, recompute: Row) -> Cause | None:
    """Returns the cause of a difference in the output of a module of class `type_`; None if nothing shows one."""
    if type_ is not None and "Dropout" in type_:
        return _RANDOM
    if forward["dtype"] != recompute["dtype"]:
        return _AUTOCAST
    return _find_rounding(forward, recompute)


def _find_rounding(forward: Row, recompute: Row) -> Cause | None:
    """Returns rounding as the cause if the statistics differ by no more than that; None otherwise."""
    names = [name for name in ("min", "max", "sumsq") if None not in (forward[name], recompute[name])]
    scale = max((abs(forward[name]) for name in ("min", "max") if forward[name] is not None), default=0.0)
    near = all(
        abs(forward[name] - recompute[name]) <= _ROUNDING * (abs(forward[name]) if name == "sumsq" else scale)
        for name in names
    )
    # Equal statistics with unequal hashes mean that elements have moved.
    is_equal = all(forward[name] == recompute[name] for name in names)
    if not names or not near or is_equal or forward["shape"] != recompute["shape"]:
        return None
    return Cause(
        "rounding",
        "they agree up to rounding: a kernel that adds in another order each time, or another kernel",
        "torch.use_deterministic_algorithms(True)",
    )


def _is_random(step: OneStep, op: int) -> bool:
    name = step.bare_names[op]
    dropout = re.search(r'"dropout_p":([\d.]+)', step.op_args[op] or "") if is_attention(name) else None
    return name in RANDOM or (dropout is not None and float(dropout[1]) > 0)


def _find_other_arguments(step: OneStep, op: int, forward: int) -> Cause | None:
    """Returns a cause if arguments other than tensors differ, such as a counter or a random number of Python."""
    others = compare_arguments(step.op_args[forward], step.op_args[op])
    if not others:
        return None
    return Cause("other arguments", f"forward and recompute gave it others: {', '.join(others)}", _SAME_WAY)


def _pair_reads(step: OneStep, op: int, forward: int) -> Iterator[tuple[str, int, int]]:
    """Yields the slots at which both ops read, with the tensors of the forward and of the recompute."""
    before = dict(step.reads[forward])
    reads = step.reads[op]
    return ((slot, before[slot], tensor) for slot, tensor in reads if slot in before)


def _find_another_tensor(step: OneStep, op: int, forward: int) -> Cause | None:
    for slot, old, tensor in _pair_reads(step, op, forward):
        is_other = step.regions[old].storage != step.regions[tensor].storage
        if is_other and step.find_leaf(old) is not None and step.find_leaf(tensor) is not None:
            return Cause(
                "another tensor",
                f"`{slot}` is a tensor that no op has made, as one from NumPy, and the recompute made another one",
                "draw it outside of what is recomputed, or by torch, whose random generators a checkpoint restores",
            )
    return None


def _find_changed(step: OneStep, op: int, forward: int) -> Cause | None:
    """Returns a changed input as the cause if one was written to after the forward had read it."""
    for slot, old, tensor in _pair_reads(step, op, forward):
        (storage, version), (other, other_version) = _identify(step, old), _identify(step, tensor)
        if storage is not None and storage == other and version != other_version:
            return _describe_changed(step, slot, tensor, op, forward)
    return None


def _describe_changed(step: OneStep, slot: str, tensor: int, op: int, forward: int) -> Cause:
    what, name = "input", f"`{slot}`"
    storage = step.tensors.storage  # the parameter or buffer may be read through a view
    known = (step.sites[other] for other in np.flatnonzero(storage == storage[tensor]).tolist())
    site = next((site for site in known if site is not None), None)
    if site is not None and site.role in (BUFFER, PARAMETER):
        what, name = site.role, site.name
    writer = _find_writer(step, tensor)
    if writer == forward and what == BUFFER:
        readers = [reader for _, made in step.returns[op] for reader in step.flow.readers[made].tolist()]
        if readers:
            return Cause(
                "changed buffer",
                f"the forward updates the buffer {name}, the recompute updates it once more, and "
                f"{step.describe_op(readers[0])} reads it",
                "count outside of what is recomputed, or keep what reads it out of the checkpoint",
            )
        return Cause(
            UPDATED_TWICE,
            f"the forward updates the buffer {name}, and the recompute updates it once more",
            "keep this module out of what is recomputed, if its running statistics matter",
        )
    by = f" by {step.describe_op(writer)}" if writer >= 0 else ""
    return Cause(
        f"changed {what}",
        f"the {what} {name} was written to{by} after the forward had read it",
        "keep a copy of it, or write to it after backward, or keep what writes to it out of the checkpoint",
    )


def _find_writer(step: OneStep, tensor: int) -> int:
    """Returns the op that wrote the present contents of a tensor, maybe before a view; -1 if no op of the step did."""
    tensors, held = step.tensors, _identify(step, tensor)
    is_held = (tensors.storage == tensors.storage[tensor]) & (step.versions == step.versions[tensor])
    made = tensors.producer[is_held & (tensors.producer >= 0)]
    if not len(made):
        return -1
    writer = int(made.min())
    is_view = any(_identify(step, read) == held for _, read in step.reads[writer])
    return -1 if is_view else writer


def _identify(step: OneStep, tensor: int) -> tuple[int | None, int]:
    """Returns the storage of a tensor and its version, which together identify its contents."""
    return step.regions[tensor].storage, int(step.versions[tensor])


def _find_unpaired(step: OneStep, op: int, pairs: Mapping[int, int]) -> Cause | None:
    """Returns another op as the cause if the inputs come from an op that ran only in the forward or the recompute."""
    saved = {_identify(step, tensor) for _, tensor in step.reads[op]}
    in_recompute = next(_find_unpaired_inputs(step, op, set(pairs), set()), None)
    in_forward = next(_find_unpaired_inputs(step, pairs[op], set(pairs.values()), saved), None)
    if in_recompute is not None and _is_random(step, in_recompute):
        return _RANDOM
    if in_recompute is None and in_forward is None:
        return None
    phases = [("recompute", in_recompute), ("forward", in_forward)]
    ran = " and ".join(f"{step.describe_op(one)} in the {phase}" for phase, one in phases if one is not None)
    return Cause("another op", f"its input comes from what ran in one of the two alone: {ran}", _SAME_WAY)


def _find_unpaired_inputs(
    step: OneStep, op: int, paired: set[int], saved: Collection[tuple[int | None, int]]
) -> Iterator[int]:
    """Yields the ops of the same phase without pair from which an op reads, maybe through ops that never have one.

    Tensors that both read are left out, because they were made before the recomputed part.
    """
    for _, tensor in step.reads[op]:
        before = int(step.tensors.producer[tensor])
        is_known = before < 0 or before in paired or _identify(step, tensor) in saved
        if is_known or step.ops.phase[before] != step.ops.phase[op]:
            continue
        if step.bare_names[before] in UNPAIRED:
            yield from _find_unpaired_inputs(step, before, paired, saved)
        else:
            yield before
