"""The functions with which users record: `record()`, and the recording that it returns."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .analysis.modules.module_tree import ModuleTree
from .analysis.values.nonfinite import NonFinite
from .errors import MisuseError, NonFiniteError, NothingRecordedError
from .face import Recording
from .nonfinite_reports import NonFiniteReports
from .optional import require
from .record_options import RecordOptions, check_choices, checked_compiled, checked_tensors
from .recording.in_memory.recording import MemoryRecording
from .recording.meta import HELD, Note, Progress, RunMeta
from .recording.options.capture import INSIDE, STATS, Capture, Patterns, to_captures
from .recording.options.op_options import Ops, to_ops
from .recording.options.step_range import to_step_range
from .recording.options.tensor_options import TensorOptions
from .recording.protocols import RecordingData, Sink
from .recording.suggestions import count_of
from .recording.triggers.trigger_kinds import Trigger, check_keep_last, to_triggers
from .store.reader import FolderReader
from .store.writer import FolderWriter
from .surface import choose_phrase

if TYPE_CHECKING:
    from .collect.recorder.launch import Launch
    from .collect.recorder.recorder import Recorder
    from .collect.recorder.running import Running

#: What a recording in memory keeps of rows.
MAX_BYTES = 256 * 2**20


class LiveRecording(Recording):
    """A recording while it is made: a context manager, entered once, or `start()` and `stop()`.

    It can be read while it runs and afterwards.
    """

    def __init__(self, model: object, to: str | os.PathLike[str] | None, options: "RecordOptions") -> None:
        super().__init__(MemoryRecording(max_bytes=options.max_bytes))
        self.path = None if to is None else Path(to)
        self._model: object = model
        self._options = options
        self._recorder: Recorder | None = None  # while it runs
        self._last_recorder: Recorder | None = None
        self._writer: FolderWriter | None = None
        self._claim: Running | None = None
        self._launch: Launch | None = None  # of this process
        self._is_unrecorded = False  # modtrace failed when it began, or a rank cannot write
        self._flags: dict[str, Any] | None = None  # of the recording's meta data

    @property
    def data(self) -> RecordingData:
        """The tables as they are now, with the steps that have ended."""
        if self._recorder is not None:
            self._recorder.flush(force=True)
        return self._data

    def _settled(self) -> RecordingData:
        data = self.data
        if self._writer is not None:
            self._writer.wait_for_tensors()
        return data

    @property
    def progress(self) -> Progress:
        """The extent of the recording so far."""
        sink: Any = self._writer or self._data
        steps = self._last_recorder.steps_ended if self._last_recorder else 0
        held = self._last_recorder.held_steps if self._last_recorder else 0
        return Progress(steps=steps, rows=sink.rows, size_bytes=sink.size_bytes, held=held)

    def step(self) -> None:
        """Ends the step: from now on steps end only here.

        Raises:
            MisuseError: it is not running.
        """
        if recorder := self._running("step()"):
            recorder.end_step()

    def log(self, **scalars: Any) -> None:
        """Keeps numbers of the user's with the step that is running: `rec.log(loss=loss)`.

        Args:
            scalars: numbers, or tensors with one element. One on a CUDA device is read when its step is written, and
                nobody waits for it; see docs/devices.md.

        Raises:
            TypeError: a value is no number.
            MisuseError: it is not running.
        """
        if recorder := self._running("log()"):
            recorder.log(scalars)

    def dump(self, reason: str = "") -> None:
        """Writes the last `keep_last` steps up to now, of which the step that is open is the last.

        A step ends when the next one begins, at `step()`, or with the block. Those that have ended are written when
        this returns; the open one, to which `log()` now adds, follows when it ends.

        Args:
            reason: is kept with the recording, see `triggers`.

        Raises:
            MisuseError: it is not running, or neither `keep_last` nor `triggers` were given.
        """
        if recorder := self._running("dump()"):
            recorder.fire("dump", reason, with_open=True)

    def nonfinite(self) -> Iterator[NonFinite]:
        """Yields all that made NaN or infinite values, or held them, in the order in which they came up.

        While the recording runs, it yields nothing if no tensor has been measured yet.

        Raises:
            NothingRecordedError: no tensor was measured; the message says why.
        """
        try:
            yield from super().nonfinite()
        except NothingRecordedError:
            if self._recorder is None or not self._options.values:
                raise

    def module_tree(self, step: int | None = None) -> ModuleTree:
        """Returns the calls and times of one step by module; its notes also say how many steps are held.

        Args:
            step: the number of the step; None for the last complete one.

        Raises:
            ValueError: there is no such step.
        """
        tree, held = super().module_tree(step), self.progress.held
        if self._recorder is None or not held:
            return tree
        reason = f"{count_of(held, 'step')} held in memory; rec.dump() writes what is held"
        return replace(tree, notes=(*tree.notes, Note(step=None, kind=HELD, reason=reason)))

    def start(self) -> None:
        """Begins to record, until `stop()`: in a notebook, where a `with` block cannot reach over several cells.

        A cell that fails does not end the recording. It ends when Python does, or when another one begins and nothing
        refers to this object any more.

        Raises:
            MisuseError: it is running, or has ended; else as on entering.
        """
        from .collect.recorder.running import warn_if_any_is_held

        if self._last_recorder is None:
            warn_if_any_is_held()
        self._begin()

    def stop(self) -> None:
        """Ends the recording and writes what is left. Does nothing if the recording has already ended.

        Raises:
            MisuseError: it was not started.
        """
        if not self._has_begun:
            raise MisuseError(
                "rec.stop() ends a recording, and this one has not begun: rec.start() begins it"
            )
        self._end(None)

    def __enter__(self) -> "LiveRecording":
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    @property
    def _has_begun(self) -> bool:
        return self._last_recorder is not None or self._is_unrecorded

    def _begin(self) -> None:
        if self._recorder is not None:
            raise MisuseError(
                "this recording is running already: rec.stop(), or the end of its block, ends it"
            )
        if self._has_begun:
            raise MisuseError("a recording is started or entered once; call record() again for another")
        from .collect.compiled_parts import warn_of_missing_parts
        from .collect.recorder.launch import warn_of_no_start
        from .collect.recorder.running import claim

        warn_of_missing_parts(values=bool(self._options.values), ops=self._options.ops is not None)
        self._claim = claim(self, self.path)
        try:
            self._recorder = self._last_recorder = self._claim.recorder = self._start()
        except BaseException as error:
            self._undo()
            if self._options.strict or not isinstance(error, Exception):
                raise
            mark = warn_of_no_start(error, self._launch)
            if mark is None:
                raise
            self._is_unrecorded, self.path = True, None
            self._data = MemoryRecording(RunMeta(marks=(mark,)))
        self._model = None
        if self._writer is not None:
            try:
                self._writer.delete_replaced()
            except BaseException as error:  # Ctrl-C, which may come while a large folder is deleted
                self._end(error)
                raise

    def _start(self) -> "Recorder":
        from .collect.recorder.environment import describe_run
        from .collect.recorder.flush_timer import FLUSH_TO_DISK_S, FLUSH_TO_MEMORY_S
        from .collect.recorder.launch import find_launch
        from .collect.recorder.recorder import Recorder
        from .store.flight_recorder.sink import FlightRecorder, in_front_of

        options = self._options
        self._launch = find_launch()
        meta = describe_run(options.to_json(), self._launch)
        self._flags = meta.flags
        sink = in_front_of(
            self._make_sink(meta),
            options.keep_last,
            options.triggers,
            max_bytes=options.max_bytes,
            behind=options.steps_behind,
            reports=NonFiniteReports(strict=options.strict, measures_all=options.measures_all),
        )
        recorder = Recorder(
            sink,
            self._model,
            steps=options.steps,
            backward_times=options.backward_times,
            device_times=options.device_times,
            values=options.values,
            ops=options.ops,
            strict=options.strict,
            inside=options.compiled == INSIDE,
            flight_recorder=sink if isinstance(sink, FlightRecorder) else None,
            flush_after_s=FLUSH_TO_MEMORY_S if self.path is None else FLUSH_TO_DISK_S,
        )
        recorder.start()
        return recorder

    def _undo(self) -> None:
        """Leaves what is at `to` as it was before the recording was entered."""
        if self._writer is not None:
            self._writer.undo()
            self._writer = None
        self._release()

    def _end(self, error: BaseException | None) -> None:
        recorder, self._recorder = self._recorder, None
        try:
            if recorder is not None:
                self._read_flags_again()
                recorder.stop(error)
        except Exception as problem:
            if recorder is None or self._options.strict or isinstance(problem, NonFiniteError):
                raise
            recorder.failed(problem, "when recording ended")
        finally:
            self._release()

    def _read_flags_again(self) -> None:
        """Describes the run by what is set at its end: `modtrace record` begins before a script sets anything."""
        from .collect.recorder.flags import read_flags

        if self._flags is not None:
            self._flags.update(read_flags())

    def _release(self) -> None:
        from .collect.recorder.running import release

        if self._claim is not None:
            release(self._claim)

    def _make_sink(self, meta: RunMeta) -> Sink:
        from .collect.recorder.launch import agent_start_ns

        options = self._options
        if self.path is None:
            memory = MemoryRecording(meta, max_bytes=options.max_bytes, tensors=options.tensors)
            self._data = memory
            return memory
        writer = FolderWriter(
            self.path,
            meta,
            overwrite=options.overwrite,
            agent_start_ns=agent_start_ns(),
            strict=options.strict,
            tensors=options.tensors,
        )
        self._writer = writer
        self._data = FolderReader(writer.folder)
        return writer

    def _running(self, what: str) -> "Recorder | None":
        """Returns the recorder; None where the run goes on unrecorded."""
        if self._recorder is None and not self._is_unrecorded:
            raise MisuseError(
                f"rec.{what} works inside the `with record(...) as rec:` block, or between rec.start() and rec.stop()"
            )
        return self._recorder


def record(
    model: object = None,
    to: str | os.PathLike[str] | None = None,
    *,
    values: "str | Capture | Sequence[str | Capture] | None" = STATS,
    include: Patterns = None,
    exclude: Patterns = None,
    ops: "bool | Ops" = False,
    steps: "str | range | slice | None" = None,
    backward_times: bool = False,
    device_times: bool = False,
    overwrite: bool = False,
    strict: bool = False,
    max_bytes: int = MAX_BYTES,
    keep_last: int | None = None,
    triggers: "Trigger | Sequence[Trigger] | None" = None,
    on_nonfinite: str | None = None,
    tensors: TensorOptions | None = None,
    compiled: str = "boundary",
) -> LiveRecording:
    """Records every module call inside its `with` block.

        with modtrace.record(model, to="run.modtrace") as rec:
            for batch in data:
                train_step(batch)
        print(rec)

    Args:
        model: the root module, a dict of named roots, or a list of roots; None finds the roots. Other modules that
            run are recorded too.
        to: a folder to which the recording is written while it is made; None keeps it in memory.
        values: `"stats"` measures the output of every module, its gradients, and at each optimizer step the
            parameters and their gradients: count, minimum, maximum, sums, NaN and infinite elements.
            `Capture(...)`, or a list of several, selects the tensors, the steps, and what is kept. None measures
            nothing, and only calls are recorded.
        include: with `"stats"`, selects modules and parameters by path: a glob over the whole path, where `*` stays
            within one part and `**` crosses dots; a compiled regular expression, which is searched; a list of
            those; None for all. A parameter is selected by its own path or by its module's.
        exclude: leaves out modules and parameters that `include` selects.
        ops: records every operator too: forward, backward, recompute and optimizer, with the tensors it reads and
            returns and its costs; with `values="stats"` its outputs are measured as well. `Ops(...)` selects what
            else is kept. Ops on other threads of the user's are not seen.
        steps: selects steps: `"START:STOP[:EVERY]"`, a range or a slice; None for all.
        backward_times: also records when each call's backward begins and ends (about 10 us per call).
        device_times: also records when a CUDA device works on each call, and on each op with `ops` (some 10 us each).
            Other times are those at which the host issues work.
        overwrite: replaces a recording at `to`.
        strict: raises internal errors of modtrace instead of storing a mark in the recording.
        max_bytes: without `to`, and with `keep_last`, the limit of the rows in bytes; the oldest are dropped first.
        keep_last: the number of last steps to hold in memory. They are written only when a trigger fires, an
            exception leaves the block, or at `rec.dump()`. None writes every step.
        triggers: `NonFinite(...)`, `Above(...)`, `OutOfBand(...)`, `OnSignal(...)`, or a list of those. None means
            `NonFinite()` with `keep_last`. Without `keep_last` each only leaves a note: see `rec.triggers`.
        on_nonfinite: `"report"` prints what made the first NaN or infinite values as soon as their step has ended;
            `"stop"` raises `NonFiniteError` before the optimizer uses them, else when the step has ended; `"dump"`
            writes the steps that `keep_last` holds. It adds `NonFinite(then=...)` to `triggers`.
        tensors: how whole tensors are kept: how many bytes of them may wait or be held, and what happens if there
            are more. None means `TensorOptions()`.
        compiled: `"inside"` also measures modules inside of `torch.compile`, which compiles once more for that (in
            bfloat16 and float16 results are rounded otherwise); `"boundary"` what a region as a whole returns.

    Raises:
        TypeError: `model` is or contains something that is not a module.
        ValueError: `steps` contains no step, `max_bytes` or `keep_last` is not positive, `values` is something else,
            `on_nonfinite` or `compiled` can do nothing, or a pattern cannot be read or matches nothing in `model`.
        NonFiniteError: in the block and at its end, with `on_nonfinite="stop"`.
        MissingLibraryError: torch is not installed.
        MisuseError: on entering, if a recording to the same path is running in this process.
        RecordingExistsError: on entering, if `to` exists already.
    """
    require("torch", choose_phrase(python="modtrace.record()", command_line="modtrace record"))
    from .collect.names.given_models import roots_of

    roots_of(model)
    wanted_ops = to_ops(ops)
    captures = to_captures(values, include, exclude, ops=wanted_ops is not None)
    check_keep_last(keep_last)
    watched = to_triggers(triggers, keep_last=keep_last, captures=captures, on_nonfinite=on_nonfinite)
    check_choices(captures, watched, model)
    options = RecordOptions(
        steps=to_step_range(steps),
        backward_times=backward_times,
        device_times=device_times,
        values=captures,
        ops=wanted_ops,
        overwrite=overwrite,
        strict=strict,
        max_bytes=max_bytes,
        keep_last=keep_last,
        triggers=watched,
        tensors=checked_tensors(tensors),
        compiled=checked_compiled(compiled, captures),
    )
    return LiveRecording(model, to, options)
