"""Stacks the whole tensors of many sites in one array, whose first axis is the layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...recording.arrow.arrays import from_numpy
from ...recording.protocols import RecordingData
from ...recording.raw_tensor import RawTensor
from ...recording.suggestions import first_few
from ..tables.columns import column_of
from .history_statistics import group_rows
from .selection import SelectedValues, Selection, select_values


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Whole tensors of one shape, stacked."""

    sites: tuple[str, ...]  # in layer order, also of gradients
    values: npt.NDArray[Any]  # [site, ...]; bfloat16 as float32
    step: int
    role: str


def build_stack(data: RecordingData, step: int | None, selection: Selection) -> Stack:
    """Returns the tensors of the selected sites in one step; see `Recording.stack`.

    Raises:
        TypeError, ValueError: the selection is empty, it has several steps or several tensors of one site, no tensors
            were kept, their shapes differ, or numpy has no numbers for their dtype.
    """
    found = select_values(data, replace(selection, kept=True, steps=step))
    if selection.slot is None:
        found = found.filter(np.array(found.primary, bool)[found.site])
    step = _only_step(found) if step is None else step
    cells = group_rows(found)
    several = cells.several()
    if several:
        cell, rows = several[0]
        raise ValueError(
            f"{found.names[cells.site[cell]]}: {len(rows)} tensors in step {cells.step[cell]}. "
            "Choose one with call=, slot= or phase=."
        )
    names = tuple(found.names[site] for site in cells.site.tolist())
    blobs = found.table["blob"].take(from_numpy(cells.single)).to_pylist()
    raw = {name: data.tensor(blob) for name, blob in zip(names, blobs, strict=True)}
    _check_shapes(raw)
    values = np.stack([_to_numbers(name, each) for name, each in raw.items()])
    return Stack(sites=names, values=values, step=step, role=selection.role)


def _only_step(found: SelectedValues) -> int:
    steps = np.unique(column_of(found.table, "step")).tolist()
    if len(steps) > 1:
        raise ValueError(
            f"stack(): tensors of {len(steps)} steps are there ({first_few(steps)}). Give step=."
        )
    return int(steps[0])


def _check_shapes(tensors: Mapping[str, RawTensor]) -> None:
    (first, one), *others = tensors.items()
    for name, each in others:
        if each.shape != one.shape:
            raise ValueError(
                f"{name} has the shape {list(each.shape)}, and {first} has {list(one.shape)}: they do not stack. "
                "Choose sites of one shape with path= or slot=."
            )


def _to_numbers(name: str, tensor: RawTensor) -> npt.NDArray[Any]:
    array = tensor.to_numpy()
    if tensor.dtype == "bfloat16":  # the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    if array.dtype.name != tensor.dtype:
        raise ValueError(
            f"{name}: numpy has no {tensor.dtype}. Read each with rec.tensor(), which gives torch's."
        )
    return array
