"""Hooks on tensors, and the calls that wait for gradients there."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...torch_internals.dynamo import is_dynamo_compiling
from ..log.segments import CallRef, InsideCall
from ..structures.rebuild import GradientTree

#: In place of a watch's number: the gradient comes from inside of compiled code, and nothing says whether it will.
COMES_PERHAPS = -1


@dataclass(eq=False, slots=True)
class Returned:
    """The output of one call, without its tensors."""

    call: CallRef | InsideCall
    registered: Any  # passed on with the gradients
    tree: GradientTree
    watches: tuple[int, ...]  # the number of each watched tensor, without repeats
    #: By index in `watches`: the number of the watch on the tensor's base.
    bases: dict[int, int] = field(default_factory=dict)
    #: By index in `watches`, where there is a base: the graph task that brought the last gradient.
    arrived: dict[int, int] = field(default_factory=dict)


class Arriving:
    """The gradients for one call in one backward, as far as they have arrived."""

    __slots__ = ("gradients", "position", "returned", "waiting")

    def __init__(self, returned: Returned, waiting: set[int], position: int) -> None:
        self.returned = returned
        self.gradients: list[Any] = [None] * len(returned.watches)
        self.waiting = waiting  # indices of gradients that have not arrived
        self.position = position  # among the stashes, when its first gradient arrived


class Entry(NamedTuple):
    """A gradient that a call waits for."""

    returned: Returned
    place: int  # index among its gradients
    shape: torch.Size | None = None  # of a view whose base is watched


class Watch:
    """A hook on a tensor, which receives its gradient for all calls that returned it."""

    __slots__ = ("__weakref__", "_arrived", "entries", "handle", "number", "told")

    __torch_unserializable__ = True  # torch.save warns of hooks that do not say so (torch.utils.hooks, 2.13)

    def __init__(self, number: int, arrived: "Callable[[Watch, Any], None]") -> None:
        self.number = number
        self.entries: list[Entry] = []  # in the order of the calls
        self.told = 0  # how many of the entries have received a gradient
        self.handle: Any = None
        self._arrived: Callable[[Watch, Any], None] | None = arrived

    def is_of(self, arrived: "Callable[[Watch, Any], None]") -> bool:
        """Returns whether this watch calls `arrived`."""
        return self._arrived == arrived

    def remove(self) -> None:
        """Removes the hook; the graph may keep the empty watch."""
        self._arrived = None
        self.entries = []
        if self.handle is not None:
            self.handle.remove()

    def __call__(self, gradient: Any) -> None:
        if self._arrived is not None and not is_dynamo_compiling():
            self._arrived(self, gradient)
