"""Reads the numbers of whole tensors of any dtype, without torch, and tells how finely a dtype resolves them."""

from functools import cache

import numpy as np
import numpy.typing as npt

from ...recording.raw_tensor import RawTensor
from ...recording.statistics.moments import Numbers

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

#: Bits of the exponent and of the fraction, and the bias of 8-bit floats.
_SMALL_FLOATS = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2": (5, 2, 15),
    "float8_e5m2fnuz": (5, 2, 16),
}


def to_numbers(raw: RawTensor) -> Numbers | None:
    """Returns the elements as float64, the parts of complex ones along a last axis; None for an unknown dtype."""
    array = raw.to_numpy()
    if raw.dtype == "bfloat16":
        return np.asarray((array.astype(np.uint32) << np.uint32(16)).view(np.float32), np.float64)
    if raw.dtype in _SMALL_FLOATS:
        numbers: Numbers = _numbers_of_bytes(raw.dtype)[array]
        return numbers
    if raw.dtype == "float8_e8m0fnu":
        return np.asarray(np.where(array == 255, np.nan, 2.0 ** (array.astype(np.float64) - 127)))
    if raw.dtype == "complex32":
        return np.asarray(array.view(np.float16).reshape(*array.shape, 2), np.float64)
    if array.dtype.kind == "c":
        parts = array.view(array.real.dtype).reshape(*array.shape, 2)
        return np.asarray(parts, np.float64)
    if array.shape != raw.shape or array.dtype.kind not in "fiub":
        return None
    return np.asarray(array, np.float64)


@cache
def _numbers_of_bytes(dtype: str) -> Numbers:
    exponent_bits, fraction_bits, bias = _SMALL_FLOATS[dtype]
    bits = np.arange(256)
    sign = np.where(bits & 128, -1.0, 1.0)
    exponent, fraction = bits >> fraction_bits & (1 << exponent_bits) - 1, bits & (1 << fraction_bits) - 1
    share = fraction / (1 << fraction_bits)
    numbers = sign * np.where(
        exponent == 0, share * 2.0 ** (1 - bias), (1 + share) * 2.0 ** (exponent.astype(float) - bias)
    )
    if dtype.endswith("fnuz"):
        numbers[128] = np.nan
    elif dtype == "float8_e4m3fn":
        numbers[[127, 255]] = np.nan
    else:
        top = exponent == 31
        numbers[top] = np.where(fraction[top] == 0, sign[top] * np.inf, np.nan)
    return numbers


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
