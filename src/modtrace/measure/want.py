"""Describes what to keep of a tensor beyond its usual statistics, and what was measured of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


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


class _Referable:
    """Lets weak references refer to a dataclass with slots. (`weakref_slot` came with Python 3.11.)"""

    __slots__ = ("__weakref__",)


@dataclass(eq=False, slots=True)
class Extra(_Referable):
    """The extra results for one tensor. A result is None if it was not wanted or could not be computed.

    A result that was measured on another device is a tensor there until its step is written (`torch.Tensor` below).
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

    def add_note(self, text: str | None, of: str = "", about: Any = None) -> None:
        """Adds a note once: the reason why something could not be measured, or the part that was. None adds nothing."""
        note = ExtraNote(text or "", of, about)
        if text and note not in self.notes:
            self.notes += (note,)
