"""Finds the thread that has made an autograd node: its number is one of that thread's."""

from typing import Any

from ...torch_internals.autograd import is_custom_function, queue_callback
from ..log.segments import Segment
from ..log.thread_log import Backward, ThreadLog, ThreadLogs
from .gradient_marks import mark_of
from .graph_watch import GraphOwners


class NodeThreads:
    """The threads that have made the nodes of the graphs that run.

    On the CPU the engine runs nodes on the thread that has begun the backward, which most often has built the graph. On
    a device it runs them on a thread of its own, whose numbers mean other nodes: those of a reentrant checkpoint's
    recompute, and of backwards with `create_graph`.
    """

    def __init__(self, logs: ThreadLogs) -> None:
        self._logs = logs
        self._unseen: tuple[int, GraphOwners] | None = None  # of a graph task that no `Backward` describes

    def sole(self, log: ThreadLog, backward: Backward | None) -> ThreadLog | None:
        """Returns the log of the thread that has made all nodes of a graph; None if several may have made some.

        Args:
            log: the log of this thread, which runs a node.
            backward: the run of the graph, if it is known.
        """
        home = log if backward is None else backward.home
        if backward is not None and backward.log is not home:
            return None  # a node on a thread of the engine's own has begun it
        is_another = any(other.has_built() for other in self._logs.all if other is not home)
        return None if is_another else home

    def of(self, log: ThreadLog, task: int, backward: Backward | None, node: Any) -> ThreadLog | None:
        """Returns the log of the thread that has made a node of a running graph; None if that cannot be known.

        Args:
            log: the log of this thread.
            task: the graph task.
            backward: the run of the graph; None if it did not come through the wrapped entry.
            node: the node.
        """
        sole = self.sole(log, backward)
        if sole is not None:
            return sole
        mark = mark_of(node)
        if mark is not None:
            return mark.log
        number = node._sequence_nr()
        if backward is None:
            return _only(self._builders(log, task, None, node))
        began_on = backward.log
        own = began_on.span_of(number)
        if isinstance(own, Segment) and backward.outer is not None and own.task == backward.outer.task:
            return began_on  # what that thread recomputed itself, in the backward around this one
        known = self._builders(began_on, task, backward, node)
        makers = known or {backward.home, *(each for each in self._logs.all if each.has_built_forward())}
        if number >= backward.home_seq:
            makers.discard(backward.home)
        makers |= {each for each in self._logs.all if number < each.unmarked_seq}
        if backward.may_have_remade(number):
            if not known and self._is_remade(backward):
                return began_on
            makers.add(began_on)
        return _only(makers)

    def _builders(self, log: ThreadLog, task: int, backward: Backward | None, node: Any) -> set[ThreadLog]:
        """Returns the threads of the calls whose outputs stand in the graph at or below a node."""
        known = set(self._owners_of(task, backward).below(node))
        if backward is not None:
            known |= backward.reached_logs
        if len(known) > 1:
            number = node._sequence_nr()
            known = {each for each in known if each.span_of(number) is not None}
        return known

    def _is_remade(self, backward: Backward) -> bool:
        """Returns whether a custom Function runs a backward through nothing but what it has just run again."""
        visited: GraphOwners = backward.owners
        is_inside = backward.remade_from <= visited.lowest and visited.highest < backward.first_seq
        return is_inside and is_custom_function(backward.inside)

    def _owners_of(self, task: int, backward: Backward | None) -> GraphOwners:
        """Returns the owners of a graph that runs, which are forgotten when the backward ends."""
        if backward is not None:
            if backward.owners is None:
                backward.owners = GraphOwners()
            owners: GraphOwners = backward.owners
            return owners
        unseen = self._unseen
        if unseen is None or unseen[0] != task:  # a backward that C++ code started
            unseen = self._unseen = task, GraphOwners()
            queue_callback(self.forget_unseen)  # not called if the backward raises: then the next one forgets
        return unseen[1]

    def forget_unseen(self) -> None:
        """Forgets the owners of graphs that no `Backward` describes."""
        self._unseen = None


def _only(makers: set[ThreadLog]) -> ThreadLog | None:
    return next(iter(makers)) if len(makers) == 1 else None
