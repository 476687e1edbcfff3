"""The statistics of numbers in memory, against float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.any_numbers import (
    from_valid_bytes,
    magnitudes,
    odd_numbers,
    of_magnitudes,
    random_bits,
    seeds,
)
from helpers.dtypes import COMPLEX, DTYPES, FLOAT8, FLOATS, INTEGERS
from helpers.float64_reference import (
    SQUARES_TOLERANCE,
    SUM_TOLERANCE,
    assert_near_reference,
    statistics,
    to_numbers,
)
from helpers.kernels import both_kernels
from helpers.layouts import LAYOUTS, laid_out
from modtrace.measure.dtypes import CHUNK, Format, Scratch, format_of
from modtrace.measure.measurers import measurer
from modtrace.measure.moments.cpu_kernel import EMPTY, RawStatistics, measure_array, measure_into
from modtrace.recording.statistics.moments import Stats, merge

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


#: Every law holds for both kernels.
kernel = both_kernels((measurer, "measure_into"))

#: Where blocks, pairs of blocks and chunks end.
ENDS = [1, 2, 511, 512, 513, 1023, 1025, 1537, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 513]

laws = settings(deadline=None, max_examples=60)


def check(tensor: torch.Tensor) -> RawStatistics:
    found = statistics(tensor)
    assert_near_reference(found, to_numbers(tensor))
    return found


# Any bits, any size, any magnitude.


@laws
@given(st.binary(max_size=400), st.sampled_from(DTYPES))
def test_statistics_of_any_bits_equal_the_reference(content, dtype):
    check(from_valid_bytes(content, dtype))


@laws
@given(
    seeds,
    st.sampled_from([0, *ENDS]) | st.integers(0, 5000),
    st.sampled_from(FLOATS),
    magnitudes,
    odd_numbers,
)
def test_statistics_equal_the_reference_at_any_size_and_magnitude(seed, size, dtype, between, odd):
    check(of_magnitudes(seed, size, *between, dtype, odd))


@laws
@given(seeds, st.sampled_from(ENDS), st.sampled_from([torch.float32, torch.bfloat16, torch.float16, *FLOAT8]))
def test_no_finite_tensor_is_ever_reported_non_finite(seed, size, dtype):
    tensor = random_bits(seed, size, dtype)
    finite = torch.from_numpy(to_numbers(tensor)).isfinite()
    raw = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]).clone()
    raw[~finite] = 1
    found = check(raw.view(dtype))
    assert (found.nan_count, found.inf_count) == (0, 0)
    assert all(map(math.isfinite, found))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_nan_or_infinity_is_found_at_either_end(dtype):
    for size, value in itertools.product(ENDS, (math.nan, math.inf, -math.inf)):
        for place in (0, size // 2, size - 1):
            tensor = torch.full((size,), 0.5, dtype=dtype)
            tensor[place] = value
            found = statistics(tensor)
            assert (found.nan_count, found.inf_count) == (int(math.isnan(value)), int(math.isinf(value)))
            if math.isnan(value):
                assert all(map(math.isnan, (found.min, found.max, found.sum, found.sumsq)))
            else:
                assert (found.sum, found.sumsq) == (value, math.inf)


@pytest.mark.parametrize("dtype", FLOATS)
def test_infinities_of_both_signs_in_different_chunks_sum_to_nan(dtype):
    tensor = torch.ones(2 * CHUNK + 5, dtype=dtype)
    tensor[0], tensor[-1] = math.inf, -math.inf
    found = statistics(tensor)
    assert (found.min, found.max, found.sumsq, found.nan_count, found.inf_count) == (
        -math.inf,
        math.inf,
        math.inf,
        0,
        2,
    )
    assert math.isnan(found.sum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_of_every_power_of_two_are_summed(dtype):
    """A sum of squares in float32 overflows from 2^64 on, and is 0 below 2^-74."""
    for exponent in range(-149, 128):
        check(torch.full((1500,), 2.0**exponent, dtype=dtype))


def test_what_float64_cannot_sum_is_counted_as_finite_still():
    tensor = torch.tensor([1.7e308, -1.7e308, 1.7e308, 1.7e308], dtype=torch.float64)
    found = statistics(tensor)
    assert (found.count, found.min, found.max, found.nan_count, found.inf_count) == (
        4,
        -1.7e308,
        1.7e308,
        0,
        0,
    )
    assert found.sumsq == math.inf


# Decoders against torch's own conversion.


def decoded(tensor: torch.Tensor, raw_dtype: torch.dtype) -> np.ndarray:
    form = format_of(tensor.dtype)
    raw = tensor.view(raw_dtype).numpy().view(form.raw)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return form.decode(raw, Scratch()).astype(np.float64)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_every_byte_of_a_float8_is_what_torch_takes_it_for(dtype):
    tensor = torch.arange(256, dtype=torch.uint8).view(dtype)
    np.testing.assert_array_equal(decoded(tensor, torch.uint8), to_numbers(tensor))
    check(tensor)


@pytest.mark.parametrize("finite", [True, False], ids=["the finite ones", "all"])
@pytest.mark.parametrize("skipped", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_pattern_of_16_bits_is_what_torch_takes_it_for(dtype, skipped, finite):
    """`skipped` elements in front: memory that is not aligned for pairs, and odd sizes."""
    tensor = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    if finite:
        tensor = tensor[tensor.isfinite()]
    tensor = tensor[skipped:]
    ours, theirs = decoded(tensor, torch.int16), to_numbers(tensor)
    np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))  # pairs change the order
    # Before sorting: with AVX-512 numpy's sort gives a zero any sign (2.4).
    assert np.signbit(ours[ours == 0]).sum() == np.signbit(theirs[theirs == 0]).sum()
    check(tensor)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_the_ends_of_an_integer_are_measured(dtype):
    if dtype is torch.bool:
        tensor = torch.tensor([True, False, True])
    else:
        limits = torch.iinfo(dtype)
        tensor = torch.tensor([limits.min, limits.max, 1, 0, 7], dtype=dtype)
    check(tensor)
    check(tensor.repeat(50_001))


def test_any_byte_but_zero_is_true():
    """As in `tensor.double()`: such bytes come from `view(torch.bool)`."""
    tensor = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)
    assert statistics(tensor) == (4, 0, 1, 3, 3, 0, 0)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_parts_of_a_complex_number_are_numbers_of_their_own(dtype):
    tensor = torch.view_as_complex(torch.tensor([[3.0, -4.0], [0.0, 0.5]])).to(dtype)
    assert statistics(tensor) == (4, -4, 3, -0.5, 25.25, 0, 0)
    tensor = torch.view_as_complex(torch.tensor([[3.0, math.nan], [0.0, math.inf]])).to(dtype)
    assert statistics(tensor)[5:] == (1, 1)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
)
def test_memory_that_is_not_aligned_is_read_as_well(dtype):
    numbers = torch.arange(1, 3001).remainder(100).to(dtype)
    content = bytearray(1) + bytearray(numbers.view(torch.uint8).numpy().tobytes())
    tensor = torch.frombuffer(content, dtype=dtype, offset=1)
    assert statistics(tensor) == statistics(numbers)


# Strides.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64, FLOAT8[0]], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_are_measured(layout, dtype):
    tensor = laid_out(layout, dtype)
    assert check(tensor).count == tensor.numel() * (2 if dtype.is_complex else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_views_of_more_than_a_chunk_are_measured(dtype):
    tensor = torch.linspace(-3, 5, 700 * 1001).to(dtype).view(700, 1001)
    for view in (
        tensor.t(),
        tensor[:, 1:],
        tensor[::2, ::3],
        tensor[:, ::2].t(),
        tensor[:, :1].expand(-1, 3000),
    ):
        check(view)
    stepped = tensor.view(-1)[::2]  # more than a chunk in one dimension
    check(stepped)


# Sums.


def alternating(size: int) -> np.ndarray:
    return np.where(np.arange(size) % 2, -1.0, 1.0) * (1 + np.arange(size) * 1e-6)


ADVERSARIAL = {
    "constant": lambda size: np.full(size, 1.1),
    "constant, nearly a power of two": lambda size: np.full(size, 1.9999999),
    "alternating signs": alternating,
    "ramp": lambda size: np.arange(size) / 3,
    "ramp down": lambda size: np.arange(size)[::-1] / 3,
    "one huge among tiny": lambda size: np.where(np.arange(size) == size // 2, 1e9, 1e-3),
    "one beyond 2^40 among tiny": lambda size: np.where(np.arange(size) == 0, 1e30, 1.1e-30),
    "ones, then halves of their last bit": lambda size: np.where(
        np.arange(size) % 1024 < 8, 1, 2.0**-24 * 1.0001
    ),
    "64 ones, then halves of their last bit": lambda size: np.where(
        np.arange(size) % 4096 < 64, 1, 2.0**-24 * 1.0001
    ),
    "cancelling halves": lambda size: np.where(np.arange(size) < size // 2, 1e5, -1e5) + 0.1,
}


@pytest.mark.parametrize("numbers", ADVERSARIAL.values(), ids=ADVERSARIAL.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_of_adversarial_numbers_are_as_near_as_promised(numbers, dtype):
    for size in (1025, CHUNK + 1, 3 * CHUNK):
        check(torch.from_numpy(numbers(size)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_twenty_million_equal_numbers_are_as_near_as_promised(dtype):
    tensor = torch.full((20_000_000,), 1.1, dtype=dtype)
    value, found = tensor[0].item(), statistics(tensor)
    assert (found.count, found.min, found.max) == (20_000_000, value, value)
    assert found.sum == pytest.approx(20_000_000 * value, rel=SUM_TOLERANCE)
    assert found.sumsq == pytest.approx(20_000_000 * value**2, rel=SQUARES_TOLERANCE)


# Merging.


def to_stats(found: RawStatistics) -> Stats:
    none = not found.count
    return Stats(
        **{**found._asdict(), "min": None if none else found.min, "max": None if none else found.max}
    )


@laws
@given(seeds, st.sampled_from(ENDS), st.lists(st.floats(0, 1), max_size=4), st.booleans())
def test_rows_of_any_split_merge_into_the_row_of_the_whole(seed, size, cuts, has_odd_ones):
    tensor = of_magnitudes(seed, size, -10, 10, torch.float32)
    if has_odd_ones:
        tensor[seed % size], tensor[seed // 2 % size] = math.nan, -math.inf
    ends = [0, *sorted(int(cut * size) for cut in cuts), size]
    parts = [tensor[start:end] for start, end in itertools.pairwise(ends)]
    merged = merge(to_stats(statistics(part)) for part in parts)
    assert_near_reference(
        RawStatistics(**{name: getattr(merged, name) for name in RawStatistics._fields}), to_numbers(tensor)
    )


def test_of_no_elements_there_is_no_minimum():
    np.testing.assert_equal(tuple(EMPTY), (0, math.nan, math.nan, 0.0, 0.0, 0, 0))
    np.testing.assert_equal(
        tuple(measure_array(np.empty((3, 0), np.float32), Format(np.float32))), tuple(EMPTY)
    )


@pytest.mark.parametrize(
    "dtype", [torch.uint4, torch.int4, torch.bits8, torch.quint8, torch.float4_e2m1fn_x2]
)
def test_a_dtype_that_cannot_be_measured_has_no_format(dtype):
    assert format_of(dtype) is None


# The bits of the compiled kernel, which are those of 32 lanes whatever the processor has.


@pytest.mark.skipif(measure_into is None, reason="the kernel is not compiled")
@pytest.mark.parametrize("kind", range(3), ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("numbers", ["any", "positive", "negative", "zeros", "no negative", "no positive"])
def test_sums_and_extremes_are_those_of_32_lanes_bit_by_bit(kind, numbers):
    dtype = (torch.float32, torch.bfloat16, torch.float16)[kind]
    generator = torch.Generator().manual_seed(kind)
    tensor = torch.randn(9 * 512, generator=generator)
    zeros = torch.where(torch.rand(len(tensor), generator=generator) < 0.5, 0.0, -0.0)
    has_number = torch.rand(len(tensor), generator=generator) < 0.1
    tensor = {
        "any": tensor,
        "positive": tensor.abs(),
        "negative": -tensor.abs(),
        "zeros": zeros,
        "no negative": torch.where(has_number, tensor.abs(), zeros),
        "no positive": torch.where(has_number, -tensor.abs(), zeros),
    }[numbers].to(dtype)
    row = np.full(32, 7.0)
    measure_into(tensor.data_ptr(), len(tensor), 1, kind, row.ctypes.data)
    assert row[1:5].tobytes() == np.array(sum_lanes(tensor.float().numpy())).tobytes()


def sum_lanes(numbers: np.ndarray) -> list[float]:
    """Returns the extremes and sums of 32 lanes, of which each adds 16 numbers at a time in float32."""
    low, high = np.full(32, np.inf, np.float32), np.full(32, -np.inf, np.float32)
    sums, squares = np.zeros((2, 32))
    for block in numbers.reshape(-1, 16, 32):
        total, square = np.zeros((2, 32), np.float32)
        for row in block:
            low, high = np.where(row < low, row, low), np.where(row > high, row, high)
            total, square = total + row, square + row * row
        sums, squares = sums + total, squares + square
    found = [low[0].item(), high[0].item(), 0.0, 0.0]
    for lane in range(32):
        found[0] = low[lane].item() if low[lane] < found[0] else found[0]
        found[1] = high[lane].item() if high[lane] > found[1] else found[1]
        found[2], found[3] = found[2] + sums[lane], found[3] + squares[lane]
    return found
