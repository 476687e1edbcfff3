"""The backward calls that listeners receive, with the tensors that went into and came out of the forward calls."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..log.call_context import CallContext
from ..log.segments import CallRef, Segment
from .call_tensors import Flat, keys_of, slots_of


@dataclass(eq=False, slots=True)
class BackwardCall:
    """The backward of one call in one run of the engine."""

    segment: Segment
    index: int
    context: CallContext
    parent: "BackwardCall | None"  # the call around it
    first: int  # its nodes have numbers from here ...
    last: int  # ... to before here
    inputs: Flat
    outputs: Flat
    passed: Flat  # outputs that the call did not make
    #: The gradients of the inputs, then of what it has passed on, as far as they have been collected.
    gradients: list[torch.Tensor | None] | None = None
    taken_at: int = -1  # the node whose arriving gradients are those of all inputs
    is_passthrough: bool = False  # no node is its own
    is_open: bool = False  # its backward runs
    is_silent: bool = False  # ... and listeners do not receive it, because it is a scope and not a module

    @property
    def forward(self) -> CallRef:
        """The forward call."""
        return CallRef(self.segment, self.index)

    @property
    def input_count(self) -> int:
        """The number of input tensors that need a gradient."""
        return len(self.inputs) // 3

    @property
    def has_hooked_input(self) -> bool:
        """True if a user's hook on an input may change the gradient that arrives there."""
        call_tensors = self.segment.call_tensors
        return call_tensors is not None and call_tensors.is_hooked(self.segment, self.index)

    @property
    def module(self) -> nn.Module | None:
        """The module; None if it is dead."""
        return self.context.module

    def inputs_by_slot(self, gradients: Any) -> dict[str, torch.Tensor | None]:
        """Returns the gradients of the call's inputs by slot."""
        return dict(zip(slots_of(self.inputs), gradients, strict=False))

    def outputs_by_slot(self, received: Any, number: int) -> dict[str, torch.Tensor | None]:
        """Returns the gradients of the call's outputs that arrive at node `number`, by slot."""
        if self.is_passthrough:
            return dict(zip(slots_of(self.passed), received, strict=False))
        keyed = zip(slots_of(self.outputs), keys_of(self.outputs), strict=True)
        return {slot: received[key[1]] for slot, key in keyed if key[0] == number}


class SegmentCalls:
    """Caches the `BackwardCall`s of each segment, which are built when they are first needed."""

    def __init__(self) -> None:
        self._calls: dict[Segment, list[BackwardCall]] = {}

    def of(self, segment: Segment) -> list[BackwardCall]:
        """Returns the calls of a segment, in the order in which they began."""
        calls = self._calls.get(segment)
        if calls is None:
            calls = self._calls[segment] = _calls(segment)
        return calls


def _calls(segment: Segment) -> list[BackwardCall]:
    structure, call_tensors = segment.structure(), segment.call_tensors
    enter = structure.enter_event.tolist()
    seqs = np.asarray(segment.seqs)
    first, last = seqs[structure.enter_event].tolist(), _last(segment, seqs)
    contexts = segment.log.all_contexts
    inputs = {} if call_tensors is None else call_tensors.inputs
    outputs = {} if call_tensors is None else call_tensors.outputs
    passed = {} if call_tensors is None else call_tensors.passed
    calls: list[BackwardCall] = []
    columns = (segment.contexts_of_calls(), structure.parent.tolist(), enter, first, last)
    for index, (number, parent, event, begin, end) in enumerate(zip(*columns, strict=True)):
        around = calls[parent] if parent >= 0 else None
        into, out, past = inputs.get(event, ()), outputs.get(event, ()), passed.get(event, ())
        calls.append(BackwardCall(segment, index, contexts[number], around, begin, end, into, out, past))
    return calls


def _last(segment: Segment, seqs: Any) -> list[int]:
    """Returns, for each call, the number of the first node after it; for a running call, a number above all others."""
    exits = segment.structure().exit_event
    last: list[int] = np.append(seqs, np.iinfo(np.int64).max)[np.minimum(exits, len(seqs))].tolist()
    return last
