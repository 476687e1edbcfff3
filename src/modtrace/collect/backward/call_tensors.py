"""Records the tensors that each call takes and returns, so that the gradients of its backward can be found."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...torch_internals.autograd import ACCUMULATE_SEQUENCE_NR
from ...torch_internals.dynamo import keep_out_of_dynamo
from ...torch_internals.modes import DisableTorchFunction, has_function_modes
from ...torch_internals.tensors import any_hooked
from ...torch_internals.transforms import is_functorch_tensor
from ..log.listeners import Listener, Subscribers
from ..log.thread_log import ThreadLog
from ..structures.find import find_slots
from .graph_walk import node_of

#: Where a gradient arrives in an autograd graph: the numbers of a node and of its output; the `id` for a leaf.
Key = tuple[int, int]

#: Tensors that need a gradient: for each its slot and the two numbers of its key. The tuple is flat, so that the
#: garbage collector visits one object for each call, and only once.
Flat = tuple[Any, ...]

_PLAIN = (type(None), bool, int, float, str)


@dataclass(eq=False, slots=True)
class CallTensors:
    """The tensors of the calls of one segment. The key of a call is the number of the event with which it begins."""

    inputs: dict[int, Flat] = field(default_factory=dict)
    outputs: dict[int, Flat] = field(default_factory=dict)
    #: By call, the outputs that existed before it.
    passed: dict[int, Flat] = field(default_factory=dict)
    hooked: set[int] = field(default_factory=set)  # calls with a user's hook on one of their inputs
    #: By `id`, references to the leaves that an outermost call returned.
    leaves: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    open_contexts: list[Any] = field(default_factory=list)  # the contexts of the running calls
    open_events: list[int] = field(default_factory=list)  # the events with which the running calls began


def slots_of(flat: Flat) -> tuple[str, ...]:
    """Returns the slots of the tensors."""
    return flat[::3]


def keys_of(flat: Flat) -> list[Key]:
    """Returns the keys of the tensors."""
    return list(zip(flat[1::3], flat[2::3], strict=True))


class CallTensorRecorder(Listener):
    """Records which autograd nodes made the inputs and outputs of module calls, while hooks of users need it.

    Such hooks are called before and after backwards. Recording takes 2 us a call.
    """

    def __init__(self, subscribers: Subscribers) -> None:
        self._subscribers = subscribers
        self._wanted: list[bool] = []  # for each user, whether it needs the outputs of all calls

    def want(self, with_outputs: bool) -> None:
        """Starts recording for one more user.

        Args:
            with_outputs: whether to record the outputs of every call.
        """
        self._wanted.append(with_outputs)
        if len(self._wanted) == 1:
            keep_out_of_dynamo(CallTensorRecorder.entering, CallTensorRecorder.leaving)
            self._subscribers.add(self, first=True)

    def unwant(self, with_outputs: bool) -> None:
        """Stops recording for one user; `with_outputs` is as it was given to `want`."""
        self._wanted.remove(with_outputs)
        if not self._wanted:
            self._subscribers.remove(self)

    def entering(self, log: ThreadLog, module: nn.Module, args: Any) -> None:
        segment = log.segment
        if segment is None or log.context.outermost != id(module) or not torch.is_grad_enabled():
            return
        call_tensors = segment.call_tensors
        if call_tensors is None:
            call_tensors = segment.call_tensors = CallTensors()
        event = len(log.contexts) - 1
        call_tensors.open_contexts.append(log.context)
        call_tensors.open_events.append(event)
        if not args:
            return
        try:
            is_one = len(args) == 1 and type(args[0]) is torch.Tensor
            found = _one("[0]", args[0]) if is_one else _find(args)
        except Exception as error:
            self._subscribers.fail(error, module)
            return
        if found:
            call_tensors.inputs[event] = found

    def leaving(
        self, log: ThreadLog, module: nn.Module, args: Any, kwargs: Any, output: Any, raised: bool
    ) -> None:
        call_tensors = None if log.segment is None else log.segment.call_tensors
        if call_tensors is None:
            return
        event = _begin_of(call_tensors, log.context)
        if event < 0 or output is None:
            return
        first = log.seqs[event]
        try:
            if any_hooked(args):
                call_tensors.hooked.add(event)
            if kwargs:
                # No global hook receives keyword arguments when the call begins. A tensor that was written to in place
                # since has lost its node.
                given = _made_before(first, _find(kwargs))
                if given:
                    call_tensors.inputs[event] = call_tensors.inputs.get(event, ()) + given
            found = _one("", output) if type(output) is torch.Tensor else _find(output)
        except Exception as error:
            self._subscribers.fail(error, module)
            return
        if found:
            if True in self._wanted:
                call_tensors.outputs[event] = found
            if len(found) > 3 or found[1] < first or found[1] == ACCUMULATE_SEQUENCE_NR:
                passed = _made_before(first, found)
                if passed and log.context.above is None:
                    with DisableTorchFunction():
                        call_tensors.leaves.update(
                            (id(tensor), weakref.ref(tensor))
                            for _, tensor in _tensors(output)
                            if tensor.grad_fn is None
                        )
                if passed:
                    call_tensors.passed[event] = passed
                    call_tensors.outputs[event] = found


def _begin_of(call_tensors: CallTensors, context: Any) -> int:
    """Returns the event with which the innermost call in a context began; -1 if gradients were off then.

    Calls above it on the stack have ended without running their hooks, so they are dropped.
    """
    contexts, events = call_tensors.open_contexts, call_tensors.open_events
    if contexts and contexts[-1] is context:
        contexts.pop()
        return events.pop()
    if not any(running is context for running in contexts):
        return -1
    while contexts.pop() is not context:
        events.pop()
    return events.pop()


def _made_before(first: int, flat: Flat) -> Flat:
    """Returns the tensors whose nodes have numbers below `first`, and the leaves."""
    kept: Flat = ()
    for at, (number, _) in enumerate(keys_of(flat)):
        if number < first or number == ACCUMULATE_SEQUENCE_NR:
            kept += flat[3 * at : 3 * at + 3]
    return kept


def _find(value: Any) -> Flat:
    with DisableTorchFunction():
        return tuple([part for slot, tensor in _tensors(value) for part in _key(slot, tensor)])


def _one(slot: str, tensor: torch.Tensor) -> Flat:
    """Returns the entry of one plain tensor, which is most often all that a module takes or returns."""
    if has_function_modes():
        with DisableTorchFunction():
            return _key(slot, tensor) if tensor.requires_grad else ()
    return _key(slot, tensor) if tensor.requires_grad else ()


def _key(slot: str, tensor: torch.Tensor) -> Flat:
    node = node_of(tensor)
    if node is None and is_functorch_tensor(tensor):
        return ()  # the graph belongs to the transform
    if node is None:
        return slot, ACCUMULATE_SEQUENCE_NR, id(tensor)
    return slot, node._sequence_nr(), tensor.output_nr


def _tensors(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, _PLAIN):
        return
    for slot, tensor, _ in find_slots(value):
        if tensor is not None and tensor.requires_grad and not is_functorch_tensor(tensor):
            yield slot, tensor
