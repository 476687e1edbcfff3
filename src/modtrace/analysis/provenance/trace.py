"""Follows NaN and infinite values through the ops of one step, from what made them to what reads them."""

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np

from ...recording.phase import BACKWARD, OPTIMIZER, PHASES
from ...recording.role import INPUT, LEAF, PARAMETER
from ..tables.one_step import OneStep
from ..tables.op_rules import (
    AVERAGES,
    CARRIERS,
    CASTS,
    DIVISIONS,
    EXPONENTIALS,
    FILLS,
    LOGARITHMS,
    NEVER_NAN,
    SEED,
    SHAPES_ONLY,
    SOFTMAX,
    UNINITIALIZED,
    holds_infinity,
    holds_nan,
    is_attention,
)  # fmt: skip
from ..values.nonfinite import FIRST_SEEN, PRODUCER, SOURCE
from .doubtful_ops import find_doubtful_ops
from .memory import BAD, CLEAN, MEANT, UNSEEN, Events, Finiteness, Memory, join_states, list_events
from .step_counts import StepCounts
from .traced import MODEL_STATE, End, Origin, Reading, Trace

_BACKWARD, _OPTIMIZER = PHASES.index(BACKWARD), PHASES.index(OPTIMIZER)


#: For each read of an op: its slot, its tensor, and what that holds.
_Inputs = list[tuple[str, int, Finiteness]]


def trace_step(step: OneStep, counts: StepCounts) -> Trace:
    """Returns the trace of a step: the events in which its non-finite values came up, without intended ones."""
    tracer = _Tracer(step, counts)
    for op in find_doubtful_ops(step, counts).tolist():
        tracer.visit(op)
    tracer.close()
    return Trace(
        step=step,
        counts=counts,
        events=tracer.events,
        memory=tracer.memory,
        ends=tracer.ends,
        returns_meant=tracer.returns_meant,
        carriers=tracer.carriers,
        absorbers=tracer.absorbers,
        cast=tracer.cast,
    )


class _Tracer:
    """Follows the ops of a step in order, and the state of memory at each of them."""

    def __init__(self, step: OneStep, counts: StepCounts) -> None:
        self.events: list[Origin] = []
        self._step = step
        self._names = step.bare_names
        self._counts = counts
        self.memory = Memory(step)
        self._leaves: set[int] = set()  # leaves that some op has read
        self._meant: list[Origin] = []
        self._accused: dict[int, Finiteness] = {}  # from positions in `_meant` to the states of their events
        self.ends: list[End] = []
        self.carriers: list[Reading] = []
        self.absorbers: list[Reading] = []
        self.cast: Events = 0
        self.returns_meant = False
        self._given: Events = 0
        self._loaded: Events = 0
        self._gradients: list[tuple[int, Finiteness]] = []  # bad outputs of backward ops

    def visit(self, op: int) -> None:
        """Derives the state of an op's outputs from that of its inputs."""
        reads = () if self._names[op] in SHAPES_ONLY else self._step.reads[op]
        inputs = [(slot, tensor, self._read(tensor, op, slot)) for slot, tensor in reads]
        worst = join_states(state for _, _, state in inputs)
        if op in self._counts.reads_dropped:
            worst = join_states([worst, Finiteness(UNSEEN)])
            if self._step.is_view[op]:  # later ops may read other parts of the tensor behind the view
                for _, tensor in self._step.returns[op]:
                    self.memory.doubt(tensor)
        is_bad = self._visit_outputs(op, inputs, worst)
        if worst.kind == BAD:
            self._note_reading(Reading(op, worst.events), inputs, is_bad=is_bad)
        self._note_end(op, worst)

    def _note_reading(self, reading: Reading, inputs: _Inputs, *, is_bad: bool) -> None:
        for _, tensor, state in inputs:
            if state.kind == BAD:
                self.memory.mark_read(tensor, reading.events)
        if is_bad:
            self.carriers.append(reading)
        elif not self._has_integers(reading.op):
            self.absorbers.append(reading)
        elif self._names[reading.op] in CASTS:  # `isnan` and comparisons return integers, but replace nothing
            self.cast |= reading.events

    def _note_end(self, op: int, worst: Finiteness) -> None:
        """Records an end if an op is the seed of a backward, which reads the loss, or is part of an optimizer."""
        phase = int(self._step.ops.phase[op])
        if phase == _OPTIMIZER:
            self._end(worst)
        elif self._step.name_op(op) == SEED and phase < 0:
            for _, tensor in self._step.reads[op]:
                self._end(self._accuse_meant(self.memory.read(tensor)))

    def _accuse_meant(self, state: Finiteness) -> Finiteness:
        """Returns the state of a tensor that must be finite; an infinity that was intended elsewhere becomes bad."""
        if state.kind != MEANT or state.origin < 0:
            return state
        if state.origin not in self._accused:
            self._accused[state.origin] = self._add_event(self._meant[state.origin])
        accused = self._accused[state.origin]
        self.memory.write(self._meant[state.origin].tensor, accused)
        return accused

    def _add_event(self, event: Origin) -> Finiteness:
        """Adds an event, and returns the state of its values."""
        self.events.append(event)
        return Finiteness(BAD, 1 << (len(self.events) - 1))

    def _end(self, state: Finiteness, *, is_returned: bool = False) -> None:
        if state.events:
            self.ends.append(End(state.events, is_returned))

    def close(self) -> None:
        """Records at the end of the step which gradients, parameters, buffers and returned tensors are ends."""
        step = self._step
        read_in_backward = np.zeros(len(step.tensors), bool)
        read_in_backward[step.flow.read[step.ops.phase[step.flow.reader] == _BACKWARD]] = True
        for tensor, state in self._gradients:
            if not read_in_backward[tensor]:
                self._end(state)
        held: dict[int, Events] = defaultdict(int)  # by tensor, the events that came up in it
        for number, event in enumerate(self.events):
            held[event.tensor] |= 1 << number
        for tensor in step.find_tensors_of(*MODEL_STATE):
            state = self.memory.read(tensor)
            if not state.events & held.get(tensor, 0):  # else it held the values when the step began
                self._end(state)
        for tensor in [*step.given, *step.find_tensors_of(INPUT)]:
            events = self.memory.read(tensor).events
            for number in list_events(events & ~self._given):
                self.events[number].given = tensor
            self._given |= events
        returned = [self.memory.read(tensor) for tensor in step.returned]
        for state in returned:
            self._end(state, is_returned=True)
        self.returns_meant = max((state.kind for state in returned), default=CLEAN) == MEANT

    def _role_of(self, tensor: int) -> str | None:
        site = self._step.sites[tensor]
        return None if site is None else site.role

    def _has_integers(self, op: int) -> bool:
        """Returns whether the outputs of an op are all integer or boolean, so that they cannot be NaN."""
        returned = self._step.returns[op]
        return bool(returned) and not any(self._step.tensors.is_float[tensor] for _, tensor in returned)

    def _visit_outputs(self, op: int, inputs: _Inputs, worst: Finiteness) -> bool:
        if self._step.name_op(op).startswith("profiler."):
            return False
        is_bad, measured = False, set()
        for slot, tensor in self._step.returns[op]:
            # An op in place returns the view first; a further tensor at that slot is the base, as later ops read it.
            state = None if slot in measured else self._judge(op, slot, tensor, inputs, worst)
            if self._counts.is_measured[tensor]:
                measured.add(slot)
            if state is not None:  # else the output is a view, whose state memory already has
                self.memory.write(tensor, state)
                if state.kind == BAD:
                    self.memory.keep_unread(tensor, state.events)
                    if self._step.ops.phase[op] < 0 and self._role_of(tensor) in MODEL_STATE:
                        self._note_loaded(tensor, state.events)
            held = self.memory.read(tensor) if state is None else state
            is_bad |= held.kind == BAD
            if held.kind == BAD and self._step.ops.phase[op] == _BACKWARD:
                self._gradients.append((tensor, held))
        return is_bad

    def _note_loaded(self, tensor: int, events: Events) -> None:
        for number in list_events(events & ~self._loaded):
            self.events[number].loaded = tensor
        self._loaded |= events

    def _judge(
        self, op: int, slot: str, tensor: int, inputs: _Inputs, worst: Finiteness
    ) -> Finiteness | None:
        """Returns the state of an op's output; None if the op has written nothing."""
        name, counts = self._names[op], self._counts.of_output(tensor)
        if name in UNINITIALIZED:
            self.memory.allocate(tensor)
            return None
        if counts is None:
            return self._judge_unmeasured(op, tensor, worst)
        if not counts.nan and not counts.inf:
            return Finiteness()
        if self._step.is_internal[tensor]:
            return self._judge_internal(op)
        masks = self._find_masks(name, inputs, worst) if counts.nan else 0
        if worst.kind == BAD and not masks:
            if counts.nan and worst.events.bit_count() == 1:
                self.events[worst.events.bit_length() - 1].became_nan = True
            return worst
        made = Origin(PRODUCER, op, slot, tensor, counts)
        if not counts.nan and (meant := self._find_meant(op, name, inputs, worst)) is not None:
            is_scalar = meant.origin < 0 or self._meant[meant.origin].counts.numel == 1
            return self._note_meant(made) if is_scalar and name in FILLS else meant
        if (constant := self._find_constant(name, made, worst)) is not None:
            return constant
        return self._add_event(replace(self._blame(made, inputs, worst), masks=masks))

    def _note_meant(self, constant: Origin) -> Finiteness:
        """Registers an intended infinity, and returns its state."""
        self._meant.append(replace(constant, is_meant=True))
        return Finiteness(MEANT, len(self._meant) - 1)

    def _judge_unmeasured(self, op: int, tensor: int, worst: Finiteness) -> Finiteness | None:
        if self._step.find_shown(tensor) is not None:
            return None
        if worst.kind == BAD and self._step.tensors.holds_numbers[tensor]:
            return worst
        if (meant := self._find_meant(op, self._names[op], [], worst)) is not None:
            return meant
        is_known = self._names[op] in SHAPES_ONLY or not self._step.tensors.holds_numbers[tensor]
        return Finiteness() if is_known else Finiteness(UNSEEN, tensor)

    def _blame(self, made: Origin, inputs: _Inputs, worst: Finiteness) -> Origin:
        """Returns the event of an op that returned bad values without reading any that are known to be bad."""
        name = self._names[made.op]
        if worst.kind == UNSEEN:
            if worst.origin >= 0:
                self.memory.write(worst.origin, Finiteness(BAD, 1 << len(self.events)))
            return replace(made, kind=FIRST_SEEN, unseen=worst.origin)
        args = self._step.op_args[made.op]
        is_constant = holds_nan(args) or holds_infinity(args)
        if worst.kind == CLEAN and made.counts.nan and not is_constant:
            memory = (self.memory.find_unwritten(tensor) for _, tensor, _ in inputs)
            unwritten = next((tensor for tensor in memory if tensor is not None), None)
            if name in NEVER_NAN or (name in AVERAGES and unwritten is not None):
                return replace(made, kind=FIRST_SEEN, unwritten=unwritten)
        # Bad inputs can only be masks here.
        meant = tuple(other for _, other, state in inputs if state.kind in (MEANT, BAD))
        return replace(made, meant_inputs=meant)

    def _find_constant(self, name: str, made: Origin, worst: Finiteness) -> Finiteness | None:
        """Returns the state of an intended infinity that an op passes on where none belongs; None if it made one."""
        if worst.kind != MEANT or worst.origin < 0 or name in SOFTMAX or is_attention(name):
            return None
        is_given = self._meant[worst.origin].kind == SOURCE and name not in CARRIERS
        makes_its_own = made.counts.nan or name in EXPONENTIALS | LOGARITHMS | DIVISIONS
        return self._accuse_meant(worst) if is_given or not makes_its_own else None

    def _holds_infinity(self, tensor: int) -> bool:
        """Returns whether a measurement shows that a tensor holds +inf."""
        counts = self._counts.of_output(tensor)
        return counts is not None and counts.max == math.inf

    def _find_masks(self, name: str, inputs: _Inputs, worst: Finiteness) -> Events:
        """Returns the events whose -inf a softmax reads as masks, if it reads no others; a full mask gives NaN."""
        is_softmax = name in SOFTMAX or is_attention(name)
        if not is_softmax or any(
            self._holds_infinity(tensor) for _, tensor, state in inputs if state.kind == BAD
        ):
            return 0
        are_masks = all(self.events[number].is_mask(self._names) for number in list_events(worst.events))
        return worst.events if are_masks else 0

    def _judge_internal(self, op: int) -> Finiteness:
        """Returns the state of an internal output: bad if the op's first output is bad, else intended."""
        first = self.memory.read(self._step.returns[op][0][1])
        return first if first.kind == BAD else Finiteness(MEANT)

    def _find_meant(self, op: int, name: str, inputs: _Inputs, worst: Finiteness) -> Finiteness | None:
        """Returns the intended infinities that an op passes on; None if its output is not known to be intended."""
        if name in FILLS and holds_infinity(self._step.op_args[op]):
            return Finiteness(MEANT)
        if (
            worst.kind == UNSEEN
            and name in CARRIERS
            and (worst.origin < 0 or worst.origin in self._counts.dropped)
            and self._counts.describe_dropped(op) is None
        ):
            return Finiteness(MEANT)  # a mask that was made in a dropped step
        states = [worst, *(state for _, _, state in inputs)]
        return next((state for state in states if state.kind == MEANT and name in CARRIERS), None)

    def _read(self, tensor: int, op: int, slot: str) -> Finiteness:
        """Returns the state of a tensor when an op reads it; a leaf is judged when it is first read."""
        if self._step.tensors.producer[tensor] < 0 and tensor not in self._leaves:
            self._leaves.add(tensor)
            state = self._judge_leaf(tensor, op, slot)
            if state.kind != CLEAN:
                self.memory.write(tensor, state)
        return self.memory.read(tensor)

    def _judge_leaf(self, tensor: int, op: int, slot: str) -> Finiteness:
        counts = self._counts.of_leaf(tensor)
        if counts is None:
            return Finiteness(UNSEEN, tensor) if self._step.tensors.holds_numbers[tensor] else Finiteness()
        if not (counts.nan or counts.inf):
            return Finiteness()
        role = self._role_of(tensor)
        if role != PARAMETER and (not counts.nan or (role == LEAF and counts.numel == 1)):
            # A mask or a constant is intended; if it becomes NaN, the op that made the NaN is to be named.
            return self._note_meant(Origin(SOURCE, op, slot, tensor, counts))
        return self._add_event(Origin(SOURCE, op, slot, tensor, counts))
