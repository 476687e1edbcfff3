"""Notes the collectives that Python code calls, inside of these calls; what happens there each time is in C."""

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...recording.phase import FORWARD
from ...recording.protocols import RecentCollectives
from ...recording.suggestions import ranges_of
from ...torch_internals.autograd import graph_task_id
from ...torch_internals.collectives import (
    backend_of,
    describe_group,
    local_name,
    number_of_last,
    number_reader,
    size_of,
    tells,
    unwatch_collectives,
    watch_collectives,
)
from ..log.thread_log import ThreadLog
from ..scopes.tracker import ScopeTracker
from .rows import (
    BYTES_READ,
    GROUP,
    MOST_IN_LOG,
    NUMBER,
    SITE,
    WIDTH,
    CalledBatch,
    CalledKey,
    CollectiveSite,
    KnownGroup,
    make_called_columns,
    to_numbers,
)

if TYPE_CHECKING:
    from ._called import CompiledCalls, CompiledMethod, state
else:
    try:
        from ._called import CompiledCalls, CompiledMethod, state
    except ImportError:  # it is not compiled: all collectives are read from torch's log
        CompiledCalls, CompiledMethod, state = object, None, None

_END_OF_TIME = 2**63 - 1
_ROW_BYTES = 8 * WIDTH


class CalledCollectives(CompiledCalls):
    """Notes collectives as they are called: 1.3 us each in a loop, and some 5 us after a wait, with cold caches.

    The base class, in C, calls methods with an underscore for what it does not know. An internal error ends the noting,
    and never reaches the user's collective.
    """

    def __init__(self, fail: Callable[[Exception], None], begin: Callable[[], None]) -> None:
        """Creates what notes; see `start`.

        Args:
            fail: receives an internal error.
            begin: called before the first collective of a process group is noted.
        """
        self.groups: dict[str, KnownGroup] = {}  # by the name that the group has in this process
        self.ring: RecentCollectives | None = None
        self._by_index: list[KnownGroup | None] = []
        self._lives: dict[int, weakref.ref[Any]] = {}  # by the index of the group
        self._adding = threading.RLock()  # the watching thread may meet a group first
        self._begin, self._fail = begin, fail
        self._tracker: ScopeTracker | None = None
        self._sites: list[CollectiveSite] = []
        self._numbers_of_sites: dict[tuple[Any, ...], int] = {}
        self.placed: list[CalledBatch] = []  # taken, and not written yet
        #: The numbers of the newest that were taken, whose keys are not in those of their groups.
        self._not_keyed: deque[bytearray] = deque()
        self._not_keyed_calls = 0

    def start(self, tracker: ScopeTracker) -> None:
        """Starts noting."""
        if state is None:
            return
        self._tracker = tracker
        logs = tracker.logs
        held = (
            logs, logs.threads, tracker.optimizers.starts, graph_task_id, tracker.backwards.all_running,
            number_reader(), perf_counter_ns, torch.Tensor, torch.nn.Parameter, FORWARD,
        )  # fmt: skip
        probe: Any = ThreadLog.__new__(ThreadLog)
        probe.segment, probe.context = object(), object()
        self.set_up(state, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), probe, held)
        self.is_on = True
        watch_collectives(self, CompiledMethod)

    def stop(self) -> None:
        """Stops noting."""
        unwatch_collectives(self)
        self._tracker = None
        if state is not None:
            self.is_on = False
            self.keep_in(None, 0, 0)

    def use_ring(self, ring: RecentCollectives | None) -> None:
        """Keeps the newest collectives in a ring."""
        self.ring = ring
        if ring is not None and state is not None:
            memory = np.frombuffer(ring.memory, np.uint8)
            self.keep_in(memory, memory.ctypes.data, memory.nbytes)

    # Process groups.

    def find_group(self, group: Any, messages_before: int | None = 0) -> KnownGroup:
        """Returns what is known of a process group, which is noted if it is new.

        Args:
            group: the process group.
            messages_before: of a new group on gloo, how many of its collectives were messages; None if it is not known.
        """
        own_name = local_name(group) or ""
        with self._adding:
            known = self.groups.get(own_name)
            life = None if known is None else self._lives.get(known.index)
            if known is None or life is None or life() is not group:  # another group had the name
                known = self.groups[own_name] = self._add_known(group, messages_before)
        return known

    def _add_known(self, group: Any, messages_before: int | None) -> KnownGroup:
        name, ranks = describe_group(group)
        is_gloo = backend_of(group) == "gloo"
        is_counted = not is_gloo or (messages_before is not None and state is not None)
        last, shown = number_of_last(group), ranges_of(sorted(ranks)) or None
        known = KnownGroup(name, ranks, shown, len(self._by_index), is_counted and last is not None)
        messages = messages_before or 0 if is_gloo else -1
        self._follow(group, known, messages, last or 0, shows_ends=is_gloo)
        return known

    def _follow(
        self, group: Any, known: KnownGroup | None, messages: int, last: int, *, shows_ends: bool
    ) -> int:
        """Returns the index of a process group, by whose address the collectives on it are found until it is freed."""
        with self._adding:
            index = len(self._by_index)
            self._by_index.append(known)
            self._lives[index] = weakref.ref(group, lambda _: self._forget(index))
            if state is not None:
                is_numbered = known is not None and known.is_numbered
                self.append_group(group, messages, last, known is None, is_numbered, shows_ends)
        return index

    def _forget(self, index: int) -> None:
        if state is not None:
            self.forget_group(index)
        self._lives.pop(index, None)

    def count_calls(self, known: KnownGroup) -> tuple[int, int]:
        """Returns how many collectives of a group were seen to be called, and how many messages it counts as such.

        The first includes messages where they count.
        """
        calls, messages = (0, 0) if state is None else self.count(known.index)
        return calls, max(messages, 0)

    # What the base class does not know.

    def _add_group(self, group: Any) -> int:
        if local_name(group) is None:
            return self._follow(group, None, -1, 0, shows_ends=False)
        self._begin()
        return self.find_group(group).index

    def _add_site(
        self, name: str, group: int, dtype: Any, phase: str | None, context: Any
    ) -> tuple[int, bytes]:
        key = (name, group, dtype, phase, context)
        number = self._numbers_of_sites.get(key)
        if number is None:
            known = self._by_index[group]
            assert known is not None
            named = None if context is None else context.named
            path = None if named is None else context.path or named.shown
            number = self._numbers_of_sites[key] = len(self._sites)
            self._sites.append(CollectiveSite(name, known.name, known.shown_ranks, dtype, phase, path))
        return number, self._sites[number].texts

    def _locate(self) -> tuple[Any, Any, str | None]:
        """Returns the call that runs on this thread, its context, and the phase."""
        if self._tracker is None:
            return None, None, None
        where = self._tracker.where()
        return where.call, None if where.call is None else where.call.context, where.phase

    def _number_message(self, group: int, name: str, rank: Any) -> tuple[int, int]:
        """Returns the global rank of the other one, and the number of a message; -1 for what is not known."""
        known = self._by_index[group]
        peer = None if known is None else known.global_rank(rank)
        if known is None or peer is None:
            return -1, -1
        number = known.message_numbers[name, peer] = known.message_numbers.get((name, peer), 0) + 1
        return peer, number

    _has_facts = staticmethod(tells)
    _size_of = staticmethod(size_of)

    def _end_late(self, numbers: tuple[int, int, int]) -> None:
        """Notes that the program has waited for a collective that was taken before."""
        call, wait_ns, end_ns = numbers
        for batch in [*self.placed]:
            batch.end(call, wait_ns, end_ns)

    # What was noted.

    def take_until(self, until_ns: float) -> CalledBatch | None:
        """Returns the collectives that began before a time, and forgets them; None if there are none."""
        if state is None:
            return None
        first, content, places, options = self.take(int(min(until_ns, _END_OF_TIME)))
        if not options:
            return None
        self._not_keyed.append(content)
        self._not_keyed_calls += len(options)
        while self._not_keyed_calls - len(self._not_keyed[0]) // _ROW_BYTES > MOST_IN_LOG:
            self._not_keyed_calls -= len(self._not_keyed.popleft()) // _ROW_BYTES
        return CalledBatch(first, content, places, options)

    def columns(self, batches: Sequence[CalledBatch]) -> dict[str, Any]:
        """Returns the columns of `collectives` of some of them, whose steps are known."""
        return make_called_columns(batches, self._sites, self._by_index)

    def count_keys(self) -> Counter[tuple[str, CalledKey]]:
        """Returns how often each key was called, by the name of its group, of those yet to be found in torch's log."""
        groups = [known for known in [*self._by_index] if known is not None]
        found = Counter((known.name, key) for known in groups for key in [*known.called_keys])
        contents = [*self._not_keyed, *(() if state is None else self.read()[1:])]
        found.update((known.name, key) for content in contents for known, key in self._list_keys(content))
        return found

    def note_keys(self) -> None:
        """Adds the calls that were taken to those of their groups that are yet to be found in torch's log."""
        while self._not_keyed:
            for known, key in self._list_keys(self._not_keyed.popleft()):
                known.called_keys.append(key)
        self._not_keyed_calls = 0

    def forget_keys(self, found: Sequence[tuple[str, CalledKey]]) -> None:
        """Forgets calls that were found in torch's log, by the name of their group, of which there may be several."""
        left = Counter(found)
        for known in self._by_index:
            keys = () if known is None else tuple(known.called_keys)
            for key in keys:
                assert known is not None
                known.called_keys.popleft()
                if left[known.name, key] > 0:
                    left[known.name, key] -= 1
                else:
                    known.called_keys.append(key)

    def _list_keys(self, content: bytearray) -> Iterator[tuple[KnownGroup, CalledKey]]:
        columns = to_numbers(content)[:, (SITE, GROUP, NUMBER, BYTES_READ)].tolist()
        for site, group, number, read in columns:
            known, name = self._by_index[group], self._sites[site].name
            if known is not None and name not in ("send", "recv"):
                yield known, (name, read) if number < 0 else number
