"""Adds to the tables of a report what differs in a second run: rows that only it has, its numbers, and the verdicts."""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from ...recording.phase import FORWARD, PHASES
from ..divergence.run_pair import FOLLOWS, GRADIENTS, RESHAPED, RunPair
from ..tables.columns import Column, Rows, take
from .joined_graphs import DIFFERENCES, INSIDE, ONLY_A, ONLY_B, JoinedGraphs, include_inside
from .limits import GraphCut
from .modules import MEMBER, ModuleRows, Place
from .tables import NONE, ReportTable, number_column
from .united_tables import append_rows, difference_column, tabulate_second


class ModuleDifference:
    """How the modules of the first run differ, and which modules only the second has."""

    def __init__(self, pair: RunPair, step: int) -> None:
        """Takes the compared runs, and the shown step of the first."""
        self._missing, self._extra = pair.missing.modules, pair.extra.modules
        self._partner: Mapping[Place, Place] = {
            (one.root, one.path): (two.root, two.path) for one, two in pair.modules
        }
        self._level = _find_levels(pair, step)

    @cached_property
    def apart(self) -> Mapping[Place, Hashable]:
        """What tells modules of the first run apart that differ in other ways."""
        back = {two: one for one, two in self._partner.items()}
        inside: dict[Place, list[str]] = {}
        for root, path in sorted(self._extra):
            above, _, label = path.rpartition(".")
            inside.setdefault(back.get((root, above), (None, None)), []).append(label)
        places = {*self._level, *self._missing, *inside}
        return {
            place: (self._level.get(place), place in self._missing, *inside.get(place, ()))
            for place in places
        }

    @cached_property
    def apart_in_second(self) -> Mapping[Place, Hashable]:
        """The same of the modules of the second run, so that it is folded as the first is."""
        partners = {self._partner[place]: key for place, key in self.apart.items() if place in self._partner}
        return partners | dict.fromkeys(self._extra, "added")

    def unite(
        self,
        rows: ModuleRows,
        rows_b: ModuleRows,
        table: ReportTable,
        other: ReportTable,
        busy: Collection[Place] = (),
    ) -> tuple[ReportTable, ReportTable, Rows]:
        """Returns the united table of modules, that of the second run's numbers, and the new row of its modules.

        Args:
            rows: the modules of the first run.
            rows_b: those of the second.
            table: the table of the first.
            other: that of the second.
            busy: modules of the first that run ops which only one of the runs has.
        """
        size = len(rows.nodes)
        added = np.array([row for place, row in rows_b.index.items() if place in self._extra], np.int64)
        new, partner = np.full(len(rows_b.nodes), NONE, np.int64), np.full(size, NONE, np.int64)
        for one, two in self._partner.items():
            row, row_b = rows.index.get(one, NONE), rows_b.index.get(two, NONE)
            if row >= 0 and row_b >= 0:
                new[row_b], partner[row] = row, row_b
        new[added] = size + np.arange(len(added))
        _pair_sums(partner, np.array(rows.folded, np.int64), np.array(rows_b.folded, np.int64))
        outer = np.array([rows_b.outer(row) for row in range(len(rows_b.nodes))], np.int64)
        parent = np.concatenate([np.array(rows.parent, np.int64), take(new, outer[added])])
        fixed: Mapping[str, Column | int] = {"parent": parent, "folded": NONE, "count": 1}
        columns = [
            replace(column, values=np.where(np.arange(len(parent)) < size, column.values, fixed[column.name]))
            if column.name in fixed
            else column
            for column in append_rows(table, other, added, {"module": new}).columns
        ]
        columns.insert(0, difference_column(self._find_differences(rows, parent, busy), DIFFERENCES))
        columns.append(
            number_column("order", "order", "count", _order_modules(rows, rows_b, new, outer, parent))
        )
        united = ReportTable(rows=len(parent), columns=tuple(columns))
        return united, tabulate_second(united, other, np.append(partner, added)), new

    def _find_differences(self, rows: ModuleRows, parent: Rows, busy: Collection[Place]) -> Column:
        codes = np.full(len(parent), ONLY_B)
        codes[: len(rows.nodes)] = NONE
        for place, row in rows.index.items():
            own = self._level.get(place, NONE)
            codes[row] = (
                ONLY_A if place in self._missing else INSIDE if own < RESHAPED and place in busy else own
            )
        _fold_differences(codes, np.array(rows.folded, np.int64))
        return include_inside(codes, parent)


def _order_modules(rows: ModuleRows, rows_b: ModuleRows, new: Rows, outer: Rows, parent: Rows) -> Column:
    """Returns the position of each module among its siblings: an added one follows those that come before it.

    Args:
        rows: the modules of the first run.
        rows_b: those of the second.
        new: the united row of each module of the second; -1 for none.
        outer: the module around each of these.
        parent: the module around each united row.
    """
    size, anchors, last = len(rows.nodes), list[int](), dict[int, int]()
    for row in np.flatnonzero(new >= 0).tolist():
        at, around = int(new[row]), int(outer[row])
        if at >= size:
            anchors.append(last.get(around, int(parent[at])))
            continue
        while rows.role[at] == MEMBER:
            at = rows.parent[at]
        last[around] = at
    anchor = np.array(anchors, np.int64)
    rank = np.argsort(np.argsort(anchor, kind="stable"), kind="stable")
    before = np.searchsorted(np.sort(anchor), np.arange(size), side="left")
    return np.concatenate([np.arange(size) + before, anchor + 1 + rank])


def _find_levels(pair: RunPair, step: int) -> Mapping[Place, int]:
    judged = pair.judged
    level = np.full(len(pair.names) + 1, NONE)
    rows = np.flatnonzero((judged.step == step) & (judged.place >= 0))
    is_forward = np.isin(judged.phase, [NONE, PHASES.index(FORWARD)])
    own = np.where((judged.level == FOLLOWS) & ~is_forward, GRADIENTS, judged.level)
    np.maximum.at(level, judged.place[rows], own[rows])
    known = zip(pair.names, level.tolist(), strict=False)
    return {(name.root, name.path): code for name, code in known if code >= 0}


def _pair_sums(partner: Rows, folded: Rows, folded_b: Rows) -> None:
    """Pairs rows that sum up equal modules, if they sum up the same ones."""
    counts, counts_b = np.bincount(folded[folded >= 0]), np.bincount(folded_b[folded_b >= 0])
    for row in np.flatnonzero(counts).tolist():
        members = partner[folded == row]
        others = {*folded_b[members].tolist()} if (members >= 0).all() else set()
        if len(others) == 1 and (other := others.pop()) >= 0 and counts_b[other] == counts[row]:
            partner[row] = other


def _fold_differences(codes: Column, folded: Column) -> None:
    """Gives a row that stands for several the largest difference of them.

    If only one run has some of them, as of a structure, the row is one that both have, with a change inside.
    """
    members = np.flatnonzero(folded >= 0)
    row = folded[members].astype(np.int64)
    is_unlike = (codes[members] >= ONLY_A) & (codes[members] != codes[row])
    np.maximum.at(codes, row, np.where(is_unlike, INSIDE, codes[members]))


def unite_graphs(
    graphs: JoinedGraphs,
    cut: GraphCut,
    tables: Mapping[str, ReportTable],
    tabulate: Callable[[GraphCut], ReportTable],
    modules: Rows,
) -> Mapping[str, ReportTable]:
    """Returns the united tables of nodes and edges, and that of the second run's numbers.

    Args:
        graphs: the graphs of both runs.
        cut: the rows of the first graph that are shown.
        tables: the tables of the first run.
        tabulate: returns the table of the rows of the second graph that a cut chooses.
        modules: the united row of each module of the second run.
    """
    shown = graphs.shown_in(cut)
    added = graphs.added[shown]
    partner_of = np.full(len(graphs.a.layers) + len(graphs.a.nodes), NONE, np.int64)
    paired = np.flatnonzero(graphs.partner >= 0)
    partner_of[graphs.partner[paired]] = paired
    partner = partner_of[cut.shown]
    needed = np.union1d(partner[partner >= 0], added)
    number = np.full(len(graphs.partner) + 1, NONE, np.int64)
    number[needed] = np.arange(len(needed))
    other = tabulate(GraphCut(None, needed, number[:-1]))
    united = np.where(graphs.partner >= 0, cut.renumber(graphs.partner), NONE)
    united[added] = len(cut.shown) + np.arange(len(added))
    table = append_rows(tables["nodes"], other, number[added], {"node": united[needed], "module": modules})
    first = len(graphs.a.layers) + len(graphs.a.nodes)
    numbers = np.concatenate([cut.new, np.full(len(graphs.added) + 1, NONE)])
    numbers[first:-1][shown] = united[added]
    order, order_added = graphs.orders
    fixed = {
        "parent": numbers[graphs.parent[shown]],
        "order": order_added[shown],
        "folded": np.full(len(added), NONE),
        "count": np.ones(len(added), np.int64),
    }
    codes = graphs.differences[np.append(cut.shown, first + np.flatnonzero(shown))]
    _fold_differences(codes, np.append(tables["nodes"]["folded"].values, np.full(len(added), NONE)))
    columns = [difference_column(codes, DIFFERENCES)]
    for column in table.columns:
        if column.name in fixed:
            mine = order[cut.shown] if column.name == "order" else column.values[: len(cut.shown)]
            column = replace(column, values=np.concatenate([mine, fixed[column.name]]))
        columns.append(column)
    table = ReportTable(rows=table.rows, columns=tuple(columns))
    more = graphs.tabulate_edges(united)
    return {
        "nodes": table,
        "edges": append_rows(tables["edges"], more, np.arange(more.rows), {"node": np.arange(table.rows)}),
        "second_nodes": tabulate_second(table, other, np.concatenate([number[partner], number[added]])),
    }
