"""Describes a region that a backward runs again, and finds the calls that a custom Function made in its forward."""

import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from ...torch_internals.autograd import is_custom_function
from ...torch_internals.checkpoint import is_reentrant_checkpoint
from ..log.segments import CallRef, Segment
from ..log.thread_log import ThreadLog


class Region:
    """One recomputation of a checkpointed region, or one backward of a custom Function that runs modules."""

    __slots__ = ("custom", "is_function", "key", "next_number", "number", "owner", "task")

    def __init__(self, task: int, node: Any, checkpoint: Any, owner: ThreadLog | None) -> None:
        self.task = task
        self.number = node._sequence_nr()  # the node's backward runs the region again
        self.key = id(checkpoint)
        #: Whether the node is itself the region: a reentrant checkpoint, or another custom Function.
        self.custom = checkpoint is None and is_custom_function(node)
        self.is_function = self.custom and not is_reentrant_checkpoint(node)
        self.next_number: float = math.inf  # the number of the next such node whose backward runs modules
        self.owner = owner

    def same_as(self, other: "Region") -> bool:
        """Returns whether two regions are the same recomputation."""
        return (self.task, self.number, self.key) == (other.task, other.number, other.key)


def calls_in_function(region: Region, caller: CallRef | None, modules: Container[int]) -> list[CallRef]:
    """Returns the calls of some modules, at any depth, that a custom Function made in its forward, in order.

    The node is numbered before its forward runs, so the calls in the forward are entered at higher numbers. The end of
    the forward is not known: later calls of the same caller are included, unless they are in a Function whose backward
    has run modules already.

    Args:
        caller: the call that applied the Function; None if it was applied outside of modules.
    """
    found = _calls_inside(region, caller) if caller is not None else _outermost_calls(region)
    return [call for call in found if call.named.module_id in modules]


def find_repeated(segment: Segment, running: nn.Module | None) -> CallRef | None:
    """Returns the call that a custom Function runs again; None if there is more than one candidate.

    Args:
        running: the module one of whose methods makes the call again.
    """
    calls = calls_in_function(segment.region, segment.trigger, {segment.named.module_id})
    if len(calls) > 1 and running is not None:
        calls = [call for call in calls if call.parent is not None and call.parent.context.module is running]
    return calls[0] if len(calls) == 1 else None


def find_all_repeated(group: Sequence[Segment]) -> list[CallRef | None]:
    """Returns, for each segment of `group`, the forward call that one backward of a custom Function ran again.

    The entry is None where several calls are possible. Calls of one module are matched by order: that of the forward or
    its reverse, unless the sequence of modules is the same in both directions.
    """
    modules = [segment.named.module_id for segment in group]
    calls = calls_in_function(group[0].region, group[0].trigger, set(modules))
    ran = [call.named.module_id for call in calls]
    if modules != modules[::-1]:
        if ran[: len(modules)] == modules:
            return list(calls[: len(modules)])
        if ran[::-1] == modules:
            return list(calls[::-1])
    return [segment.repeats for segment in group]


def _calls_inside(region: Region, caller: CallRef) -> Iterator[CallRef]:
    structure = caller.segment.structure()
    begins, ends = structure.enter_event, structure.exit_event[caller.index]
    inside = (begins > begins[caller.index]) & (begins < ends)
    for index in np.flatnonzero(inside & _entered_in(region, caller.segment)).tolist():
        yield CallRef(caller.segment, index)


def _outermost_calls(region: Region) -> Iterator[CallRef]:
    """Yields the outermost calls, except those that this or an earlier backward ran again."""
    for span in region.owner.spans if region.owner is not None else ():
        if isinstance(span, Segment) and span.task != region.task:
            for index in np.flatnonzero(_entered_in(region, span)).tolist():
                yield CallRef(span, index)


def _entered_in(region: Region, segment: Segment) -> npt.NDArray[np.bool_]:
    """Returns, for each call of a segment, whether it began between the numbers of this and the next Function."""
    entered_at = np.asarray(segment.seqs, np.int64)[segment.structure().enter_event]
    entered: npt.NDArray[np.bool_] = (entered_at > region.number) & (entered_at <= region.next_number)
    return entered
