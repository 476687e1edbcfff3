"""Collects the gradients of calls' inputs while the engine runs, and finds calls that pass gradients on."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...torch_internals.autograd import ACCUMULATE_SEQUENCE_NR
from ...torch_internals.dynamo import is_dynamo_compiling
from ...torch_internals.modes import unseen
from ..log.segments import Segment
from .backward_call import BackwardCall
from .call_tensors import Key, keys_of
from .plan import EngineGraph

#: A gradient to collect: the index of the node's edge, the call, and the position among the call's tensors.
_Sink = tuple[int, BackwardCall, int]


def collectors(
    graph: EngineGraph, calls: Iterable[BackwardCall]
) -> Iterator[tuple[Any, Callable[[Any, Any], None]]]:
    """Yields pairs of a node and a hook for it, which takes the gradients that leave a call there.

    No hook is needed where all inputs of a call come from the node that runs next and nothing else feeds that node; a
    hook on a node takes 3 us.
    """
    wanted = _wanted(calls)
    if not wanted:
        return
    fed: dict[Key, int] = {}  # the number of edges that lead to each key
    sinks: dict[Any, list[_Sink]] = {}
    for node, number, edge, key in edges_of(graph, with_leaves=any(_is_leaf(key) for key in wanted)):
        receivers = wanted.get(key)
        if receivers is None:
            continue
        fed[key] = fed.get(key, 0) + 1
        for call, position in receivers:
            is_input = position < call.input_count
            if (is_input and call.first <= number < call.last) or (not is_input and number >= call.last):
                sinks.setdefault(node, []).append((edge, call, position))
    if not graph.pruned:  # in a pruned graph, the next node may not run
        _take_what_arrives(graph, wanted, fed)
    for node, found in sinks.items():
        needed = [sink for sink in found if sink[1].taken_at < 0]
        if needed:
            yield node, _collector(needed)


def input_gradients(call: BackwardCall, number: int, arriving: Any) -> tuple[torch.Tensor | None, ...]:
    """Returns what a call itself contributed to the gradient of each of its inputs.

    Args:
        number: the number of the node that runs next.
        arriving: the gradients that arrive at that node.
    """
    keys = keys_of(call.inputs)
    if call.taken_at >= 0 and call.taken_at == number:
        first_positions = _first_positions(keys)
        return tuple(arriving[key[1]] if first_positions[key] == at else None for at, key in enumerate(keys))
    own = call.gradients or [None] * len(keys)
    if not call.passed:
        return tuple(own)
    # The gradient of a passed-on tensor also arrives, and belongs to the same input tensor.
    behind = dict(zip(keys_of(call.passed), passthrough_gradients(call, number, arriving), strict=True))
    return tuple(_sum(own[at], behind.pop(key, None)) for at, key in enumerate(keys))


def passthrough_gradients(call: BackwardCall, number: int, arriving: Any) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients of the tensors that a call passed on, as contributed by nodes made after the call."""
    keys = keys_of(call.passed)
    found = [None] * len(keys) if call.gradients is None else call.gradients[call.input_count :]
    for at, key in enumerate(keys):
        if found[at] is None and call.is_passthrough and key[0] == number:
            found[at] = arriving[key[1]]  # backward began with this gradient, or a user wrapped the node
    return tuple(found)


def _wanted(calls: Iterable[BackwardCall]) -> dict[Key, list[tuple[BackwardCall, int]]]:
    """Returns, for each key, the calls that took or passed on the tensor, with its position among their tensors."""
    wanted: dict[Key, list[tuple[BackwardCall, int]]] = {}
    for call in calls:
        for begin, flat in ((0, call.inputs), (call.input_count, call.passed)):
            for key, position in _first_positions(keys_of(flat)).items():
                wanted.setdefault(key, []).append((call, begin + position))
    return wanted


def _first_positions(keys: list[Key]) -> dict[Key, int]:
    """Returns the first position of each key, because a tensor that occurs twice has its gradient there."""
    if len(keys) == 1:
        return {keys[0]: 0}
    return {key: at for at, key in reversed([*enumerate(keys)])}


def edges_of(graph: EngineGraph, with_leaves: bool) -> Iterator[tuple[Any, int, int, Key]]:
    """Yields every edge of the nodes that run: the node, its number, the index of the edge, and the edge's key."""
    numbers = dict(zip(graph.nodes, graph.numbers.tolist(), strict=True))
    for node, number in numbers.items():
        for edge, (target, slot) in enumerate(graph.edges[node]):
            at = numbers.get(target)
            if at is not None:
                yield node, number, edge, (at, slot)
            elif target is not None:
                at = target._sequence_nr()
                if at != ACCUMULATE_SEQUENCE_NR:
                    yield node, number, edge, (at, slot)
                elif with_leaves:
                    yield node, number, edge, (at, id(target.variable))


def _take_what_arrives(
    graph: EngineGraph, wanted: dict[Key, list[tuple[BackwardCall, int]]], fed: dict[Key, int]
) -> None:
    """Finds the calls for which the gradients that arrive at the next node are those of all their inputs."""
    calls = list({id(call): call for receivers in wanted.values() for call, _ in receivers}.values())
    begins = np.array([call.first for call in calls], np.int64)
    following = np.searchsorted(-graph.numbers, -begins, side="right")
    for call, number in zip(calls, np.append(graph.numbers, -1)[following].tolist(), strict=True):
        if number in graph.roots or call.passed or call.has_hooked_input:
            continue
        if all(key[0] == number and fed.get(key) == 1 for key in keys_of(call.inputs)):
            call.taken_at = number


def _collector(sinks: list[_Sink]) -> Callable[[Any, Any], None]:
    def collect(grad_inputs: Any, grad_outputs: Any) -> None:
        if is_dynamo_compiling():
            return
        for edge, call, position in sinks:
            gradient = grad_inputs[edge]
            if gradient is None:
                continue
            keys = keys_of(call.inputs + call.passed)
            if _is_leaf(keys[position]) and type(gradient) is torch.Tensor and not torch.is_grad_enabled():
                with unseen():  # a leaf takes it over only if no one else has it
                    gradient = gradient.detach()
            if call.gradients is None:
                call.gradients = [None] * len(keys)
            call.gradients[position] = _sum(call.gradients[position], gradient)

    return collect


def _is_leaf(key: Key) -> bool:
    return key[0] == ACCUMULATE_SEQUENCE_NR


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    with unseen(), torch.no_grad():
        return one + other


def find_passthrough(
    graph: EngineGraph, segments: Sequence[Segment], calls: Callable[[Segment], list[BackwardCall]]
) -> dict[int, list[BackwardCall]]:
    """Returns passthrough calls by the number of the node before which the gradients pass; -1 stands for the end."""
    found: list[tuple[int, int, int, BackwardCall]] = []
    arrived: _Arrived | None = None
    for at, segment in reversed([*enumerate(segments)]):
        if not segment.call_tensors.passed:
            continue
        arrived = arrived or _Arrived(graph)
        runs = graph.has_any(segment.first_seq, segment.last_seq)
        structure = segment.structure()
        for event, outputs in segment.call_tensors.passed.items():
            call = calls(segment)[int(structure.scope_after[event])]
            if not graph.has_any(call.first, call.last) and any(
                arrived.at(key, call, runs) for key in keys_of(outputs)
            ):
                found.append((-call.last, -at, -int(structure.exit_event[call.index]), call))
    by_node: dict[int, list[BackwardCall]] = {}
    for _, _, _, call in sorted(found, key=lambda entry: entry[:3]):
        by_node.setdefault(graph.next_before(call.last), []).append(call)
    return by_node


class _Arrived:
    """The tensors at which gradients arrive in one run of the engine."""

    def __init__(self, graph: EngineGraph) -> None:
        self._roots = graph.roots
        self._fed: dict[Key, int] = {}  # by key, the largest number of a node that leads there
        self._claimed: dict[int, int] = {}
        for _, number, _, key in edges_of(graph, with_leaves=True):
            self._fed.setdefault(key, number)

    def at(self, key: Key, call: BackwardCall, runs: bool) -> bool:
        """Returns whether a gradient arrives at a tensor that a call passed on, from nodes made after the call.

        Args:
            runs: whether any node of the surrounding outermost call runs.
        """
        if self._fed.get(key, -1) < call.last:
            return key[0] in self._roots
        if key[0] != ACCUMULATE_SEQUENCE_NR or runs:
            return True
        # None of the model's nodes runs, so the leaf's gradient passed the newest call that took the leaf before its
        # use.
        leaf = call.segment.call_tensors.leaves.get(key[1])  # a newer object may have its `id`
        lives = leaf is not None and leaf() is not None
        return lives and self._claimed.setdefault(key[1], call.last) == call.last
