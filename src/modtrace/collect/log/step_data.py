"""Finds the calls that prepared the data of a step: modules without parameters that run before its model."""

import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ...torch_internals.call_frames import call_arguments, is_in_data_loader
from ...torch_internals.modes import DisableTorchFunction
from ..structures.find import find_slots
from .segments import Segment

#: Weak references without callbacks to storages.
Storages = tuple["weakref.ref[Any]", ...]


class Handover:
    """The storages that an outermost call was given and has returned."""

    __slots__ = ("given", "in_loader", "made")

    def __init__(self, frame: FrameType | None, *, has_parameters: bool, is_after_data: bool) -> None:
        """Reads the arguments of the call (5 us), but only if the outermost call before it may have prepared them."""
        self.in_loader = not has_parameters and is_in_data_loader(frame)
        self.given: Storages = ()
        if is_after_data and not self.in_loader:
            args, kwargs = call_arguments(frame)
            self.given = _storages_of([*args, *kwargs.values()])
        self.made: Storages = ()

    def returned(self, output: Any) -> None:
        """Records what the call has returned."""
        self.made = _storages_of(output)


def find_data_calls(segments: Sequence[Segment], after_ns: int, root: Segment) -> int:
    """Returns the position in `segments` from which on all calls have prepared what a root is given now.

    Such calls run in a data loader, or return what the root or the next of them is given.

    Args:
        segments: earlier outermost calls, in order.
        after_ns: calls that began before this time do not count.
    """
    wanted = _ids(root.handover.given) if root.handover is not None else set()
    at = len(segments)
    while at > 0:
        call = segments[at - 1]
        handover = call.handover
        if handover is None or not call.is_closed or call.named.parameters or int(call.times[0]) < after_ns:
            break
        if not handover.in_loader and wanted.isdisjoint(_ids(handover.made)):
            break
        wanted |= _ids(handover.given)
        at -= 1
    return at


def _storages_of(value: Any) -> Storages:
    found = []
    with DisableTorchFunction():
        for slot in find_slots(value):
            try:
                if slot.tensor is not None:
                    found.append(weakref.ref(slot.tensor.untyped_storage()))
            except Exception:  # it has none: sparse, of a transform, a subclass that raises
                continue
    return tuple(found)


def _ids(storages: Storages) -> set[int]:
    alive = [storage() for storage in storages]
    return {id(storage) for storage in alive if storage is not None}
