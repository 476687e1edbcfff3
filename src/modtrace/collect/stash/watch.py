"""Hooks on tensors, and the calls that wait for gradients there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...torch_internals import is_dynamo_compiling
from ..log.segments import CallRef
from ..structures.rebuild import GradientTree


class Returned:
    """What one call has returned, without its tensors."""

    __slots__ = ("arrived", "bases", "call", "registered", "tree", "watches")

    def __init__(self, call: CallRef, registered: Any, tree: GradientTree, watches: tuple[int, ...]) -> None:
        self.call = call
        self.registered = registered  # of whoever is told
        self.tree = tree
        self.watches = watches  # the numbers of those at its tensors, each once
        self.bases: dict[int, int] = {}  # by place among these: of those at what a tensor is a view of
        #: By place: the graph task in which a gradient came last, if it has such.
        self.arrived: dict[int, int] = {}


class Arriving:
    """The gradients for one call in one backward, as far as they have come."""

    __slots__ = ("gradients", "position", "returned", "waiting")

    def __init__(self, returned: Returned, waiting: set[int], position: int) -> None:
        self.returned = returned
        self.gradients: list[Any] = [None] * len(returned.watches)
        self.waiting = waiting  # for which of them
        self.position = position  # where it is to be told: its first gradient came before those told since


class Entry(NamedTuple):
    """A gradient that a call waits for."""

    returned: Returned
    place: int  # among its gradients
    shape: torch.Size | None = None  # of a view whose base is watched


class Watch:
    """A hook on a tensor: hears of its gradient for all calls that have returned it."""

    __slots__ = ("__weakref__", "_arrived", "entries", "handle", "number", "told")

    __torch_unserializable__ = True  # torch.save warns of hooks that do not say so (torch.utils.hooks, 2.13)

    def __init__(self, number: int, arrived: "Callable[[Watch, Any], None]") -> None:
        self.number = number
        self.entries: list[Entry] = []  # the first call first
        self.told = 0  # of how many of them a backward has told
        self.handle: Any = None
        self._arrived: Callable[[Watch, Any], None] | None = arrived

    def is_of(self, arrived: "Callable[[Watch, Any], None]") -> bool:
        """Whether this is what it calls."""
        return self._arrived == arrived

    def remove(self) -> None:
        """Takes it off; what the graph keeps of it is empty."""
        self._arrived = None
        self.entries = []
        if self.handle is not None:
            self.handle.remove()

    def __call__(self, gradient: Any) -> None:
        if self._arrived is not None and not is_dynamo_compiling():
            self._arrived(self, gradient)
