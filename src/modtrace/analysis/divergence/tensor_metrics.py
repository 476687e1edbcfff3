"""Compares whole tensors of any dtype element by element, without torch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...recording.raw_tensor import RawTensor
from ...recording.statistics.moments import Numbers
from ...recording.statistics.number_formats import to_float64

#: The distance between 1 and the next larger number, by dtype. Integers and bools have none.
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


def ulp_of(numbers: npt.NDArray[np.float64], dtype: str) -> Numbers | None:
    """Returns the distance of each number from the next larger one of its dtype; None for an unknown dtype."""
    epsilon = EPSILONS.get(dtype)
    if epsilon is None:
        return None
    magnitude = np.abs(numbers)
    smallest = {"float64": 2.0**-1022, "float16": 2.0**-14}.get(dtype, 2.0**-126)
    _, exponent = np.frexp(np.maximum(magnitude, smallest))
    distances: Numbers = np.ldexp(epsilon, exponent - 1)
    return distances


#: Elements are close if they differ by no more than this share of the larger magnitude.
CLOSE = 1e-3


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """The difference of two whole tensors."""

    relative_l2: float  # the L2 norm of the difference over the larger norm of the two; 0 if both are zero
    largest: float  # the largest absolute difference
    where: tuple[int, ...]  # the index of the largest difference
    pair: tuple[float, float]  # the two elements at that index
    cosine: float  # NaN if one tensor is zero
    close_share: float  # the share of elements whose difference is at most CLOSE times the larger magnitude
    #: The largest difference in units of the last place of the coarser dtype; None if the dtype has no such unit.
    ulps: float | None


def compare_tensors(
    a: RawTensor, b: RawTensor, *, axes: tuple[int, ...] | None = None
) -> TensorDifference | None:
    """Returns the difference of two tensors; None if their shapes do not match or a dtype is unknown.

    Elements that are the same infinity, or NaN in both, count as equal. `axes` permutes the dimensions of the second
    tensor first, as in `transpose` of numpy.
    """
    first, second = to_float64(a), to_float64(b)
    if first is None or second is None:
        return None
    if axes is not None:
        # A complex tensor has its real and imaginary parts along a last axis, which stays last.
        second = second.transpose([*axes, *range(len(axes), second.ndim)])
    if first.size != second.size:
        return None
    return compare_numbers(first, second.reshape(first.shape), coarser_dtype(a.dtype, b.dtype))


def coarser_dtype(a: str, b: str) -> str:
    """Returns that of two dtypes which resolves fewer numbers."""
    return max(a, b, key=lambda dtype: EPSILONS.get(dtype, 0.0))


def compare_numbers(a: Numbers, b: Numbers, dtype: str) -> TensorDifference:
    """Returns the difference of two arrays of one shape; `dtype` is the coarser of their dtypes."""
    with np.errstate(all="ignore"):
        distance = distances(a, b)
    distance = np.where(np.isnan(distance), np.inf, distance)
    if not distance.size:
        return TensorDifference(
            relative_l2=0.0, largest=0.0, where=(), pair=(0.0, 0.0), cosine=np.nan, close_share=1.0, ulps=None
        )
    finite_a, finite_b = (np.where(np.isfinite(numbers), numbers, 0.0) for numbers in (a, b))
    norm_a, norm_b = norm_of(finite_a), norm_of(finite_b)
    farthest = int(distance.argmax())
    larger = np.maximum(np.abs(finite_a), np.abs(finite_b))
    ulp = ulp_of(larger, dtype)
    with np.errstate(all="ignore"):
        ulps = None if ulp is None else float(np.max(distance / ulp))
    return TensorDifference(
        relative_l2=_divide(norm_of(distance), max(norm_a, norm_b)),
        largest=float(distance.flat[farthest]),
        where=tuple(int(index) for index in np.unravel_index(farthest, a.shape)),
        pair=(float(a.flat[farthest]), float(b.flat[farthest])),
        cosine=_divide(float(np.vdot(finite_a, finite_b)), norm_a * norm_b, zero=np.nan),
        close_share=float(np.mean(distance <= CLOSE * larger)),
        ulps=ulps,
    )


def distances(a: Numbers, b: Numbers) -> Numbers:
    """Returns the absolute differences of two arrays; 0 where both are NaN or the same infinity."""
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(b - a))


def norm_of(numbers: npt.NDArray[Any]) -> float:
    """Returns the L2 norm, even of numbers whose squares overflow or underflow a float64."""
    largest = float(np.max(np.abs(numbers), initial=0.0))
    if not largest or not np.isfinite(largest):
        return largest
    return largest * float(np.linalg.norm(numbers / largest))


def _divide(number: float, by: float, *, zero: float = 0.0) -> float:
    if by:
        return number / by
    return zero if not number or zero != 0.0 else float("inf")
