"""A whole tensor comes back as an array or a tensor with exactly its bits."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from helpers.raw_tensors import Given, given_tensor, given_tensors
from modtrace.recording.raw_tensor import RawTensor, copy_raw, to_torch_if_there


def raw_of(each: Given) -> RawTensor:
    return RawTensor(dtype=each.dtype, shape=each.shape, data=memoryview(each.data))


@settings(max_examples=100, deadline=None)
@given(each=given_tensors())
def test_copy_is_in_row_major_order_whatever_the_strides(each: Given) -> None:
    target = np.full(len(each.data) + 3, 7, np.uint8)
    copy_raw(each.array, target[3:])  # not aligned
    assert target.tobytes() == b"\x07\x07\x07" + each.data


@settings(max_examples=100, deadline=None)
@given(each=given_tensors())
def test_array_has_the_bits(each: Given) -> None:
    array = raw_of(each).to_numpy()
    assert array.tobytes() == each.data
    assert array.shape[: len(each.shape)] == each.shape


DTYPES = ["float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool"]
DTYPES += ["int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "float8_e4m3fn"]
DTYPES += ["float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"]


@pytest.mark.parametrize("shape", [(), (3, 5), (0,), (2, 0, 4), (1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_has_the_bits(dtype: str, shape: tuple[int, ...]) -> None:
    each = given_tensor("t", dtype, shape, seed=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        tensor = raw_of(each).to_torch()
    assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, dtype), shape)
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    assert flat.numpy().tobytes() == each.data
    assert tensor.is_contiguous()
    assert tensor.requires_grad is False


def test_tensor_is_the_users_own() -> None:
    each = given_tensor("t", "float32", (3,))
    raw = raw_of(each)
    raw.to_torch().fill_(1)
    assert bytes(raw.data) == each.data


@pytest.mark.parametrize("shape", [(3,), (0,)])
def test_tensor_is_in_memory_whatever_the_users_device_is(shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        tensor = raw_of(given_tensor("t", "float32", shape)).to_torch()
    assert (tensor.device.type, tuple(tensor.shape)) == ("cpu", shape)


def test_word_of_torch_that_is_no_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match=r"has no dtype 'nn'\. Use to_numpy\(\)"):
        RawTensor(dtype="nn", shape=(3,), data=memoryview(b"abc")).to_torch()


def test_what_numpy_lacks_comes_as_its_bits() -> None:
    ones = torch.ones(2)
    for dtype, bits in ((torch.bfloat16, [0x3F80] * 2), (torch.float8_e4m3fn, [0x38] * 2)):
        data = ones.to(dtype).view(torch.uint8).numpy().tobytes()
        array = RawTensor(dtype=str(dtype)[6:], shape=(2,), data=memoryview(data)).to_numpy()
        assert array.tolist() == bits
        assert array.dtype.kind == "u"


def test_dtype_that_torch_lacks_is_an_error_that_says_so() -> None:
    raw = raw_of(given_tensor("t", "a_dtype_of_the_future", (3,)))
    with pytest.raises(TypeError, match=r"has no dtype 'a_dtype_of_the_future'. Use to_numpy\(\)"):
        raw.to_torch()
    assert raw.to_numpy().shape == (3, 2)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from modtrace.recording.raw_tensor import RawTensor, to_torch_if_there
raw = RawTensor(dtype="bfloat16", shape=(2,), data=memoryview(b"\\x80\\x3f\\x80\\x3f"))
assert to_torch_if_there(raw) is raw
print(raw.dtype, raw.to_numpy().tolist())
"""


def test_without_torch_the_bits_come_with_the_name_of_their_dtype() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    assert done.stdout == "bfloat16 [16256, 16256]\n"


def test_with_torch_a_tensor_comes() -> None:
    raw = raw_of(given_tensor("t", "int64", (3,)))
    assert to_torch_if_there(raw).tolist() == raw.to_numpy().tolist()
