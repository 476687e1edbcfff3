"""Tensors of any content, made of what Hypothesis draws."""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)

#: Two powers of ten, the smaller one first: of what float32 holds, and of what is zero in it.
magnitudes = st.tuples(st.floats(-45, 38.5), st.floats(-45, 38.5)).map(sorted)
odd_numbers = st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0]), max_size=3)


def from_bytes(content: bytes, dtype: torch.dtype) -> torch.Tensor:
    """As many elements as the bytes hold; a bool may be any byte."""
    content = content[: len(content) - len(content) % dtype.itemsize]
    return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)


def from_valid_bytes(content: bytes, dtype: torch.dtype) -> torch.Tensor:
    """The same, with bools of 0 and 1."""
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    return from_bytes(content, dtype)


def random_bits(seed: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return from_valid_bytes(np.random.default_rng(seed).bytes(size * dtype.itemsize), dtype)


def of_magnitudes(
    seed: int, size: int, low: float, high: float, dtype: torch.dtype, odd: Sequence[float] = ()
) -> torch.Tensor:
    """Random signs, and magnitudes whose logarithm is uniform between those of two powers of ten.

    The odd numbers stand somewhere among them.
    """
    random = np.random.default_rng(seed)
    numbers = random.choice([-1.0, 1.0], size) * 10 ** random.uniform(low, high, size)
    tensor = torch.from_numpy(numbers).to(dtype)
    for place, value in enumerate(odd[:size]):
        tensor[(place * 7919 + seed) % size] = value
    return tensor
