"""How numbers in memory are tier2, against float64 and exact counts."""

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.any_numbers import from_bytes, magnitudes, odd_numbers, of_magnitudes, seeds
from helpers.dtypes import DTYPES, FLOAT8, FLOATS
from helpers.float64_reference import to_numbers
from helpers.kernels import both_kernels
from helpers.layouts import LAYOUTS, laid_out
from helpers.tier2_reference import bin_of, tier2_of
from modtrace.measure.dtypes import CHUNK, format_of
from modtrace.measure.memory import logical_array
from modtrace.measure.tier2 import tier2
from modtrace.measure.tier2.tier2 import RawTier2, tier2_array

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


#: Where groups of lanes, blocks and chunks end.
ENDS = [1, 3, 4, 5, 15, 16, 17, 1023, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1041]

laws = settings(deadline=None, max_examples=60)


#: Every law holds for both kernels.
kernel = both_kernels((tier2, "tier2_into"), (tier2, "largest_into"))


def measured(tensor: torch.Tensor) -> RawTier2:
    return tier2_array(logical_array(tensor), format_of(tensor.dtype))


def check(tensor: torch.Tensor) -> RawTier2:
    """Against what is computed one number after the other."""
    found, numbers = measured(tensor), to_numbers(tensor)
    assert_is_tier2(found, numbers, 2 if tensor.is_complex() else 1)
    return found


def assert_is_tier2(found, numbers: np.ndarray, parts: int = 1) -> None:
    expected = tier2_of(numbers)
    assert found.zero_count == expected["zero_count"]
    assert found.argmax == (None if expected["argmax"] is None else expected["argmax"] // parts)
    assert found.histogram.dtype == np.int64
    assert found.histogram.tolist() == expected["histogram"]
    smallest = numbers.size * 2.0**-1074  # below it float64 itself has no digits
    np.testing.assert_allclose(found.sumabs, expected["sumabs"], rtol=1e-12, atol=smallest)
    np.testing.assert_allclose(found.sum4, expected["sum4"], rtol=1e-12, atol=smallest)
    nonfinite = int((~np.isfinite(numbers)).sum())
    assert found.histogram.sum() + found.zero_count + nonfinite == numbers.size


# By hand.


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8[:2], torch.complex64], ids=str)
def test_tier2_of_a_few_numbers(dtype):
    tensor = torch.tensor([0.0, 1.5, -2.0, -0.0, 3.0, 0.25], dtype=dtype)
    found = measured(tensor)
    zeros = 8 if dtype.is_complex else 2
    assert (found.sumabs, found.zero_count, found.sum4, found.argmax) == (6.75, zeros, 102.06640625, 4)
    counts = {int(k): int(found.histogram[k]) for k in np.flatnonzero(found.histogram)}
    assert counts == {125: 1, 127: 1, 128: 2}  # 0.25; 1.5; 2 and 3


def test_bins_begin_and_end_at_powers_of_two():
    ends = [2.0**-126, 2.0**-125, 1.0, 2.0, 2.0**127, math.nextafter(2.0**128, 0), 2.0**128, 1.7e308]
    below = [5e-324, math.nextafter(2.0**-126, 0)]
    found = measured(torch.tensor([*ends, *below], dtype=torch.float64))
    counts = {int(k): int(found.histogram[k]) for k in np.flatnonzero(found.histogram)}
    assert counts == {0: 2, 1: 1, 2: 1, 127: 1, 128: 1, 254: 2, 255: 2}


def test_a_nan_makes_sums_nan_and_an_infinity_infinite():
    found = measured(torch.tensor([1.0, math.inf, -3.0, -math.inf]))
    assert (found.sumabs, found.sum4, found.argmax) == (math.inf, math.inf, 1)
    found = measured(torch.tensor([1.0, math.inf, -3.0, math.nan, math.nan]))
    assert math.isnan(found.sumabs) and math.isnan(found.sum4)
    assert found.argmax == 3
    assert found.histogram.sum() == 2


def test_the_first_nan_is_the_largest_whatever_its_bits():
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int64).to(torch.int32)
    tensor = torch.cat([torch.tensor([math.inf]), bits.view(torch.float32)])
    assert measured(tensor).argmax == 1
    assert measured(tensor.flip(0)).argmax == 0


def test_true_is_one_whatever_its_byte():
    tensor = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)
    found = measured(tensor)
    assert (found.sumabs, found.zero_count, found.sum4, found.argmax, found.histogram[127]) == (3, 1, 3, 1, 3)


def test_the_part_of_a_complex_number_counts_and_its_element_is_told():
    found = measured(torch.tensor([[1 + 2j, 3 - 4j], [0 + 3j, 4 + 0j]]))
    assert (found.sumabs, found.zero_count, found.argmax, found.histogram.sum()) == (17, 2, 1, 6)
    nan = measured(torch.tensor([1 + 2j, complex(0, math.nan), complex(math.nan, 0)]))
    assert nan.argmax == 1


# Any bits, any size, any magnitude.


@laws
@given(st.binary(max_size=800), st.sampled_from(DTYPES))
def test_tier2_of_any_bits_is_the_reference(content, dtype):
    check(from_bytes(content, dtype))


@laws
@given(
    seeds,
    st.sampled_from(ENDS[:-3]) | st.integers(0, 3000),
    st.sampled_from(FLOATS),
    magnitudes,
    odd_numbers,
)
def test_tier2_is_the_reference_at_any_size_and_magnitude(seed, size, dtype, between, odd):
    check(of_magnitudes(seed, size, *between, dtype, odd))


@pytest.mark.parametrize("size", ENDS[-3:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64], ids=str)
def test_pieces_are_put_together(size, dtype):
    tensor = torch.arange(size).remainder(101).sub(50).to(dtype)
    tensor[-1] = 77
    assert check(tensor).argmax == size - 1
    every_second = torch.stack([tensor, tensor + 1], dim=1)[:, 0]
    assert check(every_second).argmax == size - 1


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_tier2_of_every_8_bit_float_is_the_reference(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    check(every)
    for one in every.view(torch.uint8):
        check(one.view(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tier2_of_every_16_bit_float_is_the_reference(dtype):
    every = torch.arange(2**16).to(torch.int32).to(torch.uint16).view(dtype)
    finite = every[every.isfinite()]
    check(every)
    check(finite)
    histogram = measured(finite).histogram
    expected = np.bincount([bin_of(each) for each in finite.double().tolist() if each], minlength=256)
    np.testing.assert_array_equal(histogram, expected)


@pytest.mark.parametrize("value", [1e-45, 2.0**-20, 2e19, 3.3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fourth_powers_beyond_the_range_of_float32_are_summed(dtype, value):
    tensor = torch.full((20_000,), value, dtype=dtype)
    number = tensor[0].item()
    found = measured(tensor)
    assert found.sum4 == pytest.approx(20_000 * number**4, rel=1e-12, abs=0)
    assert found.sumabs == pytest.approx(20_000 * number, rel=1e-12, abs=0)


def test_subnormal_numbers_count_although_the_user_flushes_them(kernel):
    tensor = torch.full((2000,), 1e-40)
    sum_of_magnitudes = 2000 * tensor[0].item()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        found = measured(tensor)
    finally:
        torch.set_flush_denormal(False)
    assert (found.zero_count, found.histogram[0]) == (0, 2000)
    if kernel == "compiled":  # numpy adds with what the user has set
        assert found.sumabs == pytest.approx(sum_of_magnitudes, rel=1e-12, abs=0)


def test_no_numpy_handler_of_the_users_hears_of_anything():
    bits = torch.arange(2**16).to(torch.int32).to(torch.uint16)
    numbers = torch.tensor([1e308, math.nan, 5e-324], dtype=torch.float64)
    with np.errstate(all="raise"):
        for tensor in (bits.view(torch.float16), bits.view(torch.bfloat16), numbers):
            measured(tensor[::2])
            measured(tensor)


# Strides.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tier2_of_any_strides_is_in_logical_order(layout, dtype):
    check(laid_out(layout, dtype))


@laws
@given(st.data())
def test_any_chunks_of_any_strides_are_put_together(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    strides = [data.draw(st.integers(0, 40)) for _ in shape]
    tensor = torch.arange(1000.0).sin().as_strided(shape, strides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier2, "CHUNK", data.draw(st.integers(1, 20)))
        check(tensor)


def test_an_expanded_tensor_is_not_walked_in_full():
    found = measured(torch.tensor([1.0, 0.0, -3.0]).expand(2**25, 2**24, 3))
    assert (found.sumabs, found.zero_count, found.sum4, found.argmax) == (2**51, 2**49, 82 * 2**49, 2)
    assert (found.histogram[127], found.histogram[128]) == (2**49, 2**49)


def test_tier2_of_an_array_that_is_not_aligned():
    content = np.zeros(41, np.uint8)
    array = content[1:].view(np.float32)
    array[:] = np.arange(10)
    assert not array.flags.aligned
    assert tier2_array(array, format_of(torch.float32)).sumabs == 45


def test_threads_do_not_disturb_each_other():
    tensors = [torch.arange(300_000).remainder(97 + at).to(torch.uint8) for at in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(measured, tensors * 3))
    for tensor, each in zip(tensors * 3, found, strict=True):
        assert_is_tier2(each, to_numbers(tensor))


@laws
@given(seeds, st.integers(0, 3000), st.lists(st.floats(0, 1), max_size=4))
def test_tier2_of_parts_adds_up(seed, size, cuts):
    tensor = torch.from_numpy(np.random.default_rng(seed).standard_normal(size).astype(np.float32))
    ends = [0, *sorted(int(cut * size) for cut in cuts), size]
    parts = [measured(tensor[start:end]) for start, end in pairwise(ends)]
    whole = measured(tensor)
    np.testing.assert_array_equal(sum(each.histogram for each in parts), whole.histogram)
    assert sum(each.zero_count for each in parts) == whole.zero_count
    assert sum(each.sumabs for each in parts) == pytest.approx(whole.sumabs, rel=1e-12)
    assert sum(each.sum4 for each in parts) == pytest.approx(whole.sum4, rel=1e-12)
