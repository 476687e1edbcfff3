"""Finds the whole tensors that were kept of a site."""

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..recording.protocols import RecordingData
from ..recording.raw_tensor import RawTensor
from ..recording.schedule import to_schedule
from .calls import RowFinder, column_of
from .value_sites import Wanted, select_values

_SHOWN = 8


def find_tensor(data: RecordingData, site: str | int, step: int | None, wanted: Wanted) -> RawTensor:
    """The one tensor that is meant; see `Recording.tensor`.

    Raises:
        TypeError, ValueError: none is meant, or several are; the text says which there are.
        RecordingError: it was to be kept, and is not there.
    """
    rows = _rows(data, site, wanted if step is None else replace(wanted, steps=step))
    blobs = rows["blob"].to_pylist()
    if len(set(blobs)) > 1:
        raise ValueError(_describe_several(data, rows, site))
    return data.tensor(blobs[0])


def find_tensors(data: RecordingData, site: str | int, wanted: Wanted) -> Iterator[tuple[int, RawTensor]]:
    """Each tensor that is meant with its step, in the order of measuring; each is read when it is asked for.

    Raises:
        TypeError, ValueError: none is meant, or those of several sites are.
    """
    rows = _rows(data, site, wanted).sort_by([("step", "ascending"), ("order", "ascending")])
    steps, blobs = rows["step"].to_pylist(), rows["blob"].to_pylist()
    return ((step, data.tensor(blob)) for blob, step in dict(zip(blobs, steps, strict=True)).items())


class _Kept:
    """The recording as it is without values of which no tensor was kept."""

    def __init__(self, data: RecordingData) -> None:
        values = data.table("values")
        self.values = values.filter(values["blob"].is_valid())
        if not self.values.num_rows:
            raise ValueError(
                "no whole tensors were kept here. Record them with values=Capture(tensors=True)."
            )
        self.meta = data.meta
        self.tensor = data.tensor
        self._table = data.table

    def table(self, name: str) -> pa.Table:
        return self.values if name == "values" else self._table(name)


def _rows(data: RecordingData, site: str | int, wanted: Wanted) -> pa.Table:
    """The rows of one site, in one slot."""
    kept = _Kept(data)
    if not isinstance(site, str):
        return _rows_of_id(kept.values, _to_id(site), wanted.steps)
    found = select_values(kept, replace(wanted, path=site))
    if len(found.names) > 1:
        raise ValueError(
            f"tensor({site!r}): {len(found.names)} sites are meant: {_list(found.names)}. "
            "Give the path of one, or slot=."
        )
    return found.table


def _to_id(site: object) -> int:
    try:
        return operator.index(site)  # type: ignore[arg-type]  # whatever it is
    except TypeError:
        raise TypeError(f"tensor({site!r}): give the path of a module or parameter, or a site_id") from None


def _rows_of_id(values: pa.Table, site_id: int, steps: Any) -> pa.Table:
    rows = values.filter(pc.equal(values["site_id"], site_id))
    if not rows.num_rows:
        there = sorted(set(values["site_id"].to_pylist()))
        raise ValueError(f"tensor({site_id}): no tensor of this site_id was kept; there are: {_list(there)}")
    if steps is None:
        return rows
    schedule = to_schedule([steps] if isinstance(steps, int) else steps)
    there = sorted(set(rows["step"].to_pylist()))
    chosen = [each for each in there if each in schedule]
    if not chosen:
        raise ValueError(f"steps={steps!r}: no tensor of this site was kept there; there are: {_list(there)}")
    return rows.filter(pc.is_in(rows["step"], pa.array(chosen, pa.int32())))


def _describe_several(data: RecordingData, rows: pa.Table, site: str | int) -> str:
    """Says what tells the tensors apart, and what to give."""
    which = f"tensor({site!r})"
    steps = sorted(set(rows["step"].to_pylist()))
    if len(steps) > 1:
        return f"{which}: tensors of {len(steps)} steps were kept: {_list(steps)}. Give step=."
    sites = data.table("sites")
    at = RowFinder(column_of(sites, "site_id"))(column_of(rows, "site_id"))
    calls = np.unique(column_of(sites, "nth")[at]).tolist()
    if len(calls) > 1:
        return f"{which}: tensors of {len(calls)} calls were kept in step {steps[0]}: {_list(calls)}. Give call=."
    return (
        f"{which}: {rows.num_rows} tensors were kept in step {steps[0]}. Read them one by one with tensors()."
    )


def _list(found: Any) -> str:
    words = [str(each) for each in found]
    return ", ".join([*words[:_SHOWN], "…"] if len(words) > _SHOWN else words)
