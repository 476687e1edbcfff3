"""Makes the columns of times and statistics of modules, of one step and over steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ...recording.statistics.moments import divide
from ..modules.module_tree import MODULE_PHASES
from ..tables.columns import Column
from .tables import Kind, ReportColumn, narrow, number_column


def measured_column(
    measure: str, kind: Kind, values: Column, *, label: str = "", **more: Any
) -> ReportColumn:
    """Returns a column of a measure, maybe of one phase; its label is that of the measure if none is given."""
    phase = more.get("phase")
    name = measure.replace(" ", "_").replace("_/_", "_to_") + (f".{phase}" if phase else "")
    label = (label or measure) + (f" {phase}" if phase else "")
    more = {"overlay": True, "aggregate": "sum", "measure": measure} | more
    return number_column(name, label, kind, values, **more)


#: The times of modules: measure, name in `PhaseTimes`, and explanation.
_TIMES = (
    ("time", "total_ns", "Of its calls, with what they call."),
    ("self time", "self_ns", "Of its calls, without what they call."),
)


def list_times(read: Callable[[str, str], Column], clock: str) -> Iterator[ReportColumn]:
    """Yields the times of all phases together and of each.

    Args:
        read: returns the seconds of each row in a phase; its second argument is a name in `PhaseTimes`.
        clock: what the labels begin with.
    """
    for measure, name, about in _TIMES:
        known = {phase: read(phase, name) for phase in MODULE_PHASES}
        known = {phase: column for phase, column in known.items() if not np.isnan(column).all()}
        yield from _phases_of(known, measure, clock + measure, about, is_self=name == "self_ns")


def _phases_of(
    known: Mapping[str, Column], measure: str, label: str, about: str, *, is_self: bool
) -> Iterator[ReportColumn]:
    if len(known) > 1:
        stacked = np.stack(list(known.values()))
        total = np.where(np.isnan(stacked).all(axis=0), np.nan, np.nansum(stacked, axis=0))
        yield measured_column(measure, "seconds", total, label=label, about=about, default=is_self)
    for phase, column in known.items():
        yield measured_column(
            measure, "seconds", column, label=label, phase=phase, about=about, default=not is_self
        )


class Statistics(Protocol):
    """The statistics of rows of modules."""

    def read(self, kind: str, stat: str) -> Column:
        """Returns a statistic of the values of one kind of each row; NaN where nothing was measured."""
        ...


def list_statistics(statistics: Statistics) -> Iterator[ReportColumn]:
    """Yields the columns of statistics of which some row has one."""
    for measure, label, read, more in _STATISTICS:
        column = narrow(read(statistics))
        if not np.isnan(column).all():
            more = {"aggregate": "max", "together": True, **more}
            yield measured_column(measure, "number", column, label=label, **more)


def _compare_gradients(statistics: Statistics) -> Column:
    """Returns `ValueSummary.gradient_to_parameter` of each row; NaN where it is not known."""
    rms = statistics.read("parameters", "rms")
    return divide(statistics.read("parameter_gradients", "rms"), np.where(rms == 0, np.nan, rms))


def _of(kind: str, stat: str) -> Callable[[Statistics], Column]:
    return lambda statistics: statistics.read(kind, stat)


#: The explanation of when gradients of parameters are measured.
CLIPPED = "Measured when the optimizer begins its step: after clipping, where the loop clips."


_OF_GRADIENTS = "Of gradients at its outputs."


#: The statistics of modules: measure, label, how to read the number, and further properties of the column.
_STATISTICS: Sequence[tuple[str, str, Callable[[Statistics], Column], Mapping[str, Any]]] = (
    ("RMS", "RMS of output", _of("output", "rms"), {"default": True}),
    ("absmax", "largest of output", _of("output", "abs_max"), {"together": False}),
    ("mean", "mean of output", _of("output", "mean"), {"aggregate": "none"}),
    ("std", "std of output", _of("output", "std"), {"aggregate": "none"}),
    ("gradient RMS", "RMS of gradient", _of("gradient", "rms"), {"about": _OF_GRADIENTS}),
    (
        "gradient absmax",
        "largest of gradient",
        _of("gradient", "abs_max"),
        {"about": _OF_GRADIENTS, "together": False},
    ),
    ("parameter RMS", "RMS of parameters", _of("parameters", "rms"), {"about": "With those inside it."}),
    (
        "gradient norm",
        "norm of gradients",
        _of("parameter_gradients", "l2"),
        {"about": f"Of the gradients of its parameters and those inside it. {CLIPPED}", "default": True},
    ),
    (
        "gradient / parameter",
        "gradient / parameter",
        _compare_gradients,
        {"about": f"RMS of its parameters' gradients by that of the parameters. {CLIPPED}"},
    ),
)
