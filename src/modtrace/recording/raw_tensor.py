"""Holds a whole tensor as a recording stores it: bytes, dtype and shape."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import MissingLibraryError
from ..optional import require

_NUMPY_HAS = (
    "float64 float32 float16 complex128 complex64 bool int64 int32 int16 int8 uint64 uint32 uint16 uint8"
)

_OF_ONE_BYTE = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"

#: The numpy dtype of an element; an unsigned integer of the same width if numpy lacks the dtype.
_ELEMENTS: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in _NUMPY_HAS.split()},
    "bfloat16": np.dtype("uint16"),
    "complex32": np.dtype("uint32"),
    **dict.fromkeys(_OF_ONE_BYTE.split(), np.dtype("uint8")),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class RawTensor:
    """A tensor's bytes in row-major order, with the name of its dtype (torch's, without `torch.`).

    The bytes may be those of a memory-mapped file. They are read-only, and can be read as long as this object, or an
    array made from it, exists.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def to_numpy(self) -> npt.NDArray[Any]:
        """Returns a read-only array of the same elements, without a copy.

        bfloat16, complex32 and the 8-bit floats, which numpy lacks, are returned as unsigned integers of the same width
        with the same bits. An unknown dtype is returned as bytes, with a last axis for the bytes of an element.
        """
        element = _ELEMENTS.get(self.dtype)
        if element is not None:
            return np.frombuffer(self.data, element).reshape(self.shape)
        size = itemsize_of(self.dtype, self.shape, self.data.nbytes)
        return np.frombuffer(self.data, np.uint8).reshape(*self.shape, size)

    def to_torch(self) -> Any:
        """Returns a `torch.Tensor` with memory of its own and exactly these bits.

        Raises:
            MissingLibraryError: torch is not installed.
            TypeError: the installed torch does not have the dtype.
        """
        torch = require("torch", "RawTensor.to_torch()")
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"torch {torch.__version__} has no dtype {self.dtype!r}. Use to_numpy(), which gives the bytes."
            )
        if not self.data.nbytes:
            return torch.empty(self.shape, dtype=dtype, device="cpu")
        own = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
        return own.view(dtype).reshape(self.shape)


def to_torch_if_there(raw: RawTensor) -> Any:
    """Returns the tensor as a `torch.Tensor`, or unchanged if torch is not installed."""
    try:
        return raw.to_torch()
    except MissingLibraryError:
        return raw


def itemsize_of(dtype: str, shape: Sequence[int], size_bytes: int) -> int:
    """Returns the number of bytes per element.

    For an unknown dtype it is computed from the size, and is 1 if there are no elements.
    """
    element = _ELEMENTS.get(dtype)
    if element is not None:
        return element.itemsize
    return size_bytes // (math.prod(shape) or 1) or 1


def check_raw(name: str, array: npt.NDArray[Any], dtype: str, shape: Sequence[int]) -> None:
    """Checks that an array can hold a tensor's raw elements.

    Raises:
        ValueError: it has too few or too many bytes.
    """
    if array.nbytes != math.prod(shape) * itemsize_of(dtype, shape, array.nbytes):
        raise ValueError(
            f"{name}: {array.nbytes} bytes are no tensor of {dtype} and shape {tuple(shape)}. "
            "Give an array of its raw elements."
        )


def copy_raw(array: npt.NDArray[Any], target: npt.NDArray[np.uint8]) -> None:
    """Copies the elements of an array of any strides in row-major order into bytes."""
    if array.flags.c_contiguous:
        target[:] = array.reshape(-1).view(np.uint8)
    elif array.size:
        np.copyto(target.view(array.dtype).reshape(array.shape), array)
