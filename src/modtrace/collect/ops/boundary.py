"""Records the tensors that outermost calls take and return while ops are recorded, with their slots."""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from ...recording.role import BUFFER, PARAMETER
from ...torch_internals.call_frames import call_arguments, find_call
from ...torch_internals.dynamo import keep_out_of_dynamo
from ...torch_internals.modes import DisableTorchFunction, tracing_state, unseen
from ...torch_internals.tensors import has_own_dispatch
from ...torch_internals.transforms import is_functorch_tensor, wrapped_by_functorch
from ..identity_map import IdentityMap
from ..log.listeners import Listener
from ..log.segments import Segment
from ..log.thread_log import ThreadLog
from ..names.module_names import NamedModule
from ..names.walk import named_modules
from ..scopes.tracker import ScopeTracker
from ..structures.find import find_slots
from ..tensor_ids.tensor_ids import NO_TENSOR, RETURNED
from .leaves import Leaf, OpLeaves, is_parameter
from .mode import OpMode

#: Tensors with their slots.
_Slots = Sequence[tuple[str, torch.Tensor]]


class AtRoot(NamedTuple):
    """A tensor that an outermost call takes or returns."""

    segment: Segment  # that the call began
    slot: str  # `input[0]`, `input['ids']`; `output`, `output.logits`, `output[0].hidden`
    tensor_id: int


class OpBoundary(Listener):
    """Records the tensors that outermost calls outside of backwards take and return, without keeping them alive.

    Of the arguments, only tensors are recorded that are known already, or whose memory an op has made. Any other is
    recorded by the op that reads it first, which also measures it and gives it a site as an input.

    Measured: 3 us for a call with one tensor among its arguments, 9 us for ten; 3 us for a call that returns one
    tensor, 24 us for a dict with eight more in a cache. Inner calls are not searched.
    """

    def __init__(self, tracker: ScopeTracker, mode: OpMode, leaves: OpLeaves) -> None:
        self.found: list[AtRoot] = []
        self._tracker = tracker
        self._mode = mode
        self._leaves = leaves
        self._thread = -1
        self._named: IdentityMap[nn.Module, tuple[int, int]] = IdentityMap()  # how roots were

    def start(self) -> None:
        """Subscribes to the outermost calls of this thread, the only one whose ops are seen."""
        keep_out_of_dynamo(OpBoundary.entering, OpBoundary.outermost_returned)
        self._thread = threading.get_ident()
        self._tracker.subscribers.add(self)

    def stop(self) -> None:
        """Unsubscribes."""
        self._tracker.subscribers.remove(self)

    def take(self) -> list[AtRoot]:
        """Returns the tensors recorded since the last call."""
        found, self.found = self.found, []
        return found

    def _is_seen(self) -> bool:
        """Returns whether what runs now is recorded. What runs inside an op is not."""
        mode = self._mode
        return not (mode.is_off or mode.is_running or threading.get_ident() != self._thread)

    def find_given(self, segment: Segment) -> dict[int, int]:
        """Returns the known tensors that the module call which begins is given, with their storages.

        Both are numbers.
        """
        if self._mode.has_failed or not self._is_seen():
            return {}
        try:
            args, kwargs = call_arguments(find_call(sys._getframe()))
            with DisableTorchFunction():
                given = _tensors_in((args, kwargs))
            with _aside(given):
                found = {self._find(tensor): self._storage_of(tensor) for _, tensor in given}
        except Exception as error:
            self._mode.fail(error, f"what {segment.named.shown} was given")
            return {}
        found.pop(NO_TENSOR, None)
        return found

    def _storage_of(self, tensor: torch.Tensor) -> int:
        try:
            return self._mode.ids.storage_of(_unwrapped(tensor))
        except Exception:  # it is unreadable, or has none
            return NO_TENSOR

    # Going in. Leaves are named on every thread, and where ops are not wanted.

    def entering(self, log: ThreadLog, module: nn.Module, args: Any) -> None:
        segment, context = log.segment, log.context
        if context.above is not None or segment is None or segment.task >= 0 or self._mode.has_failed:
            return
        try:
            kwargs = log.kwargs_of(sys._getframe(2))
            with DisableTorchFunction():
                found = _tensors_in(args) + _tensors_in(kwargs) if kwargs else _tensors_in(args)
                given = [entry for entry in found if not is_parameter(entry[1])]
                self._leaves.note_inputs(given, context.named)
                if self._is_seen():
                    self._name_owned(module)
                    self._note_given(segment, given)
        except Exception as error:
            self._mode.fail(error, f"what {segment.named.shown} was given")

    def _note_given(self, segment: Segment, given: _Slots) -> None:
        with _aside(given):
            for slot, tensor in given:
                number = self._find(tensor)
                if number != NO_TENSOR:
                    self.found.append(AtRoot(segment, f"input{slot}", number))

    def _name_owned(self, root: nn.Module) -> None:
        """Names the parameters and buffers that ops have made, for a model that was made while ops are recorded.

        It is called when a root is first seen, and again if modules have been seen since or its first parameter has
        other memory (`model.double()`): 2 us for a parameter. Parameters that no op has made are named when an op reads
        them.
        """
        first = next(_parameters_of(root), None)
        state = (self._tracker.names.revision, 0 if first is None else _memory_of(first))
        if self._named.get(root) == state:
            return
        self._named[root] = state
        buffers = (
            buffer
            for module in _modules_of(root)
            for buffer in module._buffers.values()
            if buffer is not None
        )
        with _aside([("", buffer) for buffer in (*_parameters_of(root), *buffers)]):
            for owner, name, tensor, role in self._owned_by(root):
                number = self._find(tensor)
                if number != NO_TENSOR:
                    self._leaves.found.append(Leaf(number, role, name, owner))

    def _owned_by(self, root: nn.Module) -> Iterator[tuple[NamedModule, str, torch.Tensor, str]]:
        names = self._tracker.names
        parameters = {id(parameter): parameter for parameter in _parameters_of(root)}
        for at, parameter in enumerate(parameters.values()):
            owners = names.owners_of(parameter, learn=at == 0)
            if owners:
                yield owners[0].module, owners[0].name, parameter, PARAMETER
        for module in _modules_of(root):
            named = names.get(module)
            for name, buffer in module._buffers.items():
                if named is not None and buffer is not None:
                    yield named, name, buffer, BUFFER

    def _find(self, tensor: torch.Tensor) -> int:
        try:
            return self._mode.ids.find(_unwrapped(tensor))
        except Exception:  # it is unreadable: the op that reads it meets another one
            return NO_TENSOR

    # Coming out.

    def outermost_returned(self, log: ThreadLog, output: Any) -> None:
        segment = log.segment
        if segment is None or segment.task >= 0 or not self._is_seen():
            return
        try:
            root = segment.named.module
            if root is not None:
                with DisableTorchFunction():
                    self._name_owned(root)  # modules have been met inside, or lazy ones made their parameters
            self._note_returned(log, segment, output)
        except Exception as error:
            self._mode.fail(error, f"what {segment.named.shown} returned")

    def _note_returned(self, log: ThreadLog, segment: Segment, output: Any) -> None:
        with DisableTorchFunction():
            returned = _tensors_in(output)
            numbers: dict[int, int] = {}  # by `id`: a tensor without storage is another one each time
            with _aside(returned):
                for slot, tensor in returned:
                    number = numbers.get(id(tensor))
                    if number is None:
                        number = numbers[id(tensor)] = self._identify(tensor)
                    self.found.append(AtRoot(segment, f"output{slot}", number))
        if self._mode.ids.leaves:
            self._mode.report_leaves(log)

    def _identify(self, tensor: torch.Tensor) -> int:
        tensor, ids = _unwrapped(tensor), self._mode.ids
        try:
            return ids.identify(tensor)
        except Exception as error:  # it has no storage, or a subclass of the user's raises
            number = ids.next
            ids.note_unreadable(tensor, RETURNED, "", error)
            return number


def _modules_of(root: nn.Module) -> Iterator[nn.Module]:
    return (module for _, module in named_modules(root))


def _parameters_of(root: nn.Module) -> Iterator[torch.Tensor]:
    held = (parameter for module in _modules_of(root) for parameter in module._parameters.values())
    return (tensor for tensor in held if tensor is not None)


def _memory_of(tensor: torch.Tensor) -> int:
    """Returns a number that differs for different memory; 0 if there is none."""
    try:
        return id(tensor.untyped_storage())
    except Exception:  # not yet (lazy), not at all (sparse), or a subclass of the user's raises
        return 0


def _tensors_in(value: Any) -> list[tuple[str, torch.Tensor]]:
    return [(slot, tensor) for slot, tensor, _ in find_slots(value) if tensor is not None]


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor inside the wrappers of function transforms, which is what the mode sees."""
    while is_functorch_tensor(tensor):
        tensor = wrapped_by_functorch(tensor)
    return tensor


def _aside(slots: _Slots) -> AbstractContextManager[Any]:
    """Returns a context for reading attributes of tensors, which hides the ops by which subclasses may answer."""
    answers_itself = any(has_own_dispatch(kind) for kind in {type(tensor) for _, tensor in slots})
    return unseen() if answers_itself or tracing_state() is not None else DisableTorchFunction()
