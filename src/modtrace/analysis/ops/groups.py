"""Groups the ops of steps: by module, by call, or by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from ..tables.columns import Column, Rows, count_before, find_rows
from ..tables.ops import StepOps
from ..tables.placement import NO_PLACE_NAMES, PlaceName
from .alike import find_alike
from .sums import find_medians_of_sums, sum_by

GroupedBy = Literal["module", "op", "call"]
GROUPED_BY: tuple[GroupedBy, ...] = get_args(GroupedBy)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The properties that all ops of a group have in common."""

    name: str  # the path, `path@1` for a second call, or the op's name
    place: PlaceName | None = None  # None for a group by name
    call: int | None = None  # in a group by call: its number among the module's calls in the step
    call_step: int | None = (
        None  # in a group by call: the step of its forward; of several steps, for the last one
    )
    allocated_bytes: int | None = None  # what its calls allocate without inner calls; None if unknown
    busiest: PlaceName | None = None  # in a group by name: the module in which most time was spent
    busiest_ns: int = 0
    count: int = 1  # for how many equal modules it stands


@dataclass(frozen=True)
class Grouping:
    """The groups of ops, and the group of each op."""

    of_op: Rows
    groups: Sequence[Group]


def group_ops(ops: StepOps, by: GroupedBy, *, fold: bool = False) -> Grouping:
    """Returns the groups of ops by module, call or name; each group has at least one op.

    Args:
        ops: the ops.
        by: what they are grouped by.
        fold: whether modules that count up, and whose ops are as many, with as many floating-point operations and
            bytes, are one group.

    Raises:
        ValueError: `by` is none of these.
    """
    if by not in GROUPED_BY:
        raise ValueError(f"by={by!r}: give one of {', '.join(map(repr, GROUPED_BY))}")
    return _fold(ops, _GROUPERS[by](ops)) if fold else _GROUPERS[by](ops)


def _fold(ops: StepOps, grouping: Grouping) -> Grouping:
    """Returns fewer groups: those of modules that repeat are one, with the path `blocks.0..31.attn`."""
    places = [group.place or PlaceName("") for group in grouping.groups]
    costs = (np.ones(len(ops), np.int64), ops.flops, ops.bytes_read, ops.bytes_written)
    sums = [sum_by(grouping.of_op, cost, len(places)).tolist() for cost in costs]
    own = zip(places, grouping.groups, *sums, strict=True)
    likes = [(place.type, group.call, group.call_step, *numbers) for place, group, *numbers in own]
    folded_of, groups = np.zeros(len(places), np.int64), list[Group]()
    for path, rows in find_alike([(place.root, place.path) for place in places], likes):
        folded_of[rows] = len(groups)
        first, place = grouping.groups[rows[0]], places[rows[0]]
        if len(rows) > 1 and path is not None:
            sizes = [grouping.groups[row].allocated_bytes for row in rows]
            known = [size for size in sizes if size is not None]
            place = place._replace(name=path, path=path)
            first = replace(
                first,
                name=place.name_call(first.call),
                place=place,
                allocated_bytes=sum(known) if len(known) == len(sizes) else None,
                count=len(rows),
            )
        groups.append(first)
    return Grouping(folded_of[grouping.of_op], groups)


def _by_module(ops: StepOps) -> Grouping:
    distinct, of_op = np.unique(ops.where, return_inverse=True)
    allocated = _sum_allocated(ops, ops.calls.where, distinct)
    places = map(ops.calls.name, distinct.tolist())
    groups = [
        Group(name=place.name, place=place, allocated_bytes=size)
        for place, size in zip(places, allocated, strict=True)
    ]
    return Grouping(of_op, groups)


def _by_call(ops: StepOps) -> Grouping:
    """Returns groups by place and forward call; a wrapper's call and that of the wrapped module are one.

    Calls of several steps with the same number are one.
    """
    calls = ops.calls
    of_call, first, steps_ago = _number_forward_calls(ops)
    keys = np.where(ops.call >= 0, of_call[ops.call], ops.where) if len(of_call) else ops.where
    distinct, of_op = np.unique(keys, return_inverse=True)
    allocated = _sum_allocated(ops, of_call, distinct)
    nth, last = calls.nth, ops.step.step if ops.step else 0
    groups = []
    for key, size in zip(distinct.tolist(), allocated, strict=True):
        if key < 0:
            groups.append(Group(name=NO_PLACE_NAMES[key], place=calls.name(key), allocated_bytes=size))
            continue
        call = first[key]
        place, origin = calls.name(int(calls.where[call])), calls.origin[call]
        number = int(nth[origin]) if nth[origin] >= 0 else None
        groups.append(
            Group(
                name=place.name_call(number),
                place=place,
                call=number,
                call_step=last - int(steps_ago[call]),
                allocated_bytes=size,
            )
        )
    return Grouping(of_op, groups)


def _number_forward_calls(ops: StepOps) -> tuple[Rows, Rows, Column]:
    """Returns for each call the group of its forward call, for each group one of its calls, and how old forwards are.

    A call outside of the module tree has the negative code of its place instead. The age of the forward of a call is
    the number of steps since then.
    """
    calls = ops.calls
    step, origin, nth = calls.column("step"), calls.origin, calls.nth
    now = np.where(calls.in_step, step, ops.step.step if ops.step else 0)
    steps_ago = now - step[origin] if len(calls) else now
    # Calls without number are told apart by their order in the step.
    keys = np.stack([calls.where, steps_ago, nth[origin]]) if len(calls) else np.empty((3, 0), np.int64)
    unnumbered = np.flatnonzero((nth < 0) & (origin == np.arange(len(calls))))
    order = np.zeros(len(calls), np.int64)
    _, in_order = np.unique(np.stack([calls.where, step])[:, unnumbered], axis=1, return_inverse=True)
    order[unnumbered] = count_before(in_order.reshape(-1))
    in_tree = np.flatnonzero(calls.where >= 0)
    _, first, number = np.unique(
        np.vstack([keys, order[origin]])[:, in_tree], axis=1, return_index=True, return_inverse=True
    )
    of_call = calls.where.copy()
    of_call[in_tree] = number.reshape(-1)
    return of_call, in_tree[first], steps_ago


def _by_op(ops: StepOps) -> Grouping:
    """Returns groups by name. The busiest module is the one with the most time, or the first of several."""
    distinct, of_op = np.unique(ops.name, return_inverse=True)
    places, of_place = np.unique(ops.where, return_inverse=True)
    pairs, of_pair = np.unique(of_op * len(places) + of_place, return_inverse=True)
    shape = len(pairs), len(ops.steps.numbers)
    time_ns = find_medians_of_sums(of_pair, ops.in_step, ops.duration_ns, shape)
    by_place = np.full((len(distinct), len(places)), -1, np.int64)
    by_place.flat[pairs] = time_ns
    busiest = by_place.argmax(axis=1) if len(distinct) else of_op
    groups = [
        Group(
            name=ops.names[name],
            busiest=ops.calls.name(int(places[place])),
            busiest_ns=int(by_place[row, place]),
        )
        for row, (name, place) in enumerate(zip(distinct.tolist(), busiest.tolist(), strict=True))
    ]
    return Grouping(of_op, groups)


_GROUPERS: Mapping[GroupedBy, Callable[[StepOps], Grouping]] = {
    "module": _by_module,
    "op": _by_op,
    "call": _by_call,
}


def _sum_allocated(ops: StepOps, of_call: Rows, wanted: Rows) -> list[int | None]:
    """Returns for each group the bytes that its calls allocated themselves; None if one of them is not known."""
    calls, allocated = ops.calls, ops.calls.column("allocated_bytes")
    own, known = allocated.copy(), allocated >= 0
    inside = np.flatnonzero(calls.parent >= 0)
    np.subtract.at(own, calls.parent[inside], allocated[inside])
    np.logical_and.at(known, calls.parent[inside], known[inside].copy())
    is_shown = calls.in_step if ops.only_phase is None else calls.in_step & (calls.phase == ops.only_phase)
    rows = np.flatnonzero(is_shown & np.isin(of_call, wanted))
    group = np.searchsorted(wanted, of_call[rows])
    counts = np.bincount(group, minlength=len(wanted))
    unknown = np.bincount(group[~known[rows]], minlength=len(wanted))
    is_known = (counts > 0) & (unknown == 0)
    step = find_rows(ops.steps.numbers, calls.column("step")[rows])
    total = find_medians_of_sums(group, step, own[rows], (len(wanted), len(ops.steps.numbers))).tolist()
    return [size if known else None for size, known in zip(total, is_known.tolist(), strict=True)]
