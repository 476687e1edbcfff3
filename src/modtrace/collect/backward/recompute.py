"""Which forward call a recomputed call repeats."""

import math
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from ...recording.phase import BACKWARD, FORWARD, RECOMPUTE
from ...torch_internals import (
    ACCUMULATE_SEQUENCE_NR,
    caller_of_module,
    checkpoint_being_recomputed,
    current_node,
    is_custom_function,
    is_reentrant_checkpoint,
    is_repeating_forward,
    running_module,
)
from ..log.segments import CallRef, Segment
from .function_calls import calls_in_function, find_all_repeated, find_repeated

if TYPE_CHECKING:
    from ..log.thread_log import ThreadLog
    from .watcher import BackwardWatcher

#: For each call of a segment, in order: the forward call it repeats, None if that cannot be known.
Origins = list[CallRef | None]


class Region:
    """A checkpointed region being recomputed: all outermost calls of one recomputation share one."""

    __slots__ = ("custom", "is_function", "key", "next_number", "number", "owner", "task")

    def __init__(self, task: int, node: Any, checkpoint: Any, owner: "ThreadLog | None") -> None:
        self.task = task
        self.number = node._sequence_nr()  # of the node whose backward asks for it
        self.key = id(checkpoint)
        #: The node is itself the region: a reentrant checkpoint, or another custom Function.
        self.custom = checkpoint is None and is_custom_function(node)
        self.is_function = self.custom and not is_reentrant_checkpoint(node)
        self.next_number: float = math.inf  # of the next such node that runs modules in its backward
        self.owner = owner

    def same_as(self, other: "Region | None") -> bool:
        """Whether it is the very same recomputation."""
        return other is not None and (self.task, self.number, self.key) == (
            other.task,
            other.number,
            other.key,
        )


def classify(
    segment: Segment, log: "ThreadLog", backwards: "BackwardWatcher", frame: FrameType | None
) -> None:
    """Says what a module call inside a running backward is: a recompute, or a custom Function's own work."""
    node = current_node()
    segment.phase = RECOMPUTE
    if node is None:
        return
    number = node._sequence_nr()
    checkpoint = checkpoint_being_recomputed(frame)
    if checkpoint is None and not is_custom_function(node):
        segment.phase = BACKWARD  # a hook of the user's calls it
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


def _find_region(region: Region, log: "ThreadLog") -> Region:
    """The region itself, or the very same one that the last call belongs to."""
    before = (span.region for span in reversed(log.spans) if isinstance(span, Segment))
    last: Region | None = next(before, None)
    if last is not None and region.same_as(last):
        return last
    while last is not None and (last.task != region.task or last.number <= region.number):
        last = next(before, None)
    # The engine runs nodes in descending order, so the last one that is higher is the lowest of them.
    region.next_number = math.inf if last is None else last.number
    return region


def find_around(segment: Segment, log: "ThreadLog", frame: FrameType | None) -> None:
    """Finds the call around the one that is repeated, or whose custom Function works; and the repeated one.

    Done while it runs, so the repeated one is known only where that is certain.
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
    repeated = running_module(caller)  # whose `forward`, or a function in it, the checkpoint runs again
    while call is not None:
        if repeated is None and call.place.named is named:
            segment.around, segment.repeats = _around_call(call), call
            return
        children = [each for each in _children(call) if each.place.named is named]
        if children and (repeated is None or call.place.module is repeated):
            segment.around = call
            rank = _rank_in_region(segment, log)
            if len(children) == 1:
                segment.repeats = children[0]
            elif rank < len(children) and is_repeating_forward(caller):
                segment.repeats = children[rank]
            return
        call = _around_call(call)


def _rank_in_region(segment: Segment, log: "ThreadLog") -> int:
    """How many outermost calls of its module the running recomputation has had before."""
    rank = 0
    for span in reversed(log.spans):
        if not isinstance(span, Segment) or span.region is None or span.region is not segment.region:
            break
        rank += span.named is segment.named
    return rank


def original_of(call: CallRef) -> CallRef | None:
    """The forward call that a call of a recompute repeats, as far as it is known while it runs."""
    segment, original = call.segment, call.segment.repeats
    for index in _way_to(call):
        if original is None:
            return None
        twins = [
            each for each in _children(CallRef(segment, segment.parent_of(index))) if _is_of(each, index)
        ]
        alike = [each for each in _children(original) if _is_of(each, index, segment)]
        rank = [each.index for each in twins].index(index)
        original = alike[rank] if rank < len(alike) else None
    if original is not None and original.segment.phase == RECOMPUTE:
        return original_of(original)
    return original


def _way_to(call: CallRef) -> list[int]:
    """The calls that lead from the outermost one of its segment to it, without that one."""
    way: list[int] = []
    index = call.index
    while index > 0:
        way.append(index)
        index = call.segment.parent_of(index)
    return way[::-1]


def _children(call: CallRef) -> list[CallRef]:
    return [CallRef(call.segment, at) for at in call.segment.children_of(call.index)]


def _is_of(call: CallRef, index: int, segment: Segment | None = None) -> bool:
    """Whether a call is of the same module as another one, of its own segment or of the one given."""
    return call.place.named is (segment or call.segment).place_of(index).named


def _around_call(call: CallRef) -> CallRef | None:
    """The call around one, across the begin of a recompute."""
    return call.parent or call.segment.around


def origins_of(segments: Iterable[Segment]) -> dict[Segment, Origins]:
    """The originals of recomputed segments, which come in the order in which they ran."""
    found: dict[Segment, Origins] = {}
    for group in _by_region(segments):
        for segment, top in zip(group, _tops(group), strict=True):
            found[segment] = [_forward_of(origin, found) for origin in _inside(segment, top)]
    return found


def _forward_of(origin: CallRef | None, found: dict[Segment, Origins]) -> CallRef | None:
    """A recompute of a recompute repeats the same forward call; what ran earlier is found already."""
    if origin is None or origin.segment.phase != RECOMPUTE:
        return origin
    earlier = found.get(origin.segment)
    return None if earlier is None else earlier[origin.index]


def _by_region(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    group: list[Segment] = []
    for segment in segments:
        if group and (segment.region is None or segment.region is not group[-1].region):
            yield group
            group = []
        group.append(segment)
    if group:
        yield group


def _tops(group: list[Segment]) -> Origins:
    """The originals of the outermost calls of one recomputation."""
    region = group[0].region
    wanted = [segment.named.module_id for segment in group]
    if region is None:
        return [None] * len(group)
    if region.is_function:
        return find_all_repeated(group)
    if region.custom:
        candidates = list(_after_function(region, group[0].trigger))[: len(wanted)]
        if [_module_id(call) for call in candidates] == wanted:
            return list(candidates)
        return [None] * len(group)
    matches = [match for match in _around(group[0], wanted) if match is not None]
    return list(matches[0]) if len(matches) == 1 else [None] * len(group)


def _after_function(region: Region, caller: CallRef | None) -> Iterator[CallRef]:
    """The calls directly below `caller` from the custom Function on.

    Its node is numbered before its forward runs, so what runs in it is entered at a higher number.
    """
    if region.owner is None:
        return
    if caller is None:
        for span in region.owner.spans:
            is_after = span.first_seq > region.number and span.last_seq is not None
            if (
                isinstance(span, Segment) and is_after and span.region is not region
            ):  # not what is recomputed now
                yield CallRef(span, 0)
        return
    segment = caller.segment
    structure = segment.structure()
    children = np.flatnonzero(structure.parent == caller.index)
    if segment.last_seq is not None:
        entered_at = segment.seqs[structure.enter_event[children]]
        for child in children[entered_at > region.number].tolist():
            yield CallRef(segment, child)


def _around(first: Segment, wanted: list[int]) -> Iterator[Origins | None]:
    """Where the recomputed sequence of modules stands among the calls around the node that asked for it.

    Backward runs in descending order, so that node lies in the last call of the region that saved anything.
    """
    inner = first.trigger
    if inner is None or inner.segment.last_seq is None:
        return
    caller: CallRef | None = inner
    inside: int | None = None  # the child of `caller` that the node lies in
    while caller is not None:
        segment = caller.segment
        structure = segment.structure()
        children = np.flatnonzero(structure.parent == caller.index)
        if inside is None:
            began = segment.seqs[structure.enter_event[children]] <= first.trigger_seq
            at = int(np.count_nonzero(began)) - 1
        else:
            at = int(np.searchsorted(children, inside))
        calls = [CallRef(segment, child) for child in children.tolist()]
        yield _align(calls, wanted, at)
        inside = caller.index
        caller = caller.parent
    yield _align_segments(inner.segment, wanted)


def _align(calls: list[CallRef], wanted: list[int], at: int) -> Origins | None:
    """The run of `wanted` modules among `calls` that covers the one at `at`, as its last if it can be."""
    modules = [_module_id(call) for call in calls]
    for last in range(at, min(at + len(wanted), len(calls))):
        start = last - len(wanted) + 1
        if start >= 0 and modules[start : last + 1] == wanted:
            return list(calls[start : last + 1])
    return None


def _align_segments(segment: Segment, wanted: list[int]) -> Origins | None:
    """The same among outermost calls, for checkpoints that the script itself calls."""
    spans = [
        span for span in segment.log.spans if isinstance(span, Segment) and span.phase in (FORWARD, RECOMPUTE)
    ]
    spans = [span for span in spans if span.last_seq is not None and span.phase == segment.phase]
    if segment not in spans:
        return None
    return _align([CallRef(span, 0) for span in spans], wanted, spans.index(segment))


def _inside(segment: Segment, top: CallRef | None) -> Origins:
    """The originals of all calls of a segment: the k-th of a module below the original of its parent."""
    origins: Origins = [top]
    if top is None or top.segment.last_seq is None:
        return [top] + [None] * (segment.calls - 1)
    originals = _by_rank(top.segment)
    ranks: dict[tuple[int, int], int] = {}
    modules = _module_ids(segment)
    for index, parent in enumerate(segment.structure().parent.tolist()[1:], start=1):
        above = origins[parent]
        rank = ranks[parent, modules[index]] = ranks.get((parent, modules[index]), -1) + 1
        found = None if above is None else originals.get((above.index, modules[index], rank))
        origins.append(None if found is None else CallRef(top.segment, found))
    return origins


def _by_rank(segment: Segment) -> dict[tuple[int, int, int], int]:
    """The calls of a segment by (parent, module, k-th of it there)."""
    ranks: dict[tuple[int, int], int] = {}
    found = {}
    modules = _module_ids(segment)
    for index, parent in enumerate(segment.structure().parent.tolist()):
        rank = ranks[parent, modules[index]] = ranks.get((parent, modules[index]), -1) + 1
        found[parent, modules[index], rank] = index
    return found


def _module_ids(segment: Segment) -> list[int]:
    places: Any = segment.log.all_places
    entered = segment.places[segment.structure().enter_event].tolist()
    return [places[place].named.module_id for place in entered]


def _module_id(call: CallRef) -> int:
    assert call.place.named is not None
    return call.place.named.module_id
