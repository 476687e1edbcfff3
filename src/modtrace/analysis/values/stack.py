"""Stacks the whole tensors of many sites in one array, whose first axis is the layers."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...recording.arrow.arrays import from_numpy
from ...recording.protocols import RecordingData
from ...recording.raw_tensor import RawTensor
from ...recording.statistics.number_formats import to_float64
from ...recording.suggestions import first_few
from ..tables.columns import column_of
from .history_statistics import group_rows
from .selection import Selection, select_values


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Whole tensors of one shape, stacked."""

    sites: tuple[str, ...]  # in the order of the layers, even for gradients
    values: npt.NDArray[Any]  # [site, ...]; bfloat16 as float32
    step: int
    role: str


def build_stack(data: RecordingData, step: int | None, selection: Selection) -> Stack:
    """Returns the tensors of the selected sites in one step; see `Recording.stack`.

    Raises:
        TypeError, ValueError: the selection is empty, it has several steps or several tensors of one site, no tensors
            were kept, their shapes differ, or numpy has no numbers for their dtype.
    """
    selected = select_values(data, replace(selection, kept=True, steps=step))
    if selection.slot is None:
        selected = selected.filter(np.array(selected.primary, bool)[selected.site])
    steps = np.unique(column_of(selected.select("step"), "step")).tolist()
    if step is None and len(steps) > 1:
        raise ValueError(
            f"stack(): tensors of {len(steps)} steps are there ({first_few(steps)}). Give step=."
        )
    cells = group_rows(selected)
    several = cells.several()
    if several:
        cell, rows = several[0]
        raise ValueError(
            f"{selected.names[cells.site[cell]]}: {len(rows)} tensors in step {cells.step[cell]}. "
            "Choose one with call=, slot= or phase=."
        )
    names = tuple(selected.names[site] for site in cells.site.tolist())
    blobs = selected.select("blob")["blob"].take(from_numpy(cells.single)).to_pylist()
    tensors = {name: data.tensor(blob) for name, blob in zip(names, blobs, strict=True)}
    first = tensors[names[0]]
    for name, tensor in tensors.items():
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has the shape {list(tensor.shape)}, and {names[0]} has {list(first.shape)}: they do not "
                "stack. Choose sites of one shape with path= or slot=."
            )
    values = np.stack([_to_numbers(name, tensor) for name, tensor in tensors.items()])
    return Stack(
        sites=names, values=values, step=int(steps[0]) if step is None else step, role=selection.role
    )


def _to_numbers(name: str, tensor: RawTensor) -> npt.NDArray[Any]:
    array = tensor.to_numpy()
    if tensor.dtype == "bfloat16":
        return np.asarray(to_float64(tensor), np.float32)
    if array.dtype.name != tensor.dtype:
        raise ValueError(
            f"{name}: numpy has no {tensor.dtype}. Read each with rec.tensor(), which gives torch's."
        )
    return array
