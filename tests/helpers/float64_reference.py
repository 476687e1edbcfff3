"""Statistics of a tensor by torch and numpy in float64, and how near ours have to be."""

import math

import numpy as np
import torch

from modtrace.measure.measurers.measurer import Measurement, Measurer
from modtrace.measure.moments.cpu_kernel import RawStatistics
from modtrace.measure.moments.rows import FIRST_INDEX
from modtrace.torch_internals.modes import DisableTorchFunction

SUM_TOLERANCE, SQUARES_TOLERANCE = 1e-6, 2e-6

#: More numbers than these are not summed one by one.
_FEW = 5000

_measurer = Measurer()


def measure(tensor) -> Measurement:
    """Measured by one measurer for all tests, which take and free rows beside each other."""
    with DisableTorchFunction():
        return _measurer.measure(tensor)


def read(measurement: Measurement) -> RawStatistics:
    """What the row holds; it is free afterwards."""
    row = measurement.rows.read([measurement.row])[0].tolist()
    measurement.rows.free([measurement.row])
    return RawStatistics(*row[:FIRST_INDEX])


def statistics(tensor) -> RawStatistics:
    return read(measure(tensor))


def to_numbers(tensor: torch.Tensor) -> np.ndarray:
    """All elements as float64, by torch's own conversion; real and imaginary parts one by one."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.double().reshape(-1).numpy()


def assert_near_reference(found: RawStatistics, numbers: np.ndarray) -> None:
    """Counts and extremes are equal, sums as near as promised."""
    nans, infs = int(np.isnan(numbers).sum()), int(np.isinf(numbers).sum())
    low, high = (numbers.min(), numbers.max()) if numbers.size else (math.nan, math.nan)
    assert (found.count, found.nan_count, found.inf_count) == (numbers.size, nans, infs)
    np.testing.assert_array_equal((found.min, found.max), (low, high))  # -0 is 0
    with np.errstate(all="ignore"):
        squares = numbers * numbers
        if nans or infs:
            np.testing.assert_equal((found.sum, found.sumsq), (np.sum(numbers), np.sum(squares)))
            return
        magnitudes = _sum(np.abs(numbers))
        if math.isfinite(magnitudes):  # else the sum depends on the order of adding
            assert abs(found.sum - _sum(numbers)) <= SUM_TOLERANCE * magnitudes
        expected = _sum(squares)
    if math.isfinite(expected):
        smallest = numbers.size * 2.0**-1074  # below it float64 itself has no digits
        assert abs(found.sumsq - expected) <= SQUARES_TOLERANCE * expected + smallest
    else:
        assert found.sumsq == math.inf


def _sum(numbers: np.ndarray) -> float:
    try:
        return math.fsum(numbers) if numbers.size <= _FEW else float(np.sum(numbers))
    except (OverflowError, ValueError):
        return math.inf
