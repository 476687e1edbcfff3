"""Collects the gradients of each call's output, and passes them on once a backward has brought all of them."""

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...torch_internals.autograd import ACCUMULATE_SEQUENCE_NR, graph_task_id, queue_callback
from ...torch_internals.deep_graphs import cut_below
from ...torch_internals.modes import DisableTorchFunction, unseen
from ...torch_internals.tensors import GradientHook, hooks_on
from ...torch_internals.transforms import is_batched_tensor
from ..backward.graph_walk import base_made_in, edges_to_written_bases, root_nodes, walk_graph, will_run
from ..identity_map import IdentityMap
from ..log.listeners import Listener
from ..log.segments import CallRef, InsideCall
from ..log.thread_log import Backward
from ..scopes.tracker import ScopeTracker
from ..structures.rebuild import GradientTree

#: In place of a watch's number: the gradient comes from inside of compiled code, if at all.
COMES_PERHAPS = -1


@dataclass(eq=False, slots=True)
class Returned:
    """The output of one call, without its tensors."""

    call: CallRef | InsideCall
    registered: Any  # the caller's object, passed on with the gradients
    tree: GradientTree
    watches: tuple[int, ...]  # the number of the watch of each tensor, without repeats
    #: By index in `watches`, for a view: the number of the watch on its base.
    bases: dict[int, int] = field(default_factory=dict)
    #: By index in `watches`, for a view: the graph task in which its last gradient came.
    arrived: dict[int, int] = field(default_factory=dict)


class Arriving:
    """The gradients of one call that have arrived in one backward."""

    __slots__ = ("gradients", "position", "returned", "waiting")

    def __init__(self, returned: Returned, waiting: set[int], position: int) -> None:
        self.returned = returned
        self.gradients: list[Any] = [None] * len(returned.watches)
        self.waiting = waiting  # the indices of gradients that have not arrived
        self.position = position  # its position among the stashes


class Entry(NamedTuple):
    """A gradient that a call waits for."""

    returned: Returned
    place: int  # the gradient's index in the call
    shape: torch.Size | None = None  # the view's shape, if its base is watched


class Watch(GradientHook):
    """A hook on a tensor, which receives its gradient for all calls that returned it."""

    __slots__ = ("__weakref__", "entries", "hooks_ref", "number", "receive", "served")

    def __init__(self, number: int, receive: "Callable[[Watch, Any], None]") -> None:
        self.receive, self.hooks_ref = receive, None
        self.number = number
        self.entries: list[Entry] = []  # in the order of the calls
        self.served = 0  # how many entries have received a gradient

    def remove(self) -> None:
        """Removes the hook; the graph may keep the empty watch."""
        self.unhook()
        self.entries, self.receive = [], _ignore


def _ignore(watch: Watch, gradient: Any) -> None:
    """Ignores a gradient of a watch that was removed while torch ran its hooks."""


#: The largest number of calls that receive the gradient of one leaf, which may be returned over and over.
_MAX_CALLS_OF_LEAF = 64

#: A function that receives the gradients of a call, and a position if other calls were passed on before it.
Receiver = Callable[[Returned, tuple[Any, ...], Arriving | None], None]


class _Run:
    """One run of the engine that may bring gradients."""

    def __init__(self, running: set[int] | None, copied: set[int]) -> None:
        self.running = running  # numbers of the watches whose nodes run; None if unknown
        self.copied = copied  # numbers of the watches on tensors that were written to through a view
        self.arriving: dict[Returned, Arriving] = {}


class OutputGradients(Listener):
    """Watches the gradients of outputs for one tracker.

    Hooks are on tensors and not on modules: a module's backward hook adds a node to the graph, which changes gradients
    if an output is used twice, and fails if the output is written to in place.
    """

    def __init__(self, tracker: ScopeTracker, receiver: Receiver, position: Callable[[], int]) -> None:
        self._tracker = tracker
        self._receiver = receiver
        self._position = position  # returns the number of stashes so far
        self._on_gradient = self._arrived  # bound once, as each watch refers to it
        self._key = object()  # the key in nodes' metadata, different for each tracker
        self._numbers = itertools.count()
        self._watches: IdentityMap[Watch, None] = IdentityMap()
        self._runs: dict[int, _Run] = {}  # keyed by graph task
        self._waiting: list[Arriving] = []  # waiting calls of all runs, in order
        self._lock = threading.RLock()

    def wait_for(self, registered: Any, call: CallRef, output: Any) -> None:
        """Registers for the gradients of an output's tensors, which the receiver gets during the backward.

        Args:
            registered: an object that is passed to the receiver unchanged.
            call: the call that returned the output.
            output: tensors in any structure; those that require no gradient are skipped.
        """
        places: dict[Watch, int] = {}
        bases: dict[int, tuple[Watch, torch.Size]] = {}  # the bases of views, with the views' shapes

        def slot_of(tensor: torch.Tensor) -> int | None:
            watch = self._watch(tensor)
            if watch is None:
                return None
            place = places.setdefault(watch, len(places))
            base = base_made_in(call.segment, call.first_seq, tensor)  # the base may be written to later
            base_watch = None if base is None else self._watch(base)
            if base_watch is not None:
                bases[place] = base_watch, tensor.shape
            return place

        with DisableTorchFunction():
            tree = GradientTree(output, slot_of)
        if places:
            returned = Returned(call, registered, tree, tuple(watch.number for watch in places))
            for watch, place in places.items():
                watch.entries.append(Entry(returned, place))
            for place, (watch, shape) in bases.items():
                returned.bases[place] = watch.number
                watch.entries.append(Entry(returned, place, shape))

    def arrived_inside(self, returned: Returned, place: int, gradient: torch.Tensor) -> None:
        """Passes on a gradient from inside of compiled code, where tensors cannot be watched."""
        found: tuple[list[Any], Arriving | None] | None = None
        with self._tracker.subscribers.guard(returned.call.context.module):
            found = self._take(Entry(returned, place), gradient)
        if found is not None:
            self._pass_on(returned, *found)

    def stop(self) -> None:
        """Removes every hook from every tensor."""
        for watch, _ in self._watches.items():
            watch.remove()
        self._runs, self._waiting = {}, []

    def backward_ended(self, backward: Backward) -> None:
        """Drops calls that still wait after an exception has ended the backward."""
        with self._lock:
            run = self._runs.pop(backward.task, None)
            for arriving in [] if run is None else run.arriving.values():
                self._waiting.remove(arriving)

    def make_room(self, arriving: Arriving) -> int:
        """Returns the position of a call that others have overtaken; calls that began to wait later move up by one."""
        with self._lock:
            at = self._waiting.index(arriving) if arriving in self._waiting else len(self._waiting)
            position = arriving.position
            for waiting in self._waiting[at:]:
                waiting.position += 1
            return position

    # Watching tensors.

    def _watch(self, tensor: torch.Tensor) -> Watch | None:
        """Returns the watch of a tensor; None if it gets no gradient, or if torch would run no hook."""
        try:
            if not tensor.requires_grad or is_batched_tensor(tensor):
                return None
            node: Any = tensor.grad_fn
            if node is None:
                return self._watch_leaf(tensor)
            known: dict[int, Watch] = node.metadata.setdefault(self._key, {})
            watch = known.get(tensor.output_nr)
            if watch is None:
                watch = known[tensor.output_nr] = self._hook(tensor)
                cut_below(node, node.next_functions)
            return watch
        except RuntimeError:  # torch refuses hooks on a view whose base was written to
            return None

    def _watch_leaf(self, tensor: torch.Tensor) -> Watch:
        """Returns the watch of a leaf, without the entries of finished calls, because a leaf outlives its graphs."""
        watch = next(iter(self._watches_of_leaf(tensor)), None)
        if watch is None:
            return self._hook(tensor)
        del watch.entries[: watch.served]
        del watch.entries[:-_MAX_CALLS_OF_LEAF]
        watch.served = 0
        return watch

    def _watches_of_leaf(self, tensor: torch.Tensor) -> Iterator[Watch]:
        for hook in hooks_on(tensor):
            if isinstance(hook, Watch) and hook.receive is self._on_gradient:
                yield hook

    def _hook(self, tensor: torch.Tensor) -> Watch:
        watch = Watch(next(self._numbers), self._on_gradient)
        watch.hook(tensor)
        self._watches[watch] = None
        return watch

    # Receiving gradients.

    def _arrived(self, watch: Watch, gradient: Any) -> None:
        """Passes on the gradient of a tensor, first to the call that returned it last, i.e. the outermost one."""
        entries = tuple(watch.entries)
        watch.served = len(entries)
        for entry in reversed(entries):
            found: tuple[list[Any], Arriving | None] | None = None
            with self._tracker.subscribers.guard(entry.returned.call.context.module):
                if entry.shape is None or self._arrives_at_base(entry, watch.number, gradient):
                    found = self._take(entry, gradient)
            if found is not None:
                self._pass_on(entry.returned, *found)

    def _arrives_at_base(self, entry: Entry, number: int, gradient: Any) -> bool:
        """Returns whether a base's gradient is that of its view, because the view was written to."""
        if gradient is None or entry.returned.arrived.get(entry.place) == graph_task_id():
            return False
        with self._lock:
            return number in self._run(graph_task_id()).copied

    def _take(self, entry: Entry, gradient: Any) -> tuple[list[Any], Arriving | None] | None:
        """Stores a gradient. Returns all gradients of the call if this was the last one."""
        returned, place, shape = entry
        if returned.bases and gradient is not None:
            returned.arrived[place] = graph_task_id()
        if shape is not None:
            with unseen():
                gradient = gradient.reshape(shape)
        if len(returned.watches) == 1:
            return [gradient], None
        with self._lock:
            run = self._run(graph_task_id())
            arriving = run.arriving.get(returned) or self._begin_waiting(run, returned)
            arriving.gradients[place] = gradient
            arriving.waiting.discard(place)
            if arriving.waiting:
                return None
            del run.arriving[returned]
        return arriving.gradients, arriving

    def _pass_on(self, returned: Returned, gradients: list[Any], arriving: Arriving | None) -> None:
        try:
            # The node may still run for another of its outputs.
            if any(gradient is not None for gradient in gradients):
                self._receiver(returned, returned.tree.fill(gradients), arriving)
        finally:
            if arriving is not None:
                with self._lock:
                    self._waiting = [waiting for waiting in self._waiting if waiting is not arriving]

    def _run(self, task: int) -> _Run:
        run = self._runs.get(task)
        if run is None:
            backward = self._tracker.backwards.running(self._tracker.logs.current, task)
            outputs = None if backward is None else backward.outputs
            run = self._runs[task] = _Run(None, set()) if outputs is None else self._read_graph(outputs)
            queue_callback(lambda: self._finish(task))
        return run

    @staticmethod
    def _comes(run: _Run, returned: Returned, place: int) -> bool:
        """Returns whether a run will bring the gradient at index `place`."""
        if run.running is None or returned.bases.get(place) in run.copied:
            return True
        return returned.watches[place] == COMES_PERHAPS or returned.watches[place] in run.running

    def _begin_waiting(self, run: _Run, returned: Returned) -> Arriving:
        waiting = {place for place in range(len(returned.watches)) if self._comes(run, returned, place)}
        arriving = run.arriving[returned] = Arriving(returned, waiting, self._position())
        self._waiting.append(arriving)
        return arriving

    def _finish(self, task: int) -> None:
        """Passes on incomplete calls, since the engine has run every node and no further gradient can arrive."""
        with self._lock:
            run = self._runs.pop(task, None)
        for arriving in [] if run is None else list(run.arriving.values()):
            self._pass_on(arriving.returned, arriving.gradients, arriving)

    def _read_graph(self, outputs: Any) -> _Run:
        """Finds the watches whose nodes will run, by walking the graph (1 us a node)."""
        running: set[int] = set()
        copied: set[int] = set()
        with DisableTorchFunction():
            for node, number, _ in walk_graph(root_nodes(outputs, with_leaves=True)):
                watches = list(node.metadata.get(self._key, {}).values())
                if number == ACCUMULATE_SEQUENCE_NR:
                    watches += self._watches_of_leaf(node.variable)
                if watches and will_run(node):
                    running.update(watch.number for watch in watches)
                for base, output_nr in edges_to_written_bases(node):
                    watch = base.metadata.get(self._key, {}).get(output_nr)
                    if watch is not None:
                        copied.add(watch.number)
        return _Run(running, copied)
