"""Calls listeners when the backward of each call begins and ends, with its gradients."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol

from ..log.segments import Segment
from ..log.thread_log import ThreadLog
from .backward_call import BackwardCall, calls_of
from .input_gradients import collectors, find_passthrough, input_gradients, passthrough_gradients
from .plan import EngineGraph


class BackwardListener(Protocol):
    """Receives the backward of each call. Exceptions of its methods propagate to the caller of `backward()`."""

    @property
    def wants_gradients(self) -> bool:
        """True if the listener reads the gradients of inputs."""

    def call_began(self, call: BackwardCall, received: Any, number: int) -> None:
        """Receives the beginning of a call's backward.

        `number` is that of the call's first node, at which the gradients `received` arrive.
        """

    def call_ended(self, call: BackwardCall, gradients: Any) -> None:
        """Receives the end of a call's backward.

        `gradients` are what the call itself contributed to those of its inputs.
        """


class CallEvents:
    """Turns the progress of one run of the engine into the beginnings and ends of calls."""

    def __init__(
        self, graph: EngineGraph, spans: Sequence[Any], listeners: Sequence[BackwardListener]
    ) -> None:
        self._listeners = listeners
        self._graph = graph
        self._open: list[BackwardCall] = []
        self.raised: BaseException | None = None  # the exception that a user's hook raised
        self._calls = cache(calls_of)  # the calls of each segment, read on first use
        self._segments = [
            span for span in spans if isinstance(span, Segment) and span.call_tensors is not None
        ]
        self.passthrough = find_passthrough(graph, self._segments, self._calls)

    def move(
        self, log: ThreadLog, segment: Segment | None, index: int, number: int = -1, arriving: Any = ()
    ) -> None:
        """Reports the calls that end and begin when the engine goes on to a node of another call.

        Args:
            segment: the segment of the call; None for nodes outside of modules or of another backward, and at the run's
                end.
            number: the number of the node; -1 if there is none.
            arriving: the gradients that arrive at the node.
        """
        try:
            for call in self.passthrough.pop(number, ()):
                call.is_passthrough = True
                self._go_to(log, call, number, arriving)
            self._go_to(log, None if segment is None else self._calls(segment)[index], number, arriving)
        finally:
            log.hooked = None

    def _go_to(self, log: ThreadLog, target: BackwardCall | None, number: int, arriving: Any) -> None:
        at, entered, is_open = target, [], self._open
        while at is not None and not at.is_open:
            entered.append(at)
            at = at.parent
        if is_open and is_open[-1] is not at:
            ended = [is_open.pop()]
            while is_open and is_open[-1] is not at:
                ended.append(is_open.pop())
            self._report_ended(log, ended, number, arriving)
        while entered:
            call = entered.pop()
            call.is_open = True
            is_open.append(call)
            if call.is_passthrough:
                received = passthrough_gradients(call, number, arriving)
            elif call.context.is_scope:
                call.is_silent = True
                continue
            else:
                received = arriving
            log.hooked = call.forward
            for listener in self._listeners:
                try:
                    listener.call_began(call, received, number)
                except BaseException as error:
                    self.raised = error
                    raise

    def _report_ended(self, log: ThreadLog, ended: list[BackwardCall], number: int, arriving: Any) -> None:
        """Reports calls that have ended together.

        Calls with an input that needs a gradient come first, outer calls before inner ones. The others follow, inner
        calls first. This is the order of PyTorch's ModTracker, whose input hooks run before its final callbacks.

        Args:
            ended: the calls, innermost first.
            number: the number of the next node.
            arriving: the gradients that arrive at the next node.
        """
        log.hooked = ended[0].forward
        if len(ended) > 1:
            fed = [call for call in reversed(ended) if call.inputs]
            ended = [*fed, *(call for call in ended if not call.inputs)]
        for call in ended:
            call.is_open = False
            if call.is_silent:
                call.is_silent = False
                continue
            gradients = input_gradients(call, number, arriving)
            call.gradients = None
            for listener in self._listeners:
                try:
                    listener.call_ended(call, gradients)
                except BaseException as error:
                    self.raised = error
                    raise

    def collectors(self) -> Iterator[tuple[Any, Callable[[Any, Any], None]]]:
        """Yields pairs of a node and a hook for it, which takes the gradients that leave a call there."""
        if any(listener.wants_gradients for listener in self._listeners):
            ran = [
                segment
                for segment in self._segments
                if self._graph.has_any(segment.first_seq, segment.last_seq)
            ]
            yield from collectors(self._graph, (call for segment in ran for call in self._calls(segment)))
