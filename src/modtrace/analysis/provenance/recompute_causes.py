"""Why an op of a recompute returned something else than in forward."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from ...recording.role import BUFFER, PARAMETER
from ..tables.arguments import compare_arguments
from ..tables.op_rules import RANDOM, is_attention
from ..tables.sites import Site
from .causes_and_remedies import Cause
from .recompute_pairs import UNPAIRED
from .step_flow import StepFlow

Row = Mapping[str, Any]

#: Statistics that agree up to this, relative to the values, differ by rounding (a float32 has 24 bits).
_ROUNDING = 1e-5

#: The cause of what differs in a buffer alone, in none of the numbers that a gradient is computed from.
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
    flow: StepFlow,
    sites: Mapping[int, Site],
    op: int,
    pairs: Mapping[int, int],
    forward: Row,
    recompute: Row,
) -> Cause | None:
    """Returns the cause; None where the recording does not show one.

    Args:
        flow: the ops of the step.
        sites: the sites of the recording, by their ids.
        op: of the recompute.
        pairs: the forward op of each op of a recompute.
        forward: what was measured of its output.
        recompute: the same.
    """
    if _is_random(flow, op):
        return _RANDOM
    if forward["dtype"] != recompute["dtype"]:
        return _AUTOCAST
    return (
        _other_arguments(flow, op, pairs[op])
        or _changed(flow, sites, op, pairs[op])
        or _unpaired(flow, op, pairs)
        or _another_tensor(flow, op, pairs[op])
        or find_cause_of_numbers(forward, recompute)
    )


def find_cause_of_module(type_: str | None, forward: Row, recompute: Row) -> Cause | None:
    """Returns the cause of what a module of this class returned; None where nothing shows one."""
    if type_ is not None and "Dropout" in type_:
        return _RANDOM
    if forward["dtype"] != recompute["dtype"]:
        return _AUTOCAST
    return find_cause_of_numbers(forward, recompute)


def find_cause_of_numbers(forward: Row, recompute: Row) -> Cause | None:
    """Returns rounding as the cause if the numbers differ by no more than that; None otherwise."""
    names = [name for name in ("min", "max", "sumsq") if None not in (forward[name], recompute[name])]
    scale = max((abs(forward[name]) for name in ("min", "max") if forward[name] is not None), default=0.0)
    near = all(
        abs(forward[name] - recompute[name]) <= _ROUNDING * (abs(forward[name]) if name == "sumsq" else scale)
        for name in names
    )
    # And other hashes: elements stand elsewhere.
    is_equal = all(forward[name] == recompute[name] for name in names)
    if not names or not near or is_equal or forward["shape"] != recompute["shape"]:
        return None
    return Cause(
        "rounding",
        "they agree up to rounding: a kernel that adds in another order each time, or another kernel",
        "torch.use_deterministic_algorithms(True)",
    )


def _is_random(flow: StepFlow, op: int) -> bool:
    name = flow.bare_names[op]
    return name in RANDOM or (is_attention(name) and bool(_read_dropout(flow.args[op])))


def _read_dropout(args: str | None) -> float:
    """Returns the dropout probability of an attention op; 0 if its arguments do not contain it."""
    try:
        given = json.loads(args or "{}")
    except ValueError:
        return 0.0
    share = given.get("dropout_p", 0.0) if isinstance(given, dict) else 0.0
    return float(share) if isinstance(share, int | float) else 0.0


def _other_arguments(flow: StepFlow, op: int, forward: int) -> Cause | None:
    """Returns which arguments that are no tensors are others: a number that Python counts or draws."""
    told = compare_arguments(flow.args[forward], flow.args[op])
    if not told:
        return None
    return Cause("other arguments", f"forward and recompute gave it others: {', '.join(told)}", _SAME_WAY)


def _another_tensor(flow: StepFlow, op: int, forward: int) -> Cause | None:
    before = dict(flow.reads.get(forward, ()))
    for slot, tensor in flow.reads.get(op, ()):
        old = before.get(slot)
        if old is None or flow.regions[old].storage == flow.regions[tensor].storage:
            continue
        if flow.find_leaf(old) is not None and flow.find_leaf(tensor) is not None:
            return Cause(
                "another tensor",
                f"`{slot}` is a tensor that no op has made, as one from NumPy, and the recompute made another one",
                "draw it outside of what is recomputed, or by torch, whose random generators a checkpoint restores",
            )
    return None


def _changed(flow: StepFlow, sites: Mapping[int, Site], op: int, forward: int) -> Cause | None:
    """Returns which of its inputs was written to since the forward read it."""
    before = dict(flow.reads.get(forward, ()))
    for slot, tensor in flow.reads.get(op, ()):
        old = before.get(slot)
        if old is None or flow.regions[old].storage is None:
            continue
        is_same_memory = flow.regions[old].storage == flow.regions[tensor].storage
        if is_same_memory and flow.versions[old] != flow.versions[tensor]:
            return _describe_changed(flow, _find_site(flow, sites, tensor), slot, tensor, op, forward)
    return None


def _describe_changed(
    flow: StepFlow, site: Site | None, slot: str, tensor: int, op: int, forward: int
) -> Cause:
    what, name = "input", f"`{slot}`"
    if site is not None and site.role in (BUFFER, PARAMETER):
        what, name = site.role, site.name
    writer = _find_writer(flow, tensor)
    if writer == forward and what == BUFFER:
        readers = [reader for _, made in flow.returns.get(op, ()) for reader in flow.readers.get(made, ())]
        if readers:
            return Cause(
                "changed buffer",
                f"the forward updates the buffer {name}, the recompute updates it once more, and "
                f"{flow.describe_op(readers[0])} reads it",
                "count outside of what is recomputed, or keep what reads it out of the checkpoint",
            )
        return Cause(
            UPDATED_TWICE,
            f"the forward updates the buffer {name}, and the recompute updates it once more",
            "keep this module out of what is recomputed, if its running statistics matter",
        )
    by = f" by {flow.describe_op(writer)}" if writer >= 0 else ""
    return Cause(
        f"changed {what}",
        f"the {what} {name} was written to{by} after the forward had read it",
        "keep a copy of it, or write to it after backward, or keep what writes to it out of the checkpoint",
    )


def _find_writer(flow: StepFlow, tensor: int) -> int:
    """Returns the op that has made what a tensor holds, of which it may be a view; -1 if none of the step has."""
    storage, version = flow.regions[tensor].storage, flow.versions[tensor]

    def is_same(other: int) -> bool:
        return bool(flow.regions[other].storage == storage and flow.versions[other] == version)

    makers = flow.tensors.producer
    made = np.flatnonzero((np.array(flow.versions) == version) & (makers >= 0)).tolist()
    writer = min((int(makers[each]) for each in made if is_same(each)), default=-1)
    is_view = any(is_same(read) for _, read in flow.reads.get(writer, ()))
    return -1 if is_view else writer


def _find_site(flow: StepFlow, sites: Mapping[int, Site], tensor: int) -> Site | None:
    """Returns the site of a tensor, or of what it is a view of."""
    storage = flow.regions[tensor].storage
    known = zip(flow.regions, flow.sites, strict=True)
    found = next((site for region, site in known if site is not None and region.storage == storage), None)
    return None if found is None else sites.get(found)


def _unpaired(flow: StepFlow, op: int, pairs: Mapping[int, int]) -> Cause | None:
    """Returns which op, that its inputs come from, ran in one of the two alone."""
    repeated = set(pairs.values())
    saved = {_identify(flow, tensor) for _, tensor in flow.reads.get(op, ())}
    in_recompute = next(_find_unpaired(flow, op, set(pairs), set()), None)
    in_forward = next(_find_unpaired(flow, pairs[op], repeated, saved), None)
    if in_recompute is not None and _is_random(flow, in_recompute):
        return _RANDOM
    if in_recompute is None and in_forward is None:
        return None
    told = [("recompute", in_recompute), ("forward", in_forward)]
    ran = " and ".join(f"{flow.describe_op(each)} in the {phase}" for phase, each in told if each is not None)
    return Cause(
        "another op",
        f"its input comes from what ran in one of the two alone: {ran}",
        _SAME_WAY,
    )


def _identify(flow: StepFlow, tensor: int) -> tuple[int | None, int]:
    """Returns the memory of a tensor, and its version."""
    return flow.regions[tensor].storage, flow.versions[tensor]


def _find_unpaired(
    flow: StepFlow, op: int, paired: set[int], saved: Collection[tuple[int | None, int]]
) -> Iterator[int]:
    """Yields the ops of the same phase without a pair from which an op reads, through those that never have one.

    What both read is left out: it was made in front of what is recomputed.
    """
    for _, tensor in flow.reads.get(op, ()):
        before = int(flow.tensors.producer[tensor])
        if before < 0 or before in paired or flow.ops.phase[before] != flow.ops.phase[op]:
            continue
        if _identify(flow, tensor) in saved:
            continue
        if flow.bare_names[before] in UNPAIRED:
            yield from _find_unpaired(flow, before, paired, saved)
        else:
            yield before
