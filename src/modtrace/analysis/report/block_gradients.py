"""Adds the gradient norm of each block, over all parameters inside it, to the statistics over steps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...recording.role import PARAMETER_GRAD
from ..tables.columns import Column
from .module_columns import CLIPPED
from .modules import ModuleRows
from .tables import NONE, ReportColumn, ReportTable

#: The role of the sites that are added for blocks.
INSIDE = "parameter_grad_inside"
_TITLE = "gradients of all parameters inside"


def add_block_gradients(
    sites: ReportTable, series: ReportTable, rows: ModuleRows, steps: int
) -> tuple[ReportTable, ReportTable]:
    """Returns the sites and series with a site added for the gradient norm of each module around others.

    Args:
        sites: the table of sites.
        series: the statistics of the sites over the steps: all steps of the first site, then all of the second, and so
            on.
        rows: the rows of modules.
        steps: the number of steps.
    """
    norms = next((column for column in series.columns if column.name == "l2"), None)
    blocks = _find_blocks(sites, rows) if norms is not None else {}
    if norms is None or not blocks:
        return sites, series
    columns = norms.values.astype(float) ** 2, series["nonfinite"].values
    squares, nonfinite = (
        np.concatenate([_sum(column, inside, steps) for inside in blocks.values()]) for column in columns
    )
    added = {
        "l2": np.where(nonfinite > 0, np.nan, np.sqrt(squares)),
        "nonfinite": np.nan_to_num(nonfinite, nan=NONE).astype(np.int64),
    }
    unknown = np.full(len(nonfinite), np.nan)
    appended = [_append(column, added.get(column.name, unknown)) for column in series.columns]
    values = ReportTable(rows=series.rows + len(unknown), columns=tuple(appended))
    names = [rows.nodes[row].path or rows.nodes[row].root or "" for row in blocks]
    texts = {"label": names, "role": [INSIDE], "role_title": [_TITLE], "role_about": [CLIPPED]}
    appended = [
        _append(column, np.array([*blocks]))
        if column.name == "module"
        else _append_texts(column, texts.get(column.name, [""]), len(blocks))
        for column in sites.columns
    ]
    return ReportTable(rows=sites.rows + len(blocks), columns=tuple(appended)), values


def _find_blocks(sites: ReportTable, rows: ModuleRows) -> Mapping[int, list[int]]:
    """Returns for each unfolded module around modules with gradients the sites of these gradients."""
    role, module = sites["role"], sites["module"].values
    of_gradients = [code for code, text in enumerate(role.texts or ()) if text == PARAMETER_GRAD]
    inside: dict[int, list[int]] = {}
    for site in np.flatnonzero(np.isin(role.values, of_gradients)).tolist():
        outer = int(module[site])
        while outer >= 0:
            if rows.nodes[outer].count == 1:
                inside.setdefault(outer, []).append(site)
            outer = rows.parent[outer]
    return {row: own for row, own in sorted(inside.items()) if any(module[site] != row for site in own)}


def _sum(column: Column, sites: Sequence[int], steps: int) -> Column:
    """Returns the sum over some sites in each step, ignoring unknown values; NaN if all are unknown."""
    values = column.reshape(-1, steps)[sites].astype(np.float64)
    known = ~np.isnan(values) & (values >= 0)
    total: Column = np.where(known.any(axis=0), np.where(known, values, 0).sum(axis=0), np.nan)
    return total


def _append(column: ReportColumn, values: Column) -> ReportColumn:
    return replace(column, values=np.append(column.values, values.astype(column.values.dtype)))


def _append_texts(column: ReportColumn, texts: Sequence[str], size: int) -> ReportColumn:
    """Returns a column with `texts` appended; a single text is repeated for all `size` further rows."""
    known = column.texts or ()
    codes = np.resize(np.arange(len(texts)), size) + len(known)
    return replace(_append(column, codes), texts=(*known, *texts))
