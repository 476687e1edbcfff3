"""Notes what outermost calls return while ops are recorded: which tensors, at which slots."""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..torch_internals import (
    DisableTorchFunction,
    has_own_dispatch,
    is_functorch_tensor,
    keep_out_of_dynamo,
    tracing_state,
    unseen,
    wrapped_by_functorch,
)
from .op_mode import OpMode
from .segments import Segment
from .slots import find_slots
from .tensor_ids import RETURNED

if TYPE_CHECKING:
    from .scopes import ScopeTracker
    from .thread_log import ThreadLog


class Returned(NamedTuple):
    """One tensor that an outermost call has returned."""

    segment: Segment  # that the call began
    slot: str  # `output`, `output.logits`, `output[0].hidden`
    tensor_id: int


class OpReturns:
    """Notes them for one recorder; keeps no tensor. What runs inside a backward goes back to the engine: not noted.

    Measured: 3 us for a call that returns one tensor, 24 us for a dict with eight more in a cache. Calls inside of
    others cost nothing.
    """

    def __init__(self, tracker: "ScopeTracker", mode: OpMode) -> None:
        self.found: list[Returned] = []
        self._tracker = tracker
        self._mode = mode
        self._thread = -1
        self._hear = self._returning  # bound once

    def start(self) -> None:
        """Looks at what outermost calls of this thread return, which is the one whose ops are seen."""
        keep_out_of_dynamo(OpReturns._returning)
        self._thread = threading.get_ident()
        self._tracker.returning.append(self._hear)

    def stop(self) -> None:
        """Looks no more."""
        self._tracker.returning[:] = [hear for hear in self._tracker.returning if hear is not self._hear]

    def take(self) -> list[Returned]:
        """What has been noted since this was last called."""
        found, self.found = self.found, []
        return found

    def _returning(self, log: "ThreadLog", output: Any) -> None:
        segment, mode = log.segment, self._mode
        if mode.is_off or mode.is_running or segment is None or segment.task >= 0:
            return  # is_running: what runs inside of an op is not seen
        if threading.get_ident() != self._thread:
            return
        try:
            self._note(log, segment, output)
        except Exception as error:
            mode.fail(error, f"what {segment.named.shown} returned")

    def _note(self, log: "ThreadLog", segment: Segment, output: Any) -> None:
        with DisableTorchFunction():
            slots = [(slot, tensor) for slot, tensor, _ in find_slots(output) if tensor is not None]
            numbers: dict[int, int] = {}  # by `id`: a tensor without storage is another one each time
            with _aside([tensor for _, tensor in slots]):
                for slot, tensor in slots:
                    number = numbers.get(id(tensor))
                    if number is None:
                        number = numbers[id(tensor)] = self._identify(tensor)
                    self.found.append(Returned(segment, f"output{slot}", number))
        if self._mode.ids.leaves:
            self._mode.tell_leaves(log)

    def _identify(self, tensor: torch.Tensor) -> int:
        while is_functorch_tensor(tensor):  # the mode has seen what it wraps
            tensor = wrapped_by_functorch(tensor)
        ids = self._mode.ids
        try:
            return ids.identify(tensor)
        except RuntimeError:  # it has no storage; NotImplementedError is one, too
            number = ids.next
            ids.note_without_storage(tensor, RETURNED, "")
            return number


def _aside(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """Around reading what tensors show: a subclass may answer by an op, and `torch.jit.trace` traces it."""
    answers_itself = any(has_own_dispatch(kind) for kind in {*map(type, tensors)})
    return unseen() if answers_itself or tracing_state() is not None else DisableTorchFunction()
