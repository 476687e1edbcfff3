"""The three ways to a hash and a sketch, under one name each, for laws that hold for all of them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from helpers import kernels
from modtrace.measure.dtypes import format_of
from modtrace.measure.fingerprints import device_fingerprints, fingerprints
from modtrace.measure.fingerprints.fingerprints import Shard
from modtrace.measure.memory import logical_array

#: Of a tensor at an offset, or of a block: the hash, and the sketch.
Take = Callable[..., tuple[int, np.ndarray]]

KERNELS = ["compiled", "numpy", "torch"]


def use_kernel(name: str, patch: pytest.MonkeyPatch) -> Take:
    """The function of one kernel; skips the test where it has not been built."""
    if name == "torch":
        return _take_with_torch
    kernels.use_kernel(name, patch, (fingerprints, "compiled"))
    return take


def take(tensor: torch.Tensor, offset: int = 0, shard: Shard | None = None) -> tuple[int, np.ndarray]:
    """In one pass, which must give what two give."""
    array, form = logical_array(tensor), format_of(tensor.dtype)
    both = fingerprints.fingerprint_array(array, form, offset, shard=shard)
    assert both.hash == fingerprints.fingerprint_array(array, None, offset, shard=shard).hash
    sketched = fingerprints.fingerprint_array(array, form, offset, shard=shard, is_hashed=False)
    np.testing.assert_array_equal(both.sketch, sketched.sketch)
    return both


def _take_with_torch(
    tensor: torch.Tensor, offset: int = 0, shard: Shard | None = None
) -> tuple[int, np.ndarray]:
    hashed = device_fingerprints.hash_on_device(tensor, offset, shard=shard)
    sketch = device_fingerprints.sketch_on_device(tensor, offset, shard=shard)
    assert (hashed.dtype, hashed.shape, sketch.dtype) == (torch.int64, (), torch.float64)
    return int(hashed) % 2**64, sketch.numpy()
