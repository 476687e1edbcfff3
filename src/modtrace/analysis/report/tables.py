"""The tables of a report: columns that state what they hold and how they are summed up."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ...recording.meta import Note
from ..compile.compilations import Reason
from ..compile.kernels import CompiledInside
from ..divergence.answer import Comparison, Divergence
from ..provenance.recompute import RecomputeCheck
from ..tables.columns import Column
from ..values.nonfinite import Absorbed, NonFinite

#: What the values of a column are. The last ones are rows of the table of that name.
Kind = Literal[
    "text", "count", "bytes", "seconds", "flops", "number", "flag", "dtype", "phase", "module", "node", "step", "site"
]  # fmt: skip
#: How one value for several rows is made.
Aggregate = Literal["sum", "max", "min", "mean", "any", "none"]

#: No row, and no text.
NONE = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportColumn:
    """A column. -1 stands for what is not known; in a column of floating-point numbers NaN does."""

    name: str
    label: str
    kind: Kind
    values: Column
    texts: tuple[str, ...] | None = None  # the values are codes of these
    about: str = ""  # a sentence
    aggregate: Aggregate = "none"
    measure: str | None = None  # what it measures, where there are several of it: `time` of each phase
    phase: str | None = None  # of which phase
    overlay: bool = False  # it can colour
    default: bool = False  # it is shown unasked
    scalar: bool = False  # the user logged it
    together: bool = False  # a row of several equal modules has it over the elements of all


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportTable:
    """A table of columns that are equally long."""

    rows: int
    columns: tuple[ReportColumn, ...]

    def __getitem__(self, name: str) -> ReportColumn:
        return next(column for column in self.columns if column.name == name)


@dataclass(frozen=True, kw_only=True)
class ReportFinding:
    """An answer of an analysis, and the rows that it is about."""

    #: A text is a mark.
    answer: (
        NonFinite | Absorbed | RecomputeCheck | Comparison | Divergence | Reason | CompiledInside | Note | str
    )
    module: int = NONE
    node: int = NONE
    step: int = NONE


@dataclass(frozen=True, kw_only=True)
class ReportLane:
    """A lane of the timeline."""

    label: str
    kind: str
    thread: int | None
    rank: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """All that a page shows of a recording."""

    title: str
    about: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]  # what is missing, and what was left out
    shown_step: int  # row of the steps; -1 for none
    tables: Mapping[str, ReportTable]
    lanes: tuple[ReportLane, ...] = ()
    dimensions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    findings: tuple[ReportFinding, ...] = ()


def number_texts(texts: Iterable[str | None]) -> tuple[Column, tuple[str, ...]]:
    """Returns texts as codes of the different ones, and those; -1 for None."""
    known: dict[str, int] = {}
    codes = [NONE if text is None else known.setdefault(text, len(known)) for text in texts]
    return np.array(codes, np.int32), tuple(known)


def text_column(
    name: str, label: str, texts: Iterable[str | None], *, kind: Kind = "text", **more: Any
) -> ReportColumn:
    """Returns a column of texts."""
    codes, known = number_texts(texts)
    return ReportColumn(name=name, label=label, kind=kind, values=codes, texts=known, **more)


def number_column(name: str, label: str, kind: Kind, *parts: Column, **more: Any) -> ReportColumn:
    """Returns a column of numbers: those of all parts, one after the other."""
    return ReportColumn(name=name, label=label, kind=kind, values=np.concatenate(parts), **more)


def coded_column(
    name: str, label: str, codes: Column, texts: Sequence[str], *, kind: Kind = "text", **more: Any
) -> ReportColumn:
    """Returns a column of texts that are already codes."""
    return ReportColumn(name=name, label=label, kind=kind, values=codes, texts=tuple(texts), **more)


def optional(values: Iterable[float | None]) -> Column:
    """Returns numbers with NaN for None."""
    return narrow(np.array([np.nan if value is None else value for value in values], np.float64))


def seconds(time_ns: Column) -> Column:
    """Returns durations in seconds; NaN for -1."""
    return narrow(np.where(time_ns < 0, np.nan, time_ns / 1e9))


def narrow(values: Column) -> Column:
    """Returns numbers with seven digits, which take half the room; unchanged if one is too large or small for that."""
    with np.errstate(over="ignore", under="ignore"):
        short = values.astype(np.float32)
    fits = (np.isinf(short) == np.isinf(values)) & ((short == 0) == (values == 0))
    return short if fits.all() else values


def round_to_show(values: Column) -> Column:
    """Returns float32 numbers rounded to 16 bits, which compress to a third; others unchanged.

    They are off by at most 2^-16 of themselves, below the fourth digit; three are shown.
    """
    if values.dtype != np.float32:
        return values
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + 0x7F + (bits >> 8 & 1)) & ~np.uint32(0xFF)).view(np.float32)
    is_normal = np.isfinite(values) & (np.abs(values) >= np.finfo(np.float32).tiny)
    # Others may become 0 or infinite.
    shown: Column = np.where(is_normal & np.isfinite(rounded), rounded, values)
    return shown
