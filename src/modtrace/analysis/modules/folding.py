"""Folds equal siblings: each keeps its line, but the modules inside them are shown once for all."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from ...recording.module_path import is_below, join
from ..tables.times import NO_CALLS, PhaseTimes, sum_times
from .module_tree import ModuleNode, ModuleTree, children_first, rebuild
from .value_summary import ValueSummary, merge_summaries

#: A run of more siblings than this becomes one line.
LISTED = 12

_Signed = tuple[ModuleNode, int]  # a folded node, and a number that equals that of nodes with the same shape


def fold(
    tree: ModuleTree,
    *,
    listed: int = LISTED,
    apart: Mapping[tuple[str | None, str | None], Hashable] | None = None,
) -> ModuleTree:
    """Returns the tree with runs of equal, consecutively numbered siblings folded: `blocks.0` to `blocks.5`.

    The nodes of a run stay, but without children. A node with the role `inside` follows, which sums up what is inside
    all of them. A run of more than `listed` nodes becomes one node with the role `folded`, with the shortest and the
    longest time among them.

    Args:
        tree: the tree.
        listed: a run of more siblings than this becomes one line.
        apart: by root and path, what tells modules apart that are equal in the tree.
    """
    apart = apart or {}
    shapes: dict[Hashable, int] = {}

    def fold_node(node: ModuleNode, children: Sequence[_Signed]) -> _Signed:
        own = (_own_shape(node), apart.get((node.root, node.path)) if apart else None)
        if not children:  # as of most nodes
            return node, shapes.setdefault(own, len(shapes))
        shape = (own, tuple([(child.label, number) for child, number in children]))
        folded = tuple(chain.from_iterable(_fold_run(run, listed) for run in _find_runs(children)))
        return replace(node, children=folded), shapes.setdefault(shape, len(shapes))

    return replace(tree, roots=tuple(node for node, _ in rebuild(tree.roots, fold_node)))


def _own_shape(node: ModuleNode) -> tuple[Hashable, ...]:
    calls = node.forward.calls, node.backward.calls, node.recompute.calls
    return node.type, node.called, node.same_as, node.parameters, calls, _nonfinite_kinds(node.values)


def _nonfinite_kinds(values: ValueSummary | None) -> tuple[Hashable, ...]:
    """Returns the kinds of non-finite values in a module, so that the first layer with some is not folded."""
    if values is None:
        return ()
    return (*(count.kind for count in values.nonfinite), *(["inside"] if values.nonfinite_inside else []))


def _find_runs(children: Sequence[_Signed]) -> list[list[ModuleNode]]:
    """Returns the children in order, grouped into runs of equal ones with consecutive numbers."""
    runs: list[list[ModuleNode]] = []
    last_number = None
    for node, number in children:
        before = runs[-1][-1].label if runs else ""
        is_next = before.isdecimal() and node.label.isdecimal() and int(node.label) == int(before) + 1
        if number == last_number and is_next:
            runs[-1].append(node)
        else:
            runs.append([node])
        last_number = number
    return runs


def _fold_run(run: Sequence[ModuleNode], listed: int) -> Iterator[ModuleNode]:
    if len(run) == 1:
        yield run[0]
    elif len(run) > listed:
        yield replace(_merge(run), role="folded")
    else:
        yield from (replace(node, children=()) if node.children else node for node in run)
        if run[0].children:
            yield replace(_merge(run), role="inside")


def _merge(run: Sequence[ModuleNode]) -> ModuleNode:
    """Returns one node that stands for all nodes of a run, with merged children."""
    label = f"{run[0].label}..{run[-1].label}"
    path = join(run[0].path.removesuffix(run[0].label).removesuffix("."), label)
    old, made = run[0].path, list[ModuleNode]()
    for group in children_first([run], _find_children):
        children = made[len(made) - len(group[0].children) :]
        del made[len(made) - len(children) :]
        own = group[0].path
        made.append(_sum_up(group, path + own[len(old) :] if is_below(own, old) else own, tuple(children)))
    return replace(made[0], label=label, members=tuple(run))


def _find_children(group: Sequence[ModuleNode]) -> Iterator[Sequence[ModuleNode]]:
    """Yields for each child of the nodes the corresponding children of all nodes of a group."""
    return zip(*(node.children for node in group), strict=True)


def _sum_up(group: Sequence[ModuleNode], path: str, children: tuple[ModuleNode, ...]) -> ModuleNode:
    parameters = [node.parameters for node in group if node.parameters is not None]
    return replace(
        group[0],
        path=path,
        parameters=sum(parameters) if parameters else None,
        forward=_sum_times([node.forward for node in group]),
        backward=_sum_times([node.backward for node in group]),
        recompute=_sum_times([node.recompute for node in group]),
        values=merge_summaries(node.values for node in group),
        count=sum(node.count for node in group),
        children=children,
        members=(),
    )


def _sum_times(times: Sequence[PhaseTimes]) -> PhaseTimes:
    if all(one is NO_CALLS for one in times):
        times = [NO_CALLS]
    return replace(
        sum_times(times, times),
        shortest_ns=min(one.total_ns if one.shortest_ns is None else one.shortest_ns for one in times),
        longest_ns=max(one.total_ns if one.longest_ns is None else one.longest_ns for one in times),
    )
