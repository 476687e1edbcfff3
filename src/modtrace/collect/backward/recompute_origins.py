"""Finds the forward calls that recomputed calls repeated, once their whole region has run."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from ...recording.phase import FORWARD, RECOMPUTE
from ..log.segments import CallRef, Segment
from .region import Region, find_all_repeated

#: For each call of a segment, in order, the forward call that it repeats; None if it is not known.
Origins = list[CallRef | None]


def origins_of(segments: Iterable[Segment]) -> dict[Segment, Origins]:
    """Maps recomputed segments, given in the order in which they ran, to the forward calls that their calls repeat."""
    found: dict[Segment, Origins] = {}
    for group in _by_region(segments):
        for segment, top in zip(group, _tops(group), strict=True):
            found[segment] = [_forward_of(origin, found) for origin in _inside(segment, top)]
    return found


def _forward_of(origin: CallRef | None, found: dict[Segment, Origins]) -> CallRef | None:
    """Returns the forward call behind an original that is itself recomputed; earlier segments are in `found`."""
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
    """Returns the forward calls that the outermost calls of one recomputation repeat."""
    region = group[0].region
    wanted = [segment.named.module_id for segment in group]
    if region is None:
        return [None] * len(group)
    if region.is_function:
        return find_all_repeated(group)
    if region.custom:
        candidates = list(_after_function(region, group[0].trigger))[: len(wanted)]
        if [call.named.module_id for call in candidates] == wanted:
            return list(candidates)
        return [None] * len(group)
    matches = [match for match in _around(group[0], wanted) if match is not None]
    return list(matches[0]) if len(matches) == 1 else [None] * len(group)


def _after_function(region: Region, caller: CallRef | None) -> Iterator[CallRef]:
    """Yields the calls directly below `caller` that ran in or after the custom Function.

    The node is numbered before its forward runs, so the calls in the forward are entered at higher numbers.
    """
    if region.owner is None:
        return
    if caller is None:
        for span in region.owner.spans:
            is_after = span.first_seq > region.number and span.last_seq is not None
            # The calls that are being recomputed now are left out.
            if isinstance(span, Segment) and is_after and span.region is not region:
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
    """Yields possible matches of the recomputed modules with the calls around the node that requested the recompute.

    Backward runs in descending order, so that node lies in the last call of the region that saved a tensor.
    """
    inner = first.trigger
    if inner is None or inner.segment.last_seq is None:
        return
    caller: CallRef | None = inner
    inside: int | None = None  # the child of `caller` whose forward made the node
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
    """Returns consecutive calls whose modules are `wanted`, or None if there are none among `calls`.

    The result includes the call at position `at`, if possible as the last one.
    """
    modules = [call.named.module_id for call in calls]
    for last in range(at, min(at + len(wanted), len(calls))):
        start = last - len(wanted) + 1
        if start >= 0 and modules[start : last + 1] == wanted:
            return list(calls[start : last + 1])
    return None


def _align_segments(segment: Segment, wanted: list[int]) -> Origins | None:
    """Aligns outermost calls as `_align` does, for checkpoints that the script itself calls."""
    spans = [
        span for span in segment.log.spans if isinstance(span, Segment) and span.phase in (FORWARD, RECOMPUTE)
    ]
    spans = [span for span in spans if span.last_seq is not None and span.phase == segment.phase]
    if segment not in spans:
        return None
    return _align([CallRef(span, 0) for span in spans], wanted, spans.index(segment))


def _inside(segment: Segment, top: CallRef | None) -> Origins:
    """Returns the forward calls that all calls of a segment repeat, below the repeated call `top`.

    The k-th call of a module below a parent repeats the k-th call of that module below the parent's original.
    """
    origins: Origins = [top]
    if top is None or top.segment.last_seq is None:
        return [top] + [None] * (segment.calls - 1)
    originals = {place: index for index, place in enumerate(_places(top.segment))}
    for parent, module, rank in islice(_places(segment), 1, None):
        above = origins[parent]
        found = None if above is None else originals.get((above.index, module, rank))
        origins.append(None if found is None else CallRef(top.segment, found))
    return origins


def _places(segment: Segment) -> Iterator[tuple[int, int, int]]:
    """Yields for each call its parent, its module, and its rank among the calls of that module below the parent."""
    contexts: Any = segment.log.all_contexts
    entered = segment.contexts[segment.structure().enter_event].tolist()
    ranks: dict[tuple[int, int], int] = {}
    for parent, number in zip(segment.structure().parent.tolist(), entered, strict=True):
        module = contexts[number].named.module_id
        rank = ranks[parent, module] = ranks.get((parent, module), -1) + 1
        yield parent, module, rank
