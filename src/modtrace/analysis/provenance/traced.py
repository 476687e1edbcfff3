"""Defines what is known of a step after its ops were traced: the events, and which ops read them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import NamedTuple

from ...recording.role import BUFFER, OPTIMIZER_STATE, PARAMETER
from ..tables.one_step import OneStep
from ..tables.op_rules import CASTS, GUARDS, LOGARITHMS, UNSCALES
from ..values.nonfinite import PRODUCER
from .memory import Events, Memory, list_events
from .step_counts import Counts, StepCounts

#: The roles of tensors that a model keeps from step to step.
MODEL_STATE = (PARAMETER, BUFFER, OPTIMIZER_STATE)


@dataclass(eq=False)
class Origin:
    """An event: non-finite values that were not intended, at the op where they came up."""

    kind: str
    op: int  # the op that made the values, or read them first
    slot: str  # the slot of the op's output or input
    tensor: int
    counts: Counts
    became_nan: bool = False  # whether an op that read no other events returned NaN
    is_meant: bool = False  # whether the program wrote the infinities, or gave them as a mask
    meant_inputs: tuple[int, ...] = ()  # inputs of the op that held intended infinities
    masks: Events = 0  # the events whose -inf the op read as a mask
    given: int | None = None  # the argument of an outermost call that holds the values
    loaded: int | None = None  # the parameter or buffer into which the program wrote the values
    #: For kind FIRST_SEEN: the tensor that the op read and that was not measured; -1 if it has no row.
    unseen: int | None = None
    unwritten: int | None = None  # a tensor that the op read, whose memory was not written in full

    def is_mask(self, names: list[str]) -> bool:
        """Returns whether the tensor holds no other values than -inf that are intended, or of a logarithm or a cast."""
        is_made = self.kind == PRODUCER and names[self.op] in LOGARITHMS | CASTS
        may_be_one = (self.is_meant or is_made) and not self.became_nan
        return may_be_one and not self.counts.nan and self.counts.max != math.inf


@dataclass(frozen=True)
class Trace:
    """The events of a step, in the order of the ops."""

    step: OneStep
    counts: StepCounts
    events: list[Origin]
    memory: Memory  # the state of memory at the end of the step
    ends: list["End"]
    returns_meant: bool  # whether the outermost calls returned infinities that are intended, and no others
    carriers: list["Reading"]  # the ops that read events and returned such values, in order
    absorbers: list["Reading"]  # the ops that read events and returned finite values
    cast: Events  # the events whose values an op turned into integers

    @property
    def unscales(self) -> bool:
        """Whether a GradScaler looks at the gradients of this step."""
        return UNSCALES in self.step.bare_names

    @cached_property
    def numbers(self) -> dict[Origin, int]:
        """The number of each event."""
        return {event: number for number, event in enumerate(self.events)}

    @cached_property
    def unread_tensors(self) -> list[tuple[int, Events]]:
        """The tensors with values of events that no op has read, each with these events."""
        return self.memory.list_unread()

    @cached_property
    def unread(self) -> Events:
        """The events whose values are in tensors that no op has read."""
        return _unite(events for _, events in self.unread_tensors)

    @cached_property
    def replacers(self) -> list["Reading"]:
        """The absorbers that wrote something, which an op that only returns views does not."""
        step = self.step
        return [
            reading
            for reading in self.absorbers
            if any(step.find_shown(tensor) is None for _, tensor in step.returns[reading.op])
        ]

    @cached_property
    def guarded(self) -> Events:
        """The events whose values end at nothing but ops that look for such values and replace them."""
        names = self.step.bare_names
        ends = self.cast | _unite(reading.events for reading in self.absorbers)
        others = _unite(reading.events for reading in self.absorbers if names[reading.op] not in GUARDS)
        return ends & ~(self.unread | others)

    def select(self, events: Events) -> list[Origin]:
        """Returns the events of a set, in order."""
        return [self.events[number] for number in list_events(events & ((1 << len(self.events)) - 1))]

    def find_ops(self, readings: list["Reading"], event: Origin) -> list[int]:
        """Returns which of these ops read an event, in order."""
        own = 1 << self.numbers[event]
        return [reading.op for reading in readings if reading.events & own]


class Reading(NamedTuple):
    """An op that read the values of events."""

    op: int
    events: Events


class End(NamedTuple):
    """A loss, gradient, parameter, buffer or output of the model that is not finite."""

    events: Events  # the events from which the values come
    is_returned: bool = False  # whether an outermost call returned the tensor


def _unite(sets: Iterable[Events]) -> Events:
    return reduce(or_, sets, 0)
