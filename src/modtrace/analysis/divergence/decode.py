"""Reads the numbers of whole tensors of any dtype, without torch, and tells how finely a dtype resolves them."""

import numpy as np
import numpy.typing as npt

from ...recording.raw_tensor import RawTensor
from ...recording.statistics.moments import Numbers
from ...recording.statistics.number_formats import FLOAT8, float8_table

#: The distance of 1 from the next larger number, by dtype. Integers and bools have none.
EPSILONS = {
    "float64": 2.0**-52,
    "complex128": 2.0**-52,
    "float32": 2.0**-23,
    "complex64": 2.0**-23,
    "float16": 2.0**-10,
    "complex32": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e4m3fnuz": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "float8_e5m2fnuz": 2.0**-2,
    "float8_e8m0fnu": 1.0,
}


def to_numbers(raw: RawTensor) -> Numbers | None:
    """Returns the elements as float64, the parts of complex ones along a last axis; None for an unknown dtype."""
    array = raw.to_numpy()
    if raw.dtype == "bfloat16":
        return np.asarray((array.astype(np.uint32) << np.uint32(16)).view(np.float32), np.float64)
    if raw.dtype in FLOAT8:
        return np.asarray(float8_table(raw.dtype)[array])
    if raw.dtype == "complex32":
        return np.asarray(array.view(np.float16).reshape(*array.shape, 2), np.float64)
    if array.dtype.kind == "c":
        parts = array.view(array.real.dtype).reshape(*array.shape, 2)
        return np.asarray(parts, np.float64)
    if array.shape != raw.shape or array.dtype.kind not in "fiub":
        return None
    return np.asarray(array, np.float64)


def ulp_of(numbers: npt.NDArray[np.float64], dtype: str) -> Numbers | None:
    """Returns the distance of each number from the next larger one of its dtype; None if it has no such."""
    epsilon = EPSILONS.get(dtype)
    if epsilon is None:
        return None
    magnitude = np.abs(numbers)
    smallest = {"float64": 2.0**-1022, "float16": 2.0**-14}.get(dtype, 2.0**-126)
    _, exponent = np.frexp(np.maximum(magnitude, smallest))
    distances: Numbers = np.ldexp(epsilon, exponent - 1)
    return distances
