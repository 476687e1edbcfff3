"""Tensors of a recording as columns."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from .columns import Bools, Column, Rows, column_of, dictionary_codes

#: How the names of dtypes of whole numbers begin.
_WHOLE = ("int", "uint", "bool")


@dataclass(frozen=True, kw_only=True, eq=False)
class Tensors:
    """Tensors that ops or calls read or return."""

    tensor_id: Column
    producer: Rows  # the op, in a graph the node, that made it; -1 for none
    slot: Column  # codes of `slots`: of the op's output
    table: pa.Table  # the columns of `tensors`: a row for each
    slots: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tensor_id)

    @cached_property
    def site_id(self) -> Column:
        """The site of each tensor that no op has made, or that belongs to the model; -1 for none."""
        return column_of(self.table, "site_id")

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each tensor."""
        return [tuple(shape) for shape in self.table["shape"].to_pylist()]

    @cached_property
    def shape_texts(self) -> list[str]:
        """The shape of each tensor as a text."""
        return [shape_text(shape) for shape in self.shapes]

    @cached_property
    def dtypes(self) -> list[str]:
        """The dtype of each tensor, such as `float32`."""
        return list(self.table["dtype"].to_pylist())

    @cached_property
    def is_whole(self) -> Bools:
        """Which tensors hold whole numbers or truth values."""
        code, dtypes = dictionary_codes(self.table["dtype"])
        return np.array([*(name.startswith(_WHOLE) for name in dtypes), True])[code]


def shape_text(shape: Iterable[int]) -> str:
    """Returns the sizes of a tensor as a text that is easily typed: `64x32`, or `scalar`."""
    return "x".join(map(str, shape)) or "scalar"
