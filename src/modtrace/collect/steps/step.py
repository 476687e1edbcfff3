"""One iteration of a training or inference loop, as far as it is known."""

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...measure.measurers.measurer import Measurement
from ..log.segments import Segment
from ..log.thread_log import Backward
from .cleared_gradients import GradientEvidence


@dataclass(eq=False)
class Step:
    """One iteration of the loop, with everything that ran in it."""

    start_ns: int
    end_ns: int = 0  # the end of the last event in the step
    number: int | None = None  # None until nothing before it can change any more
    segments: list[Segment] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    optimizer_steps: list[tuple[int, int, int]] = field(default_factory=list)  # start_ns, end_ns, thread
    optimizer_events: list[Any] = field(default_factory=list)  # device events of these; as many, or none
    scalars: list[tuple[str, float | Measurement]] = field(default_factory=list)
    #: module_ids of the outermost modules that began the step or joined it.
    entered: set[int] = field(default_factory=set)
    roots: list["weakref.ref[Any]"] = field(default_factory=list)
    is_open: bool = True
    settled: bool = False  # no later backward can join it to the next step
    went_backward: bool = False
    goes_on: bool = False  # whether a gradient was taken with a graph (a penalty), so that more follows
    accumulated: bool = False  # whether a backward() has added to gradients
    stepped: bool = False  # whether an optimizer has stepped
    evidence: list[GradientEvidence] | None = field(
        default_factory=list
    )  # None if gradients could not be read
    values: list[Any] = field(default_factory=list)  # values measured outside of segments
    ops: list[Any] = field(default_factory=list)  # batches of ops
    saved: list[Any] = field(default_factory=list)  # memory that autograd saved for its backwards
    #: The number of forward calls in dropped segments, by `counted_as`.
    folded: Counter[Any] = field(default_factory=Counter)
    #: Whether an optimizer used gradients that were not cleared since its last step; None if none stepped before.
    uncleared: bool | None = None
    worked_ns: int = 0  # the end of its last backward or optimizer's step
    restart: int | None = None  # the index of the first segment that may belong to the next step
    asked_for: int = 0  # 1: written when it ends; 2: likewise the step split from it
    #: Set when it has ended, as the columns of `steps`.
    next_start_ns: int | None = None
    resident_bytes: int | None = None
    device_bytes: int | None = None

    @property
    def kind(self) -> str:
        """`train` if gradients were computed or an optimizer stepped, else `eval`."""
        return "train" if self.went_backward or self.stepped else "eval"

    def measured(self) -> Iterator[Any]:
        """Yields everything that was measured in the step, including by ops."""
        yield from self.values
        yield from (batch.measured for batch in self.ops if batch.measured is not None)

    def add_root(self, segment: Segment) -> None:
        """Adds the module of an outermost call, as a weak reference without a callback."""
        module = segment.named.module
        if module is not None:
            plain = weakref.ref(module)
            if not any(root is plain for root in self.roots):
                self.roots.append(plain)

    def fold(self) -> None:
        """Replaces the first segments whose graphs are dead by their numbers of calls, because a step may never end."""
        last = len(self.segments) if self.restart is None else self.restart
        dead = 0
        while dead < last and self.segments[dead].is_closed and not self.segments[dead].has_graph():
            self.folded.update(self.segments[dead].forward_counts())
            dead += 1
        self.segments = self.segments[dead:]
        if self.restart is not None:
            self.restart -= dead

    def may_be_divided(self) -> bool:
        """Returns whether calls that are running in the step may later be assigned to the next step."""
        last = self.segments[-1].handover if self.segments else None
        return self.restart is not None or (last is not None and last.in_loader)

    def add_uncleared(self, uncleared: bool | None) -> None:
        """Adds what is known of one more step of an optimizer."""
        if uncleared is not None:
            self.uncleared = bool(self.uncleared) or uncleared

    def touch(self, now_ns: int) -> None:
        """Moves the end of the step to this time, unless it is later."""
        self.end_ns = max(self.end_ns, now_ns)

    def gradients_cleared(self) -> bool:
        """Returns whether the gradients that the step's backwards left are gone or zero again."""
        return self.evidence is not None and all(evidence.is_cleared() for evidence in self.evidence)

    def is_running(self) -> bool:
        """Returns whether a call in the step still runs on any thread."""
        return not all(segment.is_closed for segment in self.segments)

    def is_waiting(self) -> bool:
        """Returns whether a graph made in the step lives, so that a later backward may still reach it."""
        return not self.settled and any(segment.has_graph() for segment in self.segments)

    def move_end(self, at: int, new: "Step") -> None:
        """Moves the calls from an index on, and the ops since the first of them, to the step that begins with it."""
        self.segments, new.segments = self.segments[:at], self.segments[at:]
        new.start_ns = int(new.segments[0].times[0])
        new.ops = [batch for batch in self.ops if batch.start_ns >= new.start_ns]
        self.ops = [batch for batch in self.ops if batch.start_ns < new.start_ns]
        self.end_ns = max(self.start_ns, self.worked_ns, *self._ends())
        new.end_ns = max(new.start_ns, *new._ends())

    def _ends(self) -> Iterator[int]:
        return (int(segment.times[-1]) for segment in self.segments if segment.is_closed)

    def append(self, step: "Step") -> None:
        """Takes over everything that ran in a later step."""
        self.segments += step.segments
        step.segments = []  # `StepFollower` then searches their step again
        self.backwards += step.backwards
        self.optimizer_steps += step.optimizer_steps
        self.optimizer_events += step.optimizer_events
        self.scalars += step.scalars
        self.folded.update(step.folded)
        self.entered |= step.entered
        self.roots += step.roots
        self.went_backward |= step.went_backward
        self.goes_on |= step.goes_on
        self.accumulated |= step.accumulated
        self.stepped |= step.stepped
        self.add_uncleared(step.uncleared)
        self.asked_for = max(self.asked_for, step.asked_for)
        self.worked_ns = max(self.worked_ns, step.worked_ns)
        if self.evidence is None or step.evidence is None:
            self.evidence = None
        else:
            self.evidence += step.evidence
        self.values += step.values
        self.ops += step.ops
        self.saved += step.saved
        self.touch(step.end_ns)
