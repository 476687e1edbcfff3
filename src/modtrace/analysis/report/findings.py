"""Finds what a report opens with: what made NaN and infinite values or a difference, and what other checks find."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

import numpy as np

from ...errors import NothingRecordedError
from ...recording.meta import HELD
from ...recording.phase import PHASES
from ...recording.protocols import RecordingData
from ..compile.compilations import Compilations, Reason
from ..compile.kernels import CompiledInside, read_compiled
from ..divergence.answer import AMPLIFIED, SECOND, Comparison, Divergence
from ..findings.failed_call import FAILED
from ..findings.finding import Finding
from ..findings.out_of_memory import OUT_OF_MEMORY
from ..graph.columns import Graph
from ..provenance.recompute import check_recomputes
from ..provenance.search import find_absorbed, find_all
from ..tables.columns import Column, find_rows
from ..tables.missing_rows import explain_empty
from ..values.nonfinite import SOURCE, Absorbed, NonFinite
from .joined_graphs import JoinedGraphs
from .limits import GraphCut
from .modules import Place
from .tables import NONE, ReportFinding

#: The largest number of findings of one kind: places where NaN or infinite values came up, or where a difference was
#: made.
_MOST = 20

#: The checks that find where the run failed.
FAILURES = (FAILED.name, OUT_OF_MEMORY.name)


def find_nonfinite(data: RecordingData) -> tuple[NonFinite, ...]:
    """Returns what made NaN and infinite values in the first step with some; empty if nothing was measured.

    Parameters that hold such values later, and tensors computed from these, are consequences.
    """
    answers = find_all(data)
    try:
        first = next(answers, None)
    except NothingRecordedError:
        return ()
    if first is None:
        return ()
    of_step = islice(takewhile(lambda answer: answer.step <= first.step, answers), _MOST)
    return (first, *(answer for answer in of_step if answer.kind != SOURCE))


@dataclass(frozen=True, eq=False)
class Located:
    """Finds the rows of the report's tables that an answer is about."""

    modules: Mapping[Place, int]
    graph: Graph
    cut: GraphCut
    steps: Column
    joined: JoinedGraphs | None = None  # with the graph of a second run

    def build_finding(self, answer: NonFinite | Divergence) -> ReportFinding:
        """Returns an answer as a finding, with the rows that it is about."""
        node = int(self.cut.renumber(np.array([self._find_node(answer)]))[0])
        if self.joined is not None and isinstance(answer, Divergence) and answer.only_in == SECOND:
            node = self._find_added(self.joined, answer)
        module = self.modules.get((answer.root, answer.path), NONE)
        return ReportFinding(answer=answer, module=module, node=node, step=self.find_step(answer.step))

    def build_finding_of_compiled(
        self, answer: Reason | CompiledInside, module: str | None, step: int
    ) -> ReportFinding:
        """Returns a finding about what torch.compile reported or made of a module, with the rows of module and step."""
        rows = (row for (root, path), row in self.modules.items() if module == (path or root))
        return ReportFinding(answer=answer, module=next(rows, NONE), step=self.find_step(step))

    def build_finding_of_check(self, answer: Finding) -> ReportFinding:
        """Returns what a check found, with the rows of its module and its step."""
        module = self.modules.get((answer.root or "", answer.path or ""), NONE)
        node = self._find_raised(answer.step) if answer.check in FAILURES else NONE
        return ReportFinding(answer=answer, module=module, node=node, step=self.find_step(answer.step))

    def _find_raised(self, step: int | None) -> int:
        """Returns the row of the last op, or else call, that raised in the shown step; -1 if it is not there."""
        layers, nodes = self.graph.layers, self.graph.nodes
        if self.graph.step is None or step != self.graph.step.step:
            return NONE
        raised = np.concatenate([np.flatnonzero(layers.raised), np.flatnonzero(nodes.raised) + len(layers)])
        return int(self.cut.renumber(raised[-1:])[0]) if len(raised) else NONE

    def find_step(self, number: int | None) -> int:
        """Returns the row of a step."""
        return int(find_rows(self.steps, np.array([NONE if number is None else number]))[0])

    def _find_node(self, answer: NonFinite | Divergence) -> int:
        """Returns the row of the answer's op, or else of its call, in the shown step; -1 if it is not there."""
        step = self.graph.step
        is_shown = step is not None and answer.step == step.step
        return _find_row(self.graph, answer) if is_shown else NONE

    def _find_added(self, joined: JoinedGraphs, answer: Divergence) -> int:
        """Returns the shown row of an op that only the second run has; -1 if it is not there."""
        found = np.flatnonzero(joined.added[joined.shown_in(self.cut)] == _find_row(joined.b, answer))
        is_shown = answer.step == joined.step and len(found)
        return len(self.cut.shown) + int(found[0]) if is_shown else NONE


def _find_row(graph: Graph, answer: NonFinite | Divergence) -> int:
    """Returns the row of the answer's op, or else of its call, as `GraphCut` numbers rows; -1 if it is not there."""
    layers, nodes = graph.layers, graph.nodes
    if answer.phase is None:
        return NONE
    for layer in np.flatnonzero(layers.phase == PHASES.index(answer.phase)).tolist():
        place = layers.places[int(layers.place[layer])]
        is_place = (place.root, place.path) == (answer.root, answer.path)
        if not is_place or answer.call not in (None, int(layers.nth[layer])):
            continue
        for node in np.flatnonzero((nodes.layer == layer) & (nodes.nth == answer.op_nth)).tolist():
            if nodes.names[int(nodes.name[node])] == answer.op:
                return len(layers) + int(node)
        return int(layer)
    return NONE


def find_findings(
    data: RecordingData,
    nonfinite: tuple[NonFinite, ...],
    comparison: Comparison | None,
    checked: Sequence[Finding],
    compilations: Compilations | None,
    located: Located,
) -> Iterator[ReportFinding]:
    """Yields the findings, starting with the gravest."""
    if nothing := explain_empty(data):
        yield ReportFinding(answer=nothing)
    yield from map(located.build_finding, nonfinite)
    yield from map(located.build_finding_of_check, checked)
    if comparison is not None:
        first = comparison.first
        finding = located.build_finding(first) if first else ReportFinding(answer=comparison)
        yield replace(finding, answer=comparison)
        divergences = comparison.divergences[1:_MOST]
        yield from (located.build_finding(one) for one in divergences if one.kind != AMPLIFIED)
    check = None
    with contextlib.suppress(NothingRecordedError):
        check = check_recomputes(data)
    if check is not None:
        difference = next(iter(check.differences), None)
        yield ReportFinding(
            answer=check,
            module=located.modules.get((difference.root, difference.path), NONE) if difference else NONE,
            step=located.find_step(difference.step) if difference else NONE,
        )
    if compilations is not None:
        for reasons in (compilations.errors, compilations.recompilations, compilations.graph_breaks):
            for reason in reasons[:_MOST]:
                yield located.build_finding_of_compiled(reason, reason.module, reason.steps[0])
    shown = located.graph.step
    for region in (read_compiled(data, step=shown.step if shown else None, phase=None) or ())[:_MOST]:
        yield located.build_finding_of_compiled(region, region.name, region.step)
    if absorbed := find_absorbed(data, _MOST):
        yield ReportFinding(answer=Absorbed(tuple(absorbed)))
    for note in data.meta.notes:
        if note.kind != HELD:
            yield ReportFinding(answer=note, step=located.find_step(note.step))
    yield from (ReportFinding(answer=mark) for mark in data.meta.marks)


#: The rows of modules and the rows of nodes in which NaN or infinite values came up, rather than being passed on.
Origins = tuple[set[int], set[int]]


def find_origins(findings: Iterable[ReportFinding]) -> Origins:
    """Returns the rows that findings on NaN and infinite values name."""
    named = [finding for finding in findings if isinstance(finding.answer, NonFinite)]
    return {finding.module for finding in named} - {NONE}, {finding.node for finding in named} - {NONE}
