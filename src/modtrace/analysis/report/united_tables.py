"""Appends the rows that only the second run has to a table of the first, and tabulates its numbers beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..tables.columns import Column, Rows, take
from .tables import NONE, ReportColumn, ReportTable, text_column

#: Texts of the second run that are shown beside those of the first, where they differ.
_SHOWN_BESIDE = ("label", "path", "type", "dtype", "shape", "args")


def append_rows(a: ReportTable, b: ReportTable, added: Rows, links: Mapping[str, Rows]) -> ReportTable:
    """Returns the rows of a table followed by some of another one, whose measured numbers are not known in `a`.

    Args:
        a: the table of the first run.
        b: that of the second.
        added: rows of `b`.
        links: for each kind of column that refers to rows of a table, the new row of each row of the second run.
    """
    theirs = {column.name: column for column in b.columns}
    columns = [_append(column, theirs.get(column.name), added, links) for column in a.columns]
    return ReportTable(rows=a.rows + len(added), columns=tuple(columns))


def _append(
    column: ReportColumn, other: ReportColumn | None, added: Rows, links: Mapping[str, Rows]
) -> ReportColumn:
    if column.texts is not None:
        texts = _texts_of(column, np.arange(len(column.values)))
        texts += [None] * len(added) if other is None else _texts_of(other, added)
        codes = text_column(column.name, column.label, texts)
        return replace(column, values=codes.values, texts=codes.texts)
    unknown = np.nan if column.values.dtype.kind == "f" else 0 if column.kind == "flag" else NONE
    if other is None or _is_measured(column):
        more: Column = np.full(len(added), unknown)
    elif column.kind in links:
        more = take(links[column.kind], other.values[added])
    else:
        more = other.values[added]
    values = column.values if column.values.dtype.kind == "f" else column.values.astype(np.int64)
    return replace(column, values=np.concatenate([values, more.astype(values.dtype)]))


def _is_measured(column: ReportColumn) -> bool:
    """Returns whether a column holds numbers of one run, which those of the other are compared with."""
    return column.texts is None and (column.overlay or column.measure is not None)


def _texts_of(column: ReportColumn, rows: Rows) -> list[str | None]:
    texts = (*(column.texts or ()), None)
    return [texts[code] for code in take(column.values, rows).tolist()]


def tabulate_second(a: ReportTable, b: ReportTable, partner: Rows) -> ReportTable:
    """Returns the second run's numbers, and its texts where they differ, for each row of the united table.

    Args:
        a: the united table.
        b: the table of the second run.
        partner: for each row of `a`, the row of `b`; -1 for none.
    """
    ours = {column.name: column for column in a.columns}
    columns = []
    for column in b.columns:
        mine = ours.get(column.name)
        if mine is not None and _is_measured(column):
            columns.append(replace(column, values=_numbers_of(column, partner), overlay=False, default=False))
        elif mine is not None and column.name in _SHOWN_BESIDE:
            texts = _texts_of(column, partner)
            mine_texts = _texts_of(mine, np.arange(len(partner)))
            other = [two if one != two else None for one, two in zip(mine_texts, texts, strict=True)]
            if any(text is not None for text in other):
                columns.append(text_column(column.name, column.label, other, kind=column.kind))
    return ReportTable(rows=len(partner), columns=tuple(columns))


def _numbers_of(column: ReportColumn, rows: Rows) -> Column:
    """Returns the numbers of rows; unknown for row -1."""
    values = column.values
    unknown = np.nan if values.dtype.kind == "f" else NONE
    if values.dtype.kind == "u":
        values = values.astype(np.int64)
    return (
        np.where(rows >= 0, values[rows], np.array(unknown, values.dtype))
        if len(values)
        else np.full(len(rows), unknown)
    )


def difference_column(codes: Sequence[int] | Column, texts: Sequence[str]) -> ReportColumn:
    """Returns the column that says how each row differs from the second run."""
    return ReportColumn(
        name="difference",
        label="difference",
        kind="difference",
        values=np.asarray(codes, np.int64),
        texts=tuple(texts),
        about="How A and B differ here, by the tensors that were compared. Empty: nothing was compared.",
        measure="difference",
        overlay=True,
        default=True,
    )
