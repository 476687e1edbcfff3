"""Describes what to keep of a tensor beyond its usual statistics, and what was measured of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..moments.rows import ArrivingRows, Table
from ..notes import shortened

#: What is measured in one pass, named by the field of `Extra` that holds it.
HISTOGRAM, CHANNEL_MAX, SAMPLE, HASH, SKETCH = "histogram", "channel_max", "sample", "hash", "sketch"


class Want(NamedTuple):
    """The union of what the captures that select a tensor ask for."""

    stats: int = 1  # the tier: 0, 1 or 2
    channel_dim: int = -1
    hash: bool = False
    sketch: bool = False
    sample: int = 0
    tensors: bool = False  # a copy at once ...
    lazy: bool = False  # ... or later; a copy at once is wanted more
    functions: tuple[Callable[[torch.Tensor], Any], ...] = ()

    def __or__(self, other: "Want") -> "Want":
        """Returns the union of this and `other`."""
        return Want(
            stats=max(self.stats, other.stats),
            channel_dim=other.channel_dim if self.stats < 2 <= other.stats else self.channel_dim,
            hash=self.hash or other.hash,
            sketch=self.sketch or other.sketch,
            sample=max(self.sample, other.sample),
            tensors=self.tensors or other.tensors,
            lazy=self.lazy or other.lazy,
            functions=(*self.functions, *(each for each in other.functions if each not in self.functions)),
        )


USUAL = Want()


class ExtraNote(NamedTuple):
    """Why something asked for could not be had, or which part of a tensor it is of."""

    text: str
    of: str = ""  # the field of `Extra` that it is about; "": all
    about: Any = None  # of `channel_max` the dimension, of `user` the function


class ArrivingResults(ABC):
    """Results that a kernel on a device writes into a row. An extra holds them until they have been read."""

    __slots__ = ("parts", "row", "rows")

    def __init__(self, parts: tuple[str, ...]) -> None:
        self.parts = parts  # the fields of the extra

    def place(self, rows: ArrivingRows, row: int) -> None:
        """Sets the row that the kernel is going to write."""
        self.rows, self.row = rows, row

    @abstractmethod
    def hold(self, extra: "Extra") -> None:
        """Stands in the fields of the extra, which are not missing any more."""

    @abstractmethod
    def put(self, extra: "Extra", row: Table) -> None:
        """Puts the results into the extra, from the row's words."""

    @abstractmethod
    def lose(self, extra: "Extra") -> None:
        """Empties the fields of the extra: there will be no results."""


class _Referable:
    """Lets weak references refer to a dataclass with slots. (`weakref_slot` came with Python 3.11.)"""

    __slots__ = ("__weakref__",)


@dataclass(eq=False, slots=True)
class Extra(_Referable):
    """The extra results for one tensor. A result is None if it was not wanted or could not be computed.

    A result that was measured on another device is a tensor there until its step is written (`torch.Tensor` below), or
    arrives in a row.
    """

    sumabs: float | torch.Tensor | None = None
    zero_count: int | torch.Tensor | None = None
    sum4: float | torch.Tensor | None = None
    argmax: int | torch.Tensor | None = None  # flat, row-major
    #: float32[channels], by dimension: sites that share a tensor may differ.
    channel_max: dict[int, Any] = field(default_factory=dict)
    histogram: Any = None  # int64[256]
    sample: dict[int, Any] = field(default_factory=dict)  # float32[...], by how many were asked for
    hash: int | torch.Tensor | None = None  # 64 bits
    sketch: Any = None  # float64[64]
    #: Functions of the user's, and what they returned.
    user: list[tuple[Callable[[torch.Tensor], Any], Any]] = field(default_factory=list)
    blob: str | None = None  # where it lies
    notes: tuple[ExtraNote, ...] = ()
    arriving: list[ArrivingResults] = field(default_factory=list)

    def hold(self, arriving: ArrivingResults) -> None:
        """Holds results until they are read, or freed."""
        arriving.hold(self)
        self.arriving.append(arriving)

    def lose(self, arriving: ArrivingResults) -> None:
        """Forgets results that will not be read. Their row is not freed."""
        arriving.lose(self)
        self.arriving.remove(arriving)

    def free(self) -> None:
        """Frees the rows of results that nobody has read."""
        while self.arriving:
            arriving = self.arriving[-1]
            self.lose(arriving)
            arriving.rows.free([arriving.row])

    def note_absence(self, part: str, reason: str, want: Want) -> None:
        """Adds the note that a part of what is wanted could not be had."""
        about = want.channel_dim if part == CHANNEL_MAX else want.sample if part == SAMPLE else None
        self.add_note(shortened(f"no {part}: {reason}"), part, about)

    def add_note(self, text: str | None, of: str = "", about: Any = None) -> None:
        """Adds a note once: the reason why something could not be measured, or the part that was. None adds nothing."""
        note = ExtraNote(text or "", of, about)
        if text and note not in self.notes:
            self.notes += (note,)
