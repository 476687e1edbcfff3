"""Records what torch.compile compiles: which functions of which modules, how often and why, and where graphs break."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...recording.failure_reporter import FailureReporter
from ...recording.phase import BACKWARD, FORWARD, PHASES
from ...recording.protocols import Sink
from ...torch_internals.compiled_graphs import RunListener
from ...torch_internals.dynamo import (
    CompileRecord,
    call_after_compilations,
    describe_graph_break,
    ended_compilation,
    last_compilations,
    last_graph_breaks,
    loaded_backward,
    no_more_calls_after_compilations,
    read_compilation,
)
from ..log.listeners import Listener
from ..log.segments import CallRef, Segment, call_at
from ..scopes.tracker import ScopeTracker
from ..steps.step import Step
from .compiled_ops import CompiledOpRecorder


@dataclass(eq=False)
class _Compilation:
    """A compilation, with facts that Dynamo's record lacks."""

    record: CompileRecord
    call: CallRef | None = None  # the call that waited for it; dropped when it is written
    breaks: list[str] | None = None  # None if unknown, because Dynamo did not announce it
    forward: "_Compilation | None" = None  # for a compilation of a backward, that of its forward
    module_id: int | None = None
    step: int | None = None  # its step; while it is unplaced, the next step after it that has ended
    has_calls: bool = False  # whether rows of the step's calls are written


class CompilationRecorder(Listener):
    """Reads Dynamo's records of compilations, and adds to each the module whose call was running.

    Dynamo calls us at the end of each compilation, on the thread that waits for it, and stores its record only
    afterwards. It stores only the last ones, so they are read each time. A compilation that Dynamo did not announce,
    such as one beyond the limit for a function, is assigned to a call of its step by its time.
    """

    def __init__(self, sink: Sink, reporter: FailureReporter) -> None:
        self._sink = sink
        self._reporter = reporter
        self._tracker: ScopeTracker | None = None  # set while it records
        self._lock = threading.RLock()  # guards the following; no lock is taken inside
        self._last: Any = None  # the newest record that was read
        self._last_break: Any = None  # the newest graph break that was read
        #: What ran at each compilation that Dynamo has announced, until its record is read.
        self._announced: dict[tuple[str, bool], tuple[CallRef | None, list[str]]] = {}
        self._of_graph: dict[str, _Compilation] = {}  # compilations of forwards by compile id
        self._functions: dict[str, str] = {}  # names of functions by their numbers
        self._ids: dict[str, int] = {}  # compilation_ids of forwards by compile id
        self._ops: CompiledOpRecorder | None = None
        self._unplaced: list[_Compilation] = []  # compilations whose steps have not ended
        self._placed: list[_Compilation] = []  # compilations that are not written yet
        self._written = 0
        self._failure: Exception | None = None  # an error that is not reported yet

    def start(self, tracker: ScopeTracker, runs: RunListener | None) -> None:
        """Starts listening. What was compiled before is not recorded.

        Args:
            runs: receives each run of compiled code, if ops are recorded.
        """
        try:
            self._last = next(reversed(last_compilations()), None)
            self._last_break = next(reversed(last_graph_breaks()), None)
            self._tracker = tracker
            self._ops = None if runs is None else CompiledOpRecorder(tracker, runs, self._sink, self._fail)
            self._watch()
            tracker.subscribers.add(self)
        except Exception as error:
            self._fail(error)

    def stop(self) -> None:
        """Removes our callback from Dynamo, and reads what is left."""
        try:
            if self._tracker is not None:
                with self._lock:
                    self._read()
            self._leave()
        except Exception as error:
            self._fail(error)

    def _leave(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.subscribers.remove(self)
        no_more_calls_after_compilations(self._ended)
        if self._ops is not None:
            self._ops.stop()

    def _watch(self) -> None:
        """Registers our callback with Dynamo, if it has been imported or reset since."""
        call_after_compilations(self._ended)
        if self._ops is not None:
            self._ops.watch()

    def forked(self) -> None:
        self._leave()

    def segment_opened(self, segment: Segment, in_step: bool) -> None:
        self._watch()

    def _ended(self, event: Any) -> None:
        """Notes a compilation that ends on this thread, when Dynamo calls it."""
        if self._tracker is None:
            return
        try:
            compile_id, is_backward = ended_compilation(event)
            segment = None if is_backward else self._tracker.logs.current.segment
            call = None if segment is None else CallRef(segment, segment.open_calls.innermost)
            with self._lock:
                self._read()
                breaks = _behind(self._last_break, last_graph_breaks())
                self._last_break = breaks[-1] if breaks else self._last_break
                self._announced[compile_id, is_backward] = (
                    call,
                    [describe_graph_break(graph_break) for graph_break in breaks],
                )
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Stops recording after an internal error, which is reported later, as Dynamo expects no exception here."""
        self._leave()
        self._failure = error

    def _report(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._reporter.rows_failed("compilations", failure)

    def _read(self) -> None:
        """Reads the new records of Dynamo."""
        kept = last_compilations()
        if not kept or kept[-1] is self._last:
            return
        new, self._last = _behind(self._last, kept), kept[-1]
        for record in map(read_compilation, new):
            if record is not None:
                backwards = [loaded_backward(record)] * record.loaded_backwards
                self._unplaced += map(self._complete, (record, *backwards))

    def _complete(self, record: CompileRecord) -> _Compilation:
        call, breaks = self._announced.pop((record.compile_id, record.is_backward), (None, None))
        made = _Compilation(record, call, breaks)
        if record.is_backward:
            made.forward = self._of_graph.get(record.compile_id)
        else:
            self._of_graph[record.compile_id] = made
        if record.function is not None:
            self._functions[record.frame] = record.function
        elif record.frame in self._functions:
            made.record = record._replace(function=self._functions[record.frame])
        return made

    def settle(self, step: Step, *, has_calls: bool) -> None:
        """Assigns compilations to the step that has just ended. Callers hold the lock over the tracker's events.

        Args:
            step: the step; it still has its segments.
            has_calls: the rows of its calls will be written.
        """
        try:
            with self._lock:
                if self._tracker is not None:
                    self._read()
                for compilation in self._unplaced:
                    if compilation.breaks is None and compilation.call is None:
                        compilation.call = _find_call(step, compilation.record)
                in_step = [compilation for compilation in self._unplaced if _is_in(compilation, step)]
                self._unplaced = [compilation for compilation in self._unplaced if compilation not in in_step]
                for compilation in in_step:
                    compilation.step, compilation.has_calls = step.number, has_calls
                for compilation in self._unplaced:  # an open step that began earlier takes precedence
                    if compilation.step is None and compilation.record.start_ns < step.start_ns:
                        compilation.step = step.number
                self._placed += in_step
        except Exception as error:
            self._fail(error)
        self._report()

    def write(self) -> None:
        """Writes compilations of ended steps; after `stop()` also those in no step. Callers hold the sink's lock."""
        with self._lock:
            if self._tracker is None:
                for compilation in self._unplaced:
                    compilation.step = (
                        max(self._reporter.step - 1, 0) if compilation.step is None else compilation.step
                    )
                self._placed += self._unplaced
                self._unplaced = []
            rows, self._placed = self._placed, []
        if rows:
            self._sink.write("compilations", self._columns(rows))
            self._written += len(rows)
        if self._ops is not None:
            self._ops.write(self._ids)
        self._report()

    def _columns(self, rows: list[_Compilation]) -> dict[str, Any]:
        rows.sort(key=lambda row: row.record.start_ns)
        for row in rows:
            row.module_id = None if row.call is None else row.call.named.module_id
        call_ids = [row.call.call_id if row.has_calls and row.call is not None else None for row in rows]
        for row in rows:
            row.call = None  # a call keeps all surrounding calls alive
        records = [row.record for row in rows]
        ids = list(range(self._written, self._written + len(rows)))
        self._ids.update(
            (record.compile_id, at) for record, at in zip(records, ids, strict=True) if not record.is_backward
        )
        return {
            "compilation_id": ids,
            "step": [row.step for row in rows],
            "call_id": call_ids,
            "module_id": [(row.forward or row).module_id for row in rows],
            "phase": [PHASES.index(BACKWARD if record.is_backward else FORWARD) for record in records],
            "compile_id": [record.compile_id for record in records],
            "function": [record.function for record in records],
            "ops": [record.ops for record in records],
            "guards": [record.guards for record in records],
            "failed_guards": [record.failed_guards for record in records],
            "graph_breaks": [row.breaks for row in rows],
            "error": [record.error for record in records],
            "start_ns": [record.start_ns for record in records],
            "end_ns": [record.end_ns for record in records],
        }


def _behind(last: Any, kept: Sequence[Any]) -> Sequence[Any]:
    """Returns the entries after `last`; all if Dynamo has forgotten that one, as after `torch._dynamo.reset()`."""
    seen = next((at for at in reversed(range(len(kept))) if kept[at] is last), -1)
    return kept[seen + 1 :]


def _find_call(step: Step, record: CompileRecord) -> CallRef | None:
    """Returns the innermost call that ran when a compilation began; None if calls ran on two threads, or no call."""
    if record.is_backward or not step.start_ns <= record.start_ns <= step.end_ns:
        return None
    return call_at(step.segments, record.start_ns)


def _is_in(compilation: _Compilation, step: Step) -> bool:
    call, start_ns = compilation.call, compilation.record.start_ns
    if call is None or step.folded:
        return step.start_ns <= start_ns <= step.end_ns
    return call.segment in step.segments
