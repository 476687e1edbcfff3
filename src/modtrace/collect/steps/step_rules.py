"""Finds the steps of a training or inference loop from what runs in it."""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf
from typing import Any

from torch import nn

from ...measure.measurers.measurer import Measurement
from ...recording.options.schedule import StepRange
from ..log.segments import Segment
from ..log.step_data import find_data_calls
from ..log.thread_log import Backward
from .cleared_gradients import evidence_of
from .step import Step

#: The largest number of steps that wait for a backward to join them: one for each move of an episode.
_MAX_PENDING = 10_000

#: The largest number of pairs of models for which it is remembered whether they are related.
_MOST_KNOWN = 256


class StepFinder:
    """Assigns what runs to steps, by the rules of the vocabulary (docs/vocabulary.md)."""

    def __init__(self) -> None:
        self.ended = 0  # the number of steps that `take_ended` has returned
        self._pending: list[Step] = []  # in the order of their start
        self._running: dict[Segment, Step] = {}  # keyed by outermost call
        self.training: Step | None = None  # the open training step, to which optimizer steps belong
        self._eval: Step | None = None
        self._manual = False
        self._trains = False  # whether a backward has added to gradients
        self._has_stepped = False  # whether an optimizer has stepped
        #: Whether a module and the roots of a step are parts of one model, by their ids.
        self._are_related: dict[tuple[int, frozenset[int]], bool] = {}
        self._optimizer_start: int | None = None
        self._early_scalars: list[tuple[str, float | Measurement]] = []

    def drop(self, segment: Segment) -> None:
        """Removes a call that an interrupt kept from beginning."""
        self._running.pop(segment, None)
        for step in self._pending:
            if segment in step.segments:
                step.segments.remove(segment)

    @property
    def current(self) -> Step | None:
        """The open step, to which the user's scalars belong."""
        return self.training or self._eval

    # Events of the run.

    def enter(self, segment: Segment, in_step: bool, now_ns: int) -> Step:
        """Returns the step of an outermost call that begins.

        Args:
            in_step: the call runs inside something that belongs to the open step.
        """
        going_on = self._slot(segment.with_grad) if segment.is_later_micro_batch else None
        if self._manual or in_step:
            step = self._join(segment, now_ns)
        elif going_on is not None:
            step = going_on
        elif not segment.named.parameters:
            self._optimizer_start = None
            self._end_without_roots()
            step = self._slot(segment.with_grad) or self.current or self._open(segment.with_grad, now_ns)
        else:
            self._optimizer_start = None
            step = self._begin(segment, now_ns)
        step.segments.append(segment)
        self._running[segment] = step
        return step

    def leave(self, segment: Segment) -> Step | None:
        """Returns the step in which an ended outermost call began; None if it is not known."""
        return self._running.pop(segment, None)

    def step_around(self, segment: Segment | None) -> Step | None:
        """Returns the step of the call that encloses something that begins."""
        step = None if segment is None else self._running.get(segment)
        return self.current if step is None else step

    def backward_began(self, backward: Backward) -> None:
        """Records that a backward begins.

        If gradients are cleared at this time, they were cleared since the last backward.
        """
        if not backward.accumulate or backward.outer is not None:
            return
        self._end_without_roots()
        step = self.training
        if step is not None and step.restart is not None and step.gradients_cleared():
            self._split(step, step.restart)
        elif step is not None:
            step.restart = None

    def backward_ended(self, backward: Backward) -> Step:
        """Returns the step of a backward that has ended: the open training step."""
        segments = set(backward.reached)
        reached = [step for step in self._pending if not segments.isdisjoint(step.segments)]
        if backward.accumulate or len(reached) > 1:
            self._rejoin(reached)
        step = self.training or self._eval or self._open(True, backward.start_ns)
        step.backwards.append(backward)
        step.worked_ns = backward.end_ns
        step.touch(backward.end_ns)
        step.went_backward = True
        step.goes_on |= backward.create_graph and not backward.accumulate
        if backward.accumulate and backward.outer is None:
            self._trains = step.accumulated = True
            self._take_between(step)
            roots = [segment.named.ref for segment in backward.reached] or step.roots
            evidence = evidence_of(roots)
            # Where no optimizer ends steps, gradients that cannot be read must not keep one open for ever.
            step.evidence = [] if evidence is None and not self._has_stepped else evidence
        return step

    def optimizer_began(self, start_ns: int) -> None:
        """Records that an optimizer's step begins. No step of the loop closes until it ends."""
        self._optimizer_start = start_ns

    def optimizer_ended(self, start_ns: int, end_ns: int, thread: int) -> Step:
        """Records that an optimizer's step has ended, and returns the step of the loop that it belongs to."""
        self._optimizer_start = None
        step = self.training or self._open(True, start_ns)
        step.optimizer_steps.append((start_ns, end_ns, thread))
        step.stepped = self._has_stepped = True
        step.worked_ns = end_ns
        step.touch(end_ns)
        return step

    def possible_numbers(self, step: Step | None) -> range:
        """Returns the possible numbers of a step; None stands for a step that would begin now.

        There are several as long as earlier steps may be joined to each other, or the step itself may be divided.
        """
        before = self._steps_before(step)
        pending = zip(range(before), self._pending, strict=False)
        joinable = next((at for at, step in pending if not step.settled), before)
        first, last = self.ended + joinable, self.ended + before
        if step is not None and step.number is not None:
            first = last = step.number
        return range(first, last + 1 + (step is not None and step.may_be_divided()))

    def _steps_before(self, step: Step | None) -> int:
        """Returns the number of pending steps that began before a step; for None, the number of all."""
        pending = len(self._pending)
        steps = () if step is None else zip(range(pending - 1, -1, -1), reversed(self._pending), strict=True)
        return next((before for before, other in steps if other is step), pending)

    def number_of(self, step: Step) -> int:
        """Returns the number of a step, as far as it can be known now."""
        return step.number if step.number is not None else self.possible_numbers(step)[-1]

    def ask_for(self, selected: StepRange) -> list[int]:
        """Marks the open step to be written when it ends; if it is not selected, the last selected step before.

        Returns:
            the possible numbers of the selected steps, up to that step, that have not ended.
        """
        begun = self._pending
        if self.current is not None:
            begun = begun[: begun.index(self.current) + 1]
        chosen = [step for step in begun if self.number_of(step) in selected]
        if chosen:
            chosen[-1].asked_for = 1 if chosen[-1].restart is None else 2
        return [self.number_of(step) for step in chosen]

    def step_of(self, segment: Segment) -> Step | None:
        """Returns the step that contains a segment, unless `take_ended` has returned it already."""
        return next((step for step in self._pending if segment in step.segments), None)

    def log(self, scalars: dict[str, float | Measurement]) -> None:
        """Adds scalars to the open step, or to the next one if none is open."""
        step = self.current
        target = self._early_scalars if step is None else step.scalars
        target.extend(scalars.items())

    def end_step(self) -> None:
        """Ends the step on the user's request. From now on only the user ends steps."""
        self._manual = True
        self._close(self._eval, settled=True)
        self._close(self.training, settled=True)

    def finish(self, now_ns: int, early_ops: Sequence[Any] = ()) -> None:
        """Ends every step. Scalars and ops that belong to no step get one of their own."""
        if self._early_scalars or early_ops:
            step = self._open(False, early_ops[0].start_ns if early_ops else now_ns)
            step.ops += early_ops
            step.touch(now_ns)
        self._close(self._eval, settled=True)
        self._close(self.training, settled=True)
        for step in self._pending:
            step.settled = True

    def take_ended(self) -> list[Step]:
        """Returns the steps that have ended and whose numbers are final. Each is returned once."""
        ended: list[Step] = []
        for step in self._pending:
            crowded = len(self._pending) - len(ended) > _MAX_PENDING
            if not step.is_open and (step.is_running() or (step.is_waiting() and not crowded)):
                break
            if step.number is None:
                step.number = self.ended + sum(
                    1 for pending_step in self._pending if pending_step.number is not None
                )
            if not step.is_open:
                ended.append(step)
        for step in ended:
            self._pending.remove(step)
        self.ended += len(ended)
        return ended

    def next_starts(self, ended: Sequence[Step]) -> list[float]:
        """Returns for each step that `take_ended` has returned when the next one began; infinite if none has."""
        starts = [*sorted(step.start_ns for step in (*self._pending, *ended)), inf]
        return [starts[bisect_right(starts, step.start_ns)] for step in ended]

    # The rules of docs/vocabulary.md.

    def _begin(self, segment: Segment, now_ns: int) -> Step:
        module_id = segment.named.module_id
        train, before = self.training, (self.training, self._eval)
        if train is not None and (train.stepped or (train.accumulated and train.gradients_cleared())):
            self._close(train, settled=True)
        elif train is not None and segment.with_grad:
            if train.accumulated:
                if train.restart is None:
                    train.restart = find_data_calls(train.segments, train.worked_ns, segment)
            elif self._is_repeated(train, segment):
                self._close(train, settled=False)
        train = self.training
        if train is not None and self._trains and self._is_between(train, segment):
            return train
        if segment.with_grad or (self._eval is not None and module_id in self._eval.entered):
            self._close(self._eval, settled=True)
        step = self._slot(segment.with_grad)
        if step is None:
            step = self._open(segment.with_grad, now_ns)
            for last in filter(None, before):
                self._take_data(last, step, segment)
        step.entered.add(module_id)
        step.add_root(segment)
        return step

    def _is_between(self, step: Step, segment: Segment) -> bool:
        """Returns whether a call is of another model, without gradients, before the step's optimizer: a teacher's."""
        if segment.with_grad or step.stepped or self._is_validation(step, segment):
            return False
        key = (segment.named.module_id, frozenset(step.entered))
        if key not in self._are_related:
            if len(self._are_related) >= _MOST_KNOWN:
                self._are_related.clear()
            roots = [root for root in (ref() for ref in step.roots) if root is not None]
            self._are_related[key] = _is_related(segment.named.module, roots)
        return not self._are_related[key]

    @staticmethod
    def _is_validation(step: Step, segment: Segment) -> bool:
        """Returns whether a model is called again after a backward, with no forward between.

        In that case the optimizer was skipped, and the call is a validation.
        """
        for earlier in reversed(step.segments):
            if earlier.with_grad or not step.accumulated or int(earlier.times[0]) < step.worked_ns:
                return False
            if earlier.named.module_id == segment.named.module_id and earlier is not segment:
                return True
        return False

    def _take_between(self, step: Step) -> None:
        """Takes over the open step with gradients off, if its calls lie between the forward and the backward."""
        between = self._eval
        if between is None or between is step or between.start_ns < step.start_ns or between.is_running():
            return
        if not all(self._is_between(step, segment) for segment in between.segments):
            return
        self._pending.remove(between)
        between.entered.clear()  # its models do not begin a step
        between.roots.clear()
        self._eval = None
        step.append(between)

    def _join(self, segment: Segment, now_ns: int) -> Step:
        if self._optimizer_start is not None and not self._manual:
            self._begin_closure(segment, self._optimizer_start)
        return self.training or self._eval or self._open(segment.with_grad or self._manual, now_ns)

    def _begin_closure(self, segment: Segment, start_ns: int) -> None:
        """Begins the step of an optimizer that calls the model itself (LBFGS), unless its backward has run."""
        train = self.training
        if train is None or train.stepped or self._is_repeated(train, segment):
            self._close(self._eval, settled=True)
            self._close(train, settled=train is None or train.stepped)
            self._open(True, start_ns).add_root(segment)

    @staticmethod
    def _is_repeated(step: Step, segment: Segment) -> bool:
        """Returns whether a call ends a step by rule 3: it was called in it before, and no backward has run."""
        return segment.named.module_id in step.entered and not step.accumulated and not step.goes_on

    def _end_without_roots(self) -> None:
        """Ends a step in which an optimizer stepped without a call of a root, as when tensors are trained directly."""
        step = self.training
        if step is not None and step.stepped and not step.roots and not self._manual:
            self._close(step, settled=True)

    def _take_data(self, last: Step, step: Step, root: Segment) -> None:
        """Moves the calls that prepared a root's data from the end of the preceding step to the root's step."""
        at = find_data_calls(last.segments, last.worked_ns, root)
        if at == len(last.segments):
            return
        last.move_end(at, step)
        if not last.segments and not last.entered and self._pending[-2:] == [last, step]:
            self._close(last, settled=True)
            self._pending.remove(last)  # the root's step gets the number of their step
            step.append(last)

    def _slot(self, with_grad: bool) -> Step | None:
        return self.training if with_grad else self._eval

    def _open(self, with_grad: bool, start_ns: int) -> Step:
        step = Step(start_ns=start_ns, end_ns=start_ns, scalars=self._early_scalars)
        self._early_scalars = []
        self._pending.append(step)
        if with_grad:
            self.training = step
        else:
            self._eval = step
        return step

    def _close(self, step: Step | None, *, settled: bool) -> None:
        if step is None:
            return
        step.is_open = False
        step.settled = settled
        if step is self.training:
            self.training = None
        if step is self._eval:
            self._eval = None
        if settled and step.stepped:  # a backward across an optimizer's step does not join steps
            for earlier in self._pending:
                earlier.settled = earlier.settled or not earlier.is_open

    def _rejoin(self, reached: list[Step]) -> None:
        """Joins steps that were closed before a backward that reaches both, as in a siamese model."""
        first = next((step for step in reached if not step.is_open and not step.settled), None)
        if first is None:
            return
        later = [step for step in self._pending if not step.settled or step.is_open]
        later = [step for step in later[later.index(first) + 1 :] if step is not self._eval]
        for step in later:
            self._pending.remove(step)
            self._follow(step.segments, first)
            first.append(step)
        if self.training is None or self.training in later:
            self.training = first
            first.is_open = True

    def _split(self, step: Step, restart: int) -> None:
        """Ends a step before one of its segments, because `zero_grad()` came between forward and backward."""
        step.restart = None
        self._close(step, settled=True)
        new = self._open(True, int(step.segments[restart].times[0]))
        new.asked_for = max(step.asked_for - 1, 0)
        step.move_end(restart, new)
        self._follow(new.segments, new)
        for segment in new.segments:
            new.entered.add(segment.named.module_id)
            new.add_root(segment)

    def _follow(self, moved: Sequence[Segment], step: Step) -> None:
        """Assigns those of the calls that still run to the step to which they have moved."""
        self._running.update((segment, step) for segment in moved if segment in self._running)


def _is_related(module: Any, roots: Sequence[Any]) -> bool:
    """Returns whether a module is one of the roots, or inside or around one; True if the module was freed."""
    if module is None:
        return True
    inside = set(map(id, nn.Module.modules(module)))
    return any(
        id(root) in inside or any(inner is module for inner in nn.Module.modules(root)) for root in roots
    )
