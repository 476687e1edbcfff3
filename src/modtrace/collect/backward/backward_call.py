"""The calls whose backward is heard, with what goes in and out of each."""

from typing import Any

import numpy as np
import torch
from torch import nn

from ..log.call_context import Place
from ..log.segments import CallRef, Segment
from .call_tensors import Flat, keys_of, slots_of


class Heard:
    """One call in one run of the engine."""

    __slots__ = (
        "first", "gradients", "index", "inputs", "is_open", "is_silent", "last", "outputs", "parent", "passed",
        "passes", "place", "segment", "taken_at",
    )  # fmt: skip

    def __init__(
        self,
        segment: Segment,
        index: int,
        place: Place,
        parent: "Heard | None",
        first: int,
        last: int,
        inputs: Flat,
        outputs: Flat,
        passed: Flat,
    ) -> None:
        self.segment = segment
        self.index = index
        self.place = place
        self.parent = parent  # the call around it
        self.first = first  # its nodes have numbers from here ...
        self.last = last  # ... to before here
        self.inputs = inputs
        self.outputs = outputs
        self.passed = passed  # outputs that it has not made
        #: Of the inputs and, behind them, of what it has passed on: as far as they have been collected.
        self.gradients: list[torch.Tensor | None] | None = None
        self.taken_at = -1  # the node whose arriving gradients are those of all inputs
        self.passes = False  # no node is its own
        self.is_open = False  # its backward runs
        self.is_silent = False  # ... and nobody is told: a scope is no module

    @property
    def call(self) -> CallRef:
        """The call in its segment."""
        return CallRef(self.segment, self.index)

    @property
    def input_count(self) -> int:
        """How many of the tensors it took need a gradient."""
        return len(self.inputs) // 3

    @property
    def has_hooked_input(self) -> bool:
        """Whether a hook of the user's may change the gradient of one of its inputs where it arrives."""
        crossings = self.segment.crossings
        return crossings is not None and crossings.is_hooked(self.segment, self.index)

    @property
    def module(self) -> nn.Module | None:
        """The module, None if it is dead."""
        return self.place.module

    def inputs_by_slot(self, gradients: Any) -> dict[str, torch.Tensor | None]:
        """The gradients of its inputs."""
        return dict(zip(slots_of(self.inputs), gradients, strict=False))

    def outputs_by_slot(self, received: Any, number: int) -> dict[str, torch.Tensor | None]:
        """What arrives at the node of a number, as far as it is for outputs."""
        if self.passes:
            return dict(zip(slots_of(self.passed), received, strict=False))
        keyed = zip(slots_of(self.outputs), keys_of(self.outputs), strict=True)
        return {slot: received[key[1]] for slot, key in keyed if key[0] == number}


class HeardCalls:
    """All calls of the segments that are asked for."""

    def __init__(self) -> None:
        self._calls: dict[Segment, list[Heard]] = {}

    def of(self, segment: Segment) -> list[Heard]:
        """The calls of a segment, in the order in which they began."""
        calls = self._calls.get(segment)
        if calls is None:
            calls = self._calls[segment] = _calls(segment)
        return calls


def _calls(segment: Segment) -> list[Heard]:
    structure, crossings = segment.structure(), segment.crossings
    enter = structure.enter_event.tolist()
    seqs = np.asarray(segment.seqs)
    first, last = seqs[structure.enter_event].tolist(), _last(segment, seqs)
    places = segment.log.all_places
    inputs = {} if crossings is None else crossings.inputs
    outputs = {} if crossings is None else crossings.outputs
    passed = {} if crossings is None else crossings.passed
    calls: list[Heard] = []
    columns = (segment.places_of_calls(), structure.parent.tolist(), enter, first, last)
    for index, (place, parent, event, begin, end) in enumerate(zip(*columns, strict=True)):
        around = calls[parent] if parent >= 0 else None
        into, out, past = inputs.get(event, ()), outputs.get(event, ()), passed.get(event, ())
        calls.append(Heard(segment, index, places[place], around, begin, end, into, out, past))
    return calls


def _last(segment: Segment, seqs: Any) -> list[int]:
    """For each call the number that the first node after it has; of one that runs still none is after it."""
    exits = segment.structure().exit_event
    last: list[int] = np.append(seqs, np.iinfo(np.int64).max)[np.minimum(exits, len(seqs))].tolist()
    return last
