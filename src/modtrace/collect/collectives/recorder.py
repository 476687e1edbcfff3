"""Records collectives without a dispatch mode: of Python where they are called, of C++ from torch's log."""

import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import inf
from operator import attrgetter, itemgetter
from typing import NamedTuple

from ...recording.failure_reporter import FailureReporter
from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER
from ...recording.process import read_clocks
from ...recording.protocols import LAST, RecentCollectives, Sink
from ...recording.suggestions import ranges_of
from ...torch_internals.collectives import (
    StartedCollective,
    describe_group,
    is_distributed,
    list_groups,
    number_of_last,
    read_torch_log,
)
from ..log.segments import Segment, call_at
from ..scopes.tracker import ScopeTracker
from ..steps.step import Step
from .buckets import BucketLayers
from .called import CalledCollectives
from .rows import CalledBatch, CalledKey, CollectiveSite, Row, make_columns
from .stall_watch import StallWatch

#: When nothing advances, the most collectives of C++ code that are kept, which are fewer than a ring has room for, and
#: how many of them may stand before the first that is not done.
_MOST_KEPT, _DONE_KEPT = 512, 64

#: The newest steps to which collectives may be assigned that are read late.
_MOST_STEPS = 2**12


class CollectiveRecorder:
    """Records the collectives of this process. It sends no message, and waits for none.

    An internal error ends the recording of collectives alone.
    """

    def __init__(self, sink: Sink, reporter: FailureReporter) -> None:
        self._sink = sink
        self._reporter = reporter
        self._tracker: ScopeTracker | None = None  # set while it records
        self._make_ring: Callable[[], RecentCollectives | None] | None = None
        self._has_groups = False
        self._called = CalledCollectives(self._fail, self._begin)
        #: Guards what rows are made of; the watching thread reads without it. No lock is taken inside.
        self._lock = threading.RLock()
        self._waiting: list[Row] = []  # of C++ code; their steps have not ended
        self._placed: list[Row] = []  # not written yet
        self._spans: deque[_Span] = deque(maxlen=_MOST_STEPS)  # the newest steps that have ended
        self._unseen_when_read = 0
        self._buckets = BucketLayers()
        self._last_records: dict[str, int] = {}  # the newest record of each of torch's logs that was read
        self._seen: dict[str, tuple[int, int]] = {}  # by group, the last number and when it was first seen
        self._stalls = StallWatch(self._keep_last, self._keep_unseen)
        self._failure: tuple[Exception, int] | None = None  # an error that is not reported yet, and its step

    def start(self, tracker: ScopeTracker, make_ring: Callable[[], RecentCollectives | None] | None) -> None:
        """Starts recording; `make_ring` makes what keeps the newest collectives, once there is one."""
        self._make_ring = make_ring
        self._tracker = tracker
        self._called.step = self._reporter.step
        try:
            self._begin()
            self._called.start(tracker)
        except Exception as error:
            self._fail(error)

    def _begin(self) -> None:
        """Starts the ring and the watch once there are process groups, and reads what these have done before."""
        with self._lock:
            if self._has_groups or not is_distributed():
                return
            self._has_groups = True
            self._read_what_was_before()
            if self._make_ring is not None:
                self._called.use_ring(self._make_ring())
            self._stalls.start()

    def _read_what_was_before(self) -> None:
        """Reads how many collectives there were before, and on gloo how many messages were counted among them."""
        entries = read_torch_log()
        last = {entry.group: entry.number for entry in entries}
        self._last_records = {entry.log: entry.record for entry in entries}
        is_whole = bool(entries) and entries[0].record == 0
        for group in list_groups():
            started = number_of_last(group)
            name, _ = describe_group(group)
            before = started or 0
            messages: int | None = before - last.get(name, 0)
            if before - last.get(name, 0) < 0 or (name not in last and not is_whole):
                messages = None if before else 0  # what the log has is of another group that had the name
            self._called.find_group(group, messages).before = before

    def stop(self) -> None:
        """Stops recording, and reads what is left in torch's log."""
        try:
            if self._tracker is not None and self._has_groups:
                with self._lock:
                    self._read_log(None)
                    recorded = [span.step for span in self._spans if span.is_recorded]
                    self._placed += self._list_last(max(recorded, default=0))
        except Exception as error:
            self._fail(error)
        self._leave()
        self._stalls.join()

    def _leave(self) -> None:
        self._called.stop()
        self._stalls.stop()
        self._tracker = None

    def forked(self) -> None:
        """Stops in a forked child, which writes nothing and has no thread of ours."""
        self._leave()

    def _fail(self, error: Exception) -> None:
        """Stops recording after an internal error, which is reported at the end of the step."""
        self._leave()
        self._failure = error, self._reporter.step

    # What C++ code starts, from torch's log.

    def _count_unseen(self) -> int:
        """Returns how many collectives C++ code has started since the recording began, of the groups that there are."""
        unseen = 0
        for group in list_groups():
            started = number_of_last(group)
            if started is not None:
                known = self._called.find_group(group)
                calls, _ = self._called.count_calls(known)
                unseen += max(started - known.before - calls, 0)
        return unseen

    def _read_log(self, step: Step | None) -> None:
        """Takes the collectives that were not seen to be called. Callers hold the lock."""
        if self._tracker is not None and step is not None:
            self._buckets.learn(self._tracker.names)
        self._called.note_keys()
        found, last, known = self._unseen([] if step is None else step.segments)
        self._last_records.update(last)
        self._called.forget_keys(known)
        self._waiting += found

    def _unseen(
        self, segments: Sequence[Segment]
    ) -> tuple[list[Row], dict[str, int], list[tuple[str, CalledKey]]]:
        """Returns what was neither seen to be called nor read before, and the newest record of each log.

        The last result is what the log has of those that were seen to be called, by group.
        """
        called = self._called.count_keys()
        wall_ns, counter_ns = read_clocks()
        ranks = {name: ranges_of(sorted(ranks)) for name, ranks in map(describe_group, list_groups())}
        new = [entry for entry in read_torch_log() if entry.record > self._last_records.get(entry.log, -1)]
        known = {entry: key for entry in new if (key := _take_called(entry, called)) is not None}
        entries = [entry for entry in new if entry not in known]
        buckets = self._buckets.find([entry for entry in entries if entry.name == "all_reduce"])
        found = []
        for entry in entries:
            start_ns = entry.time_ns - wall_ns + counter_ns
            call = call_at(segments, start_ns)
            path = (
                buckets.get((entry.log, entry.record))
                if call is None
                else call.context.path or call.named.shown
            )
            phase = None if call is None else call.segment.phase
            site = CollectiveSite(entry.name, entry.group, ranks.get(entry.group), entry.dtype, phase, path)
            row = Row(site, start_ns, entry.number, entry.bytes_read, entry.bytes_written)
            row.call, row.is_done = call, entry.is_done
            found.append(row)
        return found, {entry.log: entry.record for entry in new}, [*known.values()]

    def _list_last(self, step: int) -> list[Row]:
        """Returns for each group the number of its last collective, as another rank may wait for one that has no row.

        The row begins when that number was first seen, and ends now.
        """
        rows, now_ns = [], time.perf_counter_ns()
        for group in list_groups():
            started = number_of_last(group)
            known = self._called.find_group(group)
            if started is None or not known.is_numbered:
                continue
            _, messages = self._called.count_calls(known)
            number = started - messages
            seen, since_ns = self._seen.get(known.name, (-1, now_ns))
            if seen != number:
                since_ns = now_ns
            self._seen[known.name] = number, since_ns
            row = Row(CollectiveSite(LAST, known.name, known.shown_ranks), since_ns, number)
            row.end_ns, row.step = now_ns, step
            rows.append(row)
        return rows

    def _keep_last(self) -> None:
        """Keeps what `_list_last` returns."""
        ring = self._called.ring
        if ring is None:
            return
        try:
            for at, row in enumerate(self._list_last(self._reporter.step)):
                ring.set_last(at, row.numbers(), row.site.texts)
        except Exception as error:
            self._fail(error)

    def _keep_unseen(self) -> None:
        """Keeps what C++ code has started, on the thread that has found no collective to advance."""
        tracker, ring = self._tracker, self._called.ring
        if tracker is None or ring is None:
            return
        try:
            found, _, _ = self._unseen(tracker.running_segments())
            for row in _choose(found):
                self._find_place(row)
                ring.begin(row.numbers(), row.site.texts)
        except Exception as error:
            self._fail(error)

    def _find_place(self, row: Row) -> None:
        """Sets the step and the phase of a collective whose step may not have ended."""
        spans = [*self._spans]
        span = _find_span(spans, row.start_ns) if spans else None
        if span is not None and row.start_ns <= span.end_ns:
            _place(row, span)
            return
        row.step = self._reporter.step
        logs = () if self._tracker is None else self._tracker.logs.all
        backwards = [log.backward for log in logs if log.backward is not None]
        if row.site.phase is None and any(backward.start_ns <= row.start_ns for backward in backwards):
            row.site = replace(row.site, phase=BACKWARD)

    # Steps.

    def settle(self, step: Step, *, is_recorded: bool, until_ns: float) -> None:
        """Assigns collectives to the step that has just ended. Callers hold the lock over the tracker's events.

        Args:
            step: the step; it still has its segments.
            is_recorded: its rows are written.
            until_ns: when the next step began; what comes before counts as of this one.
        """
        try:
            self._begin()
            if self._has_groups:
                with self._lock:
                    self._settle(step, is_recorded=is_recorded, until_ns=until_ns)
        except Exception as error:
            self._fail(error)
        self._report()

    def _settle(self, step: Step, *, is_recorded: bool, until_ns: float) -> None:
        self._called.step = self._reporter.step
        if self._tracker is not None:
            unseen = self._count_unseen()
            # Counts are equal on all ranks, so all read the log in the same step, and none holds up the others.
            if unseen > 0 and unseen >= 2 * self._unseen_when_read:
                self._unseen_when_read = unseen
                self._read_log(step)
        number = 0 if step.number is None else step.number
        self._spans.append(_Span(step.start_ns, step.end_ns, number, is_recorded, _list_phases(step)))
        self._place_until(until_ns)

    def _place_until(self, until_ns: float) -> None:
        """Assigns each collective that began before a time to the last step that began before it, or to the first."""
        rows = [row for row in self._waiting if row.start_ns < until_ns]
        self._waiting = [row for row in self._waiting if row.start_ns >= until_ns]
        for row in sorted(rows, key=_start_of):
            span = _find_span(self._spans, row.start_ns)
            if span.is_recorded:
                _place(row, span)
                self._placed.append(row)
        batch = self._called.take_until(until_ns)
        if batch is not None:
            self._called.placed += _split(batch, self._spans)

    def write(self) -> None:
        """Writes collectives of ended steps; after `stop()` all. Callers hold the sink's lock."""
        with self._lock:
            if self._tracker is None:
                if not self._spans:
                    self._spans.append(_Span(0, 0, max(self._reporter.step - 1, 0), True))
                self._place_until(inf)
            rows, self._placed = self._placed, []
            batches, self._called.placed = self._called.placed, []
        if batches:
            self._sink.write("collectives", self._called.columns(batches))
        if rows:
            self._sink.write("collectives", make_columns(rows))
        self._report()

    def _report(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._reporter.rows_failed("collectives", *failure)


class _Span(NamedTuple):
    """A step that has ended. What comes behind it, and before the next, counts as of the step."""

    start_ns: int
    end_ns: int
    step: int
    is_recorded: bool
    phases: tuple[tuple[str, int, int], ...] = ()  # what ran, when it began and when it ended

    def phase_at(self, now_ns: int) -> str | None:
        """Returns what ran at a time."""
        return next((phase for phase, start_ns, end_ns in self.phases if start_ns <= now_ns <= end_ns), None)


def _list_phases(step: Step) -> tuple[tuple[str, int, int], ...]:
    """Returns what ran in a step; neighbouring calls are one, because a step may have thousands."""
    parts = [
        (int(segment.times[0]), int(segment.times[-1]), FORWARD)
        for segment in step.segments
        if segment.is_closed and segment.phase == FORWARD
    ]
    parts += [(backward.start_ns, backward.end_ns, BACKWARD) for backward in step.backwards]
    parts += [(start_ns, end_ns, OPTIMIZER) for start_ns, end_ns, _ in step.optimizer_steps]
    return tuple(
        (phase, of_phase[0][0], max(end_ns for _, end_ns, _ in of_phase))
        for phase, group in groupby(sorted(parts), key=itemgetter(2))
        for of_phase in [[*group]]
    )


_start_of = attrgetter("start_ns")


def _take_called(
    entry: StartedCollective, called: Counter[tuple[str, CalledKey]]
) -> tuple[str, CalledKey] | None:
    """Returns the key under which a collective in torch's log was called, and uses it up; None if it was not seen."""
    keys: tuple[CalledKey, ...] = entry.number, (entry.name, entry.bytes_read)
    for key in keys:
        if called[entry.group, key] > 0:
            called[entry.group, key] -= 1
            return entry.group, key
    return None


def _choose(rows: Sequence[Row]) -> Sequence[Row]:
    """Returns the first collectives that are not done, for which ranks may wait, and some before them.

    If all are done, these are the last ones.
    """
    first = next((at for at, row in enumerate(rows) if not row.is_done), len(rows))
    start = max(first - _DONE_KEPT, 0)
    return rows[start : start + _MOST_KEPT]


def _find_span(spans: Sequence[_Span], now_ns: int) -> _Span:
    """Returns the last step that began before a time, or else the first."""
    return spans[max(bisect_right(spans, now_ns, key=_start_of) - 1, 0)]


def _split(batch: CalledBatch, spans: Sequence[_Span]) -> Iterator[CalledBatch]:
    """Yields the collectives of each recorded step."""
    starts_ns = batch.starts_ns()
    begun = 0
    while begun < len(batch):
        at = max(bisect_right(spans, starts_ns[begun], key=_start_of) - 1, 0)
        is_last = at + 1 == len(spans)
        end = len(batch) if is_last else bisect_left(starts_ns, spans[at + 1].start_ns, begun)
        if spans[at].is_recorded:
            part = batch.cut(begun, end)
            part.step = spans[at].step
            yield part
        begun = end


def _place(row: Row, span: _Span) -> None:
    row.step = span.step
    if row.site.phase is None:
        row.site = replace(row.site, phase=span.phase_at(row.start_ns))
