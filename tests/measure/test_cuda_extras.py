"""The kernels of tier 2, hash and sketch, on a fake driver that runs them on the CPU."""

import numpy as np
import pytest
import torch

from helpers.any_numbers import of_magnitudes, random_bits
from helpers.cuda_on_cpu import FakeCuda, as_device, needs_compiler
from helpers.dtypes import DTYPES
from helpers.float64_reference import to_numbers
from modtrace.measure.device_results import read_results
from modtrace.measure.dtypes import format_of
from modtrace.measure.extras import Extras
from modtrace.measure.fingerprints import hash_array
from modtrace.measure.memory import logical_array
from modtrace.measure.tier2 import channel_max_array, tier2_array
from modtrace.measure.together import Together
from modtrace.measure.user_functions import UserFunctions
from modtrace.measure.want import Extra, Want
from modtrace.recording.statistics.fingerprints import SKETCH_SIZE, bucket_and_sign
from modtrace.torch_internals.modes import DisableTorchFunction

pytestmark = needs_compiler

#: Of numbers around a vector, a block of the sketch, a round of all threads, a part, a row of words, a chunk and more.
SIZES = [0, 1, 3, 15, 17, 63, 65, 255, 4099, 16_385, 70_001]
LARGE_SIZES = [262_145, 600_001]

ALL = Want(stats=2, hash=True, sketch=True)


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    with FakeCuda(tmp_path_factory.mktemp("kernels")) as driver:
        yield driver


@pytest.fixture
def fake(driver, monkeypatch):
    driver.reset()
    as_device(driver, monkeypatch)
    yield driver
    assert driver.refused == 0


def new_extras(together: "Together | None" = None) -> Extras:
    return Extras(UserFunctions(lambda what, error: None), together)


def launched(extras: Extras, tensor: torch.Tensor, want: Want = ALL) -> Extra:
    extra = Extra()
    with DisableTorchFunction():
        extras.measure(tensor, want, extra)
    return extra


def measured(extras: Extras, tensor: torch.Tensor, want: Want = ALL) -> Extra:
    extra = launched(extras, tensor, want)
    read_results([extra])
    return extra


def numbers_of(dtype: torch.dtype, size: int) -> "list[torch.Tensor]":
    """Tensors of any bits, and of ordinary, large, tiny and non-finite numbers and zeros."""
    tensors = [random_bits(size, size, dtype)]
    if dtype.is_floating_point and dtype.itemsize > 1:
        odd = [np.inf, -np.inf, np.nan] if size % 2 else []
        tensors += [
            torch.randn(size).relu().to(dtype),
            of_magnitudes(size, size, -45, 38, dtype, odd),
        ]
    return tensors


def check(found: Extra, tensor: torch.Tensor, channel_dim: int = -1) -> None:
    """Counts, indices, maxima and the hash are exact; sums are as near as float64, and the sketch as float32."""
    array, form, numbers = logical_array(tensor), format_of(tensor.dtype), to_numbers(tensor)
    expected = tier2_array(array, form)
    assert (found.zero_count, found.argmax) == (expected.zero_count, expected.argmax)
    np.testing.assert_array_equal(found.histogram, expected.histogram)
    smallest = numbers.size * 2.0**-1074
    np.testing.assert_allclose(found.sumabs, expected.sumabs, rtol=1e-12, atol=smallest)
    np.testing.assert_allclose(found.sum4, expected.sum4, rtol=1e-12, atol=smallest)
    largest = channel_max_array(array, form, channel_dim)
    if isinstance(largest, str):
        assert found.channel_max == {}
    else:
        np.testing.assert_array_equal(found.channel_max[channel_dim], largest)
        assert found.channel_max[channel_dim].dtype == largest.dtype
    assert found.hash == hash_array(array)
    check_sketch(found.sketch, numbers)


def check_sketch(found: np.ndarray, numbers: np.ndarray) -> None:
    bucket, sign = bucket_and_sign(np.arange(numbers.size))
    finite = np.where(np.isfinite(numbers), numbers, 0)
    with np.errstate(all="ignore"):
        expected = np.bincount(bucket, finite * sign, SKETCH_SIZE)
        magnitudes = np.bincount(bucket, np.abs(finite), SKETCH_SIZE)
        is_known = np.isfinite(magnitudes)
        near = np.abs(found - expected) <= 1e-6 * magnitudes + numbers.size * 2.0**-149
    assert near[is_known].all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_those_of_main_memory(fake, dtype):
    extras, launches = new_extras(), 0
    for size in SIZES:
        for tensor in numbers_of(dtype, size):
            for start in (0, 1):  # aligned to a vector, and not
                check(measured(extras, tensor[start:]), tensor[start:])
                launches += 2
    assert fake.launches == launches
