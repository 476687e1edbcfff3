"""Sums up the module tree by module type."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...recording.phase import ByPhase
from ..tables.times import NO_CALLS, PhaseTimes, sum_times
from .module_tree import MODULE_PHASES, ModuleNode, ModuleTree, iterate_nodes


@dataclass(frozen=True, kw_only=True)
class TypeTimes(ByPhase[PhaseTimes]):
    """All called modules of one type. A module inside another one of its type adds nothing to the totals."""

    type: str
    modules: int
    forward: PhaseTimes = NO_CALLS
    backward: PhaseTimes = NO_CALLS
    recompute: PhaseTimes = NO_CALLS


def build_type_table(tree: ModuleTree) -> tuple[TypeTimes, ...]:
    """Returns the types of the modules that were called, by descending self time."""
    modules: dict[str, set[int]] = defaultdict(set)
    for _, node in iterate_nodes(tree.roots):
        if node.called:
            modules[node.type].add(node.module_id)
    sums = {phase: _sum_phase(tree.roots, phase) for phase in MODULE_PHASES}
    rows = [
        TypeTimes(
            type=each,
            modules=len(ids),
            **{phase: sums[phase].get(each, NO_CALLS) for phase in MODULE_PHASES},
        )
        for each, ids in modules.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-_self_ns(row), row.type)))


def _sum_phase(roots: Sequence[ModuleNode], phase: str) -> Mapping[str, PhaseTimes]:
    times: dict[str, list[tuple[PhaseTimes, bool]]] = defaultdict(list)
    for node, is_inside in _iterate_called(roots, phase):
        times[node.type].append((node.phase(phase), is_inside))
    return {
        each: sum_times([one for one, _ in found], [one for one, is_inside in found if not is_inside])
        for each, found in times.items()
    }


def _iterate_called(roots: Sequence[ModuleNode], phase: str) -> Iterator[tuple[ModuleNode, bool]]:
    """Yields the nodes called in a phase, each with whether it is inside such a node of the same type."""
    around: Counter[str] = Counter()
    waiting = [(node, False) for node in roots]
    while waiting:
        node, is_left = waiting.pop()
        was_called = node.phase(phase).calls > 0
        if is_left:
            around[node.type] -= was_called
            continue
        if was_called:
            yield node, around[node.type] > 0
        around[node.type] += was_called
        waiting.append((node, True))
        waiting.extend((child, False) for child in node.children)


def _self_ns(row: TypeTimes) -> int:
    return sum(row.phase(phase).self_ns for phase in MODULE_PHASES)
