"""Follows NaN and infinite values through the ops of one step, from what made them to what reads them."""

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ...recording.phase import BACKWARD, OPTIMIZER, PHASES
from ...recording.role import BUFFER, INPUT, LEAF, OPTIMIZER_STATE, PARAMETER
from ..tables.one_step import OneStep
from ..tables.op_rules import (
    AVERAGES,
    CARRIERS,
    CASTS,
    DIVISIONS,
    EXPONENTIALS,
    FILLS,
    GUARDS,
    LOGARITHMS,
    NEVER_NAN,
    SEED,
    SHAPES_ONLY,
    SOFTMAX,
    UNINITIALIZED,
    UNSCALES,
    holds_infinity,
    holds_nan,
    is_attention,
)  # fmt: skip
from ..values.nonfinite import FIRST_SEEN, PRODUCER, SOURCE
from .memory import BAD, CLEAN, MEANT, UNSEEN, Finiteness, Memory, join_states
from .step_counts import Counts, StepCounts

_BACKWARD, _OPTIMIZER = PHASES.index(BACKWARD), PHASES.index(OPTIMIZER)

#: The roles of what a model keeps from step to step.
MODEL_STATE = (PARAMETER, BUFFER, OPTIMIZER_STATE)


@dataclass(eq=False)
class Origin:
    """Where values that are not finite, and not meant, came up."""

    kind: str
    op: int  # that made them, or read them first
    slot: str  # of its output, or of its input
    tensor: int
    counts: Counts
    carried_by: list[int] = field(default_factory=list)  # further ops that returned such values, in order
    absorbed_by: list[int] = field(default_factory=list)  # ops that read them and returned finite values
    is_cast: bool = False  # an op turned them into integers
    became_nan: bool = False  # an op that read no others returned NaN
    is_meant: bool = False  # infinities that the program has written, or given as a mask
    #: Tensors that hold them, and that no op has read, by storage.
    unread: dict[int, list[int]] = field(default_factory=dict)
    meant_inputs: tuple[int, ...] = ()  # what the op read that held infinities on purpose
    masks: frozenset[int] = frozenset()  # the events whose -inf it read as a mask
    given: int | None = None  # the argument of an outermost call that holds them
    loaded: int | None = None  # the parameter or buffer into which the program has written them
    #: Of what was first seen: the tensor that the op read and nobody had measured, -1 if it has no row.
    unseen: int | None = None
    unwritten: int | None = None  # memory that it read, to which ops have not written in full

    def is_mask(self, names: list[str]) -> bool:
        """Returns whether it holds -inf and nothing else: meant, logarithms, or lowest numbers in a smaller format."""
        is_made = self.kind == PRODUCER and names[self.op] in LOGARITHMS | CASTS
        may_be_one = (self.is_meant or is_made) and not self.became_nan
        return may_be_one and not self.counts.nan and self.counts.max != math.inf

    def is_guarded(self, names: list[str]) -> bool:
        """Returns whether every op at which the values end is one that looks for such values and replaces them."""
        ends = self.is_cast or bool(self.absorbed_by)
        return ends and not self.unread and all(names[op] in GUARDS for op in self.absorbed_by)


@dataclass(frozen=True)
class Trace:
    """What came up in a step, in the order of the ops."""

    step: OneStep
    counts: StepCounts
    events: list[Origin]
    memory: Memory  # at the end of the step
    ends: list["End"]
    returns_meant: bool  # the outermost calls returned infinities that are meant, and no others

    @property
    def unscales(self) -> bool:
        """Whether a GradScaler looks at the gradients of this step."""
        return UNSCALES in self.step.bare_names


class End(NamedTuple):
    """A loss, gradient, parameter, buffer or returned tensor that is not finite."""

    origins: frozenset[int]  # numbers of the events from which it has such values
    is_returned: bool = False  # by an outermost call


#: The slot and the tensor of each read of an op, with what the tensor holds.
_Inputs = list[tuple[str, int, Finiteness]]


def trace_step(step: OneStep, counts: StepCounts) -> Trace:
    """Returns the origins of the step's NaN and infinite values, without intended ones."""
    tracer = _Tracer(step, counts)
    for op in step.order:
        tracer.visit(op)
    tracer.close()
    return Trace(step, counts, tracer.events, tracer.memory, tracer.ends, tracer.returns_meant)


class _Tracer:
    """Follows the ops of a step, and what its memory holds at each."""

    def __init__(self, step: OneStep, counts: StepCounts) -> None:
        self.events: list[Origin] = []
        self._step = step
        self._names = step.bare_names
        self._counts = counts
        self.memory = Memory(step)
        self._leaves: set[int] = set()  # that some op has read
        self._meant: list[Origin] = []
        self._accused: dict[int, int] = {}  # of those, the numbers of the events that they have become
        self.ends: list[End] = []
        self.returns_meant = False
        self._gradients: list[tuple[int, Finiteness]] = []  # bad tensors that backward ops have returned

    def visit(self, op: int) -> None:
        """Follows what one op reads into what it returns."""
        reads = () if self._names[op] in SHAPES_ONLY else self._step.reads.get(op, ())
        inputs = [(slot, tensor, self._read(tensor, op, slot)) for slot, tensor in reads]
        worst = join_states(state for _, _, state in inputs)
        if op in self._counts.reads_dropped:
            worst = max(worst, Finiteness(UNSEEN))
            if self._step.is_view[op]:  # the next ops may read other parts of it
                for _, tensor in self._step.returns.get(op, ()):
                    self.memory.doubt(tensor)
        is_bad = self._visit_outputs(op, inputs, worst)
        for event in map(self.events.__getitem__, sorted(worst.origins)):
            self._mark_read(event, [tensor for _, tensor, state in inputs if state.kind == BAD])
            if is_bad:
                event.carried_by.append(op)
            elif self._has_integers(op):  # `isnan` and comparisons replace nothing
                event.is_cast |= self._names[op] in CASTS
            else:
                event.absorbed_by.append(op)
        self._note_end(op, worst)

    def _note_end(self, op: int, worst: Finiteness) -> None:
        """Notes that values came to a loss, or to what an optimizer reads."""
        phase = int(self._step.ops.phase[op])
        if phase == _OPTIMIZER:
            self._end(worst)
        elif self._step.name_op(op) == SEED and phase < 0:
            for _, tensor in self._step.reads.get(op, ()):
                self._end(self._accuse_meant(self.memory.read(tensor)))

    def _accuse_meant(self, state: Finiteness) -> Finiteness:
        """Returns the state of what holds an infinity that was meant elsewhere, and is not meant there."""
        if state.kind != MEANT or state.origin < 0:
            return state
        if state.origin not in self._accused:
            self._accused[state.origin] = len(self.events)
            self.events.append(self._meant[state.origin])
        accused = Finiteness(BAD, self._accused[state.origin])
        self.memory.write(self._meant[state.origin].tensor, accused)
        return accused

    def _end(self, state: Finiteness, *, is_returned: bool = False) -> None:
        if state.origins:
            self.ends.append(End(state.origins, is_returned))

    def close(self) -> None:
        """Notes at the end of the step what its gradients, parameters, buffers and returned tensors hold."""
        step = self._step
        read_in_backward = {
            tensor
            for op, reads in step.reads.items()
            if step.ops.phase[op] == _BACKWARD
            for _, tensor in reads
        }
        for tensor, state in self._gradients:
            if tensor not in read_in_backward:
                self._end(state)
        roles = [self._role_of(tensor) for tensor in range(len(step.sites))]
        for tensor, role in enumerate(roles):
            if role in MODEL_STATE:
                self._end(self._without_source(tensor))
        for tensor in [*step.given, *(tensor for tensor, role in enumerate(roles) if role == INPUT)]:
            for origin in self.memory.read(tensor).origins:
                event = self.events[origin]
                event.given = tensor if event.given is None else event.given
        returned = [self.memory.read(tensor) for tensor in step.returned]
        for state in returned:
            self._end(state, is_returned=True)
        self.returns_meant = max((state.kind for state in returned), default=CLEAN) == MEANT

    def _role_of(self, tensor: int) -> str | None:
        site = self._step.sites[tensor]
        return None if site is None else site.role

    def _without_source(self, tensor: int) -> Finiteness:
        """Returns what a parameter or buffer holds, unless it has held it before."""
        state = self.memory.read(tensor)
        has_held = any(self.events[origin].tensor == tensor for origin in state.origins)
        return Finiteness() if has_held else state

    def _has_integers(self, op: int) -> bool:
        """Returns whether what an op returns cannot be NaN, because it is boolean or holds integers."""
        returned = self._step.returns.get(op, ())
        return bool(returned) and not any(self._step.is_float(tensor) for _, tensor in returned)

    def _visit_outputs(self, op: int, inputs: _Inputs, worst: Finiteness) -> bool:
        if self._step.name_op(op).startswith("profiler."):
            return False
        is_bad, measured = False, set()
        for slot, tensor in self._step.returns.get(op, ()):
            # What an op in place returns comes first. What follows is the base of that view, as later ops read it.
            state = None if slot in measured else self._judge(op, slot, tensor, inputs, worst)
            if (op, slot) in self._counts.outputs:
                measured.add(slot)
            if state is not None:  # else a view: what it shows is in memory already
                self.memory.write(tensor, state)
                is_loaded = self._step.ops.phase[op] < 0 and self._role_of(tensor) in MODEL_STATE
                for event in map(self.events.__getitem__, state.origins):
                    event.unread.setdefault(self.memory.storage_of(tensor), []).append(tensor)
                    event.loaded = tensor if is_loaded and event.loaded is None else event.loaded
            held = self.memory.read(tensor) if state is None else state
            is_bad |= held.kind == BAD
            if held.kind == BAD and self._step.ops.phase[op] == _BACKWARD:
                self._gradients.append((tensor, held))
        return is_bad

    def _mark_read(self, event: Origin, read: list[int]) -> None:
        for other in read:
            storage = self.memory.storage_of(other)
            unread = event.unread.pop(storage, [])
            unread = [tensor for tensor in unread if not self.memory.do_overlap(tensor, other)]
            if unread:
                event.unread[storage] = unread

    def _judge(
        self, op: int, slot: str, tensor: int, inputs: _Inputs, worst: Finiteness
    ) -> Finiteness | None:
        """Returns what an op has left in what it returned; None if it has written nothing."""
        name, counts = self._names[op], self._counts.outputs.get((op, slot))
        if name in UNINITIALIZED:
            self.memory.allocate(tensor)
            return None
        if counts is None:
            return self._judge_unmeasured(op, tensor, worst)
        if not counts.nan and not counts.inf:
            return Finiteness()
        if self._step.is_internal[tensor]:
            return self._judge_internal(op)
        masks = self._find_masks(name, inputs, worst) if counts.nan else frozenset()
        if worst.kind == BAD and not masks:
            if counts.nan and not worst.others:
                self.events[worst.origin].became_nan = True
            return worst
        made = Origin(PRODUCER, op, slot, tensor, counts)
        if not counts.nan and (meant := self._find_meant(op, name, inputs, worst)) is not None:
            is_scalar = meant.origin < 0 or self._meant[meant.origin].counts.numel == 1
            return self._note_meant(made) if is_scalar and name in FILLS else meant
        if (constant := self._find_constant(name, made, worst)) is not None:
            return constant
        self.events.append(replace(self._blame(made, inputs, worst), masks=masks))
        return Finiteness(BAD, len(self.events) - 1)

    def _note_meant(self, constant: Origin) -> Finiteness:
        """Returns the state of infinities that are meant."""
        self._meant.append(replace(constant, is_meant=True))
        return Finiteness(MEANT, len(self._meant) - 1)

    def _judge_unmeasured(self, op: int, tensor: int, worst: Finiteness) -> Finiteness | None:
        if self._step.find_shown(tensor) is not None:
            return None
        if worst.kind == BAD and self._step.holds_numbers(tensor):
            return worst
        if (meant := self._find_meant(op, self._names[op], [], worst)) is not None:
            return meant
        is_known = self._names[op] in SHAPES_ONLY or not self._step.holds_numbers(tensor)
        return Finiteness() if is_known else Finiteness(UNSEEN, tensor)

    def _blame(self, made: Origin, inputs: _Inputs, worst: Finiteness) -> Origin:
        """Returns the event of an op that returned bad values and read none that are known to be bad."""
        name = self._names[made.op]
        if worst.kind == UNSEEN:
            if worst.origin >= 0:
                self.memory.write(worst.origin, Finiteness(BAD, len(self.events)))
            return replace(made, kind=FIRST_SEEN, unseen=worst.origin)
        args = self._step.op_args[made.op]
        is_constant = holds_nan(args) or holds_infinity(args)
        if worst.kind == CLEAN and made.counts.nan and not is_constant:
            memory = (self.memory.find_unwritten(tensor) for _, tensor, _ in inputs)
            unwritten = next((tensor for tensor in memory if tensor is not None), None)
            if name in NEVER_NAN or (name in AVERAGES and unwritten is not None):
                return replace(made, kind=FIRST_SEEN, unwritten=unwritten)
        # What is bad of what it read is a mask.
        meant = tuple(other for _, other, state in inputs if state.kind in (MEANT, BAD))
        return replace(made, meant_inputs=meant)

    def _find_constant(self, name: str, made: Origin, worst: Finiteness) -> Finiteness | None:
        """Returns the constant that an op has returned, as it is or as another infinity; None if it made its own."""
        if worst.kind != MEANT or worst.origin < 0 or name in SOFTMAX or is_attention(name):
            return None
        is_given = self._meant[worst.origin].kind == SOURCE and name not in CARRIERS
        makes_its_own = made.counts.nan or name in EXPONENTIALS | LOGARITHMS | DIVISIONS
        return self._accuse_meant(worst) if is_given or not makes_its_own else None

    def _holds_infinity(self, tensor: int) -> bool:
        """Returns whether a tensor was measured to hold +inf."""
        counts = self._counts.of_output(tensor)
        return counts is not None and counts.max == math.inf

    def _find_masks(self, name: str, inputs: _Inputs, worst: Finiteness) -> frozenset[int]:
        """Returns the events whose -inf a softmax reads, if it reads no others: of NaN a row is masked in full."""
        is_softmax = name in SOFTMAX or is_attention(name)
        are_masks = all(self.events[origin].is_mask(self._names) for origin in worst.origins)
        reads_infinity = any(self._holds_infinity(tensor) for _, tensor, state in inputs if state.kind == BAD)
        return worst.origins if is_softmax and are_masks and not reads_infinity else frozenset()

    def _judge_internal(self, op: int) -> Finiteness:
        """Returns what the first output of an op holds if it is bad; else what others hold on purpose."""
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
            return Finiteness(MEANT)  # a mask that is made once and kept
        states = [worst, *(state for _, _, state in inputs)]
        return next((state for state in states if state.kind == MEANT and name in CARRIERS), None)

    def _read(self, tensor: int, op: int, slot: str) -> Finiteness:
        """Returns what a tensor holds when an op reads it."""
        if self._step.tensors.producer[tensor] < 0 and tensor not in self._leaves:
            self._leaves.add(tensor)
            state = self._judge_leaf(tensor, op, slot)
            if state.kind != CLEAN:
                self.memory.write(tensor, state)
        return self.memory.read(tensor)

    def _judge_leaf(self, tensor: int, op: int, slot: str) -> Finiteness:
        counts = self._counts.of_leaf(tensor)
        if counts is None:
            return Finiteness(UNSEEN, tensor) if self._step.holds_numbers(tensor) else Finiteness()
        if not (counts.nan or counts.inf):
            return Finiteness()
        role = self._role_of(tensor)
        if role != PARAMETER and (not counts.nan or (role == LEAF and counts.numel == 1)):
            # A mask, or a constant: who writes NaN into a tensor is the one to name.
            return self._note_meant(Origin(SOURCE, op, slot, tensor, counts))
        self.events.append(Origin(SOURCE, op, slot, tensor, counts))
        return Finiteness(BAD, len(self.events) - 1)
