"""Finds the forward call that a recomputed call repeats, while it runs."""

import math
from types import FrameType

from ...recording.phase import BACKWARD, RECOMPUTE
from ...torch_internals.autograd import ACCUMULATE_SEQUENCE_NR, current_node, is_custom_function
from ...torch_internals.call_frames import caller_of_module, running_module
from ...torch_internals.checkpoint import checkpoint_being_recomputed, is_repeating_forward
from ..log.segments import CallRef, Segment
from ..log.thread_log import ThreadLog
from .region import Region, calls_in_function, find_repeated
from .watcher import BackwardWatcher


def classify(segment: Segment, log: ThreadLog, backwards: BackwardWatcher, frame: FrameType | None) -> None:
    """Decides whether a module call inside a running backward is a recompute, or a custom Function's own work."""
    node = current_node()
    segment.phase = RECOMPUTE
    if node is None:
        return
    number = node._sequence_nr()
    checkpoint = checkpoint_being_recomputed(frame)
    if checkpoint is None and not is_custom_function(node):
        segment.phase = BACKWARD  # a user's hook calls the module
    owner = backwards.owner(log, segment.task, node) if number != ACCUMULATE_SEQUENCE_NR else None
    region = segment.region = _find_region(Region(segment.task, node, checkpoint, owner), log)
    if owner is not None:
        span = owner.span_of(number)
        if span is not None:
            segment.trigger = span.call_at(number)
        else:
            segment.trigger = backwards.recomputed_by(owner, backwards.running(log, segment.task), number)
    segment.trigger_seq = number
    if region.is_function and not calls_in_function(region, segment.trigger, {segment.named.module_id}):
        segment.phase = BACKWARD


def _find_region(region: Region, log: ThreadLog) -> Region:
    """Returns the region of the thread's last call if it equals `region`, else `region`."""
    before = (span.region for span in reversed(log.spans) if isinstance(span, Segment))
    last: Region | None = next(before, None)
    if last is not None and region.same_as(last):
        return last
    while last is not None and (last.task != region.task or last.number <= region.number):
        last = next(before, None)
    # The engine runs nodes in descending order, so the last node with a higher number is the nearest.
    region.next_number = math.inf if last is None else last.number
    return region


def find_around(segment: Segment, log: ThreadLog, frame: FrameType | None) -> None:
    """Finds the call that a segment repeats, and the call that encloses it or its custom Function.

    The search runs while the segment runs, so the repeated call is set only where it is certain.
    """
    named = segment.named
    segment.around = call = segment.trigger
    if segment.phase != RECOMPUTE:
        return
    if segment.region is not None and segment.region.is_function:
        segment.repeats = find_repeated(segment, running_module(caller_of_module(frame)))
        segment.around = call if segment.repeats is None else _around_call(segment.repeats)
        return
    caller = caller_of_module(frame)
    repeated = running_module(caller)  # the checkpoint is of this module, or inside it
    while call is not None:
        if repeated is None and call.named is named:
            segment.around, segment.repeats = _around_call(call), call
            return
        children = [child for child in _children(call) if child.named is named]
        if children and (repeated is None or call.context.module is repeated):
            segment.around = call
            rank = _rank_in_region(segment, log)
            if len(children) == 1:
                segment.repeats = children[0]
            elif rank < len(children) and is_repeating_forward(caller):
                segment.repeats = children[rank]
            return
        call = _around_call(call)


def _rank_in_region(segment: Segment, log: ThreadLog) -> int:
    """Returns how many outermost calls of the module the running recomputation has made before this one."""
    rank = 0
    for span in reversed(log.spans):
        if not isinstance(span, Segment) or span.region is None or span.region is not segment.region:
            break
        rank += span.named is segment.named
    return rank


def original_of(call: CallRef) -> CallRef | None:
    """Returns the forward call that a recomputed call repeats; None until that is certain."""
    segment, original = call.segment, call.segment.repeats
    for index in _way_to(call):
        if original is None:
            return None
        twins = [
            child for child in _children(CallRef(segment, segment.parent_of(index))) if _is_of(child, index)
        ]
        alike = [child for child in _children(original) if _is_of(child, index, segment)]
        rank = [twin.index for twin in twins].index(index)
        original = alike[rank] if rank < len(alike) else None
    if original is not None and original.segment.phase == RECOMPUTE:
        return original_of(original)
    return original


def _way_to(call: CallRef) -> list[int]:
    """Returns the indices of the calls around a call, below the segment's outermost call, and of the call itself."""
    way: list[int] = []
    index = call.index
    while index > 0:
        way.append(index)
        index = call.segment.parent_of(index)
    return way[::-1]


def _children(call: CallRef) -> list[CallRef]:
    return [CallRef(call.segment, at) for at in call.segment.children_of(call.index)]


def _is_of(call: CallRef, index: int, segment: Segment | None = None) -> bool:
    """Returns whether a call has the module of the call `index` in `segment`, or in its own segment by default."""
    return call.named is (segment or call.segment).context_of(index).named


def _around_call(call: CallRef) -> CallRef | None:
    """Returns the enclosing call; for the outermost call of a recompute, the call that encloses the repeated one."""
    return call.parent or call.segment.around
