"""Finds the whole tensors that were kept at a site."""

import operator
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ...recording.arrow.arrays import from_numpy
from ...recording.protocols import RecordingData
from ...recording.raw_tensor import RawTensor
from ...recording.suggestions import first_few
from ..tables.columns import ArrowTable, column_of
from ..tables.values import PlacedValues
from .selection import Selection, in_steps, kept_values, select_values


def find_tensor(data: RecordingData, site: str | int, step: int | None, selection: Selection) -> RawTensor:
    """Returns the selected tensor; see `Recording.tensor`.

    Raises:
        TypeError, ValueError: no tensor or several are selected; the message lists the candidates.
        RecordingError: the tensor should have been kept, but is missing.
    """
    rows = _rows_of_site(data, site, selection if step is None else replace(selection, steps=step))
    blobs = rows["blob"].to_pylist()
    if len(set(blobs)) > 1:
        raise ValueError(_describe_several(data, rows, site))
    return data.tensor(blobs[0])


def find_tensors(
    data: RecordingData, site: str | int, selection: Selection
) -> Iterator[tuple[int, RawTensor]]:
    """Yields each selected tensor with its step, in the order of measuring; each is read on request.

    Raises:
        TypeError, ValueError: no tensor is selected, or tensors of several sites are selected.
    """
    rows = _rows_of_site(data, site, selection).sort_by([("step", "ascending"), ("order", "ascending")])
    steps, blobs = rows["step"].to_pylist(), rows["blob"].to_pylist()
    return ((step, data.tensor(blob)) for blob, step in dict(zip(blobs, steps, strict=True)).items())


def _rows_of_site(data: RecordingData, site: str | int, selection: Selection) -> ArrowTable:
    """Returns the rows of one site that have whole tensors, in one slot."""
    selection = replace(selection, kept=True)
    if not isinstance(site, str):
        return _rows_of_id(kept_values(data), site, selection)
    selected = select_values(data, replace(selection, path=site))
    if len(selected.names) > 1:
        raise ValueError(
            f"tensor({site!r}): {len(selected.names)} sites are meant: {first_few(selected.names)}. "
            "Give the path of one, or slot=."
        )
    return selected.select()


def _rows_of_id(values: ArrowTable, site: object, selection: Selection) -> ArrowTable:
    try:
        site_id = operator.index(site)  # type: ignore[arg-type]  # raises TypeError for other types
    except TypeError:
        raise TypeError(f"tensor({site!r}): give the path of a module or parameter, or a site_id") from None
    ids = column_of(values, "site_id")
    rows = values.filter(from_numpy(ids == site_id))
    if not rows.num_rows:
        known = first_few(np.unique(ids).tolist())
        raise ValueError(f"tensor({site_id}): no tensor of this site_id was kept; there are: {known}")
    steps = column_of(rows, "step")
    return rows.filter(from_numpy(in_steps(steps, np.ones(len(steps), bool), selection)))


def _describe_several(data: RecordingData, rows: ArrowTable, site: str | int) -> str:
    """Returns a sentence on how the tensors differ, and which argument selects one."""
    which = f"tensor({site!r})"
    steps = np.unique(column_of(rows, "step")).tolist()
    if len(steps) > 1:
        return f"{which}: tensors of {len(steps)} steps were kept: {first_few(steps)}. Give step=."
    calls = np.unique(PlacedValues(data=data, table=rows).nth).tolist()
    if len(calls) > 1:
        return f"{which}: tensors of {len(calls)} calls were kept in step {steps[0]}: {first_few(calls)}. Give call=."
    return (
        f"{which}: {rows.num_rows} tensors were kept in step {steps[0]}. Read them one by one with tensors()."
    )
