"""Finds what memory was taken by when there was not enough of it."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ...recording.meta import RUN_ENDED
from ...recording.out_of_memory import is_out_of_memory, requested_bytes
from ...recording.suggestions import count_of
from ..tables.columns import column_of
from ..tables.sampled_steps import SampledSteps
from .alive import (
    ACTIVATIONS,
    BUFFERS,
    EARLIER,
    FLOWING,
    GRADIENTS,
    PARAMETERS,
    STATES,
    Holder,
    OutOfMemory,
    find_out_of_memory,
)
from .check import check
from .failed_call import describe_op, find_raised
from .finding import Finding
from .names import format_size, name_alike
from .places import name_place, place_of_module

#: How many modules, lines and storages are named.
_NAMED = 3

#: The kinds of what lives that belong together, as the same helps against them.
_GROUPS = {
    "activations": (ACTIVATIONS, FLOWING),
    "results of earlier steps": (EARLIER,),
    "parameters, gradients and optimizer states": (PARAMETERS, GRADIENTS, STATES, BUFFERS),
}

_REMEDIES = {
    "activations": "a smaller batch with accumulated gradients, or a narrower dtype (autocast)",
    "results of earlier steps": "keep loss.item() or out.detach() instead of tensors with their graphs",
    "parameters, gradients and optimizer states": "shard them over ranks (FSDP), keep states in fewer bits, or train "
    "fewer parameters; a smaller batch frees none of it",
}
_REMEDY_OF_ONE = (
    "split what the op computes, or give it less (batch, length); for attention scaled_dot_product_attention, which "
    "keeps no scores of length x length"
)

#: How much of a mark is compared with the error that was noted, as both are shortened.
_COMPARED = 200


class _Cause(NamedTuple):
    text: str
    remedy: str


@check("out-of-memory", about="what took the memory when an op could have no more")
def OUT_OF_MEMORY(run: SampledSteps) -> Iterator[Finding]:
    """Finds the op, and what lived: where it ended the run as an error, where the program went on as a note."""
    mark = next((mark for mark in run.data.meta.marks if mark.startswith(RUN_ENDED)), "")
    steps = np.unique(column_of(run.data.table("alive"), "step")).tolist()
    if is_out_of_memory(mark):
        last = find_out_of_memory(run, steps[-1]) if steps else None
        if last is not None and last.error[:_COMPARED] in mark:
            steps.pop()
            yield _describe(run, last)
        else:
            yield _describe_call(run, mark)
    if steps:
        yield _describe_caught(run, find_out_of_memory(run, steps[0]), len(steps) - 1)


def _describe(run: SampledSteps, found: OutOfMemory) -> Finding:
    cause, place = _find_cause(found), place_of_module(run, found.module_id)
    checkpointing = found.checkpointing
    helps = checkpointing is not None and checkpointing.freed_bytes >= found.bytes / 10
    advice = (
        f"checkpoint {name_alike(run.data, checkpointing.modules)}; "
        if checkpointing is not None and helps
        else ""
    )
    is_of_activations = cause.remedy == _REMEDIES["activations"]
    return Finding(
        severity="error",
        text=f"{_name(run, found)} is out of memory in step {found.step}: {cause.text}",
        remedy=(advice if is_of_activations else "") + cause.remedy,
        evidence=tuple(_list_evidence(run, found)),
        root=place.root,
        path=place.path,
        op=None if found.op is None else found.op["name"],
        step=found.step,
    )


def _name(run: SampledSteps, found: OutOfMemory) -> str:
    if found.module_id is not None:
        return place_of_module(run, found.module_id).name
    return "the optimizer" if found.op is not None and found.op["phase"] == "optimizer" else "the program"


def _find_cause(found: OutOfMemory) -> _Cause:
    """Returns what takes most: the op itself, or one kind of what lives."""
    asked = found.requested_bytes or 0
    if asked >= found.bytes:
        return _Cause(
            f"one op asks for {format_size(asked)}, {format_size(found.bytes)} live", _REMEDY_OF_ONE
        )
    sizes = {name: sum(found.by_kind.get(kind, 0) for kind in kinds) for name, kinds in _GROUPS.items()}
    name = max(sizes, key=sizes.__getitem__)
    share = f"{name} take {sizes[name] / found.bytes:.0%} of {format_size(found.bytes)}"
    if 2 * sizes[name] < found.bytes and name != "activations":
        share = f"{format_size(found.bytes)} live, {share}"
    return _Cause(share, _REMEDIES[name])


def _list_evidence(run: SampledSteps, found: OutOfMemory) -> Iterator[str]:
    if found.op is not None:
        asked = (
            "" if found.requested_bytes is None else f"; it asked for {format_size(found.requested_bytes)}"
        )
        yield f"{describe_op(run, found.op)}{asked}"
    yield f"{format_size(found.bytes)} lived: {_join(found.by_kind, len(found.by_kind))}"
    yield f"by module: {_join(found.by_module)}"
    if found.by_line:
        yield f"by line: {_join(found.by_line)}"
    yield f"largest: {'; '.join(map(_describe_holder, found.holders[:_NAMED]))}"
    if found.checkpointing is not None:
        freed, modules = found.checkpointing.freed_bytes, found.checkpointing.modules
        share = f"{format_size(freed)} ({freed / found.bytes:.0%})"
        yield f"checkpointing {name_alike(run.data, modules)} would free {share}"


def _join(sizes: Mapping[str, int], most: int = _NAMED) -> str:
    shown = [f"{name} {format_size(size)}" for name, size in [*sizes.items()][:most]]
    rest = sum([*sizes.values()][most:])
    return ", ".join([*shown, f"others {format_size(rest)}"] if rest else shown)


def _describe_holder(one: Holder) -> str:
    shape = "" if one.shape is None else f" {[*one.shape]} {one.dtype or ''}".rstrip()
    made = f" of {one.kind}" if one.op is None else f" by {one.op}"
    step = f" in step {one.step}" if one.op is not None and one.step is not None else ""
    return (
        f"{format_size(one.bytes)}{shape}{made}, {one.name}{step}{f' ({one.source})' if one.source else ''}"
    )


def _describe_call(run: SampledSteps, mark: str) -> Finding:
    """Returns what is known without ops: which call was running, and how large the process was before."""
    raised, asked = find_raised(run), requested_bytes(mark)
    place = None if raised is None else raised.calls.name(int(raised.calls.where[raised.call]))
    name = "the program" if place is None else name_place(run, place)
    asks = "" if asked is None else f": it asked for {format_size(asked)}"
    where = "" if raised is None else f" in step {raised.step}"
    rows = run.steps.to_pylist()[-2:-1]
    sizes = {
        what: rows[0][column]
        for what, column in (("the process", "resident_bytes"), ("tensors on devices", "device_bytes"))
        if rows and rows[0][column] is not None
    }
    before = (f"when step {rows[0]['step']} had ended: {_join(sizes)}",) if sizes else ()
    return Finding(
        severity="error",
        text=f"{name} is out of memory{where}{asks}",
        remedy="record --ops (ops=True) to learn what took the memory",
        evidence=before,
        root=None if place is None else place.root,
        path=None if place is None else place.path,
        step=None if raised is None else raised.step,
    )


def _describe_caught(run: SampledSteps, found: OutOfMemory, more: int) -> Finding:
    asked = "more memory" if found.requested_bytes is None else format_size(found.requested_bytes)
    further = f" (as in {count_of(more, 'more step')})" if more else ""
    place, cause = place_of_module(run, found.module_id), _find_cause(found)
    return Finding(
        severity="note",
        text=f"step {found.step}: {_name(run, found)} asked for {asked}, more than there was; the program went on"
        + further,
        remedy=cause.remedy,
        evidence=(cause.text,),
        root=place.root,
        path=place.path,
        op=None if found.op is None else found.op["name"],
        step=found.step,
    )
