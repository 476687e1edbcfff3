"""Records calls, steps and scalars into a sink: the object behind `modtrace.record`."""

import atexit
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...errors import MisuseError, ModtraceWarning, describe_error
from ...recording.arrow.checked_sink import CheckedSink
from ...recording.failure_reporter import FailureReporter, is_clean_exit
from ...recording.options.capture import Capture
from ...recording.options.op_options import Ops
from ...recording.options.schedule import ALL_STEPS, StepRange
from ...recording.protocols import RecentCollectives, Sink
from ...torch_internals.dynamo import keep_out_of_dynamo
from ..log.listeners import Listener
from ..log.segments import Segment
from ..log.thread_log import Backward
from ..names.given_models import roots_of
from ..ops.mode import OpKeeper
from ..ops.python_source import find_line
from ..ops.recorder import OpRecorder
from ..scopes import process
from ..scopes.tracker import ScopeTracker
from ..steps.step import Step
from ..steps.step_rules import StepFinder
from ..steps.training_flags import TrainingFlagReader
from ..values.recorder import ValueRecorder
from ..values.sites import SiteIds
from .flush_timer import FLUSH_TO_DISK_S, FlushTimer
from .nonfinite_stop import NonFiniteStop, OpenStep
from .ready_steps import ReadySteps
from .row_writer import RowWriter, StepHolder
from .step_memory import StepMemory
from .trigger_signals import SignalWatch


class Recorder(Listener):
    """Makes one recording, as a listener of the process's scope tracker from `start` to `stop`."""

    def __init__(
        self,
        sink: Sink,
        model: object = None,
        *,
        steps: StepRange = ALL_STEPS,
        backward_times: bool = False,
        device_times: bool = False,
        values: Sequence[Capture] = (),
        ops: Ops | None = None,
        strict: bool = False,
        inside: bool = False,  # whether modules inside of compiled code are measured
        flight_recorder: "StepHolder | None" = None,  # the sink, if it checks triggers
        flush_after_s: float = FLUSH_TO_DISK_S,  # how long ended steps may wait to be written
        make_ring: Callable[[], RecentCollectives | None] | None = None,  # keeps collectives of a killed run
    ) -> None:
        """Creates a recorder, which records nothing before `start()`."""
        self.wants_backward_events = backward_times or ops is not None
        self.wants_additions = ops is not None
        self._takes_device_times = device_times
        self._make_ring = make_ring
        self._roots = roots_of(model)
        self._selected = steps
        self._strict = strict
        self._tracker: ScopeTracker | None = None
        self._finder = StepFinder()
        self._lock = threading.RLock()  # guards the events of the tracker
        self._writing = threading.RLock()  # guards the sink; taken before `_lock`
        self._active = self._is_forked = False  # a forked child records nothing and takes no lock
        self._flight_recorder = flight_recorder
        self._reporter = FailureReporter(sink, self._writing, strict=strict, step=lambda: self.steps_ended)
        sink = self._sink = CheckedSink(sink, self._reporter)
        self._sites = SiteIds()
        self._memory = StepMemory()
        self._ready = ReadySteps(self._finder, self._reporter, steps, self._lock, self._memory)
        self._values = ValueRecorder(
            values,
            sink,
            self._sites,
            self._reporter,
            numbers=self._ready.numbers_of,
            fired=lambda: None if flight_recorder is None else flight_recorder.last_fired_step,
            inside=inside,
        )
        self._writer = RowWriter(
            sink,
            self._reporter,
            self._values,
            self._sites,
            flight_recorder,
            with_backward=self.wants_backward_events,
            with_device_times=device_times,
        )
        self._training_flags: TrainingFlagReader | None = None
        self._op_options = ops
        self._ops: OpRecorder | None = None
        self._timer = FlushTimer(self._flush_late, after_s=flush_after_s, locks=(self._writing, self._lock))
        self._nonfinite = NonFiniteStop(
            flight_recorder, self._writing, self._read_open, self._ready.numbers_of
        )
        signals = flight_recorder.signals if flight_recorder else ()
        self._signals = SignalWatch(signals, partial(self.fire, "OnSignal"))

    # Methods for the user's side.

    @property
    def steps_ended(self) -> int:
        """The number of steps that have ended, whether they are recorded or not."""
        return self._ready.ended

    @property
    def held_steps(self) -> int:
        """The number of steps that wait for a trigger."""
        return 0 if self._flight_recorder is None else self._flight_recorder.held_steps

    def start(self) -> None:
        """Starts recording."""
        keep_out_of_dynamo(Recorder.log, Recorder.end_step)  # they may be called in a compiled training step
        self._timer.start()
        try:
            self._begin()
        except BaseException:
            self._leave()
            self._values.stop()
            self._memory.stop()
            raise

    def _begin(self) -> None:
        self._active = True
        self._tracker = process.acquire(self, strict=self._strict)
        for name, module in self._roots:
            self._tracker.names.add_root(module, name)
        self._training_flags = TrainingFlagReader(self._tracker.names)
        self._values.start(self._tracker, [module for _, module in self._roots])
        self._memory.start()
        self._roots = []
        if self._op_options is not None:
            self._ops = OpRecorder(
                self._tracker,
                self._op_options,
                self._sink,
                self._sites,
                self._reporter,
                device_times=self._takes_device_times,
            )
            self._ops.start(self._values, is_wanted=self._ready.is_wanted())
        if self._takes_device_times:
            self._tracker.device_times.start(self)
        self._writer.start(self._tracker, self._ops, self._make_ring)
        self._nonfinite.start(self._tracker.subscribers)
        self._signals.start()
        atexit.register(self.stop)  # for a block that is never left, as our threads must not outlive Python

    def _leave(self) -> list[str | None]:
        """Unsubscribes from all events, and returns warnings about what could not be removed."""
        try:
            self._values.leave()
            self._nonfinite.stop()
            texts = [None if self._ops is None else self._ops.stop()]
            if self._tracker is not None:
                self._tracker.device_times.stop(self)
            process.release(self)
            texts.append(self._signals.stop())
            atexit.unregister(self.stop)
            self._active = False
            self._timer.stop()
        finally:
            self._writer.stop()  # from now on it files what belongs to no ended step, so nothing else may write
        return texts

    def stop(self, error: BaseException | None = None) -> None:
        """Ends recording, writes what is left and closes the sink; `error` is the exception that ended the run."""
        if not self._active:
            return
        texts = self._leave()
        failure = None if self._nonfinite.has_raised(error) else error
        if failure is not None:
            self._reporter.run_ended(failure, find_line(failure) if isinstance(failure, Exception) else None)
        with self._lock:
            self._take_ops(self._finder.current)
            self._finder.finish(time.perf_counter_ns(), () if self._ops is None else self._ops.early)
        try:
            self.flush(force=True)
            self._signals.act()
            if self._flight_recorder is not None and failure is not None and not is_clean_exit(failure):
                self.fire("exception", describe_error(failure))
        finally:
            self._values.stop()
            texts.append(self._values.mark_unmatched())
            self._reporter.write_late()
            self._sink.close()
            self._memory.stop()
            self._tracker = None
        for text in filter(None, texts):
            warnings.warn(text, ModtraceWarning, stacklevel=4)
        if error is None:
            self._nonfinite.raise_found()

    def end_step(self) -> None:
        """Ends the step at the user's request."""
        if not self._check_active("step()"):
            return
        began_ns = time.perf_counter_ns()
        with self._lock:
            self._take_ops(self._finder.current)
            self._finder.end_step()
            self._ready.settle(self._values, self._writer)
        if self._check_ended():
            self._writer.intervals.note_writing(began_ns, time.perf_counter_ns())
        self._nonfinite.raise_found()

    def fire(self, kind: str, reason: str, *, with_open: bool = False) -> None:
        """Writes the held steps with a note that gives the reason; `with_open` includes the open step.

        Raises:
            MisuseError: the sink does not hold steps.
        """
        if self._is_forked:
            return
        if self._flight_recorder is None:
            raise MisuseError("dump() writes the steps that are held, and none are: record(keep_last=20)")
        self._timer.run(self.flush)
        with self._writing:
            with self._lock:
                coming = self._finder.ask_for(self._selected) if with_open else ()
            try:
                self._flight_recorder.fire(kind, reason, time.perf_counter_ns(), coming=coming)
            except Exception as error:
                self.failed(error, "while writing the steps that were held")
                if self._strict:
                    raise

    def log(self, scalars: Mapping[str, Any]) -> None:
        """Adds scalars to the open step."""
        if not self._check_active("log()"):
            return
        values = self._writer.scalars.read(scalars)
        with self._lock:
            self._finder.log(values)

    def flush(self, *, force: bool = False) -> None:
        """Writes the rows of all steps that have ended."""
        if self._is_forked:
            return
        ready: list[Step] = []
        with self._writing:
            first = self.steps_ended
            try:
                with self._lock:
                    self._ready.settle(self._values, self._writer)
                    ready = self._ready.take()
                    first = next((step.number for step in ready if step.number is not None), first)
                    if self._flight_recorder is None or force:
                        self._timer.taken()
                    elif ready:
                        self._timer.count_waiting(0)  # the sink may have deferred some
                tracker = self._tracker
                while tracker is not None and self._flight_recorder is not None and ready:
                    self._writer.write([ready.pop(0)], tracker, self._ops)
                if tracker is not None and (force or self._flight_recorder is None):
                    self._writer.write(ready, tracker, self._ops, force=force)
            except Exception as error:
                self.failed(error, "while writing rows")
                if self._strict:
                    raise
            except BaseException as error:  # an interrupt: it is unknown which rows were written
                self._reporter.interrupted(error, first)
                raise

    def _check_active(self, what: str) -> bool:
        """Returns False in a forked child; raises MisuseError outside of the block."""
        if not self._active and not self._is_forked:
            raise MisuseError(
                f"{what} outside of its `with record(...)` block: nothing is being recorded there."
            )
        return not self._is_forked

    def add_op_keeper(self, keeper: OpKeeper) -> None:
        """Passes every op and its tensors to a keeper from now on. Ops must be recorded."""
        assert self._ops is not None
        self._ops.mode.add_keeper(keeper)

    def segment_opened(self, segment: Segment, in_step: bool) -> None:
        with self._lock:
            segment.holders += 1
            last = self._finder.step_around(segment.outer)
            self._take_ops(last)
            now_ns = time.perf_counter_ns()
            step = self._finder.enter(segment, in_step, now_ns)
            if self._training_flags is not None:
                self._training_flags.read(segment)
            if self._ops is not None:
                self._ops.enter_step(last, step, segment)
            self._ready.settle(self._values, self._writer)
        if self._check_ended():
            written_ns = time.perf_counter_ns()
            self._writer.intervals.note_writing(now_ns, written_ns)
            if step.start_ns == now_ns:
                step.start_ns = written_ns  # excludes the time for checking the previous step
        if not self._values.is_measuring and self._ops is None:
            return
        with self._lock:
            active = self._values.captures_for(step)
            self._values.open(segment, active)
            if self._ops is not None:
                self._ops.want(self._ready.is_wanted(step), active)

    def segment_closed(self, segment: Segment) -> None:
        with self._lock:
            self._values.close(segment)
            step = self._finder.leave(segment)
            self._take_ops(step)
            segment.pack()  # arrays take a quarter of the memory of lists
            if step is not None:
                step.touch(int(segment.times[-1]))

    def segment_dropped(self, segment: Segment) -> None:
        with self._lock:
            self._finder.drop(segment)
            self._values.drop(segment)

    def infers_shapes(self) -> None:
        with self._lock:
            self._take_ops(self._finder.current)
            if self._ops is not None:
                self._ops.want(is_wanted=False, active=0)

    def backward_began(self, backward: Backward) -> None:
        if backward.accumulate and backward.outer is None:
            self._writer.parameters.backward_began()
        with self._lock:
            self._take_ops(self._finder.step_around(backward.segment))
            self._finder.backward_began(backward)
            step = self._finder.current
        self._values.open_backward(backward, step)

    def backward_ended(self, backward: Backward) -> None:
        if backward.accumulate and backward.outer is None:
            self._writer.parameters.backward_ended()
        with self._lock:
            step = self._finder.backward_ended(backward)
            self._take_ops(step)
            if self._ops is not None:
                self._ops.take_saved(step, backward)
            self._values.take_backward(step, backward)

    def optimizer_began(self, start_ns: int) -> None:
        with self._lock:
            self._take_ops(self._finder.current)
            self._finder.optimizer_began(start_ns)

    def after_optimizer(self, optimizer: Any, has_closure: bool) -> None:
        self._writer.parameters.read_optimizer(optimizer)
        if self._ops is not None:
            self._ops.alive.add_optimizer(optimizer)

    def optimizer_ended(self, start_ns: int, end_ns: int, thread: int) -> None:
        with self._lock:
            step = self._finder.optimizer_ended(start_ns, end_ns, thread)
            step.add_uncleared(self._writer.parameters.take_uncleared())
            if self._takes_device_times and self._tracker is not None:
                step.optimizer_events.append(self._tracker.device_times.optimizer_events())
            self._take_ops(step)
            self._values.take_optimizer(step, thread)

    def failed(self, error: Exception, where: str) -> None:
        """Reports an internal error once, in the recording and to the user."""
        self._reporter.failed(error, where)

    def forked(self) -> None:
        """Drops the recording, which belongs to the parent. It takes no lock, as its holder may be missing here."""
        self._active, self._is_forked = False, True
        self._nonfinite.stop()
        self._writer.forked()
        self._memory.stop()
        self._values.abandon()
        if self._ops is not None:
            self._ops.abandon()
        self._sink.abandon()

    # Writing of rows.

    def _flush_late(self) -> None:
        """Writes ended steps, on the timer's thread. A flight recorder already has them, and only flushes its files."""
        self.flush(force=self._flight_recorder is not None)

    def _check_ended(self) -> bool:
        """Checks triggers on ended steps, or else writes these. Returns whether this may have taken time."""
        if self._flight_recorder is None:
            return bool(self._ready.steps) and self._write_if_due()
        if has_ended := bool(self._ready.steps):
            self._timer.run(self.flush)
        self._signals.act()
        self._nonfinite.check_ended()
        return has_ended

    def _read_open(self) -> OpenStep | None:
        """Returns the step whose optimizer begins, if it is recorded and has values that are not finite."""
        with self._lock:
            self._take_ops(self._finder.current)
            step = self._finder.current
            number = -1 if step is None else self._finder.number_of(step)
            if self._tracker is None or step is None or number not in self._selected:
                return None
            rows = self._writer.open_rows(step, number, self._tracker, self._ops)
        keep = partial(self._values.take_optimizer, step, self._tracker.logs.current.number)
        return OpenStep(number, rows, keep) if rows else None

    def _write_if_due(self) -> bool:
        """Writes the ended steps, or leaves them to the timer. Returns whether it wrote.

        It does not wait for a thread that is writing, which may wait for a disk. Ops are left to the timer, because a
        tensor that replaced a parameter between two steps gets its name in the next call of its root, while the op that
        made it belongs to the earlier step. Values that come from a device are left to it, too. If the timer has no
        thread, all are written here, since nothing may grow until the run ends. This takes 0.9 % of a step of the
        reference GPT.
        """
        waits = self._values.waits_for_devices, self._writer.scalars.has_met_device, self._takes_device_times
        may_write = not self._timer.has_thread or (self._ops is None and not any(waits))
        if may_write and self._timer.is_due and self._writing.acquire(blocking=False):
            self._writing.release()
            self._timer.run(self.flush)
            return True
        with self._lock:
            if self._ready.steps:
                self._timer.count_waiting(self._ready.samples)
        return False

    def _take_ops(self, step: Step | None) -> None:
        """Assigns the ops since the last call to `step`, or to the next step if it is None."""
        if self._ops is not None:
            self._ops.take(step)
