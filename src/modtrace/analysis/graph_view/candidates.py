"""Suggests similar names if a user asks for modules or ops that a graph does not have."""

from collections.abc import Sequence

import numpy as np

from ...recording.options.path_filter import PathFilter, name_nearest, unmatched
from ...recording.suggestions import did_you_mean, first_few
from ..graph.columns import NODE_KINDS, OP, Graph
from ..graph.parts import Part, forms_of_op
from .keys import paths_of_layers


def near_paths(graph: Graph, paths: PathFilter) -> str:
    """Returns the end of a sentence that suggests paths for a pattern that matches no module; empty if all match."""
    there = list(dict.fromkeys(own[0] for own in paths_of_layers(graph, None) if own))
    return "".join(name_nearest(pattern.pattern.text, there) for pattern in unmatched(paths, there)[:1])


def near_part(whole: Graph, part: Part) -> str:
    """Returns the end of a sentence that suggests modules and names of ops, for a part that matches none."""
    near = near_paths(whole, part.paths) if part.paths is not None else ""
    return near or _near_ops(whole, part.ops or ())


def _near_ops(graph: Graph, globs: Sequence[str]) -> str:
    is_op = graph.nodes.kind == NODE_KINDS.index(OP)
    names = sorted({graph.nodes.names[code] for code in np.unique(graph.nodes.name[is_op]).tolist()})
    for glob in globs:
        if not any(Part(ops=(glob,)).has_op(name) for name in names):
            hint = did_you_mean(glob.strip("*"), [form for name in names for form in forms_of_op(name)])
            return f".{hint}" if hint else f"; there are: {first_few(names)}"
    return ""
