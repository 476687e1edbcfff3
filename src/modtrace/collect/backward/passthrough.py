"""Finds passthrough calls such as Identity, or Dropout in eval mode, which make no autograd node."""

from collections.abc import Callable, Sequence

from ...torch_internals.autograd import ACCUMULATE_SEQUENCE_NR
from ..log.segments import Segment
from .backward_call import BackwardCall
from .call_tensors import Key, keys_of
from .input_gradients import edges_of
from .plan import EngineGraph


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
    for _, _, _, call in sorted(found, key=lambda each: each[:3]):
        by_node.setdefault(graph.next_before(call.last), []).append(call)
    return by_node


class _Arrived:
    """The tensors at which gradients arrive in one run of the engine."""

    def __init__(self, graph: EngineGraph) -> None:
        self._roots = graph.roots
        self._fed: dict[Key, int] = {}  # the largest number of a node that feeds it
        self._claimed: dict[int, int] = {}
        for _, number, _, key in edges_of(graph, with_leaves=True):
            self._fed.setdefault(key, number)

    def at(self, key: Key, call: BackwardCall, runs: bool) -> bool:
        """Returns whether a gradient arrives at a tensor that a call passed on, from nodes made after the call.

        Args:
            runs: a node of the enclosing outermost call runs too.
        """
        if self._fed.get(key, -1) < call.last:
            return key[0] in self._roots
        if key[0] != ACCUMULATE_SEQUENCE_NR or runs:
            return True
        # A leaf given to a model of which no node runs: it went through the newest such call before its use.
        call_tensors = call.segment.call_tensors
        return call_tensors.leaf_lives(key[1]) and self._claimed.setdefault(key[1], call.last) == call.last
