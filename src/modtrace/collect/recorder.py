"""Records calls, steps and scalars into a sink: what `modtrace.record` keeps running."""

import atexit
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import MisuseError, ModtraceWarning
from ..recording.capture import Capture
from ..recording.op_options import Ops
from ..recording.path_pattern import describe_unmatched, unmatched
from ..recording.protocols import Sink
from ..recording.step_range import ALL_STEPS, StepRange
from ..torch_internals import keep_out_of_dynamo, unseen
from . import scopes
from .backward import Backward
from .call_rows import NthMemory, call_columns, intervals_of, optimizer_columns
from .keep_last import KeepLast
from .measured import free_rows
from .names import roots_of
from .op_batches import OpBatch
from .op_call_costs import CallTable, add_costs, op_sites
from .op_mode import OpKeeper
from .op_recorder import OpRecorder
from .segments import Segment
from .signals import SignalWatch
from .steps import Step, StepFinder
from .value_rows import OpSites, SiteIds, value_columns
from .values import ValueTaps
from .wishes import Mask, Wishes

#: Rows of ended steps go to the sink this long after the first of them ended, or with the next step's end.
_FLUSH_AFTER_S = 0.2

#: ... or when so many measurements wait: with their rows in the making 1 MB.
_FLUSH_SAMPLES = 2048


class Recorder:
    """One recording in the making. A listener of the process's scope tracker while it is entered."""

    def __init__(
        self,
        sink: Sink,
        model: object = None,
        *,
        steps: StepRange = ALL_STEPS,
        backward_times: bool = False,
        values: Sequence[Capture] = (),
        ops: Ops | None = None,
        strict: bool = False,
    ) -> None:
        self.wants_backward_events = backward_times or ops is not None
        self.wants_additions = ops is not None
        self._sink = sink
        self._roots = roots_of(model)
        self._selected = steps
        self._strict = strict
        self._captures = tuple(values)
        self._wishes: Wishes | None = None  # what they want, while it is recorded
        self._taps: ValueTaps | None = None  # while they work
        self._tap: ValueTaps | None = None  # what stands in the tracker's list
        self._sites = SiteIds()
        self._wanted_ops = ops
        self._ops: OpRecorder | None = None
        self._early_ops: list[OpBatch] = []  # that ran while no step was open
        self._cannot_write_ops = False
        self._late_marks: list[str] = []  # to be written with the next rows
        self._tracker: scopes.ScopeTracker | None = None
        self._finder = StepFinder()
        self._memory = NthMemory()
        self._names_revision = 0
        self._running: dict[Segment, Step] = {}
        self._ready: list[Step] = []
        self._ready_samples = 0
        self._lock = threading.RLock()  # over what the tracker tells
        self._writing = threading.RLock()  # over the sink; taken before the other
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._stopping = False
        self._timer: threading.Thread | None = None
        self._active = False
        self._broken = False
        self._is_forked = False  # what a forked child says is not recorded, and takes no lock
        self.steps_ended = 0
        self._kept = sink if isinstance(sink, KeepLast) else None
        self._signals = SignalWatch(self._kept.signals if self._kept else (), self._fire_for_signal)

    # The user's side.

    @property
    def last_fired_step(self) -> int | None:
        """The last step in which a trigger has fired."""
        return None if self._kept is None else self._kept.last_fired_step

    @property
    def held_steps(self) -> int:
        """How many steps wait for a trigger."""
        return 0 if self._kept is None else self._kept.held_steps

    def start(self) -> None:
        """Begins to record."""
        keep_out_of_dynamo(Recorder.log, Recorder.end_step)  # called in a compiled training step
        self._timer = threading.Thread(target=self._flush_late, name="modtrace-flush", daemon=True)
        self._timer.start()
        try:
            self._begin()
        except BaseException:
            self._leave()
            raise

    def _begin(self) -> None:
        self._active = True
        self._tracker = scopes.acquire(self, strict=self._strict)
        for name, module in self._roots:
            self._tracker.names.add_root(module, name)
        self._roots = []
        if self._captures:
            self._start_taps(self._tracker)
        if self._wanted_ops is not None:
            self._start_ops(self._tracker, self._wanted_ops)
        self._signals.start()
        atexit.register(self.stop)  # a block never left, and no thread of ours alive when Python goes down

    def _leave(self) -> None:
        """Hears and times nothing any more."""
        if self._tracker is not None:
            self._tracker.taps[:] = [tap for tap in self._tracker.taps if tap is not self._tap]
        if self._ops is not None:
            self._ops.stop()
        scopes.release(self)
        self._signals.stop()
        atexit.unregister(self.stop)
        self._active = False
        self._stopping = True
        self._wake.set()
        self._hurry.set()
        if self._timer is not None:
            self._timer.join()

    def stop(self, error: BaseException | None = None) -> None:
        """Ends recording, writes what is left and closes the sink.

        Args:
            error: the exception that ended the run, if one did; it is noted in the recording.
        """
        if not self._active:
            return
        self._leave()
        if error is not None:
            self._note_end(error)
        with self._lock:
            self._take_ops(self._finder.current)
            self._finder.finish(time.perf_counter_ns(), self._early_ops)
        self.flush(force=True)
        self._signals.act()
        if self._kept is not None and error is not None and not _is_clean_exit(error):
            self.fire("exception", _describe(error))
        unmatched_patterns = self._stop_taps()
        self._sink.close()
        self._tracker = None
        if unmatched_patterns is not None:
            warnings.warn(unmatched_patterns, ModtraceWarning, stacklevel=3)

    def end_step(self) -> None:
        """The user's own mark that a step ends."""
        if self._is_forked:
            return
        self._check_active("step()")
        with self._lock:
            self._take_ops(self._finder.current)
            self._finder.end_step()
            self._settle()
        self._look_at_ended()

    def fire(self, kind: str, reason: str) -> None:
        """Writes the steps that are held, with a note that says why.

        Raises:
            MisuseError: there is nothing that holds steps.
        """
        if self._is_forked:
            return
        if self._kept is None:
            raise MisuseError("dump() writes the steps that are held, and none are: record(keep_last=20)")
        self.flush()
        with self._writing:
            try:
                self._kept.fire(kind, reason, time.perf_counter_ns())
            except Exception as error:
                self.failed(error, "while writing the steps that were held")
                if self._strict:
                    raise

    def log(self, scalars: Mapping[str, Any]) -> None:
        """Keeps scalars with the step that is open."""
        if self._is_forked:
            return
        self._check_active("log()")
        values = {name: _to_float(name, value) for name, value in scalars.items()}
        with self._lock:
            self._finder.log(values)

    def flush(self, *, force: bool = False) -> None:
        """Writes the rows of all steps that have ended."""
        if self._is_forked:
            return
        with self._writing:
            with self._lock:
                self._settle()
                ready, self._ready, self._ready_samples = self._ready, [], 0
            try:
                while self._kept is not None and ready:
                    self._write([ready.pop(0)], force=False)
                if force or self._kept is None:
                    self._write(ready, force)
            except Exception as error:
                self.failed(error, "while writing rows")
                if self._strict:
                    raise

    def _check_active(self, what: str) -> None:
        if not self._active:
            raise MisuseError(
                f"{what} outside of its `with record(...)` block: nothing is being recorded there."
            )

    def add_op_keeper(self, keeper: OpKeeper) -> None:
        """Has somebody see every op with its tensors from now on; only where ops are recorded."""
        assert self._ops is not None
        self._ops.mode.add_keeper(keeper)

    # The tracker's side.

    def segment_opened(self, segment: Segment, in_step: bool) -> None:
        with self._lock:
            segment.holders += 1
            self._take_ops(self._step_around(segment.outer))
            now_ns = time.perf_counter_ns()
            step = self._running[segment] = self._finder.enter(segment, in_step, now_ns)
            step.ops += self._early_ops
            self._early_ops = []
            self._settle()
        if self._look_at_ended() and step.start_ns == now_ns:
            step.start_ns = time.perf_counter_ns()  # looking at the one before is not its time
        if self._taps is None and self._ops is None:
            return
        with self._lock:
            active = self._captures_for(step)
            if self._taps is not None and active:
                self._taps.open(segment, active)
            if self._ops is not None:
                self._want_ops(self._may_be_selected(step), active)

    def segment_closed(self, segment: Segment) -> None:
        with self._lock:
            if self._taps is not None:
                self._taps.close(segment)
            step = self._running.pop(segment, None)
            self._take_ops(step)
            segment.pack()  # it waits to be written: lists take four times the memory
            if step is not None:
                step.touch(int(segment.times[-1]))

    def segment_dropped(self, segment: Segment) -> None:
        with self._lock:
            self._running.pop(segment, None)
            self._finder.drop(segment)
            if self._taps is not None:
                self._taps.drop(segment)

    def backward_began(self, backward: Backward) -> None:
        with self._lock:
            self._take_ops(self._step_around(backward.segment))
            self._finder.backward_began(backward)

    def backward_ended(self, backward: Backward) -> None:
        with self._lock:
            step = self._finder.backward_ended(backward)
            self._take_ops(step)
            if self._ops is not None:
                savings = self._ops.take_savings(backward)
                step.savings += [] if savings is None else [savings]
            if self._taps is not None:
                step.values += self._taps.take_backward(backward)

    def optimizer_began(self, start_ns: int) -> None:
        with self._lock:
            self._take_ops(self._finder.current)
            self._finder.optimizer_began(start_ns)

    def optimizer_ended(self, start_ns: int, end_ns: int, thread: int) -> None:
        with self._lock:
            step = self._finder.optimizer_ended(start_ns, end_ns, thread)
            self._take_ops(step)
            if self._taps is not None:
                step.values += self._taps.take_optimizer(thread)

    def failed(self, error: Exception, where: str) -> None:
        """Notes an internal error once, in the recording and to the user."""
        if self._broken:
            return
        self._broken = True
        said = _describe(error)
        text = f"incomplete from step {self.steps_ended}: modtrace failed at {where}: {said}"
        with self._writing:
            self._sink.mark(text)
        if not self._strict:
            warnings.warn(
                f"{where}: modtrace met an internal error and stopped recording; the run goes on "
                f"({said}). Please report it; record(strict=True) raises it.",
                ModtraceWarning,
                stacklevel=2,
            )

    def forked(self) -> None:
        """Lets go of the recording, which is the parent's. Takes no lock: its holder is not in this process."""
        self._active = False
        self._is_forked = True
        if self._taps is not None:
            self._taps.abandon()
        if self._ops is not None:
            self._ops.abandon()
        self._sink.abandon()

    # Writing.

    def _settle(self) -> None:
        """Takes over the steps that have ended."""
        ended = self._finder.take_ended()
        if not ended:
            return
        if self._taps is not None:
            ended[-1].values += self._taps.take_backward(None)
            self._taps.settle_kept()
        for step in ended:
            self.steps_ended += 1
            if self._taps is not None:
                step.values += self._taps.take_segments(step.segments)
            if step.number in self._selected:
                self._ready.append(step)
                self._ready_samples += sum(len(measured.sites) for measured in step.values)
                self._ready_samples += sum(len(batch) for batch in step.ops)
            else:
                _let_go(step)
        if self._ready:
            self._wake.set()
        if self._ready_samples >= _FLUSH_SAMPLES:
            self._hurry.set()

    def _flush_late(self) -> None:
        """Runs beside the training: writes ended steps even when no further step comes to an end."""
        while True:
            self._wake.wait()
            self._hurry.wait(_FLUSH_AFTER_S)
            if self._stopping:
                return
            self._wake.clear()
            self._hurry.clear()
            self.flush(force=self._kept is not None)  # what was written at a step's end is put to rest here

    def _look_at_ended(self) -> bool:
        """Has triggers look at the steps that have ended, before anything else runs; whether there are any."""
        if self._kept is not None:
            self.flush()
            self._signals.act()
        return self._kept is not None

    def _fire_for_signal(self, name: str) -> None:
        self.fire("OnSignal", name)

    def _write(self, steps: list[Step], force: bool) -> None:
        tracker = self._tracker
        if tracker is None:
            return
        while self._late_marks:
            self._sink.mark(self._late_marks.pop(0))
        batches = call_columns(steps, self._memory, with_backward=self.wants_backward_events)
        optimizer_count = sum(len(step.optimizer_steps) for step in steps)
        first_id = tracker.take_ids(optimizer_count)
        optimizers = optimizer_columns(steps, first_id)
        self._names_revision, modules = tracker.names.rows_since(self._names_revision)
        if modules:
            self._sink.write("modules", {name: [row[name] for row in modules] for name in modules[0]})
        batches += [optimizers] if optimizers else []
        try:
            sites = self._write_ops(steps, batches, range(first_id, first_id + optimizer_count))
        except Exception as error:
            sites, self._cannot_write_ops = None, True
            if self._ops is not None:
                self._ops.abandon()
            self._ops_failed(error, "while writing ops")
        for columns in batches:
            self._sink.write("calls", columns)
        step_rows = _step_columns(steps) if steps else None
        try:
            self._write_values(steps, sites)
        except Exception as error:
            _free_values(steps)
            self._values_failed(error, "while writing values")
        scalars = [(step.number, name, value) for step in steps for name, value in step.scalars]
        if scalars:
            number, name, value = (list(column) for column in zip(*scalars, strict=True))
            self._sink.write("scalars", {"step": number, "name": name, "value": value})
        if step_rows is not None:
            self._sink.write("steps", step_rows)
        for step in steps:
            _let_go(step)
        self._memory.prune()
        if steps or force:
            self._sink.end_step(time.perf_counter_ns(), force=True)

    def _write_ops(
        self, steps: list[Step], calls: list[dict[str, Any]], optimizer_ids: Sequence[int]
    ) -> OpSites | None:
        """Writes what ops have left, and adds what they cost to the columns of calls."""
        if self._ops is None or self._cannot_write_ops:
            return None
        rows = self._ops.tables.of(steps, optimizer_ids, self._sites)
        if rows is None:
            return None
        for name, columns in rows.tables.items():
            if len(next(iter(columns.values()))):
                self._sink.write(name, columns)
        table = CallTable(calls) if calls else None
        if table is not None:
            add_costs(table, rows)
        return op_sites(table, rows)

    def _write_values(self, steps: list[Step], ops: OpSites | None) -> None:
        wishes = self._wishes
        columns = None if wishes is None else value_columns(steps, self._sites, self._memory, wishes, ops)
        new_sites = self._sites.take_new()
        if new_sites is not None:
            self._sink.write("sites", new_sites)
        if columns is not None:
            self._sink.write("values", columns)
        _free_values(steps)

    # Ops.

    def _start_ops(self, tracker: scopes.ScopeTracker, options: Ops) -> None:
        self._ops = OpRecorder(tracker, options, failed=self._ops_failed, missed=self._ops_missed)
        if self._taps is not None and any(each.wants_ops for each in self._captures):
            assert self._wishes is not None
            values = self._ops.add_values(self._wishes, self._taps.measure, self._values_failed)
            self._taps.measured_by_ops = values.find
            values.active = self._captures_for()
        self._ops.start(is_wanted=self._may_be_selected())

    def _want_ops(self, is_wanted: bool, active: Mask) -> None:
        """Has what runs from now on seen or not, and what it returns measured for some captures."""
        assert self._ops is not None
        if self._ops.values is not None:
            self._ops.values.active = active
        self._ops.want(is_wanted)

    def _step_around(self, segment: Segment | None) -> Step | None:
        """The step of what runs around something that begins."""
        step = None if segment is None else self._running.get(segment)
        return self._finder.current if step is None else step

    def _take_ops(self, step: Step | None) -> None:
        """What has run since the last time belongs to a step; None: to the one that begins next."""
        batch = None if self._ops is None else self._ops.take()
        if batch is None or self._ops is None:
            return
        if step is None:
            self._early_ops.append(batch)
        else:
            step.ops += [*self._early_ops, batch]
            self._early_ops = []
        measured = None if self._ops.values is None else self._ops.values.take()
        if measured is not None:
            batch.measured = measured

    def _ops_missed(self) -> None:
        """Notes once that ops run unseen: torch has taken our mode off, or it cannot stand below the user's.

        Called with the lock over what the tracker tells, so that the sink has to wait.
        """
        self._late_marks.append(
            f"ops are missing from step {self.steps_ended}: a dispatch mode of yours was on when record() was entered, "
            "or when a step to keep began, and was left later"
        )

    def _ops_failed(self, error: Exception, where: str) -> None:
        """Notes once that ops cannot be recorded, and records none any more; calls are recorded on."""
        if self._strict:
            raise error
        said = _describe(error)
        with self._writing:
            self._sink.mark(
                f"ops are incomplete from step {self.steps_ended}: modtrace failed at {where}: {said}"
            )
        warnings.warn(
            f"{where}: modtrace met an internal error and records no more ops; the run and the recording of "
            f"calls go on ({said}). Please report it; record(strict=True) raises it.",
            ModtraceWarning,
            stacklevel=2,
        )

    # Values.

    def _start_taps(self, tracker: scopes.ScopeTracker) -> None:
        self._wishes = Wishes(
            self._captures, tracker.names, fired=lambda: self.last_fired_step, raised=self._user_raised
        )
        self._taps = ValueTaps(
            tracker,
            self._wishes,
            active=self._captures_for,
            put=self._sink.put_tensor,
            failed=self._values_failed,
            raised=self._user_raised,
        )
        self._tap = self._taps
        self._taps.start()
        tracker.taps.append(self._taps)

    def _captures_for(self, step: Step | None = None) -> Mask:
        """The captures that may look at what runs in a step; None: in the one that an optimizer belongs to."""
        if self._wishes is None:
            return 0
        with self._lock:
            numbers = self._finder.possible_numbers(step or self._finder.training)
        if self._selected == ALL_STEPS:
            return self._wishes.in_steps(numbers)
        return self._wishes.in_steps([number for number in numbers if number in self._selected])

    def _may_be_selected(self, step: Step | None = None) -> bool:
        """Whether what runs in a step may be among those to keep; None: in the one that an optimizer belongs to."""
        if self._selected == ALL_STEPS:
            return True
        with self._lock:
            numbers = self._finder.possible_numbers(step or self._finder.training)
        return any(number in self._selected for number in numbers)

    def _user_raised(self, what: str, error: Exception) -> None:
        """Notes once that a function of the user's has raised. The lock over what the tracker tells may be held."""
        said = _describe(error)
        self._late_marks.append(f"{what} raised in step {self.steps_ended}: {said}")
        warnings.warn(
            f"{what} raised {said}. The run and the recording go on; rows that it was for say so in `note`.",
            ModtraceWarning,
            stacklevel=2,
        )

    def _values_failed(self, error: Exception, where: str) -> None:
        """Notes once that measuring has failed, and measures no more; calls are recorded on."""
        if self._strict:
            raise error
        taps, self._taps = self._taps, None
        if taps is None:
            return
        taps.abandon()  # it stays in the tracker's list, which a hook may just be going through
        taps.stop()
        said = _describe(error)
        with self._writing:
            self._sink.mark(
                f"values are incomplete from step {self.steps_ended}: modtrace failed at {where}: {said}"
            )
        warnings.warn(
            f"{where}: modtrace met an internal error and measures no more values; the run and the recording of "
            f"calls go on ({said}). Please report it; record(strict=True) raises it.",
            ModtraceWarning,
            stacklevel=2,
        )

    def _stop_taps(self) -> str | None:
        """Takes the taps off; what is to be said of patterns that selected nothing, for modules are met until now."""
        if self._taps is None or self._tracker is None or self._wishes is None:
            return None
        self._taps.stop()
        filters = [each.paths for each in self._captures if not each.paths.is_all]
        if not filters:
            return None
        paths = [*self._tracker.names.paths(), *self._wishes.parameter_paths]
        found = [each for each_filter in filters for each in unmatched(each_filter, paths)]
        if not found:
            return None
        text = describe_unmatched(found, paths, what="module or parameter that was met")
        self._sink.mark(text)
        return text

    def _note_end(self, error: BaseException) -> None:
        name = type(error).__name__
        if _is_clean_exit(error):
            return
        said = _first_line(error)
        text = f"the run ended by {name}" + (f": {said}" if said else "")
        self._sink.mark(f"{text}; complete to step {self.steps_ended - 1}" if self.steps_ended else text)


def _is_clean_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and not error.code


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _free_values(steps: list[Step]) -> None:
    of_ops = (batch.measured for step in steps for batch in step.ops)
    free_rows(
        [*(each for step in steps for each in step.values), *(each for each in of_ops if each is not None)]
    )
    for step in steps:
        step.values = []


def _let_go(step: Step) -> None:
    _free_values([step])
    step.ops, step.savings = [], []
    for segment in step.segments:
        segment.holders -= 1


def _step_columns(steps: list[Step]) -> dict[str, Any]:
    columns = {
        "step": [step.number for step in steps],
        "kind": [step.kind for step in steps],
        "start_ns": [step.start_ns for step in steps],
        "end_ns": [step.end_ns for step in steps],
    }
    if any(step.values for step in steps):
        columns["overhead_ns"] = [_overhead_ns(step) for step in steps]
    return columns


def _overhead_ns(step: Step) -> int:
    """What was spent measuring between the step's start and end, on whatever thread."""
    _, begin, end = intervals_of([step])
    within = np.minimum(end, step.end_ns) - np.maximum(begin, step.start_ns)
    return int(np.maximum(within, 0).sum())


def _to_float(name: str, value: Any) -> float:
    """A scalar as the user gave it: a number, or a tensor or array with one element."""
    try:
        if isinstance(value, torch.Tensor):
            with unseen():
                return float(value.detach())
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"log({name}={str(value)[:60]!r}): a scalar is a number or a tensor with one element, "
            f"not {type(value).__name__}"
        ) from error
