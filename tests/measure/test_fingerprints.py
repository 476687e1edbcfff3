"""Hashes and sketches, by every kernel, against their definition element by element."""

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import fingerprint_reference as reference
from helpers.any_numbers import from_valid_bytes, random_bits, seeds
from helpers.dtypes import DTYPES, FLOAT8, FLOATS
from helpers.fingerprint_kernels import KERNELS, use_kernel
from helpers.fingerprint_kernels import take as take_from_memory
from helpers.float64_reference import to_numbers
from helpers.layouts import LAYOUTS, laid_out
from helpers.user_modes import SeesOps
from modtrace.measure.dtypes import format_of
from modtrace.measure.fingerprints import device_fingerprints, fingerprints
from modtrace.measure.fingerprints.fingerprints import Shard
from modtrace.measure.memory import logical_array
from modtrace.recording.statistics.fingerprints import (
    bucket_and_sign,
    hash_weight,
    merge_hashes,
    merge_sketches,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


#: Where blocks, rows of words and chunks end, in elements of some dtype.
ENDS = [1, 63, 65, 1024, 2**15 + 1, 2**16 - 1, 2**16 + 1, 2**18 - 1, 2**18, 2**18 + 2**16 + 65]
OFFSETS = [0, 3, 63, 65_535, 2**18 - 3, 2**33 + 5]

laws = settings(deadline=None, max_examples=40)


@pytest.fixture(autouse=True, scope="module", params=KERNELS)
def kernel(request):
    """Every law holds for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        yield use_kernel(request.param, patch)


def content_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of its elements, in row-major order."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()


def item_size(tensor: torch.Tensor) -> int:
    return tensor.element_size() // (2 if tensor.is_complex() else 1)


def expected_hash(tensor: torch.Tensor, offset: int = 0) -> int:
    """By the definition of weights in numpy, which the golden values compare with plain Python."""
    content, first = content_of(tensor), offset * item_size(tensor)
    padded = np.concatenate([np.zeros(first % 4, np.uint8), content])
    words = np.concatenate([padded, np.zeros(-len(padded) % 4, np.uint8)]).view("<i4")
    places = first // 4 + np.arange(len(words))
    return int((words.astype(np.int64).view(np.uint64) * hash_weight(places)).sum())


def assert_near_definition(sketch: np.ndarray, tensor: torch.Tensor, offset: int = 0) -> None:
    numbers = to_numbers(tensor)
    numbers = np.where(np.isfinite(numbers), numbers, 0)
    with np.errstate(over="ignore"):
        magnitudes = np.abs(numbers).sum()
    if not math.isfinite(magnitudes):  # float64 itself cannot hold the sums
        return
    buckets, signs = bucket_and_sign(offset + np.arange(len(numbers)))
    expected = np.bincount(buckets, signs * numbers, minlength=64)
    np.testing.assert_allclose(sketch, expected, rtol=0, atol=1e-6 * magnitudes)


def check(take, tensor: torch.Tensor, offset: int = 0) -> None:
    hashed, sketch = take(tensor, offset)
    assert hashed == expected_hash(tensor, offset)
    assert sketch.shape == (64,)
    assert_near_definition(sketch, tensor, offset)


# Any bits, any dtype, any size, any offset.


@laws
@given(st.binary(max_size=400), st.sampled_from(DTYPES), st.sampled_from(OFFSETS) | st.integers(0, 2**40))
def test_any_bits_have_the_hash_and_the_sketch_of_the_definition(kernel, content, dtype, offset):
    check(kernel, from_valid_bytes(content, dtype), offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64], ids=str)
def test_sizes_where_blocks_rows_and_chunks_end(kernel, dtype):
    for size in ENDS:
        tensor = torch.linspace(-60, 100, size).to(dtype)
        for offset in OFFSETS if size <= 2**16 + 1 else (0, 2**18 - 3):
            check(kernel, tensor, offset)


def test_nothing_and_zeros_have_a_hash_and_a_sketch_of_zeros(kernel):
    for dtype, shape in product(DTYPES, ((0,), (3, 0, 2), (), (3, 70))):
        zeros = torch.zeros(shape, dtype=torch.uint8)
        tensor = zeros.view(dtype) if dtype in FLOAT8 else zeros.to(dtype)
        hashed, sketch = kernel(tensor, 5)
        assert hashed == 0
        if dtype is not torch.float8_e8m0fnu or not tensor.numel():  # whose zero bits are 2^-127
            assert sketch.tolist() == [0.0] * 64


# Numbers that are none, and those at the ends.


@pytest.mark.parametrize("dtype", [*FLOATS, FLOAT8[1], torch.complex64], ids=str)
@pytest.mark.parametrize("size", [1000, 2**18 + 3])
def test_non_finite_numbers_count_as_zero_in_the_sketch_and_as_they_are_in_the_hash(kernel, size, dtype):
    values = torch.linspace(-2, 2, size).to(dtype)
    for at, value in ((0, math.nan), (size // 2, math.inf), (size - 1, -math.inf)):
        values[at] = value
    hashed, sketch = kernel(values)
    assert np.isfinite(sketch).all()
    assert hashed == expected_hash(values)
    assert_near_definition(sketch, values)


def test_infinities_that_cancel_count_as_zero(kernel):
    tensor = torch.full((10_000,), math.inf)
    tensor[::3] = -math.inf
    tensor[7] = 1.5
    bucket, sign = reference.bucket_and_sign(7)
    expected = [0.0] * 64
    expected[bucket] = 1.5 * sign
    assert kernel(tensor)[1].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_that_float32_cannot_hold_are_made_in_float64(kernel, dtype):
    tensor = torch.full((2**18,), 3e38, dtype=dtype)
    _, sketch = kernel(tensor)
    assert np.abs(sketch).max() > 4e38
    assert_near_definition(sketch, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_subnormal_numbers_are_added_up(kernel, dtype):
    tiny = torch.finfo(dtype).smallest_normal / 4
    tensor = torch.full((1000,), tiny, dtype=dtype)
    assert tensor[0] > 0
    _, sketch = kernel(tensor)
    assert np.count_nonzero(sketch) > 50
    assert_near_definition(sketch, tensor)


def test_what_float64_cannot_hold_is_not_finite(kernel):
    _, sketch = kernel(torch.full((100_000,), 1.7e308, dtype=torch.float64))
    assert not np.isfinite(sketch).all()


def test_any_byte_but_zero_is_true_in_the_sketch_and_itself_in_the_hash(kernel):
    tensor = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)
    hashed, sketch = kernel(tensor)
    assert hashed == reference.hash_of(b"\0\1\2\xff")
    assert sketch.tolist() == reference.sketch_of([0, 1, 1, 1])


# Parts.


@laws
@given(
    seeds,
    st.integers(0, 5000) | st.just(2**18 + 70),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex64]),
    st.lists(st.integers(0, 2**18 + 70), max_size=5),
    st.sampled_from(OFFSETS),
)
def test_parts_add_up_wherever_they_are_cut(kernel, seed, size, dtype, cuts, offset):
    tensor = torch.from_numpy(np.random.default_rng(seed).integers(-90, 90, size)).to(dtype)
    parts = 2 if dtype.is_complex else 1
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    pieces = [kernel(tensor[low:high], offset + parts * low) for low, high in pairwise(edges)]
    hashed, sketch = kernel(tensor, offset)
    assert merge_hashes(hashed for hashed, _ in pieces) == hashed
    np.testing.assert_array_equal(merge_sketches(sketch for _, sketch in pieces), sketch)  # of integers


def blocks_of(shape: tuple[int, ...], cuts: list[int]) -> list[tuple[slice, ...]]:
    """The tensor cut once along each dimension."""
    blocks: list[tuple[slice, ...]] = [()]
    for size, cut in zip(shape, cuts, strict=True):
        blocks = [
            (*block, part)
            for block in blocks
            for part in (slice(0, min(cut, size)), slice(min(cut, size), size))
        ]
    return blocks


def check_blocks(take, tensor: torch.Tensor, cuts: list[int], offset: int = 0) -> None:
    hashed, sketch = take(tensor, offset)
    hashes, sketches = [], []
    for block in blocks_of(tensor.shape, cuts):
        shard = Shard(tuple(tensor.shape), tuple(part.start for part in block))
        for of_block in (tensor[block], tensor[block].clone()):  # with the strides of the whole, and its own
            found = take(of_block, offset, shard)
            assert found[0] == take(of_block.contiguous(), offset, shard)[0]
        hashes.append(found[0])
        sketches.append(found[1])
    assert merge_hashes(hashes) == hashed
    np.testing.assert_array_equal(merge_sketches(sketches), sketch)  # of integers


@laws
@given(st.data())
def test_blocks_of_a_tensor_of_any_dimensions_add_up(kernel, data):
    shape = data.draw(st.lists(st.integers(1, 8), max_size=4))
    cuts = [data.draw(st.integers(0, size)) for size in shape]
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.int8, torch.complex64]))
    numbers = torch.arange(math.prod(shape)).remainder(201) - 100
    check_blocks(kernel, numbers.to(dtype).reshape(shape), cuts, data.draw(st.sampled_from(OFFSETS)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((300, 192), [100, 64]),
        ((9, 4160), [3, 1001]),
        ((2, 2**18 + 5), [1, 2**18 - 1]),
        ((7, 3, 500), [2, 1, 250]),
        ((300, 3), [0, 1]),
    ],
    ids=str,
)
def test_column_and_row_shards_add_up(kernel, shape, cuts, dtype):
    numbers = (torch.arange(math.prod(shape)) * 7919).remainder(101)
    check_blocks(kernel, numbers.to(dtype).reshape(shape), cuts)


@pytest.mark.parametrize(
    ("shape", "starts"),
    [
        ((10, 62), (0, 61)),
        ((10, 62), (-1, 0)),
        ((10, 62), (8, 0)),
        ((10, 62), (0,)),
        ((2, 10, 62), (2, 0, 0)),
    ],
)
def test_a_block_outside_of_its_tensor_is_refused(kernel, shape, starts):
    if kernel is not take_from_memory:
        pytest.skip("the same function says so")
    with pytest.raises(ValueError, match=r"a block of shape \(3, 2\) at .* does not lie inside of"):
        kernel(torch.zeros(3, 2), 0, Shard(shape, starts))


# Strides.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.float64, FLOAT8[0]], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_nothing(kernel, layout, dtype):
    tensor = laid_out(layout, dtype)
    for offset in (3, 2**18 - 99):
        hashed, sketch = kernel(tensor, offset)
        dense = kernel(tensor.clone(memory_format=torch.contiguous_format), offset)
        assert hashed == dense[0] == expected_hash(tensor, offset)
        np.testing.assert_allclose(sketch, dense[1], rtol=1e-12)
        assert_near_definition(sketch, tensor, offset)


def test_views_of_more_than_a_chunk_are_read_in_row_major_order(kernel):
    tensor = torch.linspace(-3, 5, 700 * 1001).bfloat16().view(700, 1001)
    for view in (tensor.t(), tensor[:, 1:], tensor[::2, ::3], tensor[:, :1].expand(-1, 500)):
        check(kernel, view, 2**18 - 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_memory_that_is_not_aligned_is_read_as_well(kernel, dtype):
    numbers = torch.arange(1, 3001).remainder(100).to(dtype)
    content = bytearray(1) + bytearray(content_of(numbers).tobytes())
    tensor = torch.frombuffer(content, dtype=dtype, offset=1)
    hashed, sketch = kernel(tensor)
    assert hashed == kernel(numbers)[0]
    np.testing.assert_array_equal(sketch, kernel(numbers)[1])


def test_steps_backwards_are_read_as_well(kernel):
    if kernel is not take_from_memory:
        pytest.skip("tensors have none")
    numbers = np.arange(300.0, dtype=np.float32).reshape(10, 30)
    form = format_of(torch.float32)
    found = fingerprints.fingerprint_array(numbers[::-1, ::-2], form)
    expected = fingerprints.fingerprint_array(np.ascontiguousarray(numbers[::-1, ::-2]), form)
    assert found.hash == expected.hash
    np.testing.assert_array_equal(found.sketch, expected.sketch)


# What hashes are for.


def flipped(tensor: torch.Tensor, bit: int, *places: int) -> torch.Tensor:
    """The float32 with one bit flipped at some places."""
    changed = tensor.clone()
    changed.view(torch.int32)[list(places)] ^= -(2**31) if bit == 31 else 1 << bit
    return changed


CHANGES = {
    "two elements swapped": lambda x: x[torch.tensor([0, 1, 2, 4, 3, *range(5, 4096)])],
    "transposed": lambda x: x.view(64, 64).t().reshape(-1),
    "rolled": lambda x: x.roll(1),
    "permuted": lambda x: x[torch.randperm(4096, generator=torch.Generator().manual_seed(1))],
    "rows swapped": lambda x: torch.cat([x[64:128], x[:64], x[128:]]),
    "negated": lambda x: -x,
    "one sign": lambda x: flipped(x, 31, 77),
    "two signs": lambda x: flipped(x, 31, 77, 78),
    "two last bits": lambda x: flipped(x, 0, 4000, 4001),
    "zero instead of negative zero": lambda x: x.masked_fill(x == 0, 0.0),
    "payload of a NaN": lambda x: flipped(x, 0, 101),
    "one element less": lambda x: x[:-1],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_hash_tells_of_a_change(kernel, change):
    for seed in range(5):
        tensor = torch.randn(4096, generator=torch.Generator().manual_seed(seed))
        tensor[100], tensor[101] = -0.0, math.nan
        assert kernel(tensor)[0] == kernel(tensor.clone())[0]
        assert kernel(tensor)[0] != kernel(change(tensor))[0]


def test_the_hash_tells_of_any_single_bit(kernel):
    tensor = torch.randn(200, generator=torch.Generator().manual_seed(0))
    changed = [kernel(flipped(tensor, bit, place))[0] for bit in range(32) for place in range(0, 200, 50)]
    assert len({kernel(tensor)[0], *changed}) == 1 + 32 * 4


# What taking them leaves alone.


def test_no_handler_of_the_users_hears_of_our_overflows(kernel):
    tensor = torch.full((2000,), 3e38)
    tensor[5] = math.inf
    halves = random_bits(0, 3000, torch.float16)
    with np.errstate(all="raise"):
        for each in (tensor, halves, tensor.t(), tensor.double() * 1e270, random_bits(1, 500, torch.int64)):
            kernel(each, 2**40 + 3)


def test_flushing_of_subnormal_numbers_is_the_users(kernel):
    if kernel is not take_from_memory or fingerprints.compiled is None:
        pytest.skip("numpy and torch flush with the user")
    tensor = torch.full((1000,), 1e-40)
    expected = kernel(tensor)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        found = kernel(tensor)
        assert (torch.full((1,), 1e-40) * 1.0).item() == 0  # still as the user wants it
    finally:
        torch.set_flush_denormal(False)
    assert found.hash == expected.hash
    np.testing.assert_array_equal(found.sketch, expected.sketch)


def test_no_mode_of_the_users_sees_an_op_and_nothing_is_written(kernel):
    if kernel is not take_from_memory:
        pytest.skip("on a device there is no other way")
    tensors = [
        torch.randn(300, 20).t(),
        torch.randn(3, dtype=torch.complex64),
        torch.arange(9),
        torch.randn(7).half(),
    ]
    before, generator = [tensor.clone() for tensor in tensors], torch.get_rng_state()
    with SeesOps() as mode:
        for tensor in tensors:
            fingerprints.fingerprint_array(logical_array(tensor), format_of(tensor.dtype))
    assert mode.seen == []
    assert torch.equal(torch.get_rng_state(), generator)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor, copy)
        assert tensor._version == 0


def test_threads_get_the_same_bits(kernel):
    tensors = [torch.randn(60_000 + size, generator=torch.Generator().manual_seed(size)) for size in range(8)]
    expected = [kernel(tensor) for tensor in tensors]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(kernel, tensors * 3))
    for (hashed, sketch), (right_hash, right_sketch) in zip(found, expected * 3, strict=True):
        assert hashed == right_hash
        np.testing.assert_array_equal(sketch, right_sketch)


def test_pieces_on_a_device_are_bounded(kernel, monkeypatch):
    if kernel in (take_from_memory,):
        pytest.skip("of the kernel for devices")
    monkeypatch.setattr(device_fingerprints, "_PIECE", 1000)
    for tensor in (
        torch.randn(70, 90),
        torch.randn(70, 90).t(),
        torch.randn(3, 5, 7, 11, dtype=torch.complex64),
    ):
        check(kernel, tensor, 2**18 - 5)
    check_blocks(kernel, torch.arange(6300.0).view(70, 90), [30, 41])
