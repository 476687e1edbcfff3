"""Notes the collectives that Python code calls, inside of these calls."""

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

from ...recording.protocols import RecentCollectives
from ...recording.suggestions import ranges_of
from ...torch_internals.autograd import graph_task_id
from ...torch_internals.collectives import (
    EntryPoint,
    are_options,
    backend_of,
    describe_group,
    local_name,
    number_of_last,
    unwatch_collectives,
    watch_collectives,
)
from ..log.call_context import CallContext
from ..log.segments import CallRef, Segment
from ..log.thread_log import ThreadLog
from ..scopes.tracker import ScopeTracker
from .rows import CollectiveSite, KnownGroup, Row, count_bytes, first_tensor

#: The most rows that are held until their step ends, which it may never do, and the most works until they are waited
#: for; then all works are dropped.
_MOST_WAITING, _MOST_WORKS = 2**16, 2**12


class CalledCollectives:
    """Notes collectives as they are called, with as little work as may be: 10 us each.

    An internal error ends the noting, and never reaches the user's collective.
    """

    def __init__(
        self, fail: Callable[[Exception], None], begin: Callable[[], None], step: Callable[[], int]
    ) -> None:
        """Creates what notes; see `start`.

        Args:
            fail: receives an internal error.
            begin: called before the first collective is noted.
            step: returns the number of the running step.
        """
        self.rows: deque[Row] = deque(maxlen=_MOST_WAITING)  # their steps have not ended
        self.groups: dict[str, KnownGroup] = {}  # by the name that the group has in this process
        self.ring: RecentCollectives | None = None
        self._begin: Callable[[], None] | None = begin
        self._fail, self._step = fail, step
        self._tracker: ScopeTracker | None = None
        self._sites: dict[tuple[Any, ...], CollectiveSite] = {}
        self._by_work: dict[int, Row] = {}  # by the id of its `Work`, until it is waited for

    def start(self, tracker: ScopeTracker) -> None:
        """Starts noting."""
        self._tracker = tracker
        watch_collectives(self)

    def stop(self) -> None:
        """Stops noting."""
        unwatch_collectives(self)
        self._tracker = None

    def find_group(self, group: Any, started: int | None, messages_before: int | None = 0) -> KnownGroup:
        """Returns what is known of a process group, which is noted if it is new.

        Args:
            group: the process group.
            started: how many collectives it has started; None if it does not count them.
            messages_before: of a new group on gloo, how many of these were messages; None if it is not known.
        """
        own_name = local_name(group) or ""
        known = self.groups.get(own_name)
        if known is None or (started or 0) < known.last:  # another group had the name
            name, ranks = describe_group(group)
            is_gloo = backend_of(group) == "gloo"
            messages = messages_before or 0 if is_gloo else None
            is_numbered = started is not None and (messages_before is not None or not is_gloo)
            known = self.groups[own_name] = KnownGroup(
                name, ranks, ranges_of(sorted(ranks)) or None, messages, is_numbered, is_gloo
            )
        return known

    def began(self, group: Any, entry: EntryPoint, args: Sequence[Any]) -> Row | None:
        """Notes a collective that begins on this thread."""
        tracker = self._tracker
        if tracker is None or local_name(group) is None:
            return None
        try:
            if self._begin is not None:
                begin, self._begin = self._begin, None
                begin()
            started = number_of_last(group)
            known = self.find_group(group, started)
            outputs = args[entry.outputs] if entry.outputs >= 0 else None
            inputs = args[entry.inputs] if entry.inputs >= 0 else None
            written = count_bytes(outputs)
            read = written if inputs is outputs else count_bytes(inputs)
            tensor = first_tensor(outputs if inputs is None else inputs)
            dtype = None if tensor is None else tensor.dtype
            is_message = entry.is_message
            number = None
            if started is not None:
                known.last = started
                if not is_message and known.is_numbered:
                    number = started + 1 - (known.messages or 0)
            log = tracker.logs.current
            segment, call, context, phase = _locate(tracker, log)
            site = self._find_site(entry, known, dtype, phase, context)
            row = Row(site, perf_counter_ns(), number, read, written, log.number, None, known)
            row.segment, row.call, row.events = segment, call, 0 if segment is None else len(log.times)
            row.step = self._step()
            if is_message:
                self._number_message(row, known, entry, args)
            else:
                known.called_keys.append((entry.name, read) if number is None else number)
                row.options = args[-1] if args and are_options(args[-1]) else None
            if not is_message or known.messages is not None:
                known.called += 1
            if self.ring is not None:
                row.kept_as = self.ring.begin(row.numbers(), site.texts)
            self.rows.append(row)
            return row
        except Exception as error:
            self._fail(error)
            return None

    def _find_site(
        self, entry: EntryPoint, known: KnownGroup, dtype: Any, phase: str | None, context: CallContext | None
    ) -> CollectiveSite:
        key = (entry.name, known, dtype, phase, context)
        site = self._sites.get(key)
        if site is None:
            named = None if context is None else context.named
            path = None if context is None or named is None else context.path or named.shown
            site = CollectiveSite(entry.name, known.name, known.shown_ranks, dtype, phase, path)
            self._sites[key] = site
        return site

    @staticmethod
    def _number_message(row: Row, known: KnownGroup, entry: EntryPoint, args: Sequence[Any]) -> None:
        peer = known.global_rank(args[entry.peer]) if 0 <= entry.peer < len(args) else None
        if peer is not None:
            row.peer = peer
            row.seq_id = known.message_numbers[entry.name, peer] = (
                known.message_numbers.get((entry.name, peer), 0) + 1
            )
        if known.messages is not None:
            known.messages += 1

    def issued(self, begun: Row | None, work: Any) -> None:
        """Notes what the program may wait for. If it is None, the call itself has waited."""
        if begun is None:
            return
        if work is None:
            self._end(begun, perf_counter_ns())
            return
        if len(self._by_work) >= _MOST_WORKS:
            self._by_work.clear()
        self._by_work[id(work)] = begun

    def waited(self, work: Any, start_ns: int) -> None:
        """Notes that the program has waited for a collective."""
        row = self._by_work.pop(id(work), None)
        if row is not None:
            now_ns = perf_counter_ns()
            row.wait_ns = now_ns - start_ns
            self._end(row, now_ns)

    def _end(self, row: Row, now_ns: int) -> None:
        if row.group is None or not row.group.shows_ends:
            return
        row.end_ns = now_ns
        if self.ring is not None:
            self.ring.end(row.kept_as, now_ns)


def _locate(
    tracker: ScopeTracker, log: ThreadLog
) -> tuple[Segment | None, CallRef | None, CallContext | None, str | None]:
    """Returns what runs on this thread: the outermost call, or the innermost one; its context; and the phase.

    Where an outermost call runs, the innermost one is found when the row is written, by the number of events, as that
    is faster.
    """
    segment = log.segment
    if segment is not None and log.task == graph_task_id():
        return segment, None, log.context, segment.phase
    where = tracker.where()
    return None, where.call, None if where.call is None else where.call.context, where.phase
