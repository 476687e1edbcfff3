"""Finds calls that prepared the data of a step: modules without parameters that ran before the model."""

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
    """The storages of an outermost call's arguments and output."""

    __slots__ = ("given", "in_loader", "made")

    def __init__(self, frame: FrameType | None, *, has_parameters: bool, is_after_data: bool) -> None:
        """Reads the call's arguments (5 us), but only if the outermost call before may have prepared them."""
        self.in_loader = not has_parameters and is_in_data_loader(frame)
        self.given: Storages = ()
        if is_after_data and not self.in_loader:
            args, kwargs = call_arguments(frame)
            self.given = _storages_of([*args, *kwargs.values()])
        self.made: Storages = ()

    def returned(self, output: Any) -> None:
        """Adds the storages of the call's output."""
        self.made = _storages_of(output)


def find_data_calls(segments: Sequence[Segment], after_ns: int, root: Segment) -> int:
    """Returns the position in `segments` from which all calls prepared the arguments of `root`.

    Such a call ran in a data loader, or returned an argument of the root or of the next such call.

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
            except Exception:  # sparse tensors, transforms and subclasses may have no storage
                continue
    return tuple(found)


def _ids(storages: Storages) -> set[int]:
    alive = [storage() for storage in storages]
    return {id(storage) for storage in alive if storage is not None}
