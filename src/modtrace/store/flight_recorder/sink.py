"""The flight recorder: a sink in front of another one, which holds the last steps until a trigger fires."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt
import pyarrow as pa

from ...recording.arrow.arrays import from_strings, to_numpy
from ...recording.arrow.batches import to_columns
from ...recording.meta import HELD, Note
from ...recording.protocols import Sink
from ...recording.suggestions import count_of
from ...recording.triggers.step_conditions import Finder, NonFiniteFinding
from ...recording.triggers.tensor_rows import Batch
from ...recording.triggers.trigger_kinds import REPORT, OnSignal, Trigger
from ...recording.triggers.watch import TriggerFinding, TriggerWatch
from .held_steps import HeldSteps
from .held_tensors import HeldTensor, HeldTensors

#: Small tables without which the rows written later cannot be understood.
_NEVER_HELD = frozenset({"modules", "sites", "compilations", "compiled_ops"})

#: The largest number of firings that are noted, because `meta.json` is rewritten for each.
_MOST_NOTES = 1000

#: The largest number of marks about rows that did not fit, lest a trigger that fires often fill `meta.json`.
_MOST_MISSING = 20


class Reports(Protocol):
    """Finds what made NaN and infinite values, and reports it to the user."""

    @property
    def find(self) -> Finder:
        """Finds what made the first NaN or infinite values of a step."""

    def report(self, finding: TriggerFinding) -> None:
        """Reports what a trigger found in a step that has ended."""

    def close(self) -> None:
        """Reports a summary at the end, such as the number of steps with findings."""


def in_front_of(
    sink: Sink,
    keep: int | None,
    triggers: Sequence[Trigger],
    *,
    max_bytes: int,
    behind: int = 0,
    reports: Reports | None = None,
) -> Sink:
    """Returns a flight recorder in front of `sink`, or `sink` itself if there are no triggers and nothing is held."""
    if keep is None and not triggers:
        return sink
    return FlightRecorder(sink, keep, triggers, max_bytes=max_bytes, behind=behind, reports=reports)


class FlightRecorder:
    """A `Sink` that passes on everything or, with `keep`, only the steps up to one in which a trigger fires.

    It must receive one step at a time, followed by `end_step`. `put_tensor` may be called at any time.
    """

    def __init__(
        self,
        sink: Sink,
        keep: int | None,
        triggers: Sequence[Trigger] = (),
        *,
        max_bytes: int,
        behind: int = 0,
        reports: Reports | None = None,
    ) -> None:
        """Creates a flight recorder.

        Args:
            sink: the sink to which steps are written.
            keep: the number of steps to hold. None: each step is passed on, and triggers only leave a note.
            triggers: the triggers to check in each step.
            max_bytes: the limit of the held rows; the oldest steps are dropped first.
            behind: the number of steps written after one in which a trigger fires, because captures wait for them.
            reports: finds what made non-finite values, and reports it if a trigger asks for that.
        """
        self.signals = tuple(trigger for trigger in triggers if isinstance(trigger, OnSignal))
        self.last_fired_step: int | None = None  # the last step in which a trigger fired
        self._sink = sink
        self.mark, self.note = sink.mark, sink.note
        self._keep = keep
        self._behind = behind
        self._max_bytes = max_bytes
        self._reports = reports
        self._watch = TriggerWatch(triggers, None if reports is None else reports.find)
        self.finds_origin = self._watch.finds_origin  # whether a trigger asks what made non-finite values
        self.stops_runs = self._watch.stops_runs  # whether a trigger may stop the run
        self._stops: list[TriggerFinding] = []  # findings that were not taken yet
        self._held = None if keep is None else HeldSteps(keep, max_bytes)
        self._held_tensors = HeldTensors(max_bytes)
        self._ending: int | None = None  # the step whose row in `steps` has come
        self._last_step: int | None = None
        self._notes = 0
        self._missing = 0  # the number of marks about rows that did not fit
        self._is_requested = False  # whether the arriving step was requested while it was open

    @property
    def held_steps(self) -> int:
        """The number of steps that wait for a trigger."""
        return 0 if self._held is None else len(self._held)

    def write(self, table: str, columns: Mapping[str, Any]) -> None:
        """Takes a batch of rows of one table; see `Sink.write`.

        Raises:
            ValueError: the columns do not fit the table.
        """
        converted = to_columns(table, columns)
        self._watch.see(table, converted)
        if self._held is None or table in _NEVER_HELD:
            self._sink.write(table, converted)
        else:
            tensors = self._held_tensors.claim(converted["blob"].to_pylist()) if "blob" in converted else {}
            self._held.add(table, converted, tensors)
        # Last, so that an interrupt does not leave a step without its row.
        if table == "steps" and len(converted["step"]):
            self._ending = int(to_numpy(converted["step"])[-1])

    def put_tensor(
        self, name: str, array: npt.NDArray[Any], dtype: str, shape: Sequence[int], *, step: int | None = None
    ) -> str | None:
        """Takes a copy of a whole tensor, which is written with its step; see `Sink.put_tensor`."""
        if self._held is None:
            return self._sink.put_tensor(name, array, dtype, shape, step=step)
        return self._held_tensors.put(name, array, dtype, shape, step)

    def request_step(self) -> None:
        """Marks the step whose rows come next to be written, with the held steps before it."""
        self._is_requested = True

    def end_step(self, now_ns: int, *, force: bool = False) -> None:
        """Checks the triggers against a step that has ended, and writes it if one fires.

        Otherwise nothing is flushed, whatever `force` says, because this runs on the user's thread.
        """
        step, self._ending = self._ending, None
        if step is None:
            self._sink.end_step(now_ns, force=force)
            return
        self._last_step = step
        if self._held is not None:
            self._held_tensors.end_step(step)
            self._held.end_step(step)
        fired = self._watch.end_step(step)
        for note in fired:
            self._note(note)
        self._report()
        is_wanted = bool(fired) or self._is_requested
        self._is_requested = False
        if is_wanted:
            self.last_fired_step = step
        if self.last_fired_step is not None and step <= self.last_fired_step + self._behind:
            self._write_held(now_ns)
        self._sink.end_step(now_ns, force=is_wanted)

    def _report(self) -> None:
        findings, self._watch.findings = self._watch.findings, []
        for finding in findings:
            if finding.then == REPORT and self._reports is not None:
                self._reports.report(finding)
            else:
                self._stops.append(finding)

    def may_skip(self, step: int, is_skipping: Callable[[], bool | None]) -> None:
        """Records that an optimizer may leave its parameters unchanged; see `TriggerWatch.may_skip`."""
        self._watch.may_skip(step, is_skipping)

    def take_stops(self) -> list[TriggerFinding]:
        """Returns the findings in ended steps that are a reason to stop, each once."""
        stops, self._stops = self._stops, []
        return stops

    def find_in_open(self, batches: Sequence[tuple[str, Mapping[str, Any]]]) -> NonFiniteFinding | None:
        """Returns what made NaN or infinite values in a step whose optimizer is about to step, to stop the run.

        Args:
            batches: the rows of the step so far, which will come again when it ends.
        """
        rows: list[Batch] = [(table, to_columns(table, columns)) for table, columns in batches]
        return self._watch.find_in_open(rows)

    def fire(self, kind: str, reason: str, now_ns: int, *, coming: Sequence[int] = ()) -> None:
        """Writes the held steps for a reason outside of the steps, including a step with only some of its rows.

        Args:
            kind: the kind of the trigger.
            reason: the text of the note.
            now_ns: the present time.
            coming: steps that belong to those to be written and have not ended. The reason is about the last of them,
                for which `request_step` will be called. They reduce the number of steps that are written now.
        """
        self._note(Note(step=coming[-1] if coming else self._last_step, kind=kind, reason=reason))
        if self._last_step is not None and not coming:
            self.last_fired_step = self._last_step
        self._write_held(now_ns, len(coming))
        self._sink.end_step(now_ns, force=True)

    def close(self) -> None:
        """Drops the held steps and notes that, then closes the sink."""
        if self._held is not None and self._held.seen:
            since = "after the last trigger, " if self._notes else "no trigger fired; "
            were = "was" if self._held.seen == 1 else "were"
            reason = f"{since}{count_of(self._held.seen, 'step')} {were} held and dropped"
            self._sink.note(Note(step=self._last_step, kind=HELD, reason=reason))
            self._held.clear()
        self._held_tensors.clear()
        reports, self._reports = self._reports, None
        if reports is not None:
            reports.close()
        self._sink.close()

    def abandon(self) -> None:
        """Drops everything, because this process is a fork and the recording is its parent's."""
        if self._held is not None:
            self._held.clear()
        self._held_tensors.clear()
        self._sink.abandon()

    def _note(self, note: Note) -> None:
        self._notes += 1
        if self._notes <= _MOST_NOTES:
            self._sink.note(note)
        elif self._notes == _MOST_NOTES + 1:
            last = Note(step=note.step, kind=HELD, reason=f"triggers fired more than {_MOST_NOTES} times")
            self._sink.note(last)

    def _write_held(self, now_ns: int, coming: int = 0) -> None:
        if self._held is None or self._keep is None:
            return
        wanted = max(self._keep - coming, 0)
        self._held.make_room(coming)
        self._mark_what_is_missing(self._held, wanted)
        for step in self._held.take():
            try:
                while step.batches:  # one by one: an interrupt leaves the rest for the next time
                    table, columns = step.batches.pop(0)
                    self._sink.write(table, self._placed(columns, step.tensors))
            except BaseException as error:
                self._sink.mark(
                    f"step {step.number} is incomplete: {type(error).__name__} while it was written"
                )
                raise
            if step.number < 0:
                self._sink.mark(
                    f"the step behind step {self._last_step} is incomplete: its rows were broken off"
                )
            self._sink.end_step(now_ns)

    def _mark_what_is_missing(self, held: HeldSteps, wanted: int) -> None:
        if held.cut and len(held) < wanted:
            self._mark_missing(
                f"only {len(held)} of the last {wanted} steps before step {(self._last_step or 0) + 1} "
                f"fitted into max_bytes={self._max_bytes}"
            )
        if self._held_tensors.left_out:
            self._mark_missing(
                f"{self._held_tensors.left_out} whole tensors ({self._held_tensors.left_out_bytes} bytes) of steps "
                f"that had not ended did not fit into max_bytes={self._max_bytes}"
            )
            self._held_tensors.left_out = self._held_tensors.left_out_bytes = 0

    def _mark_missing(self, text: str) -> None:
        self._missing += 1
        if self._missing <= _MOST_MISSING:
            self._sink.mark(text)
        elif self._missing == _MOST_MISSING + 1:
            before = (self._last_step or 0) + 1
            self._sink.mark(
                f"before step {before} and later, more did not fit into max_bytes={self._max_bytes}"
            )

    def _placed(
        self, columns: Mapping[str, pa.Array], tensors: Mapping[str, HeldTensor]
    ) -> Mapping[str, pa.Array]:
        """Writes the whole tensors, and returns the columns with the references to them."""
        if not tensors or "blob" not in columns:
            return columns
        references = columns["blob"].to_pylist()
        written: dict[str | None, str | None] = {}
        for reference in references:
            if reference in tensors and reference not in written:
                name, array, dtype, shape, step = tensors[reference]
                written[reference] = self._sink.put_tensor(name, array, dtype, shape, step=step)
        return {**columns, "blob": from_strings([written.get(blob, blob) for blob in references])}
