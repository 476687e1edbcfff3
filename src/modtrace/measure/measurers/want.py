"""Describes what to keep of a tensor beyond its usual statistics, and what was measured of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..moments.rows import ArrivingRows, Table
from ..special import shortened

#: What is measured in one pass, named by the field of `Extra` that holds it.
HISTOGRAM, CHANNEL_MAX, SAMPLE, HASH, SKETCH = "histogram", "channel_max", "sample", "hash", "sketch"


class Want(NamedTuple):
    """The union of what the captures that select a tensor ask for."""

    stats: int = 1  # the tier: 0, 1 or 2
    channel_dim: int = -1
    hash: bool = False
    sketch: bool = False
    sample: int = 0
    tensors: bool = False  # whether the tensor is copied at once
    lazy: bool = False  # whether it is copied later, unless it is copied at once
    functions: tuple[Callable[[torch.Tensor], Any], ...] = ()

    @property
    def keeps(self) -> bool:
        """True if the tensor is copied, at once or later."""
        return self.tensors or self.lazy

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
            functions=(
                *self.functions,
                *(function for function in other.functions if function not in self.functions),
            ),
        )


USUAL = Want()


class ExtraNote(NamedTuple):
    """Why something asked for could not be had, or which part of a tensor it is of."""

    text: str
    of: str = ""  # the field of `Extra` that it is about; "": all
    about: Any = None  # of `channel_max` the dimension, of `user` the function


@dataclass(eq=False, slots=True)
class ArrivingResults:
    """Results that a kernel on a device writes into a row. An extra holds them until they have been read."""

    parts: tuple[str, ...]  # the fields of the extra
    want: Want
    read: Callable[[Table], Mapping[str, Any]]  # returns the result of each part, from the row's words
    rows: ArrivingRows
    row: int


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

    def put(self, part: str, result: Any, want: Want) -> None:
        """Stores the result of a part, or what will be read for it; None if there will be none."""
        by_key = getattr(self, part)
        if part == HISTOGRAM and isinstance(result, tuple):
            self.sumabs, self.zero_count, self.sum4, self.argmax, self.histogram = result
        elif not isinstance(by_key, dict):
            setattr(self, part, result)
        elif result is not None:
            by_key[_key_of(part, want)] = result
        else:
            del by_key[_key_of(part, want)]

    def hold(self, arriving: ArrivingResults) -> None:
        """Holds results until they are read, or freed."""
        for part in arriving.parts:
            self.put(part, arriving, arriving.want)
        self.arriving.append(arriving)

    def lose(self, arriving: ArrivingResults) -> None:
        """Forgets results that will not be read. Their row is not freed."""
        for part in arriving.parts:
            self.put(part, None, arriving.want)
        self.arriving.remove(arriving)

    def free(self) -> None:
        """Frees the rows of results that nobody has read."""
        while self.arriving:
            arriving = self.arriving[-1]
            self.lose(arriving)
            arriving.rows.free([arriving.row])

    def note_absence(self, part: str, reason: str, want: Want) -> None:
        """Adds the note that a part of what is wanted could not be had."""
        self.add_note(shortened(f"no {part}: {reason}"), part, _key_of(part, want))

    def add_note(self, text: str | None, of: str = "", about: Any = None) -> None:
        """Adds a note once: the reason why something could not be measured, or the part that was. None adds nothing."""
        note = ExtraNote(text or "", of, about)
        if text and note not in self.notes:
            self.notes += (note,)


def _key_of(part: str, want: Want) -> int | None:
    """Returns which of several results of a part is wanted; None for a part that has one."""
    return want.channel_dim if part == CHANNEL_MAX else want.sample if part == SAMPLE else None
