"""Tells whoever wants to know of each call's backward at its begin and at its end, with its gradients."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ..log.segments import Segment
from ..log.thread_log import ThreadLog
from .backward_call import Heard, HeardCalls
from .input_gradients import collectors, input_gradients, passing_gradients
from .passthrough import find_passing
from .plan import Graph


class BackwardHearer(Protocol):
    """Who hears. What it raises is raised to whoever called `backward()`."""

    @property
    def wants_gradients(self) -> bool:
        """Whether it looks at the gradients of inputs."""

    def call_began(self, heard: Heard, received: Any, number: int) -> None:
        """The backward of a call begins; the node of this number is its first, and receives these gradients."""

    def call_ended(self, heard: Heard, gradients: Any) -> None:
        """It has ended; `gradients` of its inputs, what the call itself has contributed to them."""


class Hearing:
    """The calls of one run of the engine, told as they come."""

    def __init__(self, graph: Graph, spans: Sequence[Any], hearers: Sequence[BackwardHearer]) -> None:
        self._hearers = hearers
        self._graph = graph
        self._open: list[Heard] = []
        self.raised: BaseException | None = None  # by a hook of the user's
        self._calls = HeardCalls()
        self._segments = [span for span in spans if isinstance(span, Segment) and span.crossings is not None]
        self.passing = find_passing(graph, self._segments, self._calls)

    def move(
        self, log: ThreadLog, segment: Segment | None, index: int, number: int = -1, arriving: Any = ()
    ) -> None:
        """The engine goes on to a node of a call, where gradients arrive: tells what ends with that, and what begins.

        Args:
            log: of the thread that runs.
            segment: of the call; None: on to nodes outside of any module, or to the end.
            index: of the call in its segment.
            number: of the node; -1: there is none.
        """
        try:
            for passing in self.passing.pop(number, ()):
                passing.passes = True
                self._go_to(log, passing, number, arriving)
            if segment is not None and number >= 0 and not segment.has_made(number):
                segment = None  # another backward has made the node: it is none of the forward's
            self._go_to(log, None if segment is None else self._calls.of(segment)[index], number, arriving)
        finally:
            log.hooked = None

    def _go_to(self, log: ThreadLog, target: Heard | None, number: int, arriving: Any) -> None:
        at, entered, is_open = target, [], self._open
        while at is not None and not at.is_open:
            entered.append(at)
            at = at.parent
        if is_open and is_open[-1] is not at:
            ended = [is_open.pop()]
            while is_open and is_open[-1] is not at:
                ended.append(is_open.pop())
            self._tell_ended(log, ended, number, arriving)
        while entered:
            heard = entered.pop()
            heard.is_open = True
            is_open.append(heard)
            if heard.passes:
                received = passing_gradients(heard, number, arriving)
            elif heard.place.is_scope:
                heard.is_silent = True
                continue
            else:
                received = arriving
            log.hooked = heard.call
            for hearer in self._hearers:
                try:
                    hearer.call_began(heard, received, number)
                except BaseException as error:
                    self.raised = error
                    raise

    def _tell_ended(self, log: ThreadLog, ended: list[Heard], number: int, arriving: Any) -> None:
        """Calls have ended at once, given innermost first; these gradients arrive at the next node.

        Told are first those that had an input that needs a gradient, the outer before the inner, then the others,
        the inner first: the order of PyTorch's ModTracker, whose input hooks come before its final callbacks.
        """
        log.hooked = ended[0].call
        if len(ended) > 1:
            fed = [heard for heard in reversed(ended) if heard.inputs]
            ended = [*fed, *(heard for heard in ended if not heard.inputs)]
        for heard in ended:
            heard.is_open = False
            if heard.is_silent:
                heard.is_silent = False
                continue
            gradients = input_gradients(heard, number, arriving)
            heard.gradients = None
            for hearer in self._hearers:
                try:
                    hearer.call_ended(heard, gradients)
                except BaseException as error:
                    self.raised = error
                    raise

    def collectors(self) -> Iterator[tuple[Any, Callable[[Any, Any], None]]]:
        """Nodes with a hook for each, that notes gradients which leave a call there."""
        if any(hearer.wants_gradients for hearer in self._hearers):
            ran = [each for each in self._segments if self._graph.has_any(each.first_seq, each.last_seq)]
            yield from collectors(self._graph, (heard for each in ran for heard in self._calls.of(each)))
