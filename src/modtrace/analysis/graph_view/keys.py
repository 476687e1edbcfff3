"""Names the nodes and layers of a graph so that the names are equal in every step and run."""

from collections import defaultdict
from collections.abc import Iterable

from ...recording.module_path import is_below
from ...recording.phase import PHASES
from ..graph.columns import LAYER_KINDS, LEAF_KINDS, NODE_KINDS, OP, OPTIMIZER_STEP, PHASE, Graph
from .fold import Folding


def layer_keys(graph: Graph) -> list[str]:
    """Returns a name for each layer: `forward/GPT/blocks.0.attn`, `backward/GPT/head@1`."""
    layers = graph.layers
    rows = zip(
        layers.kind.tolist(), layers.phase.tolist(), layers.place.tolist(), layers.nth.tolist(), strict=True
    )
    return distinct(_layer_key(graph, *row) for row in rows)


def _layer_key(graph: Graph, kind: int, phase: int, place: int, nth: int) -> str:
    if LAYER_KINDS[kind] in (PHASE, OPTIMIZER_STEP):
        return PHASES[phase] if LAYER_KINDS[kind] == PHASE else f"{PHASES[phase]}/step"
    found = graph.layers.places[place]
    call = f"@{nth}" if nth > 0 else ""
    return f"{PHASES[phase]}/{found.root or ''}{f'/{found.path}' if found.path else ''}{call}"


def name_layers(graph: Graph, folding: Folding | None) -> tuple[list[str], list[str]]:
    """Returns the name and the label of each layer, such as `layers.0..31.attn` (in a folded run) and `attn`."""
    layers = graph.layers
    places = [layers.places[place] for place in layers.place.tolist()]
    names, labels = [place.name for place in places], [place.label for place in places]
    for run in folding.runs if folding else ():
        numbers = sorted(int(places[layer].label) for layer in run.layers)
        old, label = names[run.first], f"{numbers[0]}..{numbers[-1]}"
        new = f"{old.removesuffix(labels[run.first])}{label}"
        labels[run.first] = label
        for number in range(run.first, int(layers.last[run.first]) + 1):
            if is_below(names[number], old):
                names[number] = new + names[number][len(old) :]
    return names, labels


def paths_of_layers(graph: Graph, folding: Folding | None) -> list[tuple[str, ...]]:
    """Returns the paths by which a user can find each layer: that of its module, and its name. A phase has none."""
    layers = graph.layers
    names, _ = name_layers(graph, folding)
    rows = zip(layers.place.tolist(), layers.kind.tolist(), names, strict=True)
    return [
        () if LAYER_KINDS[kind] == PHASE or path is None else (path, name)
        for path, kind, name in ((layers.places[place].path, kind, name) for place, kind, name in rows)
    ]


def node_keys(graph: Graph, layers: list[str]) -> list[str]:
    """Returns a name for each node: its layer, op and number, `forward/GPT/head/aten.addmm.default#1`.

    Args:
        graph: the graph.
        layers: the names of the layers.
    """
    nodes = graph.nodes
    around = [*layers, "outside"]  # for nodes outside of layers: -1
    is_leaf = [kind in LEAF_KINDS for kind in NODE_KINDS]
    kinds = [f"{kind}:" if kind != OP else "" for kind in NODE_KINDS]
    columns = (nodes.layer, nodes.kind, nodes.root, nodes.name, nodes.nth)
    roots = [*(f"{root}/" for root in nodes.roots), ""]  # for nodes without root: -1
    names = nodes.names
    return distinct(
        f"{kinds[kind]}{roots[root]}{names[name]}"
        if is_leaf[kind]
        else f"{around[layer]}/{kinds[kind]}{roots[root]}{names[name]}{f'#{nth}' if nth > 0 else ''}"
        for layer, kind, root, name, nth in zip(*(column.tolist() for column in columns), strict=True)
    )


def distinct(keys: Iterable[str]) -> list[str]:
    """Returns the keys, with a number appended to each key that occurred before."""
    found: defaultdict[str, int] = defaultdict(int)
    told_apart = []
    for key in keys:
        found[key] += 1
        told_apart.append(key if found[key] == 1 else f"{key}~{found[key]}")
    return told_apart
