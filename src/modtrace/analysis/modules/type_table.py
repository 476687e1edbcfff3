"""Sums up the module tree by module type."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...recording.phase import ByPhase
from ..tables.times import NO_CALLS, PhaseTimes, sum_times
from .module_tree import MODULE_PHASES, ModuleNode, ModuleTree, iterate_nodes


@dataclass(frozen=True, kw_only=True)
class TypeTimes(ByPhase[PhaseTimes]):
    """The called modules of one type. A module inside another one of the type adds nothing to the totals."""

    type: str
    modules: int
    forward: PhaseTimes = NO_CALLS
    backward: PhaseTimes = NO_CALLS
    recompute: PhaseTimes = NO_CALLS


def build_type_table(tree: ModuleTree) -> tuple[TypeTimes, ...]:
    """Returns the types of the modules that were called, by descending self time."""
    modules: dict[str, set[int]] = defaultdict(set)
    phases = set[str]()
    for _, node in iterate_nodes(tree.roots):
        if node.called:
            modules[node.type].add(node.module_id)
            phases.update(phase for phase in MODULE_PHASES if node.phase(phase).calls)
    sums = {phase: _sum_phase(tree.roots, phase) if phase in phases else {} for phase in MODULE_PHASES}
    rows = [
        TypeTimes(
            type=name,
            modules=len(ids),
            **{phase: sums[phase].get(name, NO_CALLS) for phase in MODULE_PHASES},
        )
        for name, ids in modules.items()
    ]
    return tuple(
        sorted(rows, key=lambda row: (-sum(row.phase(phase).self_ns for phase in MODULE_PHASES), row.type))
    )


def _sum_phase(roots: Sequence[ModuleNode], phase: str) -> Mapping[str, PhaseTimes]:
    """Returns the summed times of a phase by type; a node inside another of its type adds nothing to the total."""
    times: dict[str, list[PhaseTimes]] = defaultdict(list)
    outer: dict[str, list[PhaseTimes]] = defaultdict(list)
    around: Counter[str] = Counter()
    waiting = [(node, False) for node in roots]
    while waiting:
        node, is_left = waiting.pop()
        of_node = node.phase(phase)
        if is_left:
            around[node.type] -= of_node.calls > 0
            continue
        if of_node.calls:
            times[node.type].append(of_node)
            if not around[node.type]:
                outer[node.type].append(of_node)
            around[node.type] += 1
        waiting.append((node, True))
        waiting.extend((child, False) for child in node.children)
    return {name: sum_times(of_type, outer[name]) for name, of_type in times.items()}
