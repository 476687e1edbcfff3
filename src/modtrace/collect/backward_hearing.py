"""Tells whoever wants to know of each call's backward at its begin and at its end, with its gradients."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from ..torch_internals import ACCUMULATE_SEQUENCE_NR, is_dynamo_compiling, unseen
from .backward_plan import Graph
from .crossings import Flat, Key, in_threes
from .places import Place
from .segments import CallRef, Segment

if TYPE_CHECKING:
    from .thread_log import ThreadLog


class BackwardHearer(Protocol):
    """Who hears. What it raises is raised to whoever called `backward()`."""

    @property
    def wants_gradients(self) -> bool:
        """Whether it looks at the gradients of inputs."""

    def call_began(self, heard: "Heard", received: Any, number: int) -> None:
        """The backward of a call begins; the node of this number is its first, and receives these gradients."""

    def call_ended(self, heard: "Heard", gradients: Any) -> None:
        """It has ended; `gradients` of its inputs, what the call itself has contributed to them."""


class Heard:
    """One call in one run of the engine."""

    __slots__ = (
        "first", "gradients", "index", "inputs", "is_open", "is_silent", "last", "outputs", "parent", "passed",
        "passes", "place", "segment", "taken_at",
    )  # fmt: skip

    def __init__(
        self,
        segment: Segment,
        index: int,
        place: Place,
        parent: "Heard | None",
        first: int,
        last: int,
        inputs: Flat,
        outputs: Flat,
        passed: Flat,
    ) -> None:
        self.segment = segment
        self.index = index
        self.place = place
        self.parent = parent  # the call around it
        self.first = first  # its nodes have numbers from here ...
        self.last = last  # ... to before here
        self.inputs = inputs
        self.outputs = outputs
        self.passed = passed  # outputs that it has not made
        #: Of the inputs and, behind them, of what it has passed on: as far as they have been collected.
        self.gradients: list[torch.Tensor | None] | None = None
        self.taken_at = -1  # the node whose arriving gradients are those of all inputs
        self.passes = False  # no node is its own
        self.is_open = False  # its backward runs
        self.is_silent = False  # ... and nobody is told: a scope is no module

    @property
    def call(self) -> CallRef:
        """The call in its segment."""
        return CallRef(self.segment, self.index)

    @property
    def module(self) -> nn.Module | None:
        """The module, None if it is dead."""
        return self.place.module

    def inputs_by_slot(self, gradients: Any) -> dict[str, torch.Tensor | None]:
        """The gradients of its inputs."""
        return {slot: gradients[at] for at, (slot, _) in enumerate(in_threes(self.inputs))}

    def outputs_by_slot(self, received: Any, number: int) -> dict[str, torch.Tensor | None]:
        """What arrives at the node of a number, as far as it is for outputs."""
        mine = [(slot, key[1]) for slot, key in in_threes(self.outputs) if key[0] == number]
        if self.passes:
            return {slot: received[at] for at, (slot, _) in enumerate(in_threes(self.passed))}
        return {slot: received[of] for slot, of in mine}


class Hearing:
    """The calls of one run of the engine, told as they come."""

    def __init__(self, graph: Graph, spans: Sequence[Any], hearers: Sequence[BackwardHearer]) -> None:
        self._hearers = hearers
        self._graph = graph
        self._open: list[Heard] = []
        self.raised: BaseException | None = None  # by a hook of the user's
        self._calls: dict[Segment, list[Heard]] = {}
        self._segments = [span for span in spans if isinstance(span, Segment) and span.crossings is not None]
        self.passing = self._find_passing()  # by the number of the node before which they are; -1: after all

    def move(
        self, log: "ThreadLog", segment: Segment | None, index: int, number: int = -1, arriving: Any = ()
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
            self._go_to(log, None if segment is None else self._heard(segment, index), number, arriving)
        finally:
            log.hooked = None

    def _go_to(self, log: "ThreadLog", target: Heard | None, number: int, arriving: Any) -> None:
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
                received = _passing_gradients(heard, number, arriving)
            elif heard.place.is_scope:
                heard.is_silent = True
                continue
            else:
                received = arriving
            log.hooked = heard
            for hearer in self._hearers:
                try:
                    hearer.call_began(heard, received, number)
                except BaseException as error:
                    self.raised = error
                    raise

    def _tell_ended(self, log: "ThreadLog", ended: list[Heard], number: int, arriving: Any) -> None:
        """Calls have ended at once, given innermost first; these gradients arrive at the next node.

        Told are first those that had an input that needs a gradient, the outer before the inner, then the others,
        the inner first: the order of PyTorch's ModTracker, whose input hooks come before its final callbacks.
        """
        log.hooked = ended[0]
        if len(ended) > 1:
            fed = [heard for heard in reversed(ended) if heard.inputs]
            ended = [*fed, *(heard for heard in ended if not heard.inputs)]
        for heard in ended:
            heard.is_open = False
            if heard.is_silent:
                heard.is_silent = False
                continue
            gradients = _gradients(heard, number, arriving)
            heard.gradients = None
            for hearer in self._hearers:
                try:
                    hearer.call_ended(heard, gradients)
                except BaseException as error:
                    self.raised = error
                    raise

    def collectors(self) -> Iterator[tuple[Any, Callable[[Any, Any], None]]]:
        """Nodes with a hook for each, that notes the gradients which leave a call there.

        Where all inputs of a call come from the node that runs next, and nothing else feeds it, there is no need: a
        hook on a node takes 3 us.
        """
        wanted = self._wanted() if any(hearer.wants_gradients for hearer in self._hearers) else {}
        if not wanted:
            return
        leaves = any(key[0] == ACCUMULATE_SEQUENCE_NR for key in wanted)
        numbers = dict(zip(self._graph.nodes, self._graph.numbers.tolist(), strict=True))
        fed: dict[Key, int] = {}
        sources: dict[Any, list[tuple[int, Heard, int]]] = {}
        for node, number in numbers.items():
            for edge, (target, slot) in enumerate(self._graph.edges[node]):
                at = numbers.get(target)
                if at is not None:
                    key = (at, slot)
                elif target is None:
                    continue
                else:
                    key = (target._sequence_nr(), slot)
                    if key[0] == ACCUMULATE_SEQUENCE_NR:
                        if not leaves:
                            continue
                        key = (ACCUMULATE_SEQUENCE_NR, id(target.variable))
                receivers = wanted.get(key)
                if receivers is not None:
                    fed[key] = fed.get(key, 0) + 1
                    for heard, place in receivers:
                        own = heard.first <= number < heard.last and 3 * place < len(heard.inputs)
                        if own or (number >= heard.last and 3 * place >= len(heard.inputs)):
                            sources.setdefault(node, []).append((edge, heard, place))
        if not self._graph.pruned:  # else the next node may be one whose gradient is asked for, and not run
            self._take_what_arrives(wanted, fed)
        for node, found in sources.items():
            sinks = [each for each in found if each[1].taken_at < 0]
            if sinks:
                yield node, _collector(sinks)

    def _wanted(self) -> dict[Key, list[tuple[Heard, int]]]:
        """By where it arrives: the calls with such an input, and its place among their inputs."""
        wanted: dict[Key, list[tuple[Heard, int]]] = {}
        for segment in self._segments:
            if _has_any(self._graph.numbers, segment.first_seq, segment.last_seq):
                for heard in self._calls_of(segment):
                    place = 0
                    for flat in (heard.inputs, heard.passed):
                        for at in range(0, len(flat), 3):
                            key = (flat[at + 1], flat[at + 2])
                            if at == 0 or key not in _keys(flat, 0, at):
                                wanted.setdefault(key, []).append((heard, place))
                            place += 1
        return wanted

    def _take_what_arrives(self, wanted: dict[Key, list[tuple[Heard, int]]], fed: dict[Key, int]) -> None:
        numbers = self._graph.numbers
        calls = list({id(heard): heard for receivers in wanted.values() for heard, _ in receivers}.values())
        after = np.searchsorted(-numbers, -np.array([heard.first for heard in calls], np.int64), side="right")
        next_numbers = np.append(numbers, -1)[after].tolist()
        roots = self._graph.roots
        for heard, number in zip(calls, next_numbers, strict=True):
            flat = heard.inputs
            if (
                number in roots
                or heard.passed
                or heard.segment.crossings.is_hooked(heard.segment, heard.index)
            ):
                continue
            if len(flat) == 3:
                if flat[1] == number and fed.get(flat[1:]) == 1:
                    heard.taken_at = number
            elif all(key[0] == number and fed.get(key) == 1 for _, key in in_threes(flat)):
                heard.taken_at = number

    def _heard(self, segment: Segment, index: int) -> Heard:
        calls = self._calls.get(segment)
        if calls is None:
            calls = self._calls_of(segment)
        return calls[index]

    def _calls_of(self, segment: Segment) -> list[Heard]:
        calls = self._calls.get(segment)
        if calls is None:
            calls = self._calls[segment] = _calls(segment)
        return calls

    def _find_passing(self) -> dict[int, list[Heard]]:
        """The calls through which gradients merely pass, by the number of the node before which they do; -1: last."""
        numbers = self._graph.numbers
        found: list[tuple[int, int, int, Heard]] = []
        arrived: _Arrived | None = None
        for at, segment in reversed([*enumerate(self._segments)]):
            if not segment.crossings.passed:
                continue
            arrived = arrived or _Arrived(self._graph)
            runs = _has_any(numbers, segment.first_seq, segment.last_seq)
            structure = segment.structure()
            for event, outputs in segment.crossings.passed.items():
                heard = self._heard(segment, int(structure.scope_after[event]))
                if not _has_any(numbers, heard.first, heard.last) and any(
                    arrived.at(key, heard, runs) for _, key in in_threes(outputs)
                ):
                    found.append((-heard.last, -at, -int(structure.exit_event[heard.index]), heard))
        by_node: dict[int, list[Heard]] = {}
        for last, _, _, call in sorted(found, key=lambda each: each[:3]):
            next_node = int(np.searchsorted(-numbers, last, side="right"))
            number = int(numbers[next_node]) if next_node < len(numbers) else -1
            by_node.setdefault(number, []).append(call)
        return by_node


class _Arrived:
    """Where gradients arrive in one run of the engine."""

    def __init__(self, graph: Graph) -> None:
        self._roots = graph.roots
        self._fed: dict[Key, int] = {}  # the largest number of a node that feeds it
        self._claimed: dict[int, int] = {}
        for node, number in zip(graph.nodes, graph.numbers.tolist(), strict=True):
            for target, slot in graph.edges[node]:
                if target is not None:
                    at = target._sequence_nr()
                    key = (at, id(target.variable) if at == ACCUMULATE_SEQUENCE_NR else slot)
                    self._fed.setdefault(key, number)

    def at(self, key: Key, heard: Heard, runs: bool) -> bool:
        """Whether a gradient arrives at what a call has passed on, from what was made after it.

        Args:
            runs: a node of the outermost call around it runs too.
        """
        if self._fed.get(key, -1) < heard.last:
            return key[0] in self._roots
        if key[0] != ACCUMULATE_SEQUENCE_NR or runs:
            return True
        # A leaf given to a model of which no node runs: it went through the newest such call before its use.
        crossings = heard.segment.crossings
        return crossings.leaf_lives(key[1]) and self._claimed.setdefault(key[1], heard.last) == heard.last


def _calls(segment: Segment) -> list[Heard]:
    structure, crossings = segment.structure(), segment.crossings
    enter = structure.enter_event.tolist()
    seqs = np.asarray(segment.seqs)
    first, last = seqs[structure.enter_event].tolist(), _last(segment, seqs)
    places = segment.log.all_places
    inputs = {} if crossings is None else crossings.inputs
    outputs = {} if crossings is None else crossings.outputs
    passed = {} if crossings is None else crossings.passed
    calls: list[Heard] = []
    columns = (segment.places_of_calls(), structure.parent.tolist(), enter, first, last)
    for index, (place, parent, event, begin, end) in enumerate(zip(*columns, strict=True)):
        around = calls[parent] if parent >= 0 else None
        into, out, past = inputs.get(event, ()), outputs.get(event, ()), passed.get(event, ())
        calls.append(Heard(segment, index, places[place], around, begin, end, into, out, past))
    return calls


def _last(segment: Segment, seqs: Any) -> list[int]:
    """For each call the number that the first node after it has; of one that runs still none is after it."""
    exits = segment.structure().exit_event
    last: list[int] = np.append(seqs, np.iinfo(np.int64).max)[np.minimum(exits, len(seqs))].tolist()
    return last


def _gradients(heard: Heard, number: int, arriving: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a call's inputs when the node of a number is the next to run."""
    flat = heard.inputs
    if heard.taken_at >= 0 and heard.taken_at == number:
        if len(flat) == 3:
            return (arriving[flat[2]] if flat[1] == number else None,)
        return tuple(
            arriving[key[1]] if key[0] == number and key not in _keys(flat, 0, 3 * at) else None
            for at, (_, key) in enumerate(in_threes(flat))
        )
    own = heard.gradients or [None] * ((len(flat) + len(heard.passed)) // 3)
    if not heard.passed:
        return tuple(own)
    # What it has passed on has come back too: a gradient of the very same tensor.
    by_key: dict[Key, torch.Tensor | None] = {}
    behind = _passing_gradients(heard, number, arriving)
    for (_, key), gradient in zip(in_threes(heard.passed), behind, strict=True):
        by_key[key] = gradient
    return tuple(_sum(own[at], by_key.pop(key, None)) for at, (_, key) in enumerate(in_threes(flat)))


def _passing_gradients(heard: Heard, number: int, arriving: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradients of what a call has passed on: what comes from nodes that were made after it."""
    collected = None if heard.gradients is None else heard.gradients[len(heard.inputs) // 3 :]
    found = collected or [None] * (len(heard.passed) // 3)
    for at, (_, key) in enumerate(in_threes(heard.passed)):
        if found[at] is None and heard.passes and key[0] == number:
            found[at] = arriving[key[1]]  # it is what backward began with, or a user wrapped the node
    return tuple(found)


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    with unseen(), torch.no_grad():
        return one + other


def _keys(flat: Flat, begin: int, end: int) -> list[Key]:
    """The keys of some of the tensors: a tensor that is there twice has its gradient at its first place."""
    return [(flat[at + 1], flat[at + 2]) for at in range(begin, end, 3)]


def _collector(sinks: list[tuple[int, Heard, int]]) -> Callable[[Any, Any], None]:
    def collect(grad_inputs: Any, grad_outputs: Any) -> None:
        if is_dynamo_compiling():
            return
        for edge, heard, place in sinks:
            gradient = grad_inputs[edge]
            if gradient is None:
                continue
            flat = heard.inputs + heard.passed
            is_leaf = flat[3 * place + 1] == ACCUMULATE_SEQUENCE_NR
            if is_leaf and type(gradient) is torch.Tensor and not torch.is_grad_enabled():
                with unseen():
                    gradient = gradient.detach()  # a leaf takes it over only if nobody else holds it
            if heard.gradients is None:
                heard.gradients = [None] * (len(flat) // 3)
            heard.gradients[place] = _sum(heard.gradients[place], gradient)

    return collect


def _has_any(numbers: Any, first: int, last: int | None) -> bool:
    """Whether one of the descending numbers lies in a range; `last` None: in one that has not ended."""
    if last is None:
        return len(numbers) > 0 and int(numbers[0]) >= first
    at = int(np.searchsorted(-numbers, -last, side="right"))
    return at < len(numbers) and int(numbers[at]) >= first
