"""Golden values: what hashes and sketches are, for ever. A change here makes every recording there is incomparable.

They were computed once by the plain Python of helpers/fingerprint_reference.py. Everything here is exact: the numbers
are small multiples of a power of two.
"""

import numpy as np
import pytest
import torch

from helpers import fingerprint_reference as reference
from helpers.fingerprint_kernels import KERNELS, use_kernel
from helpers.float64_reference import to_numbers
from modtrace.recording.statistics import fingerprints

FIVE = [1.0, -2.0, 0.5, 3.0, -0.25]
FIVE_INTEGERS = [1, -2, 127, -128, 5]

TENSORS = {
    "float32": lambda: torch.tensor(FIVE),
    "float64": lambda: torch.tensor(FIVE, dtype=torch.float64),
    "bfloat16": lambda: torch.tensor(FIVE, dtype=torch.bfloat16),
    "float16": lambda: torch.tensor(FIVE, dtype=torch.float16),
    "float8_e4m3fn": lambda: torch.tensor(FIVE).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda: torch.tensor(FIVE).to(torch.float8_e5m2),
    "int8": lambda: torch.tensor(FIVE_INTEGERS, dtype=torch.int8),
    "uint8": lambda: torch.tensor([1, 2, 127, 255, 5], dtype=torch.uint8),
    "int16": lambda: torch.tensor(FIVE_INTEGERS, dtype=torch.int16),
    "int32": lambda: torch.tensor(FIVE_INTEGERS, dtype=torch.int32),
    "int64": lambda: torch.tensor([1, -2, 127, -(2**40), 5]),
    "bool": lambda: torch.tensor([True, False, True, True, False]),
    "complex64": lambda: torch.tensor([1 - 2j, 0.5 + 3j]),
}

#: (tensor, offset): hash, and the buckets of the sketch that are not 0.
GOLDEN = {
    ("float32", 0): (0x1D88A0C9CFC00000, {24: 1, 25: 2, 26: -0.5, 27: 3, 28: 0.25}),
    ("float32", 1): (0xF74C586455C00000, {25: -1, 26: 2, 27: 0.5, 28: -3, 29: 0.25}),
    ("float32", 262142): (0xC4A33D182BC00000, {28: 3, 29: 0.5, 31: -0.25, 58: 1, 59: -2}),
    ("float64", 0): (0x2D859BC7F5880000, {24: 1, 25: 2, 26: -0.5, 27: 3, 28: 0.25}),
    ("float64", 1): (0x7A1AFF4997280000, {25: -1, 26: 2, 27: 0.5, 28: -3, 29: 0.25}),
    ("float64", 262142): (0x32140E5B7A880000, {28: 3, 29: 0.5, 31: -0.25, 58: 1, 59: -2}),
    ("bfloat16", 0): (0x4E4E7D3D78375500, {24: 1, 25: 2, 26: -0.5, 27: 3, 28: 0.25}),
    ("bfloat16", 1): (0xD69F28CA40592E40, {25: -1, 26: 2, 27: 0.5, 28: -3, 29: 0.25}),
    ("bfloat16", 262142): (0x730CFA953396D000, {28: 3, 29: 0.5, 31: -0.25, 58: 1, 59: -2}),
    ("float16", 0): (0xE9446CB76A8E6800, {24: 1, 25: 2, 26: -0.5, 27: 3, 28: 0.25}),
    ("float16", 1): (0xA952BA699D26F200, {25: -1, 26: 2, 27: 0.5, 28: -3, 29: 0.25}),
    ("float16", 262142): (0x3F1AE23953AEC000, {28: 3, 29: 0.5, 31: -0.25, 58: 1, 59: -2}),
    ("float8_e4m3fn", 0): (0xC28539E7782ECEB0, {24: 1, 25: 2, 26: -0.5, 27: 3, 28: 0.25}),
    ("float8_e4m3fn", 1): (0x6D6E0A301310D8FC, {25: -1, 26: 2, 27: 0.5, 28: -3, 29: 0.25}),
    ("float8_e4m3fn", 262142): (0xCF887CA98C9FC4F0, {28: 3, 29: 0.5, 31: -0.25, 58: 1, 59: -2}),
    ("float8_e5m2", 0): (0x07FAE04909F60698, {24: 1, 25: 2, 26: -0.5, 27: 3, 28: 0.25}),
    ("float8_e5m2", 1): (0xD4B888DA8FCE565E, {25: -1, 26: 2, 27: 0.5, 28: -3, 29: 0.25}),
    ("float8_e5m2", 262142): (0xC181258AFC022318, {28: 3, 29: 0.5, 31: -0.25, 58: 1, 59: -2}),
    ("int8", 0): (0xB0F499429F761E98, {24: 1, 25: 2, 26: -127, 27: -128, 28: -5}),
    ("int8", 1): (0xABC0097214B93F80, {25: -1, 26: 2, 27: 127, 28: 128, 29: -5}),
    ("int8", 262142): (0xA3296E7955F6757B, {28: -128, 29: 127, 31: 5, 58: 1, 59: -2}),
    ("uint8", 0): (0x97EC257765215298, {24: 1, 25: -2, 26: -127, 27: 255, 28: -5}),
    ("uint8", 1): (0xB3170696B94AB1B1, {25: -1, 26: -2, 27: 127, 28: -255, 29: -5}),
    ("uint8", 262142): (0x9BB5E10BE9EBF07B, {28: 255, 29: 127, 31: 5, 58: 1, 59: 2}),
    ("int16", 0): (0xDB9CF4A3E36D59DB, {24: 1, 25: 2, 26: -127, 27: -128, 28: -5}),
    ("int16", 1): (0xD1F47CFD5C0938E2, {25: -1, 26: 2, 27: 127, 28: 128, 29: -5}),
    ("int16", 262142): (0x412D18BFDB2BDB75, {28: -128, 29: 127, 31: 5, 58: 1, 59: -2}),
    ("int32", 0): (0x83E2A6A590BBD7ED, {24: 1, 25: 2, 26: -127, 27: -128, 28: -5}),
    ("int32", 1): (0x8E4B14D90B63D149, {25: -1, 26: 2, 27: 127, 28: 128, 29: -5}),
    ("int32", 262142): (0xCE0879B9EA980AB1, {28: -128, 29: 127, 31: 5, 58: 1, 59: -2}),
    ("int64", 0): (0x4FEEC30165ABFA1A, {24: 1, 25: 2, 26: -127, 27: -1099511627776, 28: -5}),
    ("int64", 1): (0x4E0EB11D51EA01E4, {25: -1, 26: 2, 27: 127, 28: 1099511627776, 29: -5}),
    ("int64", 262142): (0xD2958164305F229E, {28: -1099511627776, 29: 127, 31: 5, 58: 1, 59: -2}),
    ("bool", 0): (0x25349C3B5A2D2E0D, {24: 1, 26: -1, 27: 1}),
    ("bool", 1): (0xBBCA2CCDD26B424F, {25: -1, 27: 1, 28: -1}),
    ("bool", 262142): (0x3302C7481D9E9205, {28: 1, 29: 1, 58: 1}),
    ("complex64", 0): (0x779F8CA9A0400000, {24: 1, 25: 2, 26: -0.5, 27: 3}),
    ("complex64", 1): (0xB98D5B755C400000, {25: -1, 26: 2, 27: 0.5, 28: -3}),
    ("complex64", 262142): (0x5D50C649F5400000, {28: 3, 29: 0.5, 58: 1, 59: -2}),
}

#: Of 1,000 float32, `arange(1000) % 17 - 8`, by offset: the second lies across the end of a chunk.
THOUSAND = {
    0: (
        0x6BBDF21CF5600000,
        "-27 6 -24 -3 -11 7 39 -32 28 8 -22 21 8 25 -6 -18 "
        "27 -25 -5 4 31 1 45 -20 7 14 31 -27 12 -16 10 11 "
        "-17 6 9 -10 0 -34 -25 19 0 14 -19 9 -14 2 42 -18 "
        "2 5 14 4 -26 13 -18 12 -36 12 13 23 0 10 0 -12",
    ),
    261644: (
        0x91E9CAC2AAE00000,
        "33 -25 -24 -32 -5 24 26 9 15 -9 -4 15 15 11 -21 21 "
        "-13 54 -10 -2 -16 41 21 -3 12 32 58 -16 -19 -1 -2 39 "
        "32 -26 -14 14 3 -3 18 -5 -15 -39 7 16 -16 -11 -19 20 "
        "3 -55 7 -38 22 8 10 -1 -5 25 -18 8 -14 -39 3 -15",
    ),
}

#: Of a place in the flat tensor: its bucket and its sign.
BUCKETS = {
    0: (24, 1),
    1: (25, -1),
    63: (39, 1),
    64: (63, -1),
    4_095: (11, 1),
    262_143: (59, 1),
    262_144: (29, 1),
    5_000_000: (57, -1),
    8_589_934_597: (31, 1),
}

#: Of the place of a word.
WEIGHTS = {
    0: 0xDB285CED1F202E0D,
    1: 0xA64E1F80A53D354F,
    2: 0x652CC3F3294EBEB9,
    65_535: 0x7E68DA1E711F0A13,
    65_536: 0xB6A2421414FE8D05,
    2_147_483_655: 0xA893596F525245F5,
}


def content_of(tensor):
    """The bytes of its elements, in row-major order."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("name", "offset"), GOLDEN)
@pytest.mark.parametrize("kernel", KERNELS)
def test_five_elements_have_this_hash_and_this_sketch(kernel, name, offset, monkeypatch):
    take = use_kernel(kernel, monkeypatch)
    expected, buckets = GOLDEN[name, offset]
    hashed, sketch = take(TENSORS[name](), offset)
    assert f"{hashed:016X}" == f"{expected:016X}"
    assert {at: float(value) for at, value in enumerate(sketch) if value} == buckets


@pytest.mark.parametrize("offset", THOUSAND)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_thousand_elements_have_this_hash_and_this_sketch(kernel, offset, monkeypatch):
    take = use_kernel(kernel, monkeypatch)
    hashed, sketch = take(torch.arange(1000.0) % 17 - 8, offset)
    expected, buckets = THOUSAND[offset]
    assert f"{hashed:016X}" == f"{expected:016X}"
    assert sketch.tolist() == [int(number) for number in buckets.split()]


@pytest.mark.parametrize(("name", "offset"), GOLDEN)
def test_golden_values_are_those_of_plain_python(name, offset):
    tensor = TENSORS[name]()
    item_size = tensor.element_size() // (2 if tensor.is_complex() else 1)
    sketch = reference.sketch_of(to_numbers(tensor).tolist(), offset)
    found = reference.hash_of(content_of(tensor), offset * item_size)
    assert (found, {at: value for at, value in enumerate(sketch) if value}) == GOLDEN[name, offset]


@pytest.mark.parametrize("offset", THOUSAND)
def test_golden_values_of_a_thousand_are_those_of_plain_python(offset):
    tensor = torch.arange(1000.0) % 17 - 8
    expected, buckets = THOUSAND[offset]
    assert reference.hash_of(content_of(tensor), 4 * offset) == expected
    assert reference.sketch_of(tensor.tolist(), offset) == [int(number) for number in buckets.split()]


def test_places_have_these_buckets_and_signs():
    buckets, signs = fingerprints.bucket_and_sign(list(BUCKETS))
    assert dict(zip(BUCKETS, zip(buckets.tolist(), signs.tolist(), strict=True), strict=True)) == BUCKETS
    assert {place: reference.bucket_and_sign(place) for place in BUCKETS} == BUCKETS


def test_words_have_these_weights():
    assert dict(zip(WEIGHTS, fingerprints.hash_weight(list(WEIGHTS)).tolist(), strict=True)) == WEIGHTS
    assert {word: reference.weight(word) for word in WEIGHTS} == WEIGHTS


def test_the_definition_is_that_of_plain_python_in_all_blocks_of_two_chunks():
    places = np.arange(0, 2 * fingerprints.CHUNK, 61)
    buckets, signs = fingerprints.bucket_and_sign(places)
    expected = [reference.bucket_and_sign(place) for place in places.tolist()]
    assert list(zip(buckets.tolist(), signs.tolist(), strict=True)) == expected


def test_weights_are_those_of_plain_python_in_the_first_rows_of_words():
    words = np.arange(0, 3 * fingerprints.WORDS, 97)
    assert fingerprints.hash_weight(words).tolist() == [reference.weight(word) for word in words.tolist()]
