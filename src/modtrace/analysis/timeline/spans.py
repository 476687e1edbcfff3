"""Defines spans as measured, with their details, and joins spans of several kinds."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from ..tables.columns import Column, Rows, join_columns, repeat

# The kinds of lanes.
STEPS = "steps"
OUTSIDE = "outside of modules"  # ops without a call, or at another time than their call
DEVICE = "device"  # spans with device times, which belong to no thread
#: The kinds of lanes from top to bottom, within each thread.
LANE_KINDS = (STEPS, FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER, OUTSIDE, DEVICE)


@dataclass(frozen=True, eq=False)
class Detail:
    """A detail of spans, with one value for each span; -1 or False for a span without."""

    name: str
    values: Column
    dictionary: tuple[str, ...] | None = None  # the texts that the values are codes of

    def nothing(self, count: int) -> "Detail":
        """Returns the same detail for `count` spans, all without a value."""
        values = repeat(False, count, np.bool_) if self.values.dtype == bool else repeat(-1, count)
        return Detail(self.name, values, None if self.dictionary is None else ())

    def take(self, rows: Rows) -> "Detail":
        """Returns the detail for a selection of the spans."""
        return Detail(self.name, self.values[rows], self.dictionary)


#: The names of the details that are asked for; None for all.
Wanted = Collection[str] | None


def choose_details(details: Iterable[Detail], wanted: Wanted) -> tuple[Detail, ...]:
    """Returns the wanted ones of details that are made one by one."""
    return tuple(detail for detail in details if wanted is None or detail.name in wanted)


@dataclass(frozen=True, kw_only=True, eq=False)
class SpanRows:
    """Spans as they were measured, before they are arranged in lanes."""

    name: Detail
    step: Column
    thread: Column  # -1 for a span of no thread
    lane: Column  # codes of LANE_KINDS
    start_ns: Column
    end_ns: Column
    ended: Column  # whether the end was seen; if not, `end_ns` has no meaning
    parent: Rows  # the row of the span around; -1 for none
    row_id: Column  # the id of the call, op or step
    details: tuple[Detail, ...]

    def __len__(self) -> int:
        return len(self.start_ns)

    def on_device(self, start_ns: Column, end_ns: Column) -> "SpanRows":
        """Returns spans in the lane of devices, with other times; those with a negative time are left out."""
        rows = np.flatnonzero((start_ns >= 0) & (end_ns >= 0))
        no = np.full(len(rows), -1, np.int64)
        return SpanRows(
            name=self.name.take(rows),
            step=self.step[rows],
            thread=no,
            lane=np.full(len(rows), LANE_KINDS.index(DEVICE)),
            start_ns=start_ns[rows],
            end_ns=end_ns[rows],
            ended=np.ones(len(rows), bool),
            parent=no,
            row_id=self.row_id[rows],
            details=tuple(detail.take(rows) for detail in self.details),
        )


def join_rows(parts: Sequence[SpanRows], parents: Sequence[int]) -> SpanRows:
    """Joins the spans of all parts.

    Args:
        parts: the spans of each kind.
        parents: for each part, the index of the part that contains its parents.
    """
    firsts = [0, *accumulate(len(part) for part in parts)]
    parent = [
        np.where(parent_of.parent < 0, -1, parent_of.parent + firsts[part])
        for parent_of, part in zip(parts, parents, strict=True)
    ]
    return SpanRows(
        name=_join([part.name for part in parts]),
        details=tuple(_join_details(parts)),
        **join_columns(parts) | {"parent": np.concatenate(parent)},
    )


def _join_details(parts: Sequence[SpanRows]) -> list[Detail]:
    """Returns each detail for the spans of all parts; spans of parts without it have no value."""
    like = {detail.name: detail for part in parts for detail in part.details}
    by_name = [{detail.name: detail for detail in part.details} for part in parts]
    return [
        _join(
            [known.get(name) or column.nothing(len(part)) for known, part in zip(by_name, parts, strict=True)]
        )
        for name, column in like.items()
    ]


def _join(details: Sequence[Detail]) -> Detail:
    """Returns one detail with the concatenated values of several."""
    if details[0].dictionary is None:
        return Detail(details[0].name, np.concatenate([detail.values for detail in details]))
    dictionary: list[str] = []
    values = []
    for detail in details:
        values.append(np.where(detail.values < 0, -1, detail.values + len(dictionary)))
        dictionary += detail.dictionary or ()
    return Detail(details[0].name, np.concatenate(values), tuple(dictionary))
