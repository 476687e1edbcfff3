"""Holds measurements until their step is written, in few objects to spare the garbage collector, which visits each."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar

import torch

from ...measure.measurers.measurer import Measurement
from ...measure.moments.rows import COUNTS, Rows
from ...recording.module_path import join
from ...recording.role import ROLES
from ...torch_internals.tensors import base_of
from ..backward.graph_walk import base_made_in
from ..log.call_context import CallContext
from ..log.nesting import Ints
from ..log.segments import Segment
from .capture_masks import ROLE_CODES, Asked, Mask
from .gradient_taps import GradientTap

#: Measurements and their sites in one flat list, `width` entries for each; a tuple for each would be one more object.
Sites = list[Any]


class HasSites:
    """Holds measurements, each with its site."""

    __slots__ = ()

    width: ClassVar[int]  # the number of entries for each site, the first of which is the measurement
    sites: Sites
    intervals: Sequence[int]  # when measuring took place: start_ns, end_ns, start_ns, ...

    def row_numbers(self) -> "tuple[Rows, list[int]] | None":
        """Returns where there are measurements without a site, and the numbers of their rows; None: there are none."""
        return None

    def forget(self) -> None:
        """Drops all measurements."""
        self.sites.clear()


class MeasuredOutputs(HasSites):
    """The measurements of the arguments and outputs of one segment's calls."""

    width = 4  # the number of entries: measurement, event, slot and mark

    __slots__ = ("active", "intervals", "known", "segment", "sites", "taps", "thread")

    def __init__(self, segment: Segment, active: Mask) -> None:
        self.segment = segment
        self.active = active  # the captures that may want the segment's step
        self.thread: int = segment.log.number
        self.sites: Sites = []
        self.intervals: list[int] = []
        self.known: dict[int, GradientTap] = {}  # by id of the tensor, while the segment runs
        self.taps: list[GradientTap] = []  # all taps with a hook

    def close(self) -> None:
        """Drops the references to tensors, since the segment has ended."""
        for tap in self.known.values():
            tap.ref = None
        self.known = {}


@dataclass(eq=False, slots=True)
class SeenCall:
    """The call whose tensors are being measured."""

    measured: MeasuredOutputs
    event: int
    context: CallContext
    asked: Asked
    #: The number of the first node that it can have made itself; -1 if calls inside made some, None as it begins.
    first_seq: int | None

    def name(self, slot: str) -> str:
        """Returns the name under which a whole tensor is stored."""
        return name_of_tensor(self.context.path, self.asked.mark, slot)

    def base_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the base of a view that the call returns; see `base_made_in`."""
        segment, first_seq = self.measured.segment, self.first_seq
        if first_seq is None or base_of(tensor) is None:
            return None
        call = segment.call_after(self.event - 1) if first_seq < 0 else None
        first_seq = first_seq if call is None else call.first_seq
        return None if first_seq < 0 else base_made_in(segment, first_seq, tensor)


def name_of_tensor(path: str, mark: int, slot: str) -> str:
    """Returns the name under which a whole tensor of the module at this path is stored."""
    return join(path, ROLES[mark & ROLE_CODES] + slot)


class MeasuredGradients(HasSites):
    """The measurements of the gradients that one backward computed."""

    width = 2  # the number of entries: measurement and tap

    __slots__ = ("intervals", "last", "release", "sites", "thread", "written")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.sites: Sites = []
        self.intervals: list[int] = []
        self.release: Callable[[], None] | None = (
            None  # removes hooks that were registered again for this backward
        )
        #: The last measured gradient with its version and its measurement, in one object because a backward on two
        #: devices runs on two threads.
        self.last: tuple[weakref.ref[torch.Tensor], int | None, Measurement] | None = None
        self.written: set[tuple[int, int]] | None = None  # see `written_bases`; None until they are computed

    def close(self) -> None:
        """Drops references and removes hooks, since the backward has ended."""
        self.last = self.written = None
        release, self.release = self.release, None
        if release is not None:
            release()

    def find(self, gradient: torch.Tensor, version: int | None) -> Measurement | None:
        """Returns the last measurement if it is of this tensor, and the tensor was not written to since."""
        last = self.last
        if last is None or version is None or version != last[1] or last[0]() is not gradient:
            return None
        return last[2]


class _MeasuredInPhase(HasSites):
    """The measurements of one phase that belong to no call of a segment."""

    width = 5

    __slots__ = ("active", "intervals", "phase", "sites", "thread")

    def __init__(self, thread: int, phase: str, active: Mask) -> None:
        self.thread = thread
        self.phase = phase
        self.active = active  # the captures that may want the step
        self.sites: Sites = []
        self.intervals: list[int] = []


class MeasuredInside(_MeasuredInPhase):
    """The measurements inside of compiled code, in one segment or in one backward.

    An entry consists of a measurement, its module (`NamedModule`), call (`InsideCall` or None), slot and mark.
    """

    __slots__ = ()


class MeasuredParameters(_MeasuredInPhase):
    """The measurements, at one moment, of parameters, of their gradients, states and updates, or of buffers.

    An entry consists of a measurement, role, slot, owner (`NamedModule`, or None without a module) and captures.
    """

    __slots__ = ()


def not_measured(note: str | None) -> Measurement:
    """Returns the measurement of a tensor that could not be read; the note gives the reason."""
    nothing = Measurement(None, -1, (), None, note)
    nothing.start_ns = time.perf_counter_ns()
    return nothing


Measured = MeasuredOutputs | MeasuredGradients | MeasuredInside | MeasuredParameters


@dataclass(eq=False, slots=True)
class PlainRows:
    """Measurements that C has made of plain tensors in main memory, as columns: an object for each takes longer."""

    rows: Rows
    row: Ints
    start_ns: Ints
    kind: Ints  # positions in `kinds`
    kinds: Sequence[tuple[Any, ...]]  # shape, dtype, note, and two that such tensors have not

    def __len__(self) -> int:
        return len(self.row)

    def at(self, places: Sequence[int]) -> "PlainRows":
        """Returns the measurements at these places."""
        return replace(self, row=self.row[places], start_ns=self.start_ns[places], kind=self.kind[places])


def columns_of(sites: Sites, width: int) -> list[list[Any]]:
    """Returns the sites as columns, even while another thread adds sites."""
    kept = sites[:]
    return [kept[at::width] for at in range(width)]


def free_rows(measured: Iterable[HasSites]) -> None:
    """Frees the rows of measurements that have been written or are not wanted."""
    given = list(measured)
    taken = list(_rows_of(given))
    for some in given:
        for extra in map(_EXTRA, some.sites[:: some.width]):
            if extra is not None:
                extra.free()
        some.forget()
    for rows, numbers in taken:
        rows.free(numbers)


def are_finite(measured: Iterable[HasSites]) -> bool:
    """Returns whether no measured tensor has NaN or infinite elements, according to the counts that were measured."""
    return not any(rows.read(numbers)[:, COUNTS].any() for rows, numbers in _rows_of(measured))


def _rows_of(measured: Iterable[HasSites]) -> Iterator[tuple[Rows, list[int]]]:
    """Yields each `Rows` that holds statistics of these measurements, with the numbers of the rows used, each once."""
    given = list(measured)
    samples = list(chain.from_iterable(some.sites[:: some.width] for some in given))
    found = [(rows, numbers) for rows, _, numbers in group_by_rows(samples)]
    found += [plain for some in given if (plain := some.row_numbers()) is not None]
    for rows in dict.fromkeys(rows for rows, _ in found):
        numbers = chain.from_iterable(numbers for other, numbers in found if other is rows)
        yield rows, list(dict.fromkeys(numbers))


def group_by_rows(samples: Sequence[Measurement]) -> Iterator[tuple[Rows, Sequence[int], Sequence[int]]]:
    """Yields each `Rows`, most often one, with the places of its samples and the numbers of their rows."""
    owners = list(map(_OWNER, samples))
    numbers = list(map(_NUMBER, samples))
    for rows in dict.fromkeys(owners):
        if rows is not None and owners.count(rows) == len(owners):
            yield rows, range(len(owners)), numbers
        elif rows is not None:
            here = [at for at, owner in enumerate(owners) if owner is rows]
            yield rows, here, [numbers[at] for at in here]


#: They read attributes without a frame of Python, in 30 ns each.
_OWNER, _NUMBER, _EXTRA = attrgetter("rows"), attrgetter("row"), attrgetter("extra")
