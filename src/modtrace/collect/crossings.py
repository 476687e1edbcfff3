"""Notes which tensors go into a call and come out of it, so that its backward has its gradients and its place."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..torch_internals import (
    ACCUMULATE_SEQUENCE_NR,
    DisableTorchFunction,
    call_kwargs,
    has_function_modes,
    keep_out_of_dynamo,
)
from .graph_watch import node_of
from .slots import find_slots

if TYPE_CHECKING:
    from .scopes import ScopeTracker
    from .thread_log import ThreadLog

#: Where in an autograd graph a gradient arrives: the number of a node and of its output; of a leaf its `id`.
Key = tuple[int, int]

_PLAIN = (type(None), bool, int, float, str)


class Crossing(NamedTuple):
    """One tensor that needs a gradient."""

    slot: str
    key: Key


class Crossings:
    """The tensors of the calls of one segment; calls by the event that they begin with."""

    __slots__ = ("inputs", "open", "outputs", "passed")

    def __init__(self) -> None:
        self.inputs: dict[int, list[Crossing]] = {}
        self.outputs: dict[int, list[Crossing]] = {}
        self.passed: dict[
            int, list[Crossing]
        ] = {}  # outputs that the call has not made: they were there before
        self.open: list[tuple[Any, int, int]] = []  # place, event and sequence number of the calls that run


class CrossingRecorder:
    """Looks at what goes in and out while somebody wants backward hooks. 3 us a call."""

    def __init__(self, tracker: "ScopeTracker") -> None:
        self._tracker = tracker
        self._wanted = 0
        self._enter, self._leave = self._entering, self._leaving  # bound once

    def want(self) -> None:
        """Somebody wants them."""
        self._wanted += 1
        if self._wanted == 1:
            keep_out_of_dynamo(CrossingRecorder._entering, CrossingRecorder._leaving)
            self._tracker.entering.insert(0, self._enter)
            self._tracker.leaving.insert(0, self._leave)

    def unwant(self) -> None:
        """And does no more."""
        self._wanted -= 1
        if self._wanted == 0:
            self._tracker.entering.remove(self._enter)
            self._tracker.leaving.remove(self._leave)

    def _entering(self, log: "ThreadLog", module: nn.Module, args: Any) -> None:
        segment = log.segment
        if segment is None or log.place.outermost != id(module) or not torch.is_grad_enabled():
            return
        crossings = segment.crossings
        if crossings is None:
            crossings = segment.crossings = Crossings()
        event = len(log.places) - 1
        crossings.open.append((log.place, event, log.seqs[-1]))
        try:
            found = _crossings(args, call_kwargs(sys._getframe(2)))
        except Exception as error:
            self._tracker.fail(error, module)
            return
        if found:
            crossings.inputs[event] = found

    def _leaving(self, log: "ThreadLog", module: nn.Module, args: Any, output: Any) -> None:
        crossings = None if log.segment is None else log.segment.crossings
        if crossings is None:
            return
        opened = _opened_at(crossings, log.place)
        if opened is None or output is None:
            return
        _, event, first = opened
        try:
            found = _outputs(output)
        except Exception as error:
            self._tracker.fail(error, module)
            return
        if not found:
            return
        crossings.outputs[event] = found
        if any(each.key[0] < first or each.key[0] == ACCUMULATE_SEQUENCE_NR for each in found):
            crossings.passed[event] = [
                each for each in found if each.key[0] < first or each.key[0] == ACCUMULATE_SEQUENCE_NR
            ]


def _opened_at(crossings: Crossings, place: Any) -> tuple[Any, int, int] | None:
    """The begin of the innermost call at a place; what was above it ended without a word."""
    if not any(each[0] is place for each in crossings.open):
        return None  # it began without gradients
    while True:
        opened = crossings.open.pop()
        if opened[0] is place:
            return opened


def _crossings(args: Any, kwargs: dict[str, Any] | None) -> list[Crossing]:
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
        return _one("[0]", args[0])
    found = _outputs(args)
    return [*found, *_outputs(kwargs)] if kwargs else found


def _outputs(value: Any) -> list[Crossing]:
    if type(value) is torch.Tensor:
        return _one("", value)
    with DisableTorchFunction():
        return [Crossing(slot, _key(tensor)) for slot, tensor in _tensors(value)]


def _one(slot: str, tensor: torch.Tensor) -> list[Crossing]:
    if has_function_modes():
        with DisableTorchFunction():
            return [Crossing(slot, _key(tensor))] if tensor.requires_grad else []
    return [Crossing(slot, _key(tensor))] if tensor.requires_grad else []


def _key(tensor: torch.Tensor) -> Key:
    node = node_of(tensor)
    if node is None:
        return ACCUMULATE_SEQUENCE_NR, id(tensor)
    return node._sequence_nr(), tensor.output_nr


def _tensors(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, _PLAIN):
        return
    for slot, tensor, _ in find_slots(value):
        if tensor is not None and tensor.requires_grad:
            yield slot, tensor
