"""Identifies tensors by their storage, by how often that was written to, and by their geometry."""

import math
import re
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from ...errors import describe_error
from ...measure.special import shortened
from ...torch_internals.tensors import requires_grad_of

with suppress(ImportError):
    from ._tensor_ids import TensorIds

__all__ = ["NO_OP", "NO_TENSOR", "RETURNED", "Geometry", "TensorIds", "new_tensor_ids"]

#: The number for "no op has written to it".
NO_OP = -1

#: Used as the number of a tensor that is not known and would be a leaf.
NO_TENSOR = -1

#: Used as the op that makes a tensor without storage which a call returns and no op reads.
RETURNED = -2

#: Numbers that a tensor's row has in the rows of `TensorIds.take`, one behind the other.
ROW_WIDTH = 8
STORAGE, VERSION, OFFSET, GEOMETRY, DEVICE, PRODUCER, SLOT, BITS = range(ROW_WIDTH)

# Bits.
REQUIRES_GRAD = 1
FRESH = 2  # its storage is met with it


class Geometry(NamedTuple):
    """The geometry of a tensor on its storage: shape, strides, dtype and layout."""

    shape: tuple[int, ...]  # (): also if it is not known
    stride: tuple[int, ...] | None  # None: it has none
    dtype: torch.dtype | None  # None, here and below: it is not known
    layout: torch.layout | None
    conj: bool
    neg: bool
    note: str | None = None  # why the tensor's storage, and maybe more of it, is not known

    @classmethod
    def of(cls, shape: Any, stride: Any, dtype: Any, layout: Any, conj: bool, neg: bool) -> "Geometry":
        """Returns the geometry of a tensor that has a storage, from what the tensor has answered.

        Raises:
            TypeError: an answer has another type than torch's own, so it was made up by a subclass.
        """
        kinds = {"shape": tuple, "stride()": tuple, "dtype": torch.dtype, "layout": torch.layout}
        for (name, kind), answer in zip(kinds.items(), (shape, stride, dtype, layout), strict=True):
            if not isinstance(answer, kind):
                raise TypeError(f"{name} of the tensor is a {type(answer).__name__}")
        return cls(shape, stride, dtype, layout, conj, neg)

    @classmethod
    def of_unreadable(
        cls, tensor: torch.Tensor, error: Exception
    ) -> "tuple[Geometry, torch.device | None, bool]":
        """Returns the geometry of a tensor that has raised, as far as it can be read; its device; and whether it
        requires a gradient.
        """
        shape, dtype = _answer(tensor, "shape", tuple), _answer(tensor, "dtype", torch.dtype)
        layout, device = _answer(tensor, "layout", torch.layout), _answer(tensor, "device", torch.device)
        # Addresses and counters in the text would make each a new geometry, which is kept for the whole run.
        reason = shortened(re.sub(r"0x[0-9a-fA-F]+|\d+", "N", describe_error(error)))
        geometry = cls(shape or (), None, dtype, layout, False, False, reason)
        return geometry, device, requires_grad_of(tensor)

    @property
    def size_bytes(self) -> int:
        """The memory of the elements in bytes; 0 if it is not known."""
        if self.dtype is None:
            return 0
        sizes = [size for size in self.shape if isinstance(size, int)]  # of a nested tensor one is a symbol
        return math.prod(sizes) * self.dtype.itemsize if len(sizes) == len(self.shape) else 0


def _answer(tensor: torch.Tensor, name: str, kind: type) -> Any:
    """Returns an attribute of a tensor; None if it raises, is of another type, or could not be looked up."""
    try:
        answer = getattr(tensor, name)
        hash(answer)
    except Exception:  # a subclass of the user's may raise anything
        return None
    return answer if isinstance(answer, kind) else None


def new_tensor_ids() -> "TensorIds":
    """Returns new ids of tensors, which are in C: `record` refuses ops where they are not compiled."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return TensorIds(Geometry, exchange, (torch.Tensor, torch.nn.Parameter))
