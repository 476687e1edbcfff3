"""Builds the table of modules: the module tree, with equal siblings summed up, and all that is known of each module."""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from ...recording.phase import PHASES
from ...recording.statistics.moments import StatColumns, columns_of
from ..modules.folding import fold
from ..modules.module_tree import MODULE_PHASES, ModuleNode, ModuleTree
from ..modules.value_summary import ValueSummary
from ..ops.memory_table import MemoryTable
from ..ops.op_table import OpTable
from ..ops.sums import OpSums
from ..tables.calls import iterate_levels
from ..tables.columns import Column
from .module_columns import list_statistics, list_times, measured_column
from .tables import NONE, Kind, ReportColumn, ReportTable, number_column, optional, text_column

Place = tuple[str | None, str | None]  # the name of a root and a path
#: The dtype and shape of each module's first output.
Outputs = Mapping[Place, tuple[str | None, str | None]]

#: The role of a row that is one of the modules which the row around it sums up.
MEMBER = "member"


@dataclass(frozen=True, eq=False)
class ModuleRows:
    """The rows of the module tree in pre-order: a module, then its inside; after a run, its members."""

    nodes: tuple[ModuleNode, ...]
    parent: tuple[int, ...]
    role: tuple[str, ...]
    folded: tuple[int, ...]  # for each row, the row that sums it up with its equals

    def around(self, root: str | None, path: str | None) -> int:
        """Returns the row of a module; of one without a row, as inside compiled code, that of the module around it."""
        while path and (root, path) not in self.index:
            path = path.rpartition(".")[0]
        return self.index.get((root, path), NONE)

    def outer(self, row: int) -> int:
        """Returns the row of the single module around a row; -1 for none."""
        above = self.parent[row]
        while above >= 0 and self.nodes[above].count > 1:
            above = self.parent[above]
        return above

    @cached_property
    def index(self) -> Mapping[Place, int]:
        """The row of each module that is not folded."""
        return {(node.root, node.path): row for row, node in enumerate(self.nodes) if node.count == 1}

    def sum_inside(self, own: Column) -> Column:
        """Returns the sum over each row and everything inside; `own` holds each module's value without its inside."""
        total: Column = own.copy()
        if not total.any():
            return total
        for row in range(len(self.nodes) - 1, -1, -1):
            above, summed = self.parent[row], self.folded[row]
            if above >= 0 and self.nodes[above].count == 1:
                total[above] += total[row]
            if summed >= 0:
                total[summed] += total[row]
        return total

    def sum_known(self, own: Column, unknown: Column) -> Column:
        """Returns `sum_inside(own)`, with NaN for 0 where something inside is unknown; `unknown` counts that."""
        total = self.sum_inside(own)
        return np.where((total == 0) & (self.sum_inside(unknown) > 0), np.nan, total)

    def combine_alike(self, own: Column, combine: np.ufunc) -> Column:
        """Returns for each row `combine` over the modules that it sums up; `own` holds the values of single modules."""
        combined: Column = own.copy()
        folded = np.array(self.folded, np.int64)
        levels = list(iterate_levels(folded))
        for level in reversed(levels[1:]):
            rows = np.sort(level)[::-1]
            combine.at(combined, folded[rows], combined[rows])
        return combined


def list_modules(tree: ModuleTree, apart: Mapping[Place, Hashable] | None = None) -> ModuleRows:
    """Returns the rows of the table of modules; `apart` is as for `fold`."""
    rows: list[tuple[ModuleNode, int, str, int]] = []
    inside: list[list[int]] = []  # for each row, its children except members of runs
    waiting = [(node, NONE, 0, str(node.role)) for node in reversed(fold(tree, listed=1, apart=apart).roots)]
    while waiting:
        node, parent, number, role = waiting.pop()
        row = len(rows)
        summed = parent if role == MEMBER else rows[parent][3] if parent >= 0 else NONE
        if role != MEMBER and summed >= 0:
            summed = inside[summed][number]
        rows.append((node, parent, role, summed))
        inside.append([])
        if parent >= 0 and role != MEMBER:
            inside[parent].append(row)
        waiting += [(member, row, nth, MEMBER) for nth, member in reversed(list(enumerate(node.members)))]
        waiting += [(child, row, nth, child.role) for nth, child in reversed(list(enumerate(node.children)))]
    return ModuleRows(*map(tuple, zip(*rows, strict=True))) if rows else ModuleRows((), (), (), ())


def tabulate_modules(
    rows: ModuleRows,
    ops: OpTable,
    memory: MemoryTable,
    outputs: Outputs,
    origins: Collection[int],
    *,
    device_times: bool = False,
) -> ReportTable:
    """Returns the table of modules.

    Args:
        rows: the rows of the tree.
        ops: the costs of each module's ops, without those of its children.
        memory: the memory that modules save for backward.
        outputs: the dtype and shape of each module's first output.
        origins: the rows of modules in which NaN or infinite values came up.
        device_times: whether the times of the tree are device times.
    """
    nodes, clock = rows.nodes, "device " if device_times else ""
    columns = [
        text_column("label", "module", (node.label for node in nodes), default=True),
        text_column("path", "path", (node.path for node in nodes)),
        text_column("root", "root", (node.root for node in nodes)),
        text_column("type", "type", (node.type for node in nodes), default=True),
        number_column("parent", "inside of", "module", np.array(rows.parent, np.int32)),
        text_column("role", "role", rows.role),
        number_column("folded", "summed up in", "module", np.array(rows.folded, np.int32)),
        _count("count", "modules", [node.count for node in nodes]),
        _count("parameters", "parameters", [node.parameters for node in nodes], default=True, overlay=True),
        _count("calls", "calls", [node.calls for node in nodes], overlay=True),
        *list_times(lambda phase, name: _read_times(nodes, phase, name), clock),
        *_range_over_steps(nodes, clock),
        *_costs(rows, ops),
        *_memory(rows, memory),
        *list_statistics(_NodeStatistics(nodes)),
        *_nonfinite(rows, origins),
        *_outputs(rows, outputs),
    ]
    return ReportTable(rows=len(nodes), columns=tuple(columns))


def _count(name: str, label: str, values: Sequence[int | None], **more: Any) -> ReportColumn:
    counts = np.array([NONE if value is None else value for value in values], np.int64)
    return number_column(name, label, "count", counts, aggregate="sum", **more)


def _read_times(nodes: Sequence[ModuleNode], phase: str, name: str) -> Column:
    times = [node.phase(phase) for node in nodes]
    return optional(getattr(one, name) / 1e9 if one.calls or one.total_ns else None for one in times)


def _range_over_steps(nodes: Sequence[ModuleNode], clock: str) -> Iterator[ReportColumn]:
    """Yields how far the times of several steps lie apart, by phase, and the number of steps."""
    over_steps = {
        phase: known
        for phase in MODULE_PHASES
        if any(known := [node.phase(phase).over_steps for node in nodes])
    }
    for measure, name in (("time range", "total_ns"), ("self time range", "self_ns")):
        for phase, of_nodes in over_steps.items():
            quartiles = [None if over is None else getattr(over, name) for over in of_nodes]
            ranges = optional(None if one is None else (one.high - one.low) / 1e9 for one in quartiles)
            label = clock + measure
            more = {"phase": phase, "about": _RANGE, "aggregate": "none"}
            yield measured_column(measure, "seconds", ranges, label=label, **more)
    if over_steps:
        of_phases = zip(*over_steps.values(), strict=True)
        counts = [
            min((over.steps for over in known if over is not None), default=NONE) for known in of_phases
        ]
        about = "In how many of the steps it ran, of which the times are medians; of several phases in the fewest."
        yield number_column(
            "steps", "steps", "count", np.array(counts, np.int64), measure="steps", about=about
        )


_RANGE = "Between the first and the third quartile of the steps."


def _costs(rows: ModuleRows, ops: OpTable) -> Iterator[ReportColumn]:
    placed = [(rows.around(row.root, row.path), row.sums) for row in ops.rows]
    for cost in _COSTS:
        for phase in ("together", *PHASES):
            own, unknown = np.zeros((2, len(rows.nodes)))
            for row, sums in placed:
                if row >= 0:
                    own[row] += cost.read(sums.phase(phase))
                    unknown[row] += cost.count_unknown(sums.phase(phase))
            total = rows.sum_known(own, unknown)
            if (total > 0).any():
                of = None if phase == "together" else phase
                yield measured_column(cost.measure, cost.kind, total, phase=of, about=cost.about)


def _memory(rows: ModuleRows, memory: MemoryTable) -> Iterator[ReportColumn]:
    if not memory.rows:
        return
    saved, unknown = np.zeros((2, len(rows.nodes)))
    peak = np.full(len(rows.nodes), np.nan)
    for of_module in memory.rows:
        row = rows.index.get((of_module.root, of_module.path), NONE)
        if row >= 0:
            saved[row], unknown[row] = of_module.saved.saved_bytes, of_module.saved.unknown
            peaks = [of_module.phase(phase).peak_bytes for phase in PHASES]
            peak[row] = max((one for one in peaks if one is not None), default=np.nan)
    if any(of_module.saved.ops or of_module.saved.saved_bytes for of_module in memory.rows):
        yield measured_column(
            "saved",
            "bytes",
            rows.sum_known(saved, unknown),
            label="saved for backward",
            about="Kept in memory for backward by its ops and those inside it, as far as it is known. "
            "Another column has those of its own ops.",
            default=True,
        )
        about = "Kept in memory for backward by its ops, without those inside it."
        own = rows.combine_alike(np.where((saved == 0) & (unknown > 0), np.nan, saved), np.add)
        yield measured_column("saved own", "bytes", own, label="saved, own ops", about=about)
    about = "The most that lived at once of what the ops of one call made."
    peak = rows.combine_alike(peak, np.fmax)
    yield measured_column("peak", "bytes", peak, label="peak of a call", about=about, aggregate="max")


def _nonfinite(rows: ModuleRows, origins: Collection[int]) -> Iterator[ReportColumn]:
    """Yields columns of non-finite elements: how many, of what kind and phase, and whether they came up there."""
    values = [node.values for node in rows.nodes]
    if all(summary is None for summary in values):
        return
    counts = np.array(
        [NONE if summary is None else _count_nonfinite(summary) for summary in values], np.int64
    )
    about = "NaN and infinite elements of its tensors and those inside it."
    yield measured_column("nonfinite", "count", counts, label="non-finite", about=about, default=True)
    if counts.max() <= 0:
        return
    for measure, name in (("NaN", "nan_count"), ("inf", "inf_count")):
        for phase, kinds in _KINDS_BY_PHASE.items():
            own = np.zeros(len(values), np.int64)
            for row, summary in enumerate(values):
                if summary is not None and rows.nodes[row].count == 1:
                    own[row] = sum(getattr(one, name) for one in summary.nonfinite if one.kind in kinds)
            yield measured_column(measure, "count", rows.sum_inside(own), phase=phase, overlay=False)
    came_up = np.isin(np.arange(len(values)), list(origins)).astype(np.uint8)
    yield number_column("origin", "NaN or inf came up here", "flag", came_up, aggregate="any")


def _count_nonfinite(values: ValueSummary) -> int:
    return values.nonfinite_inside + sum(count.nan_count + count.inf_count for count in values.nonfinite)


def _outputs(rows: ModuleRows, outputs: Outputs) -> Iterator[ReportColumn]:
    """Yields dtype and shape of outputs; a row that sums up several has what they have in common."""
    nothing = (None, None)
    of_rows = [
        outputs.get((node.root, node.path), nothing) if node.count == 1 else nothing for node in rows.nodes
    ]
    for row in range(len(of_rows) - 1, -1, -1):
        own, summed = of_rows[row], rows.folded[row]
        if summed >= 0 and of_rows[summed] == nothing:
            of_rows[summed] = own
        elif summed >= 0:
            (dtype, shape), (other_dtype, other_shape) = own, of_rows[summed]
            of_rows[summed] = (
                dtype if dtype == other_dtype else "several",
                shape if shape == other_shape else "several",
            )
    if any(dtype for dtype, _ in of_rows):
        dtypes, shapes = zip(*of_rows, strict=True)
        yield text_column("dtype", "dtype", dtypes, kind="dtype", overlay=True, measure="dtype")
        yield text_column("shape", "shape", shapes)


class _Cost(NamedTuple):
    measure: str
    kind: Kind
    read: Callable[[OpSums], float]
    count_unknown: Callable[[OpSums], int]
    about: str


_COSTS = (
    _Cost(
        "FLOPs",
        "flops",
        lambda sums: sums.flops,
        lambda sums: sums.flops_unknown,
        "Of its ops and those inside it, as far as they are known.",
    ),
    _Cost(
        "bytes",
        "bytes",
        lambda sums: sums.bytes_read + sums.bytes_written,
        lambda sums: sums.bytes_unknown,
        "Read and written by its ops and those inside it.",
    ),
    _Cost("ops", "count", lambda sums: sums.ops, lambda sums: 0, "Its ops and those inside it."),
)
#: The kinds of values that each phase shows; parameters are those that forward reads.
_KINDS_BY_PHASE: Mapping[str, Collection[str]] = {
    "forward": ("output", "recomputed output", "parameter"),
    "backward": ("gradient", "parameter gradient"),
}


class _NodeStatistics:
    """The statistics of all nodes, derived together: one by one, those of 50,000 modules take 10 s."""

    def __init__(self, nodes: Sequence[ModuleNode]) -> None:
        self._nodes = nodes
        self._columns = cache(self._read_columns)

    def read(self, kind: str, stat: str) -> Column:
        """Returns a statistic of the values of one kind of each node; NaN where nothing was measured."""
        rows, columns = self._columns(kind)
        statistic = np.full(len(self._nodes), np.nan)
        statistic[rows] = getattr(columns, stat)
        return statistic

    def _read_columns(self, kind: str) -> tuple[list[int], StatColumns]:
        of_nodes = [getattr(node.values, kind, None) for node in self._nodes]
        known = [(row, stats) for row, stats in enumerate(of_nodes) if stats is not None]
        return [row for row, _ in known], columns_of([stats for _, stats in known])
