"""What users call: `record()` and `open_recording()`, and the recordings they give."""

import os
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from .analysis.memory_table import MemoryTable, build_memory_table
from .analysis.module_tree import ModuleTree, build_module_tree
from .analysis.nonfinite import NonFinite, find_first_nonfinite
from .analysis.op_groups import GroupedBy
from .analysis.op_paths import OpPaths, build_op_paths
from .analysis.op_table import OpTable, build_op_table
from .analysis.timeline import build_timeline
from .analysis.value_table import build_value_table
from .errors import MisuseError
from .model_graph import ModelGraph, graph_of
from .optional import require
from .recording.memory import MemoryRecording
from .recording.meta import RunMeta
from .recording.op_options import Ops, to_ops
from .recording.path_pattern import PathFilter, to_path_filter
from .recording.protocols import RecordingData, Sink
from .recording.step_range import StepRange, to_step_range
from .store.copy import write_recording
from .store.reader import FolderReader
from .store.writer import FolderWriter
from .views.perfetto import write_perfetto
from .views.text import render_module_tree

if TYPE_CHECKING:
    from .collect.recorder import Recorder

#: What `record(values=...)` may be told to measure.
STATS = "stats"

#: Which modules and parameters are meant: see `record()`.
Patterns = str | re.Pattern[str] | Sequence[str | re.Pattern[str]] | None

#: What a recording in memory keeps of rows.
MAX_BYTES = 256 * 2**20


class Recording:
    """A recording: its tables, and the answers they hold. `print` shows the module tree."""

    def __init__(self, data: RecordingData) -> None:
        self._data = data

    @property
    def data(self) -> RecordingData:
        """Where the tables come from; what an analysis takes."""
        return self._data

    @property
    def meta(self) -> RunMeta:
        """What is known about the run; its `marks` say what is missing from the recording."""
        return self.data.meta

    def table(self, name: str) -> pa.Table:
        """All rows of a table; docs/schema.md says what its columns mean.

        Raises:
            ValueError: there is no such table.
        """
        return self.data.table(name)

    def frame(self, name: str) -> Any:
        """All rows of a table as a `pandas.DataFrame`; integers that may be missing are pandas' `Int64`.

        `frame("values")` has more columns than the table. In front stands where the tensor was seen: `root`,
        `path`, `call` (n-th of its module in the step), `type`, `role` and `slot`. Behind `inf_count` stands
        what is derived from the raw statistics: `mean`, `std`, `rms`, `l2`, `abs_max` and `nonfinite`, the
        number of NaN and infinite elements.

        Raises:
            ValueError: there is no such table.
            MissingLibraryError: pandas is not installed.
        """
        pandas = require("pandas", "Recording.frame()")
        nullable = {pa.int64(): pandas.Int64Dtype(), pa.int32(): pandas.Int32Dtype()}
        table = build_value_table(self.data) if name == "values" else self.table(name)
        return table.to_pandas(types_mapper=nullable.get)

    def first_nonfinite(self) -> NonFinite | None:
        """The first tensor, by step and order of measuring, that holds NaN or infinite values.

        None where every tensor that was measured is finite, also where none was measured.
        """
        return find_first_nonfinite(self.data)

    def module_tree(self, step: int | None = None) -> ModuleTree:
        """Calls and times by module, of one step.

        Args:
            step: its number; None for the last complete one.

        Raises:
            ValueError: there is no such step.
        """
        return build_module_tree(self.data, step=step)

    def op_table(
        self, step: int | None = None, *, by: GroupedBy = "module", phase: str | None = None
    ) -> OpTable:
        """What the ops of one step cost, the most expensive first; its `recorded` is False without ops.

        Args:
            step: its number; None for the last complete one.
            by: `"module"`, `"call"` (a forward with its backward and recompute) or `"op"` (ops of one name).
            phase: forward, backward, recompute or optimizer, to leave all other ops out.

        Raises:
            ValueError: there is no such step, or `by` or `phase` is something else.
        """
        return build_op_table(self.data, step=step, by=by, phase=phase)

    def memory_table(self, step: int | None = None, *, ops: bool = False) -> MemoryTable:
        """What the modules save for backward and their calls allocate; its `recorded` is False without ops.

        Args:
            step: its number; None for the last complete one.
            ops: whether each row says which of its ops save.

        Raises:
            ValueError: there is no such step.
        """
        return build_memory_table(self.data, step=step, ops=ops)

    def paths(self, step: int | None = None, *, phase: str | None = None) -> OpPaths:
        """Which op ran in which module, in order; its `recorded` is False without ops.

        Args:
            step: its number; None for the last complete one.
            phase: forward, backward, recompute or optimizer, to leave all other ops out.

        Raises:
            ValueError: there is no such step, or no such phase.
        """
        return build_op_paths(self.data, step=step, phase=phase)

    def graph(self, step: int | None = None) -> ModelGraph:
        """The execution graph of one step; without ops its nodes are calls, in the order in which they began.

        Args:
            step: its number; None for the last complete one.

        Raises:
            ValueError: there is no such step.
        """
        return graph_of(self.data, step)

    def write_timeline(
        self,
        path: str | os.PathLike[str],
        *,
        steps: "str | range | slice | None" = None,
        ops: bool = True,
        op_flows: bool = False,
    ) -> None:
        """Writes when what ran as a trace in Chrome's format, which ui.perfetto.dev shows; see docs/timeline.md.

        Args:
            path: a file; one that is there is replaced.
            steps: which, `"START:STOP[:EVERY]"`, a range or a slice; None for all.
            ops: whether ops are shown inside of their calls, where they were recorded.
            op_flows: whether arrows lead from each op to its backward too, not only from calls.

        Raises:
            ValueError: `steps` holds no step of the recording.
            ModtraceError: the file cannot be written.
        """
        timeline = build_timeline(self.data, steps=to_step_range(steps), ops=ops, op_flows=op_flows)
        write_perfetto(timeline, path)

    def write(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes the recording as a folder.

        Raises:
            RecordingExistsError: something is there, and `overwrite` was not said.
            RecordingError: it cannot be written.
        """
        write_recording(self.data, path, overwrite=overwrite)

    def __str__(self) -> str:
        return render_module_tree(self.module_tree())


class LiveRecording(Recording):
    """A recording while it is made: a context manager, entered once. Readable inside and afterwards."""

    def __init__(self, model: object, to: str | os.PathLike[str] | None, options: "RecordOptions") -> None:
        super().__init__(MemoryRecording(max_bytes=options.max_bytes))
        self.path = None if to is None else Path(to)
        self._model: object = model
        self._options = options
        self._recorder: Recorder | None = None  # while it runs
        self._last_recorder: Recorder | None = None
        self._writer: FolderWriter | None = None
        self._claim: str | None = None
        self._entered = False

    @property
    def data(self) -> RecordingData:
        """The tables as they are now, with the steps that have ended."""
        if self._recorder is not None:
            self._recorder.flush(force=True)
        return self._data

    @property
    def progress(self) -> "Progress":
        """How far the recording has come."""
        sink: Any = self._writer or self._data
        steps = self._last_recorder.steps_ended if self._last_recorder else 0
        return Progress(steps=steps, rows=sink.rows, size_bytes=sink.size_bytes)

    def step(self) -> None:
        """Ends the step: from now on steps end only here.

        Raises:
            MisuseError: outside of the `with` block.
        """
        self._running("step()").end_step()

    def log(self, **scalars: Any) -> None:
        """Keeps numbers of the user's with the step that is running: `rec.log(loss=loss)`.

        Args:
            scalars: numbers, or tensors with one element (which are read at once: on a GPU this waits for it).

        Raises:
            TypeError: a value is no number.
            MisuseError: outside of the `with` block.
        """
        self._running("log()").log(scalars)

    def __enter__(self) -> "LiveRecording":
        if self._entered:
            raise MisuseError("a recording is entered once; call record() again for another")
        from .collect.environment import describe_run
        from .collect.recorder import Recorder

        self._claim = _claim(self.path)
        try:
            meta = describe_run(self._options.to_json())
            sink = self._make_sink(meta)
            recorder = Recorder(
                sink,
                self._model,
                steps=self._options.steps,
                backward_times=self._options.backward_times,
                values=self._options.values,
                ops=self._options.ops,
                strict=self._options.strict,
            )
            recorder.start()
        except BaseException:
            _release(self._claim)
            raise
        self._entered = True
        self._recorder = self._last_recorder = recorder
        self._model = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder, self._recorder = self._recorder, None
        try:
            if recorder is not None:
                recorder.stop(error)
        finally:
            _release(self._claim)

    def _make_sink(self, meta: RunMeta) -> Sink:
        if self.path is None:
            memory = MemoryRecording(meta, max_bytes=self._options.max_bytes)
            self._data = memory
            return memory
        writer = FolderWriter(
            self.path,
            meta,
            overwrite=self._options.overwrite,
            new_attempt="TORCHELASTIC_RUN_ID" in os.environ,
            strict=self._options.strict,
        )
        self._writer = writer
        self._data = FolderReader(writer.folder)
        return writer

    def _running(self, what: str) -> "Recorder":
        if self._recorder is None:
            raise MisuseError(f"rec.{what} works inside the `with record(...) as rec:` block only")
        return self._recorder


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """What `record()` was told, checked."""

    steps: StepRange
    backward_times: bool
    values: PathFilter | None  # None: no values
    ops: Ops | None  # None: no ops
    overwrite: bool
    strict: bool
    max_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The options that say what the recording holds."""
        chosen = {} if self.values is None else self.values.to_json()
        return {
            "steps": str(self.steps),
            "backward_times": self.backward_times,
            "ops": None if self.ops is None else asdict(self.ops),
            "values": None if self.values is None else STATS,
            **{name: patterns for name, patterns in chosen.items() if patterns is not None},
        }


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a recording has come."""

    steps: int
    rows: int
    size_bytes: int


def record(
    model: object = None,
    to: str | os.PathLike[str] | None = None,
    *,
    values: str | None = STATS,
    include: Patterns = None,
    exclude: Patterns = None,
    ops: "bool | Ops" = False,
    steps: "str | range | slice | None" = None,
    backward_times: bool = False,
    overwrite: bool = False,
    strict: bool = False,
    max_bytes: int = MAX_BYTES,
) -> LiveRecording:
    """Records every module call inside its `with` block.

        with modtrace.record(model, to="run.modtrace") as rec:
            for batch in data:
                train_step(batch)
        print(rec)

    Args:
        model: the root module, a dict of named roots, or a list of them; None to have the roots found. What
            runs beside the roots given is recorded too.
        to: a folder to write the recording to while it is made; None to keep it in memory.
        values: `"stats"` measures what every module returns, its gradients, and at each optimizer step the
            parameters and their gradients: count, minimum, maximum, sums, NaN and infinite elements. None
            measures nothing: calls alone are recorded.
        include: which modules and parameters are measured, by path: a glob over the whole path, where `*` stays
            within one part and `**` crosses dots; a compiled regular expression, which is searched; a list of
            those; None for all. A parameter is meant by its own path and by its module's.
        exclude: the same for what is left out although it is included.
        ops: record every operator too: forward, backward, recompute and optimizer, with the tensors it reads and
            returns and what it costs; with `values="stats"` what it returns is measured as well. `Ops(...)` chooses
            what else is kept. Of ops on other threads of the user's nothing is seen.
        steps: which steps to keep, `"START:STOP[:EVERY]"`, a range or a slice; None for all.
        backward_times: also take when each call's backward begins and ends (about 10 us per call).
        overwrite: replace a recording that is at `to`.
        strict: raise an internal failure of modtrace instead of noting it in the recording.
        max_bytes: without `to`, how many bytes of rows to keep; the oldest go first.

    Raises:
        TypeError: `model` is or holds something that is not a module.
        ValueError: `steps` holds no step, `max_bytes` is not positive, `values` is something else, or a pattern
            cannot be read or, where `model` is given, matches nothing in it.
        MissingLibraryError: torch is not installed.
        MisuseError: on entering, if a recording to the same place is running in this process.
        RecordingExistsError: on entering, if something is at `to` already.
    """
    require("torch", "modtrace.record()")
    from .collect.names import check_patterns, roots_of

    roots_of(model)
    chosen = _to_selection(values, include, exclude)
    if chosen is not None and not chosen.is_all:
        check_patterns(chosen, model)
    if max_bytes <= 0:
        raise ValueError(f"max_bytes={max_bytes!r}: give a positive number of bytes")
    options = RecordOptions(
        steps=to_step_range(steps),
        backward_times=backward_times,
        values=chosen,
        ops=to_ops(ops),
        overwrite=overwrite,
        strict=strict,
        max_bytes=max_bytes,
    )
    return LiveRecording(model, to, options)


def _to_selection(values: str | None, include: object, exclude: object) -> PathFilter | None:
    if values == STATS:
        return to_path_filter(include, exclude)
    if values is not None:
        raise ValueError(f"values={values!r}: give {STATS!r}, or None to measure nothing")
    if include is not None or exclude is not None:
        raise ValueError("include and exclude choose what is measured, and values=None measures nothing")
    return None


def open_recording(path: str | os.PathLike[str]) -> Recording:
    """Opens a recording folder, also one whose run was killed or still runs.

    Raises:
        RecordingNotFoundError: nothing is there.
        NotARecordingError: something else is there.
        NewerSchemaError: a newer modtrace wrote it.
        DamagedRecordingError: a file of it cannot be understood.
    """
    return Recording(FolderReader(path))


# Two recordings in one process may not write to one place.

_claimed: set[str] = set()
_claiming = threading.Lock()


def _claim(path: Path | None) -> str | None:
    if path is None:
        return None
    place = os.path.realpath(path)
    with _claiming:
        if place in _claimed:
            raise MisuseError(
                f"{path}: record() is writing there already in this process. "
                "Give the inner one another path, or remove it."
            )
        _claimed.add(place)
    return place


def _release(place: str | None) -> None:
    if place is not None:
        with _claiming:
            _claimed.discard(place)
