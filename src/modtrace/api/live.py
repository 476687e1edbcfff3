"""The recording that `record()` returns, and the options it runs with."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..analysis.modules.module_tree import ModuleTree
from ..analysis.values.nonfinite import NonFinite
from ..errors import MisuseError, NonFiniteError, NothingRecordedError
from ..recording.in_memory.recording import MemoryRecording
from ..recording.meta import HELD, Note, Progress, RunMeta
from ..recording.options.capture import BOUNDARY, INSIDE, Capture
from ..recording.options.capture import to_json as captures_to_json
from ..recording.options.op_options import Ops
from ..recording.options.schedule import ALL_STEPS, StepRange
from ..recording.options.tensor_options import TensorOptions
from ..recording.protocols import RecordingData, Sink
from ..recording.suggestions import count_of
from ..recording.triggers.trigger_kinds import Trigger, has_action
from ..store.reader import FolderReader
from ..store.writer import FolderWriter
from .nonfinite_reports import NonFiniteReports
from .recording import Recording

if TYPE_CHECKING:
    from ..collect.recorder.launch import Launch
    from ..collect.recorder.recorder import Recorder
    from ..collect.recorder.running import Running


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """The checked arguments of `record()`."""

    steps: StepRange
    backward_times: bool
    device_times: bool
    values: tuple[Capture, ...]  # empty if no values are measured
    ops: Ops | None  # None if no ops are recorded
    overwrite: bool
    strict: bool
    max_bytes: int
    keep_last: int | None
    tensors: TensorOptions
    triggers: tuple[Trigger, ...]
    compiled: str = BOUNDARY

    def __post_init__(self) -> None:
        if self.max_bytes <= 0:
            raise ValueError(f"max_bytes={self.max_bytes!r}: give a positive number of bytes")

    @property
    def steps_behind(self) -> int:
        """The number of steps to write behind one in which a trigger fires.

        Captures may wait for them. Ops that run between two steps belong to the first step, while measurements of their
        outputs are in the second.
        """
        of_ops = int(self.ops is not None and any(has_action(trigger) for trigger in self.triggers))
        return max([of_ops, *(capture.on_trigger for capture in self.values)])

    @property
    def measures_all(self) -> bool:
        """Whether all outputs of ops are measured in every step."""
        return (
            self.ops is not None
            and self.steps == ALL_STEPS
            and any(capture.measures_all for capture in self.values)
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the options that determine the contents of the recording."""
        return {
            "steps": str(self.steps),
            "backward_times": self.backward_times,
            **({"device_times": True} if self.device_times else {}),
            "ops": None if self.ops is None else asdict(self.ops),
            **captures_to_json(self.values),
            **({} if self.compiled == BOUNDARY else {"compiled": self.compiled}),
            **({} if self.keep_last is None else {"keep_last": self.keep_last}),
            **({"triggers": [repr(trigger) for trigger in self.triggers]} if self.triggers else {}),
        }


class LiveRecording(Recording):
    """A recording while it is made: a context manager, entered once, or `start()` and `stop()`.

    It can be read while it runs and afterwards.
    """

    def __init__(self, model: object, to: str | os.PathLike[str] | None, options: RecordOptions) -> None:
        super().__init__(MemoryRecording(max_bytes=options.max_bytes))
        self.path = None if to is None else Path(to)
        self._model: object = model
        self._options = options
        self._recorder: Recorder | None = None  # set while it runs
        self._last_recorder: Recorder | None = None
        self._writer: FolderWriter | None = None
        self._claim: Running | None = None
        self._launch: Launch | None = None  # the launch of this process
        self._is_unrecorded = False  # modtrace failed at the beginning, or a rank cannot write
        self._flags: dict[str, Any] | None = None  # the flags in the meta data

    def __repr__(self) -> str:
        """Unlike `print`, it writes no rows: a debugger may call it at any time."""
        steps = 0 if self._last_recorder is None else self._last_recorder.steps_ended
        return f"<LiveRecording steps={steps}>"

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

    def module_tree(self, step: int | None = None, steps: Any = None) -> ModuleTree:
        """Returns the calls and times of steps by module; its notes also say how many steps are held.

        Args:
            step: as for `Recording.module_tree`.
            steps: as for `Recording.module_tree`.

        Raises:
            TypeError, ValueError: there are no such steps.
        """
        tree, held = super().module_tree(step, steps), self.progress.held
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
        from ..collect.recorder.running import warn_if_any_is_held

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
        from ..collect.compiled_parts import check_parts
        from ..collect.recorder.launch import warn_of_no_start
        from ..collect.recorder.running import claim

        check_parts(values=bool(self._options.values), ops=self._options.ops is not None)
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
            except BaseException as error:  # Ctrl-C may come while a large folder is deleted
                self._end(error)
                raise

    def _start(self) -> "Recorder":
        from ..collect.recorder.environment import describe_run
        from ..collect.recorder.flush_timer import FLUSH_TO_DISK_S, FLUSH_TO_MEMORY_S
        from ..collect.recorder.launch import find_launch
        from ..collect.recorder.recorder import Recorder
        from ..store.flight_recorder.sink import FlightRecorder, in_front_of

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
            reports=NonFiniteReports(meta, strict=options.strict, measures_all=options.measures_all),
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
            make_ring=None if self._writer is None else self._writer.open_ring,
        )
        recorder.start()
        return recorder

    def _undo(self) -> None:
        """Restores what was at `to` before the recording was entered."""
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
        """Reads the settings at the end again, because `modtrace record` begins before the script sets any."""
        from ..collect.recorder.environment import read_flags

        if self._flags is not None:
            self._flags.update(read_flags())

    def _release(self) -> None:
        from ..collect.recorder.running import release

        if self._claim is not None:
            release(self._claim)

    def _make_sink(self, meta: RunMeta) -> Sink:
        from ..collect.recorder.launch import agent_start_ns

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
        """Returns the recorder; None if the run continues unrecorded."""
        if self._recorder is None and not self._is_unrecorded:
            raise MisuseError(
                f"rec.{what} works inside the `with record(...) as rec:` block, or between rec.start() and rec.stop()"
            )
        return self._recorder
