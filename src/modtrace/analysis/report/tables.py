"""Defines the tables of a report, whose columns state what they hold and how to sum them up."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ...recording.meta import Note
from ..compile.compilations import Reason
from ..compile.kernels import CompiledInside
from ..divergence.answer import Comparison, Divergence
from ..findings.finding import Finding
from ..provenance.recompute import RecomputeCheck
from ..tables.columns import Column
from ..values.nonfinite import Absorbed, NonFinite

#: The kinds of values in a column. Values of the last kinds are rows of the table with that name.
Kind = Literal[
    "text", "count", "bytes", "seconds", "flops", "number", "flag", "dtype", "phase", "difference",
    "module", "node", "step", "site",
]  # fmt: skip
#: The ways to combine the values of several rows into one.
Aggregate = Literal["sum", "max", "min", "mean", "any", "none"]

#: The value that stands for no row, and for no text.
NONE = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportColumn:
    """A column. An unknown value is -1, or NaN in a column of floating-point numbers."""

    name: str
    label: str
    kind: Kind
    values: Column
    texts: tuple[str, ...] | None = None  # the texts that the values are codes of
    about: str = ""  # a sentence that explains the column
    aggregate: Aggregate = "none"
    measure: str | None = None  # the quantity, if several columns show it: `time` in each phase
    phase: str | None = None  # the phase to which the values belong
    overlay: bool = False  # whether the column can colour the page's pictures
    default: bool = False  # whether the column is shown by default
    scalar: bool = False  # whether the user logged the values
    together: bool = False  # whether a row of equal modules has one value over all their elements


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportTable:
    """A table of columns that are equally long."""

    rows: int
    columns: tuple[ReportColumn, ...]

    def __getitem__(self, name: str) -> ReportColumn:
        return next(column for column in self.columns if column.name == name)


@dataclass(frozen=True, kw_only=True)
class ReportFinding:
    """An answer of an analysis as the page shows it, with the rows that it is about."""

    #: A finding that is a text quotes a mark of the recording.
    answer: (
        NonFinite
        | Absorbed
        | Finding
        | RecomputeCheck
        | Comparison
        | Divergence
        | Reason
        | CompiledInside
        | Note
        | str
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
    """All tables and texts of a page."""

    title: str
    about: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]  # sentences on what is missing and what was left out
    shown_step: int  # row of the table of steps; -1 for none
    tables: Mapping[str, ReportTable]
    lanes: tuple[ReportLane, ...] = ()
    dimensions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    findings: tuple[ReportFinding, ...] = ()
    #: The steps of which modules have the median times; empty where the times are of the shown step.
    medians: str = ""
    #: The names of the two runs if the page shows their difference; empty if it shows one run.
    compared: tuple[str, ...] = ()


def number_texts(texts: Iterable[str | None]) -> tuple[Column, tuple[str, ...]]:
    """Returns texts as codes of the distinct texts, and these; None has the code -1."""
    known: dict[str, int] = {}
    codes = [NONE if text is None else known.setdefault(text, len(known)) for text in texts]
    return np.array(codes, np.int32), tuple(known)


def number_codes(codes: Column, texts: Sequence[str]) -> tuple[Column, tuple[str, ...]]:
    """Returns a column of codes with the texts in the order of their first rows, as `number_texts` has them."""
    known, first = np.unique(codes[codes >= 0], return_index=True)
    known = known[np.argsort(first)]
    numbers = np.full(len(texts) + 1, NONE, np.int32)
    numbers[known] = np.arange(len(known))
    return numbers[codes], tuple(texts[code] for code in known.tolist())


def text_column(
    name: str, label: str, texts: Iterable[str | None], *, kind: Kind = "text", **more: Any
) -> ReportColumn:
    """Returns a column made of texts."""
    codes, known = number_texts(texts)
    return ReportColumn(name=name, label=label, kind=kind, values=codes, texts=known, **more)


def number_column(name: str, label: str, kind: Kind, *parts: Column, **more: Any) -> ReportColumn:
    """Returns a column made of numbers, with all parts concatenated."""
    return ReportColumn(name=name, label=label, kind=kind, values=np.concatenate(parts), **more)


def coded_column(
    name: str, label: str, codes: Column, texts: Sequence[str], *, kind: Kind = "text", **more: Any
) -> ReportColumn:
    """Returns a column made of codes and the texts that they stand for."""
    return ReportColumn(name=name, label=label, kind=kind, values=codes, texts=tuple(texts), **more)


def optional(values: Iterable[float | None]) -> Column:
    """Returns numbers as a column, with NaN for None."""
    return narrow(np.array([np.nan if value is None else value for value in values], np.float64))


def seconds(time_ns: Column) -> Column:
    """Returns durations in seconds; NaN for -1."""
    return narrow(np.where(time_ns < 0, np.nan, time_ns / 1e9))


def narrow(values: Column) -> Column:
    """Returns numbers as float32, which halves their size; unchanged if one does not fit that format."""
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
    # Rounding could turn very small numbers into 0 and very large ones into infinity.
    shown: Column = np.where(is_normal & np.isfinite(rounded), rounded, values)
    return shown
