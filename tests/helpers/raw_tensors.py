"""Raw elements of random tensors, as a collector gives them to a sink."""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from modtrace.recording.protocols import Sink

#: The numpy dtype that a collector gives for each dtype of torch, and how many parts an element has there.
RAW_FORMATS: dict[str, tuple[str, int]] = {
    **{
        name: (name, 1)
        for name in (
            *("float64", "float32", "float16", "complex128", "bool", "int64", "int32", "int16", "int8"),
            *("uint64", "uint32", "uint16", "uint8"),
        )
    },
    "bfloat16": ("uint16", 1),
    "float8_e4m3fn": ("uint8", 1),
    "float8_e5m2": ("uint8", 1),
    "float8_e8m0fnu": ("uint8", 1),
    "float4_e2m1fn_x2": ("uint8", 1),
    "complex64": ("float32", 2),
    "complex32": ("uint16", 2),
    "a_dtype_of_the_future": ("uint16", 1),
}


class Given(NamedTuple):
    """A tensor as it is put, and its bytes in row-major order."""

    name: str
    array: npt.NDArray[Any]
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def put(self, sink: Sink, step: int | None = None) -> str | None:
        return sink.put_tensor(self.name, self.array, self.dtype, self.shape, step=step)


def given_tensor(name: str, dtype: str, shape: tuple[int, ...], *, seed: int = 0, order: int = 0) -> Given:
    """Random bits; the `order` says which strides they have: 0 is contiguous."""
    raw, parts = RAW_FORMATS[dtype]
    whole = (*shape, parts) if parts > 1 else shape
    size_bytes = math.prod(whole) * np.dtype(raw).itemsize
    data = (
        np.random.default_rng(seed).integers(0, 2 if raw == "bool" else 256, size_bytes, np.uint8).tobytes()
    )
    array = np.frombuffer(data, raw).reshape(whole)
    return Given(name, _strided(array, order), dtype, shape, data)


def _strided(array: npt.NDArray[Any], order: int) -> npt.NDArray[Any]:
    """The same elements in other strides."""
    if order == 1:
        return np.asfortranarray(array)
    if order == 2 and array.ndim:
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1] + 1), array.dtype)[..., 1::2]
        wide[...] = array
        return wide
    if order == 3 and array.ndim:
        return np.ascontiguousarray(array[::-1])[::-1]
    return array


def given_tensors() -> st.SearchStrategy[Given]:
    """Tensors of any dtype, shape and strides."""
    return st.builds(
        given_tensor,
        st.text(max_size=12),
        st.sampled_from(sorted(RAW_FORMATS)),
        st.lists(st.integers(0, 7), max_size=4).map(tuple),
        seed=st.integers(0, 1000),
        order=st.integers(0, 3),
    )
