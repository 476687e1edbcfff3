"""Finds what a page opens with: who made NaN and infinite values or a difference, and what else the checks say."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, takewhile

import numpy as np

from ...errors import NothingRecordedError
from ...recording.meta import HELD
from ...recording.phase import PHASES
from ...recording.protocols import RecordingData
from ..compile.compilations import Compilations, Reason
from ..compile.kernels import CompiledInside, read_compiled
from ..divergence.answer import AMPLIFIED, Comparison, Divergence
from ..graph.columns import Graph
from ..provenance.recompute import check_recomputes
from ..provenance.search import find_absorbed, find_all
from ..tables.columns import Column, RowFinder
from ..tables.missing_rows import explain_empty
from ..values.nonfinite import SOURCE, Absorbed, NonFinite
from .cut import GraphCut
from .modules import Place
from .tables import NONE, ReportFinding

#: The number of findings at most of one kind: places where NaN or infinite values came up, or a difference was made.
_TOLD = 20


def find_nonfinite(data: RecordingData) -> tuple[NonFinite, ...]:
    """Returns who made NaN and infinite values in the first step that has some; none if nothing was measured.

    Parameters that hold them later, and what is computed from those, are consequences.
    """
    every = find_all(data)
    try:
        first = next(every, None)
    except NothingRecordedError:
        return ()
    if first is None:
        return ()
    made = islice(takewhile(lambda each: each.step <= first.step, every), _TOLD)
    return (first, *(each for each in made if each.kind != SOURCE))


@dataclass(frozen=True, eq=False)
class Located:
    """The rows of the tables that answers are about."""

    modules: Mapping[Place, int]
    graph: Graph
    cut: GraphCut
    steps: Column

    def finding(self, answer: NonFinite | Divergence) -> ReportFinding:
        """Returns an answer with the rows that it is about."""
        return ReportFinding(
            answer=answer,
            module=self.modules.get((answer.root, answer.path), NONE),
            node=self.node(answer),
            step=self.step(answer.step),
        )

    def of_compiled(self, answer: Reason | CompiledInside, module: str | None, step: int) -> ReportFinding:
        """Returns what torch.compile said or made of a module, with its row and that of the step."""
        found = (row for (root, path), row in self.modules.items() if module == (path or root))
        return ReportFinding(answer=answer, module=next(found, NONE), step=self.step(step))

    def step(self, number: int | None) -> int:
        """Returns the row of a step."""
        return int(RowFinder(self.steps)(np.array([NONE if number is None else number]))[0])

    def node(self, found: NonFinite | Divergence) -> int:
        """Returns the row of the op, or else of the call, in the shown step; -1 if it is not there."""
        row = self._row(found)
        return int(self.cut.renumber(np.array([row]))[0])

    def _row(self, found: NonFinite | Divergence) -> int:
        graph = self.graph
        if graph.step is None or found.step != graph.step.step or found.phase is None:
            return NONE
        layers = graph.layers
        phase = PHASES.index(found.phase)
        for layer in np.flatnonzero(layers.phase == phase).tolist():
            place = layers.places[int(layers.place[layer])]
            is_it = (place.root, place.path) == (found.root, found.path)
            if is_it and found.call in (None, int(layers.nth[layer])):
                return self._op(found, int(layer))
        return NONE

    def _op(self, found: NonFinite | Divergence, layer: int) -> int:
        """Returns the row of the op in a layer, or else that of the layer."""
        graph = self.graph
        for node in np.flatnonzero(graph.nodes.layer == layer).tolist():
            name = graph.nodes.names[int(graph.nodes.name[node])]
            if name == found.op and int(graph.nodes.nth[node]) == found.op_nth:
                return len(graph.layers) + int(node)
        return layer


def find_findings(
    data: RecordingData,
    nonfinite: tuple[NonFinite, ...],
    comparison: Comparison | None,
    compilations: Compilations | None,
    located: Located,
) -> Iterator[ReportFinding]:
    """Yields the findings, the gravest first."""
    nothing = explain_empty(data)
    if nothing:
        yield ReportFinding(answer=nothing)
    for each in nonfinite:
        yield located.finding(each)
    if comparison is not None:
        first = comparison.first
        yield (
            replace(located.finding(first), answer=comparison) if first else ReportFinding(answer=comparison)
        )
        made = [each for each in comparison.divergences[1:_TOLD] if each.kind != AMPLIFIED]
        yield from map(located.finding, made)
    yield from _check_recomputes(data, located)
    if compilations is not None:
        for reasons in (compilations.errors, compilations.recompilations, compilations.graph_breaks):
            yield from (located.of_compiled(each, each.module, each.steps[0]) for each in reasons[:_TOLD])
    shown = located.graph.step
    for region in (read_compiled(data, step=shown.step if shown else None, phase=None) or ())[:_TOLD]:
        yield located.of_compiled(region, region.name, region.step)
    if absorbed := find_absorbed(data, _TOLD):
        yield ReportFinding(answer=Absorbed(tuple(absorbed)))
    for note in data.meta.notes:
        if note.kind != HELD:
            yield ReportFinding(answer=note, step=located.step(note.step))
    for mark in data.meta.marks:
        yield ReportFinding(answer=mark)


#: The rows of modules, and those of nodes, in which NaN or infinite values came up, and were not merely passed on.
Origins = tuple[set[int], set[int]]


def find_origins(findings: Iterable[ReportFinding]) -> Origins:
    """Returns the places that the findings on NaN and infinite values name."""
    named = [each for each in findings if isinstance(each.answer, NonFinite)]
    return {each.module for each in named} - {NONE}, {each.node for each in named} - {NONE}


def _check_recomputes(data: RecordingData, located: Located) -> Iterator[ReportFinding]:
    try:
        check = check_recomputes(data)
    except NothingRecordedError:
        return
    if not check.differences:
        yield ReportFinding(answer=check)
        return
    first = check.differences[0]
    yield ReportFinding(
        answer=check,
        module=located.modules.get((first.root, first.path), NONE),
        step=located.step(first.step),
    )
