"""The backward calls that listeners receive, with the tensors that went into and came out of the forward calls."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..log.call_context import CallContext
from ..log.segments import CallRef, Segment
from .call_tensors import CallTensors, Flat, keys_of, slots_of


@dataclass(eq=False, slots=True)
class BackwardCall:
    """The backward of one call in one run of the engine."""

    segment: Segment
    index: int
    context: CallContext
    parent: "BackwardCall | None"  # the call around it
    first: int  # the number of the call's first node ...
    last: int  # ... and the number after that of its last node
    inputs: Flat
    outputs: Flat
    passed: Flat  # outputs that existed before the call
    #: The gradients collected so far: of the inputs, then of outputs that existed before the call.
    gradients: list[torch.Tensor | None] | None = None
    taken_at: int = -1  # the node at which the arriving gradients are those of all inputs; -1 for none
    is_passthrough: bool = False  # whether the call has no autograd node of its own
    is_open: bool = False  # whether the call's backward runs
    is_silent: bool = False  # whether listeners do not receive it, as it is a scope and not a module

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
        if call_tensors is None or not call_tensors.hooked:
            return False
        return int(self.segment.structure().enter_event[self.index]) in call_tensors.hooked

    @property
    def module(self) -> nn.Module | None:
        """The module; None if it has been freed."""
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


def calls_of(segment: Segment) -> list[BackwardCall]:
    """Returns the calls of a segment, in the order in which they began."""
    structure, call_tensors = segment.structure(), segment.call_tensors or CallTensors()
    enter = structure.enter_event.tolist()
    seqs = np.asarray(segment.seqs)
    first = seqs[structure.enter_event].tolist()
    # The number of the node after each call; for a running call, a number above all others.
    last = np.append(seqs, np.iinfo(np.int64).max)[np.minimum(structure.exit_event, len(seqs))].tolist()
    contexts = segment.log.all_contexts
    calls: list[BackwardCall] = []
    columns = (segment.contexts_of_calls(), structure.parent.tolist(), enter, first, last)
    for index, (number, parent, event, begin, end) in enumerate(zip(*columns, strict=True)):
        around = calls[parent] if parent >= 0 else None
        into, out = call_tensors.inputs.get(event, ()), call_tensors.outputs.get(event, ())
        past = call_tensors.passed.get(event, ())
        calls.append(BackwardCall(segment, index, contexts[number], around, begin, end, into, out, past))
    return calls
