"""Defines the graph that users hold, with methods that choose its visible part, and others that draw or write it."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..analysis.graph.build import build_graph
from ..analysis.graph.columns import Graph
from ..analysis.graph.parts import WHOLE, Part
from ..analysis.graph_view.build import build_view
from ..analysis.graph_view.candidates import near_part, near_paths
from ..analysis.graph_view.contract import without_views
from ..analysis.graph_view.fold import Folding, fold_graph
from ..analysis.graph_view.items import Seen, close_below
from ..analysis.graph_view.keys import paths_of_layers
from ..analysis.graph_view.records import GraphView, ViewBox, ViewEdge, ViewNode
from ..errors import ModtraceError
from ..recording.options.path_filter import PathFilter, to_path_filter
from ..recording.protocols import RecordingData

if TYPE_CHECKING:
    from ..views.dot.style import GraphStyle

_Path = str | os.PathLike[str]

#: The largest number of nodes that a notebook draws by itself, as `dot` takes seconds for more.
_DRAWN_UNASKED = 400


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The choice of a graph's visible part. Closed layers are given by their numbers in the graph."""

    part: Part = WHOLE
    step: int | None = None
    views: bool = True
    tensors: bool = False
    folded: bool = False
    closed: tuple[int, ...] = ()


class ModelGraph:
    """The execution graph of one step.

    It is immutable: every method that changes its visible part returns another graph.

        rec.graph().collapse(depth=2).fold().write_svg("model.svg")

    `nodes`, `edges` and `boxes` are its visible part, as the records that a `GraphStyle` receives.
    """

    def __init__(self, data: RecordingData, choice: Choice, graph: Graph) -> None:
        self._data = data
        self._choice = choice
        self._graph = graph

    @property
    def nodes(self) -> tuple[ViewNode, ...]:
        """The visible ops, leaves, outputs and closed layers, in order of time."""
        return self.view.nodes

    @property
    def edges(self) -> tuple[ViewEdge, ...]:
        """The edges from nodes that make tensors to nodes that read them, in order of time."""
        return self.view.edges

    @property
    def boxes(self) -> tuple[ViewBox, ...]:
        """The open layers, outer ones first."""
        return self.view.boxes

    @property
    def columns(self) -> Graph:
        """The whole graph as columns, whatever is collapsed or folded."""
        return self._graph

    @cached_property
    def view(self) -> GraphView:
        """The visible part, which pictures and exports take."""
        choice, graph = self._choice, self._graph
        closed = np.zeros(len(graph.layers), bool)
        closed[list(choice.closed)] = True
        return build_view(graph, Seen(closed=closed, folding=self._folding, tensors=choice.tensors))

    @cached_property
    def _folding(self) -> Folding | None:
        return fold_graph(self._graph) if self._choice.folded else None

    # Methods that choose what is visible.

    def collapse(self, *paths: Any, depth: int | None = None) -> "ModelGraph":
        """Shows modules as single nodes, with the edges that lead into them and out.

        Args:
            paths: globs over whole paths (`blocks.*.attn`), or compiled regular expressions; "" is the root.
            depth: collapses modules at this level below a root; 0 shows only the roots. Modules without children, and
                optimizer steps, are single nodes too, unless `depth` is larger than the number of levels.

        Raises:
            ValueError: `depth` is negative, nothing is given, or a pattern matches no module.
        """
        if not isinstance(depth, int | None):
            raise TypeError(f"collapse(depth={depth!r}): give a whole number")
        if depth is None and not paths:
            raise ValueError("collapse(): give depth=..., or the paths of modules")
        chosen = set(self._choice.closed)
        if depth is not None:
            chosen.update(np.flatnonzero(close_below(self._graph, depth)).tolist())
        if paths:
            chosen.update(self._layers_of(paths, "collapse"))
        return self._with(closed=tuple(sorted(chosen)))

    def expand(self, *paths: Any) -> "ModelGraph":
        """Opens collapsed modules and their parents; without arguments all of them.

        Args:
            paths: as for `collapse`.

        Raises:
            ValueError: a pattern matches no module.
        """
        if not paths:
            return self._with(closed=())
        parent = self._graph.layers.parent.tolist()
        opened: set[int] = set()
        for layer in self._layers_of(paths, "expand"):
            while layer >= 0 and layer not in opened:
                opened.add(layer)
                layer = parent[layer]
        if self._folding is not None:
            alike = np.isin(self._folding.layer, self._folding.layer[list(opened)])
            opened.update(np.flatnonzero(alike).tolist())
        return self._with(closed=tuple(layer for layer in self._choice.closed if layer not in opened))

    def fold(self) -> "ModelGraph":
        """Shows equal, numbered siblings (`layers.0` to `layers.31`) as one layer, `×32`.

        Times, operations and bytes are then sums over all of them.
        """
        return self._with(folded=True)

    def unfold(self) -> "ModelGraph":
        """Shows each of the folded siblings again."""
        return self._with(folded=False)

    def with_tensors(self) -> "ModelGraph":
        """Shows outputs of ops as nodes of their own, between the op that made them and those that read them."""
        return self._with(tensors=True)

    def without_views(self) -> "ModelGraph":
        """Leaves out ops that only return views (`view`, `t`, `detach`).

        Readers of a view read what it is a view of.
        """
        if not self._choice.views:
            return self
        return ModelGraph(self._data, replace(self._choice, views=False), without_views(self._graph))

    def filter(
        self,
        *,
        phase: str | Sequence[str] | None = None,
        path: Any = None,
        op: str | Sequence[str] | None = None,
    ) -> "ModelGraph":
        """Returns a part of the step: what its ops read of what others have made are leaves. Modules are open again.

        What was asked for before of the same argument is forgotten.

        Args:
            phase: forward, backward, recompute or optimizer, or several of them.
            path: modules, each with all that is inside it: patterns as `collapse` takes.
            op: globs over names of ops, with or without namespace and overload: `*mm`, `aten.add_*`.

        Raises:
            ValueError: there is no such phase, a pattern cannot be read, or no op is left by `path` or `op`.
        """
        if op is not None and not self._graph.has_ops:
            raise ValueError(
                f"{_name_filter(op=op)}: no ops were recorded in this step. "
                "Record with ops=True (modtrace record --ops)."
            )
        before = self._choice.part
        part = Part(
            phases=before.phases if phase is None else _to_tuple("phase", phase),
            paths=before.paths if path is None else _read_filter(path, "filter"),
            ops=before.ops if op is None else _to_tuple("op", op),
        )
        graph = build_graph(self._data, step=self._choice.step, part=part)
        graph = graph if self._choice.views else without_views(graph)
        found = ModelGraph(self._data, replace(self._choice, part=part, closed=()), graph)
        if not len(found.columns.nodes) and (path is not None or op is not None):
            what = "op" if op is not None else "module with ops"
            near = near_part(build_graph(self._data, step=self._choice.step), part)
            raise ValueError(f"{_name_filter(path=path, op=op)}: no {what} of this step matches{near}")
        return found

    def _with(self, **changes: Any) -> "ModelGraph":
        made = ModelGraph(self._data, replace(self._choice, **changes), self._graph)
        if "folded" not in changes and "_folding" in vars(self):
            vars(made)["_folding"] = self._folding  # the folding depends only on the graph
        return made

    def _layers_of(self, paths: Sequence[Any], what: str) -> Iterator[int]:
        paths_of = paths_of_layers(self._graph, self._folding)
        for path in paths:
            if not isinstance(path, (str, re.Pattern)):
                raise TypeError(f"{what}({path!r}): give globs over paths, or compiled regular expressions")
            chosen = _read_filter(path, what)
            found = [at for at, own in enumerate(paths_of) if own and chosen.selects(*own)]
            if not found:
                near = near_paths(self._graph, chosen)
                raise ValueError(f"{what}({path!r}): no module of this graph has such a path{near}")
            yield from found

    # Methods that draw or write the visible part.

    def render_dot(self, *, style: "GraphStyle | None" = None, color: str | None = None) -> str:
        """Returns the picture as a text in the DOT language of Graphviz.

        Args:
            style: the look of nodes, boxes and edges; None for the default one.
            color: the number by which nodes are coloured: time, flops, bytes, saved, rms, nonfinite, or a field of
                `ViewNode`.

        Raises:
            ValueError: there is no such number.
        """
        from ..views.dot.render import render_dot

        return render_dot(self.view, style=style, overlay=color)

    def render_svg(self, *, style: "GraphStyle | None" = None, color: str | None = None) -> str:
        """Returns the picture as SVG. Arguments and errors are those of `write_svg`."""
        from ..views.dot.graphviz import render_svg

        return render_svg(self.view, style=style, overlay=color)

    def write_dot(self, path: _Path, *, style: "GraphStyle | None" = None, color: str | None = None) -> None:
        """Writes the picture as a text in the DOT language of Graphviz. Arguments are those of `render_dot`.

        Raises:
            ModtraceError: the file cannot be written.
        """
        from ..views.dot.graphviz import write_dot

        write_dot(self.view, path, style=style, overlay=color)

    def write_svg(self, path: _Path, *, style: "GraphStyle | None" = None, color: str | None = None) -> None:
        """Writes the picture as SVG. Arguments are those of `render_dot`.

        Raises:
            ModtraceError: the program `dot` (Graphviz) is missing or fails, or the file cannot be written.
        """
        from ..views.dot.graphviz import write_svg

        write_svg(self.view, path, style=style, overlay=color)

    def write_png(
        self, path: _Path, *, style: "GraphStyle | None" = None, color: str | None = None, dpi: int = 96
    ) -> None:
        """Writes the picture as PNG, with `dpi` pixels an inch. Arguments and errors are those of `write_svg`."""
        from ..views.dot.graphviz import write_png

        write_png(self.view, path, style=style, overlay=color, dpi=dpi)

    def write_graphml(self, path: _Path) -> NoReturn:
        """Raises ModtraceError, which names what to do instead."""
        from ..views.common.graph_summary import NO_GRAPHML

        raise ModtraceError(f"{NO_GRAPHML}.")

    def write_model_explorer(self, path: _Path) -> None:
        """Writes the visible part for Google's Model Explorer, in which open layers can be opened and closed.

        Raises:
            ModtraceError: the file cannot be written.
        """
        from ..views.formats.model_explorer import write_model_explorer

        write_model_explorer(self.view, path)

    def __str__(self) -> str:
        from ..views.common.graph_summary import render_graph

        return render_graph(self.view)

    def __repr__(self) -> str:
        return f"<ModelGraph: {len(self.nodes)} nodes, {len(self.edges)} edges>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Returns the picture for a notebook, or the text if it cannot be drawn."""
        text = str(self)
        if len(self.nodes) > _DRAWN_UNASKED:
            too_large = "(too large to be drawn unasked: collapse(depth=...), or write_svg)"
            return {"text/plain": f"{text}{too_large}\n"}
        try:
            return {"image/svg+xml": self.render_svg(), "text/plain": text}
        except ModtraceError as error:
            return {"text/plain": f"{text}({error})\n"}


def _to_tuple(name: str, given: str | Sequence[str]) -> tuple[str, ...]:
    found = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not found or not all(isinstance(pattern, str) for pattern in found):
        raise TypeError(f"filter({name}={given!r}): give a text, or several in a list")
    return found


def _read_filter(path: Any, what: str) -> PathFilter:
    return to_path_filter(path, argument="path" if what == "filter" else what)


def _name_filter(**given: Any) -> str:
    """Returns the arguments of `filter` as text, without those that are None."""
    named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    return f"filter({', '.join(named)})"
