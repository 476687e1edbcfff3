"""Tells whoever wants to know of each call's backward at its begin and at its end, with its gradients."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..torch_internals import ACCUMULATE_SEQUENCE_NR, is_dynamo_compiling, unseen
from .backward_plan import Graph
from .crossings import Crossing, Key
from .segments import CallRef, Segment

#: A gradient with the slot of the tensor that it belongs to; None: none came.
SlotGradient = tuple[str, torch.Tensor | None]


class BackwardHearer(Protocol):
    """Who hears. What it raises is raised to whoever called `backward()`."""

    def call_began(self, call: CallRef, gradients: Callable[[], list[SlotGradient]], received: Any) -> None:
        """The backward of a call begins.

        Args:
            gradients: gives those of its outputs that have arrived.
            received: what its first node receives, as torch gives it.
        """

    def call_ended(self, call: CallRef, gradients: list[SlotGradient]) -> None:
        """It has ended; `gradients` of its inputs, what the call itself has contributed to them."""


class Hearing:
    """The calls of one run of the engine, told as they come."""

    def __init__(self, graph: Graph, spans: Sequence[Any], hearers: Sequence[BackwardHearer]) -> None:
        self.hearers = hearers
        segments = [span for span in spans if isinstance(span, Segment) and span.crossings is not None]
        self.passing = _find_passing(graph, segments)
        self._passes: set[CallRef] = set()
        self._sinks: dict[CallRef, list[SlotGradient]] = {}
        self._graph = graph
        self._segments = segments

    def began(self, call: CallRef, number: int, grad_outputs: Any, *, passes: bool = False) -> None:
        """A call's backward begins at a node; `passes`: no node is its own."""

        def gradients() -> list[SlotGradient]:
            crossings = call.segment.crossings
            outputs = [] if crossings is None else crossings.outputs.get(_event(call), [])
            return [(each.slot, grad_outputs[each.key[1]]) for each in outputs if each.key[0] == number]

        received = grad_outputs
        if passes:
            self._passes.add(call)
            received = tuple(gradient for _, gradient in gradients())
        for hearer in self.hearers:
            hearer.call_began(call, gradients, received)

    def ended(self, calls: list[CallRef], number: int = -1, grad_outputs: Any = ()) -> None:
        """Calls have ended at once, given innermost first.

        Told are first those that had an input that needs a gradient, the outer before the inner, then the others,
        the inner first: the order of PyTorch's ModTracker, whose input hooks come before its final callbacks.
        """
        fed = sorted((call for call in calls if _inputs(call)), key=lambda call: call.index)
        for call in [*fed, *(call for call in calls if not _inputs(call))]:
            found = self._sinks.pop(call, None)
            if found is None:
                found = [(each.slot, None) for each in _inputs(call)]
            if number >= 0 and call in self._passes:
                found = _passed_on(call, found, number, grad_outputs)
            for hearer in self.hearers:
                hearer.call_ended(call, found)

    def collectors(self) -> Iterator[tuple[Any, Callable[[Any, Any], None]]]:
        """Nodes with a hook for each, that notes the gradients which leave a call there."""
        wanted = self._wanted()
        if not wanted:
            return
        leaves = any(key[0] == ACCUMULATE_SEQUENCE_NR for key in wanted)
        numbers = dict(zip(self._graph.nodes, self._graph.numbers.tolist(), strict=True))
        for node, number in numbers.items():
            sinks: list[tuple[int, CallRef, int]] = []
            for edge, (target, slot) in enumerate(self._graph.edges[node]):
                at = numbers.get(target)
                if at is None:
                    if target is None or not leaves or target._sequence_nr() != ACCUMULATE_SEQUENCE_NR:
                        continue
                    key: Key = (ACCUMULATE_SEQUENCE_NR, id(target.variable))
                else:
                    key = (at, slot)
                for call, place, first, last in wanted.get(key, ()):
                    if first <= number < last:
                        sinks.append((edge, call, place))
            if sinks:
                yield node, self._collector(sinks)

    def _wanted(self) -> dict[Key, list[tuple[CallRef, int, int, int]]]:
        """By where it arrives: the calls with such an input, its place there, and the numbers of their nodes."""
        wanted: dict[Key, list[tuple[CallRef, int, int, int]]] = {}
        numbers = self._graph.numbers
        for segment in self._segments:
            if segment.last_seq is None or not _has_any(numbers, segment.first_seq, segment.last_seq):
                continue
            for event, inputs in segment.crossings.inputs.items():
                call, first, last = _range(segment, event)
                for place, crossing in enumerate(inputs):
                    wanted.setdefault(crossing.key, []).append((call, place, first, last))
        return wanted

    def _collector(self, sinks: list[tuple[int, CallRef, int]]) -> Callable[[Any, Any], None]:
        def collect(grad_inputs: Any, grad_outputs: Any) -> None:
            if is_dynamo_compiling():
                return
            for edge, call, place in sinks:
                gradient = grad_inputs[edge]
                if gradient is not None:
                    self._add(call, place, gradient)

        return collect

    def _add(self, call: CallRef, place: int, gradient: torch.Tensor) -> None:
        found = self._sinks.get(call)
        if found is None:
            found = self._sinks[call] = [(each.slot, None) for each in _inputs(call)]
        slot, before = found[place]
        if before is not None:
            with unseen(), torch.no_grad():
                gradient = before + gradient
        found[place] = (slot, gradient)


class Passing(NamedTuple):
    """A call whose output had been there before: its backward is where it stood, between two nodes."""

    call: CallRef
    exit_seq: int
    order: tuple[int, int, int]


def _find_passing(graph: Graph, segments: list[Segment]) -> dict[int, list[CallRef]]:
    """The calls through which gradients merely pass, by the number of the node before which they do; -1: at the end."""
    found: list[Passing] = []
    nodes: set[int] | None = None
    leaves: dict[int, int] = {}  # by id: the largest number of a node that feeds it
    claimed: dict[int, int] = {}
    for at, segment in reversed([*enumerate(segments)]):
        if segment.last_seq is None or not segment.crossings.passed:
            continue
        if nodes is None:
            nodes = set(graph.numbers.tolist())
            leaves = _fed_leaves(graph)
        runs = _has_any(graph.numbers, segment.first_seq, segment.last_seq)
        for event, outputs in segment.crossings.passed.items():
            call, first, last = _range(segment, event)
            if _has_any(graph.numbers, first, last):
                continue
            if any(_passes(each.key, last, runs, nodes, leaves, claimed) for each in outputs):
                exit_event = int(segment.structure().exit_event[call.index])
                found.append(Passing(call, last, (-last, -at, -exit_event)))
    by_node: dict[int, list[CallRef]] = {}
    descending = -graph.numbers
    for each in sorted(found, key=lambda each: each.order):
        next_node = int(np.searchsorted(descending, -each.exit_seq, side="right"))
        number = int(graph.numbers[next_node]) if next_node < len(graph.numbers) else -1
        by_node.setdefault(number, []).append(each.call)
    return by_node


def _passes(
    key: Key, last: int, runs: bool, nodes: set[int], leaves: dict[int, int], claimed: dict[int, int]
) -> bool:
    """Whether a gradient arrives at what a call has passed on."""
    if key[0] != ACCUMULATE_SEQUENCE_NR:
        return key[0] in nodes
    fed_by = leaves.get(key[1], -1)
    if runs or fed_by < last:
        return runs and fed_by >= last
    # A leaf given to a model of which no node runs: the newest such call before its use.
    return claimed.setdefault(key[1], last) == last


def _fed_leaves(graph: Graph) -> dict[int, int]:
    leaves: dict[int, int] = {}
    for node, number in zip(graph.nodes, graph.numbers.tolist(), strict=True):
        for target, _ in graph.edges[node]:
            if target is not None and target._sequence_nr() == ACCUMULATE_SEQUENCE_NR:
                leaves.setdefault(id(target.variable), number)
    return leaves


def _has_any(numbers: Any, first: int, last: int) -> bool:
    """Whether one of the descending numbers lies in a range."""
    at = int(np.searchsorted(-numbers, -last, side="right"))
    return at < len(numbers) and int(numbers[at]) >= first


def _range(segment: Segment, event: int) -> tuple[CallRef, int, int]:
    """The call that begins with an event, and the numbers of the nodes made in it."""
    structure = segment.structure()
    index = int(structure.scope_after[event])
    exit_event = int(structure.exit_event[index])
    return CallRef(segment, index), int(segment.seqs[event]), int(segment.seqs[exit_event])


def _event(call: CallRef) -> int:
    return int(call.segment.structure().enter_event[call.index])


def _inputs(call: CallRef) -> list[Crossing]:
    crossings = call.segment.crossings
    return [] if crossings is None else crossings.inputs.get(_event(call), [])


def _passed_on(
    call: CallRef, found: list[SlotGradient], number: int, grad_outputs: Any
) -> list[SlotGradient]:
    """The gradients of a call's inputs that are what arrives at this node: it has passed them on."""
    inputs = _inputs(call)
    return [
        (slot, grad_outputs[each.key[1]] if gradient is None and each.key[0] == number else gradient)
        for (slot, gradient), each in zip(found, inputs, strict=True)
    ]
