"""Makes the table of modules: the module tree, with equal siblings summed up, and all that is known of each module."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...recording.phase import PHASES
from ...recording.statistics.moments import Stats
from ..modules.folding import fold
from ..modules.module_tree import MODULE_PHASES, ModuleNode, ModuleTree
from ..modules.value_summary import ValueSummary
from ..ops.memory_table import MemoryTable
from ..ops.op_table import OpTable
from ..ops.sums import OpSums
from ..tables.columns import Column
from .tables import NONE, Aggregate, Kind, ReportColumn, ReportTable, number_column, optional, text_column

Place = tuple[str | None, str | None]  # the name of a root and a path
#: The dtype and shape of the first output of each module.
Outputs = Mapping[Place, tuple[str | None, str | None]]

_MEMBER = "member"


@dataclass(frozen=True, eq=False)
class ModuleRows:
    """The rows of the tree in pre-order: a module, then what is inside; of a run then its members."""

    nodes: tuple[ModuleNode, ...]
    parent: tuple[int, ...]
    role: tuple[str, ...]
    folded: tuple[int, ...]  # the row that sums it up with its like

    @cached_property
    def index(self) -> Mapping[Place, int]:
        """The row of each single module."""
        return {(each.root, each.path): row for row, each in enumerate(self.nodes) if each.count == 1}

    def sum_inside(self, own: Column) -> Column:
        """Returns the sum over each row and all inside; `own` is that of single modules without what is inside."""
        total: Column = own.copy()
        for row in range(len(self.nodes) - 1, -1, -1):
            above, summed = self.parent[row], self.folded[row]
            if above >= 0 and self.nodes[above].count == 1:
                total[above] += total[row]
            if summed >= 0:
                total[summed] += total[row]
        return total

    def combine_alike(self, own: Column, combine: np.ufunc) -> Column:
        """Returns what `combine` makes of all that each row sums up; `own` is that of single modules."""
        found: Column = own.copy()
        for row in range(len(self.nodes) - 1, -1, -1):
            if self.folded[row] >= 0:
                found[self.folded[row]] = combine(found[self.folded[row]], found[row])
        return found


def list_modules(tree: ModuleTree) -> ModuleRows:
    """Returns the rows of the table."""
    rows: list[tuple[ModuleNode, int, str, int]] = []
    inside: list[list[int]] = []  # the children of each row without members
    waiting: list[tuple[ModuleNode, int, int, str]] = [
        (each, NONE, 0, each.role) for each in reversed(fold(tree, listed=1).roots)
    ]
    while waiting:
        node, parent, number, role = waiting.pop()
        row = len(rows)
        summed = parent if role == _MEMBER else rows[parent][3] if parent >= 0 else NONE
        if role != _MEMBER and summed >= 0:
            summed = inside[summed][number]
        rows.append((node, parent, role, summed))
        inside.append([])
        if parent >= 0 and role != _MEMBER:
            inside[parent].append(row)
        waiting += [(each, row, at, _MEMBER) for at, each in reversed(list(enumerate(node.members)))]
        waiting += [(each, row, at, each.role) for at, each in reversed(list(enumerate(node.children)))]
    return (
        ModuleRows(*(tuple(each) for each in zip(*rows, strict=True))) if rows else ModuleRows((), (), (), ())
    )


def tabulate_modules(
    rows: ModuleRows,
    ops: OpTable,
    memory: MemoryTable,
    outputs: Outputs,
    origins: Collection[int],
    *,
    device_times: bool = False,
) -> ReportTable:
    """Returns the table.

    Args:
        rows: the rows of the tree.
        ops: the costs of the ops of each module without those of its children.
        memory: what the modules save for backward.
        outputs: dtype and shape of what each module returned.
        origins: the rows of modules in which NaN or infinite values came up.
        device_times: the times of the tree are those of devices.
    """
    nodes = rows.nodes
    columns = [
        text_column("label", "module", (each.label for each in nodes), default=True),
        text_column("path", "path", (each.path for each in nodes)),
        text_column("root", "root", (each.root for each in nodes)),
        text_column("type", "type", (each.type for each in nodes), default=True),
        number_column("parent", "inside of", "module", np.array(rows.parent, np.int32)),
        text_column("role", "role", rows.role),
        number_column("folded", "summed up in", "module", np.array(rows.folded, np.int32)),
        _count("count", "modules", [each.count for each in nodes]),
        _count("parameters", "parameters", [each.parameters for each in nodes], default=True, overlay=True),
        _count("calls", "calls", [each.calls for each in nodes], overlay=True),
        *_times(nodes, "device " if device_times else ""),
        *_costs(rows, ops),
        *_memory(rows, memory),
        *_values(nodes),
        *_nonfinite(rows, origins),
        *_outputs(rows, outputs),
    ]
    return ReportTable(rows=len(nodes), columns=tuple(columns))


def _count(name: str, label: str, values: Sequence[int | None], **more: Any) -> ReportColumn:
    codes = np.array([NONE if each is None else each for each in values], np.int64)
    return number_column(name, label, "count", codes, aggregate="sum", **more)


def _times(nodes: Sequence[ModuleNode], clock: str) -> Iterator[ReportColumn]:
    for measure, of, about in _TIMES:
        by_phase = {
            phase: optional(
                getattr(each.phase(phase), of) / 1e9
                if each.phase(phase).calls or each.phase(phase).total_ns
                else None
                for each in nodes
            )
            for phase in MODULE_PHASES
        }
        known = {phase: each for phase, each in by_phase.items() if not np.isnan(each).all()}
        if len(known) > 1:
            yield _measured(
                measure,
                f"{clock}{measure}",
                "seconds",
                _add(known.values()),
                about=about,
                default=of == _SELF,
            )
        for phase, each in known.items():
            yield _measured(
                measure,
                f"{clock}{measure} {phase}",
                "seconds",
                each,
                phase=phase,
                about=about,
                default=of != _SELF,
            )


def _add(columns: Iterable[Column]) -> Column:
    """Returns the sum of what is known; NaN where nothing is."""
    stacked = np.stack(list(columns))
    return np.where(np.isnan(stacked).all(axis=0), np.nan, np.nansum(stacked, axis=0))


def _measured(
    measure: str, label: str, kind: Kind, values: Column, *, phase: str | None = None, **more: Any
) -> ReportColumn:
    name = measure.replace(" ", "_").replace("_/_", "_to_") + (f".{phase}" if phase else "")
    more = {"overlay": True, "aggregate": "sum"} | more
    return number_column(name, label, kind, values, measure=measure, phase=phase, **more)


def _costs(rows: ModuleRows, ops: OpTable) -> Iterator[ReportColumn]:
    if not ops.rows:
        return
    index = rows.index
    own = {
        (measure, phase): np.zeros(len(rows.nodes)) for measure in _COSTS for phase in ("together", *PHASES)
    }
    for each in ops.rows:
        at = index.get((each.root, each.path), NONE)
        if at >= 0:
            for (measure, phase), column in own.items():
                column[at] = _COSTS[measure].read(each.sums.phase(phase))
    for (measure, phase), column in own.items():
        total = rows.sum_inside(column)
        if total.any():
            cost = _COSTS[measure]
            yield _measured(
                measure,
                measure if phase == "together" else f"{measure} {phase}",
                cost.kind,
                total,
                phase=None if phase == "together" else phase,
                about=cost.about,
            )


def _memory(rows: ModuleRows, memory: MemoryTable) -> Iterator[ReportColumn]:
    index = rows.index
    saved = np.zeros(len(rows.nodes))
    peak = np.full(len(rows.nodes), np.nan)
    for each in memory.rows:
        at = index.get((each.root, each.path), NONE)
        if at >= 0:
            saved[at] = each.saved.saved_bytes
            known = [each.phase(phase).peak_bytes for phase in PHASES]
            peak[at] = max((value for value in known if value is not None), default=np.nan)
    if memory.rows:
        yield _measured(
            "saved", "saved for backward", "bytes", rows.sum_inside(saved), about=_SAVED, default=True
        )
        own, peak = rows.combine_alike(saved, np.add), rows.combine_alike(peak, np.fmax)
        yield _measured("saved own", "saved, own ops", "bytes", own, about=_SAVED_OWN)
        yield _measured("peak", "peak of a call", "bytes", peak, about=_PEAK, aggregate="max")


def _values(nodes: Sequence[ModuleNode]) -> Iterator[ReportColumn]:
    values = [each.values for each in nodes]
    for each in _STATISTICS:
        column = optional(None if value is None else each.read(value) for value in values)
        if not np.isnan(column).all():
            more = {name: getattr(each, name) for name in ("about", "aggregate", "together", "default")}
            yield _measured(each.name, each.label, "number", column, **more)


def _nonfinite(rows: ModuleRows, origins: Collection[int]) -> Iterator[ReportColumn]:
    """Yields how many elements are not finite, what they are in which phase, and where they came up."""
    values = [each.values for each in rows.nodes]
    if all(each is None for each in values):
        return
    counts = [NONE if each is None else _count_nonfinite(each) for each in values]
    yield _measured(
        "nonfinite", "non-finite", "count", np.array(counts, np.int64), about=_NONFINITE, default=True
    )
    if max(counts) <= 0:
        return
    for label, of in (("NaN", "nan_count"), ("inf", "inf_count")):
        for phase, kinds in _KINDS_BY_PHASE.items():
            own = [
                sum(getattr(each, of) for each in value.nonfinite if each.kind in kinds)
                if value is not None and node.count == 1
                else 0
                for node, value in zip(rows.nodes, values, strict=True)
            ]
            found = rows.sum_inside(np.array(own, np.int64))
            yield _measured(label, f"{label} {phase}", "count", found, phase=phase, overlay=False)
    came_up = np.array([row in origins for row in range(len(rows.nodes))], np.uint8)
    yield number_column("origin", "NaN or inf came up here", "flag", came_up, aggregate="any")


def _count_nonfinite(values: ValueSummary) -> int:
    return values.nonfinite_inside + sum(each.nan_count + each.inf_count for each in values.nonfinite)


def _outputs(rows: ModuleRows, outputs: Outputs) -> Iterator[ReportColumn]:
    """Yields dtype and shape of outputs; of a row that sums up several, what they have in common."""
    found: list[tuple[str | None, str | None]] = [
        outputs.get((each.root, each.path), (None, None)) if each.count == 1 else (None, None)
        for each in rows.nodes
    ]
    for row in range(len(found) - 1, -1, -1):
        summed = rows.folded[row]
        if summed >= 0:
            own, other = found[row], found[summed]
            found[summed] = (
                own if other == (None, None) else (_common(own[0], other[0]), _common(own[1], other[1]))
            )
    if any(each[0] for each in found):
        yield text_column(
            "dtype", "dtype", (each[0] for each in found), kind="dtype", overlay=True, measure="dtype"
        )
        yield text_column("shape", "shape", (each[1] for each in found))


def _common(one: str | None, other: str | None) -> str | None:
    return one if one == other else _SEVERAL


_SEVERAL = "several"


class _Cost(NamedTuple):
    read: Callable[[OpSums], float]
    kind: Kind
    about: str


_SELF = "self_ns"
_TIMES = (
    ("time", "total_ns", "Of its calls, with what they call."),
    ("self time", _SELF, "Of its calls, without what they call."),
)
_COSTS: Mapping[str, _Cost] = {
    "FLOPs": _Cost(
        lambda sums: sums.flops, "flops", "Of its ops and those inside it, as far as they are known."
    ),
    "bytes": _Cost(
        lambda sums: sums.bytes_read + sums.bytes_written,
        "bytes",
        "Read and written by its ops and those inside it.",
    ),
    "ops": _Cost(lambda sums: sums.ops, "count", "Its ops and those inside it."),
}
_SAVED = (
    "Kept in memory for backward by its ops and those inside it. Another column has those of its own ops."
)
_SAVED_OWN = "Kept in memory for backward by its ops, without those inside it."
_PEAK = "The most that lived at once of what the ops of one call made."
#: The phase in which what was measured came up. Parameters are those that forward reads.
_KINDS_BY_PHASE: Mapping[str, Collection[str]] = {
    "forward": ("output", "recomputed output", "parameter"),
    "backward": ("gradient", "parameter gradient"),
}
_NONFINITE = "NaN and infinite elements of its tensors and those inside it."


def _of(kind: str, stat: str) -> Callable[[ValueSummary], float | None]:
    def read(values: ValueSummary) -> float | None:
        stats: Stats | None = getattr(values, kind)
        return None if stats is None else getattr(stats, stat)

    return read


class _Statistic(NamedTuple):
    name: str
    label: str
    read: Callable[[ValueSummary], float | None]
    about: str = ""
    aggregate: Aggregate = "max"
    together: bool = True  # of equal modules it is taken over all their elements
    default: bool = False


#: When gradients of parameters are measured.
CLIPPED = "Measured when the optimizer begins its step: after clipping, where the loop clips."
_STATISTICS: Sequence[_Statistic] = (
    _Statistic("RMS", "RMS of output", _of("output", "rms"), default=True),
    _Statistic("absmax", "largest of output", _of("output", "abs_max"), together=False),
    _Statistic("mean", "mean of output", _of("output", "mean"), aggregate="none"),
    _Statistic("std", "std of output", _of("output", "std"), aggregate="none"),
    _Statistic("gradient RMS", "RMS of gradient", _of("gradient", "rms"), "Of gradients at its outputs."),
    _Statistic(
        "gradient absmax",
        "largest of gradient",
        _of("gradient", "abs_max"),
        "Of gradients at its outputs.",
        together=False,
    ),
    _Statistic("parameter RMS", "RMS of parameters", _of("parameters", "rms"), "With those inside it."),
    _Statistic(
        "gradient norm",
        "norm of gradients",
        _of("parameter_gradients", "l2"),
        f"Of the gradients of its parameters and those inside it. {CLIPPED}",
        default=True,
    ),
    _Statistic(
        "gradient / parameter",
        "gradient / parameter",
        lambda each: each.gradient_to_parameter,
        f"RMS of its parameters' gradients by that of the parameters. {CLIPPED}",
    ),
)
