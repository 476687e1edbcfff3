"""Follows NaN and infinite values through the ops of one step, from what made them to what reads them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ...recording.role import LEAF, PARAMETER
from ..step.sites import Site
from ..values.nonfinite import FIRST_SEEN, PRODUCER, SOURCE
from .indexed_tables import IndexedTables
from .op_rules import (
    CARRIERS,
    FILLS,
    GUARDS,
    NEVER_NAN,
    SHAPES_ONLY,
    SOFTMAX,
    UNINITIALIZED,
    UNSCALES,
    holds_infinity,
    holds_nan,
    is_attention,
)  # fmt: skip
from .step_counts import Counts, StepCounts
from .step_flow import MemoryRegion, StepFlow

#: What the values of a tensor are, from the best to the worst; UNSEEN: they were not measured.
CLEAN, MEANT, UNSEEN, BAD = range(4)


class Finiteness(NamedTuple):
    """The values of a tensor, or of a part of memory."""

    kind: int = CLEAN
    #: Of BAD the number of the event, of UNSEEN the tensor written, of MEANT the leaf that held them; -1: not known.
    origin: int = -1


class Write(NamedTuple):
    """What an op has left in a part of memory."""

    region: MemoryRegion
    state: Finiteness


@dataclass
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
    #: Tensors that hold them, and that no op has read, by storage.
    unread: dict[int, list[int]] = field(default_factory=dict)
    meant_inputs: tuple[int, ...] = ()  # what the op read that held infinities on purpose
    #: Of what was first seen: the tensor that the op read and nobody had measured, -1 if it has no row.
    unseen: int | None = None

    def is_guarded(self, names: list[str]) -> bool:
        """Returns whether every op at which the values end is one that looks for such values and replaces them."""
        ends = self.is_cast or bool(self.absorbed_by)
        return ends and not self.unread and all(names[op] in GUARDS for op in self.absorbed_by)


@dataclass(frozen=True)
class Trace:
    """What came up in a step, in the order of the ops."""

    flow: StepFlow
    counts: StepCounts
    events: list[Origin]
    unscales: bool  # a GradScaler looks at the gradients of this step


def trace_step(tables: IndexedTables, flow: StepFlow, counts: StepCounts) -> Trace:
    """Returns the origins of the step's NaN and infinite values, without intended ones."""
    tracer = _Tracer(tables.sites, flow, counts)
    for op in flow.order:
        tracer.visit(op)
    return Trace(flow, counts, tracer.events, unscales=UNSCALES in flow.bare_names)


class _Tracer:
    """Knows at every op what the memory of the step holds."""

    def __init__(self, sites: Mapping[int, Site], flow: StepFlow, counts: StepCounts) -> None:
        self.events: list[Origin] = []
        self._sites = sites
        self._flow = flow
        self._names = flow.bare_names
        self._counts = counts
        self._memory: dict[int, list[Write]] = {}  # by storage: what is not known to be finite
        self._leaves: set[int] = set()  # that some op has read
        self._meant_leaves: dict[int, Counts] = {}

    def visit(self, op: int) -> None:
        """Follows what one op reads into what it returns."""
        reads = () if self._names[op] in SHAPES_ONLY else self._flow.reads.get(op, ())
        inputs = [(slot, tensor, self._read(tensor, op, slot)) for slot, tensor in reads]
        worst = max((state for _, _, state in inputs), default=Finiteness())
        if op in self._counts.reads_dropped:
            worst = max(worst, Finiteness(UNSEEN))
        is_bad = self._visit_outputs(op, inputs, worst)
        if worst.kind == BAD:
            event = self.events[worst.origin]
            self._mark_read(event, [tensor for _, tensor, state in inputs if state.kind == BAD])
            if is_bad:
                event.carried_by.append(op)
            elif self._has_integers(op):  # `isnan` and comparisons replace nothing
                event.is_cast |= self._names[op] == "to_copy"
            else:
                event.absorbed_by.append(op)

    def _has_integers(self, op: int) -> bool:
        """Returns whether what an op returns cannot be NaN, because it is boolean or holds integers."""
        returned = self._flow.returns.get(op, ())
        return bool(returned) and not any(self._flow.is_float(tensor) for _, tensor in returned)

    def _visit_outputs(self, op: int, inputs: list[tuple[str, int, Finiteness]], worst: Finiteness) -> bool:
        if self._flow.name_op(op).startswith("profiler."):
            return False
        is_bad, measured = False, set()
        for slot, tensor in self._flow.returns.get(op, ()):
            # What an op in place returns comes first. What follows is the base of that view, as later ops read it.
            state = None if slot in measured else self._judge(op, slot, tensor, inputs, worst)
            if (op, slot) in self._counts.outputs:
                measured.add(slot)
            if state is None:  # a view: what it shows is in memory already
                is_bad |= self._look(tensor).kind == BAD
                continue
            self._write(tensor, state)
            is_bad |= state.kind == BAD
            if state.kind == BAD:
                self.events[state.origin].unread.setdefault(self._memory_of(tensor), []).append(tensor)
        return is_bad

    def _mark_read(self, event: Origin, read: list[int]) -> None:
        regions = self._flow.regions
        for other in read:
            unread = event.unread.pop(self._memory_of(other), [])
            unread = [each for each in unread if not _overlap(regions[each], regions[other])]
            if unread:
                event.unread[self._memory_of(other)] = unread

    def _memory_of(self, tensor: int) -> int:
        """Returns the storage of a tensor; if that is not known, a negative number that no other tensor has."""
        storage = self._flow.regions[tensor].storage
        return -1 - tensor if storage is None else storage

    def _judge(
        self, op: int, slot: str, tensor: int, inputs: list[tuple[str, int, Finiteness]], worst: Finiteness
    ) -> Finiteness | None:
        """Returns what an op has left in what it returned; None if it has written nothing."""
        name, counts = self._names[op], self._counts.outputs.get((op, slot))
        if name in UNINITIALIZED:
            return Finiteness()
        if counts is None:
            return self._judge_unmeasured(op, tensor, worst)
        if not counts.nan and not counts.inf:
            return Finiteness()
        if worst.kind == BAD:
            return worst
        if is_attention(name) and slot != "[0]":  # its logsumexp is -inf where a row is masked in full
            return Finiteness(MEANT)
        if not counts.nan and (meant := self._find_meant(op, name, inputs, worst)) is not None:
            return meant
        self.events.append(self._blame(Origin(PRODUCER, op, slot, tensor, counts), inputs, worst))
        return Finiteness(BAD, len(self.events) - 1)

    def _judge_unmeasured(self, op: int, tensor: int, worst: Finiteness) -> Finiteness | None:
        if self._flow.shown_by(tensor) is not None:
            return None
        if worst.kind == BAD and self._flow.holds_numbers(tensor):
            return worst
        if (meant := self._find_meant(op, self._names[op], [], worst)) is not None:
            return meant
        is_known = self._names[op] in SHAPES_ONLY or not self._flow.holds_numbers(tensor)
        return Finiteness() if is_known else Finiteness(UNSEEN, tensor)

    def _blame(self, made: Origin, inputs: list[tuple[str, int, Finiteness]], worst: Finiteness) -> Origin:
        """Returns the event of an op that returned bad values and read none that are known to be bad."""
        name = self._names[made.op]
        if worst.kind == UNSEEN:
            if worst.origin >= 0:
                self._write(worst.origin, Finiteness(BAD, len(self.events)))
            return replace(made, kind=FIRST_SEEN, unseen=worst.origin)
        args = self._flow.args[made.op]
        is_constant = holds_nan(args) or holds_infinity(args)
        if worst.kind == CLEAN and made.counts.nan and name in NEVER_NAN and not is_constant:
            return replace(made, kind=FIRST_SEEN)
        if worst.origin in self._meant_leaves and name not in CARRIERS | SOFTMAX and not is_attention(name):
            slot = next(slot for slot, _, state in inputs if state == worst)
            self._write(worst.origin, Finiteness(BAD, len(self.events)))
            return Origin(SOURCE, made.op, slot, worst.origin, self._meant_leaves[worst.origin])
        return replace(made, meant_inputs=tuple(other for _, other, state in inputs if state.kind == MEANT))

    def _find_meant(
        self, op: int, name: str, inputs: list[tuple[str, int, Finiteness]], worst: Finiteness
    ) -> Finiteness | None:
        """Returns the intended infinities that an op passes on; None if its output is not known to be intended."""
        if name in FILLS and holds_infinity(self._flow.args[op]):
            return Finiteness(MEANT)
        if (
            worst.kind == UNSEEN
            and name in CARRIERS
            and (worst.origin < 0 or worst.origin in self._counts.dropped)
        ):
            return Finiteness(MEANT)  # a mask that is made once and kept
        states = [worst, *(state for _, _, state in inputs)]
        return next((state for state in states if state.kind == MEANT and name in CARRIERS), None)

    def _read(self, tensor: int, op: int, slot: str) -> Finiteness:
        """Returns what a tensor holds when an op reads it."""
        if self._flow.tensors.producer[tensor] < 0 and tensor not in self._leaves:
            self._leaves.add(tensor)
            state = self._judge_leaf(tensor, op, slot)
            if state.kind != CLEAN:
                self._write(tensor, state)
        return self._look(tensor)

    def _judge_leaf(self, tensor: int, op: int, slot: str) -> Finiteness:
        counts = self._counts.of_leaf(tensor)
        if counts is None:
            return Finiteness(UNSEEN, tensor) if self._flow.holds_numbers(tensor) else Finiteness()
        if not (counts.nan or counts.inf):
            return Finiteness()
        site = self._sites.get(-1 if (number := self._flow.sites[tensor]) is None else number)
        role = site.role if site else None
        if role != PARAMETER and (not counts.nan or (role == LEAF and counts.numel == 1)):
            # A mask, or a constant: who writes NaN into a tensor is the one to name.
            self._meant_leaves[tensor] = counts
            return Finiteness(MEANT, tensor)
        self.events.append(Origin(SOURCE, op, slot, tensor, counts))
        return Finiteness(BAD, len(self.events) - 1)

    def _look(self, tensor: int) -> Finiteness:
        region, memory = self._flow.regions[tensor], self._memory.get(self._memory_of(tensor), ())
        return max((each.state for each in memory if _overlap(each.region, region)), default=Finiteness())

    def _write(self, tensor: int, state: Finiteness) -> None:
        region, memory = self._flow.regions[tensor], self._memory_of(tensor)
        kept = [each for each in self._memory.pop(memory, ()) if not _covers(region, each.region)]
        if state.kind != CLEAN:
            kept.append(Write(region, state))
        if kept:
            self._memory[memory] = kept


def _overlap(one: MemoryRegion, other: MemoryRegion) -> bool:
    return one.start < other.stop and other.start < one.stop


def _covers(one: MemoryRegion, other: MemoryRegion) -> bool:
    if one == other:
        return True
    return one.is_dense and one.start <= other.start and other.stop <= one.stop
