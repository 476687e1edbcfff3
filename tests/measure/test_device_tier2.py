"""Tier 2 on devices, on tensors of the CPU in place of a device's: the same as in memory."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.any_numbers import from_valid_bytes
from helpers.devices import Devices, no_waiting
from helpers.dtypes import DEVICE_DTYPES as DTYPES
from helpers.float64_reference import to_numbers
from helpers.layouts import LAYOUTS, laid_out
from helpers.tier2_reference import tier2_of
from modtrace.measure.dtypes import format_of
from modtrace.measure.memory import logical_array
from modtrace.measure.tier2 import device_tier2
from modtrace.measure.tier2.device_tier2 import channel_max_on_device, sample_on_device, tier2_on_device
from modtrace.measure.tier2.tier2 import channel_max_array, sample_array, tier2_array


@pytest.fixture(scope="module", params=[2**22, 100], ids=["one chunk", "chunks of 100"])
def chunk(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_tier2, "_CHUNK", request.param)
        yield request.param


@settings(deadline=None, max_examples=60)
@given(st.binary(min_size=16, max_size=2000), st.sampled_from(DTYPES))
def test_tier2_of_any_bits_is_the_reference(chunk, content, dtype):
    tensor = from_valid_bytes(content[: len(content) // 16 * 16], dtype)
    found, expected = tier2_on_device(tensor), tier2_of(to_numbers(tensor))
    assert found.zero_count.item() == expected["zero_count"]
    assert found.argmax.item() == expected["argmax"] // (2 if dtype.is_complex else 1)
    assert found.histogram.tolist() == expected["histogram"]
    for ours, theirs in ((found.sumabs, expected["sumabs"]), (found.sum4, expected["sum4"])):
        np.testing.assert_allclose(ours.item(), theirs, rtol=1e-12, atol=tensor.numel() * 2.0**-1073)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.uint8], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_of_tier_2_is_what_it_is_in_memory(chunk, layout, dtype):
    tensor = laid_out(layout, dtype)
    array, form = logical_array(tensor), format_of(dtype)
    for ours, theirs in zip(tier2_on_device(tensor), tier2_array(array, form), strict=True):
        if theirs is None:
            assert ours is None
        else:
            np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-12)
    for dim in (-1, 0, 1, 2):
        ours, theirs = channel_max_on_device(tensor, dim), channel_max_array(array, form, dim)
        assert isinstance(ours, str) == isinstance(theirs, str)
        assert isinstance(ours, str) or ours.dtype == torch.float32
        np.testing.assert_array_equal(np.asarray(ours), theirs)
    for k in (3, 1000):
        sample = sample_on_device(tensor, k)
        assert sample.dtype == torch.float32
        np.testing.assert_array_equal(sample.numpy(), sample_array(array, form, k))


def test_an_expanded_tensor_is_not_copied_in_full():
    found = tier2_on_device(torch.tensor([1.0, 0.0, -3.0]).expand(2**25, 2**24, 3))
    assert (found.sumabs.item(), found.zero_count.item(), found.argmax.item()) == (2**51, 2**49, 2)


def test_counting_is_allowed_where_ops_have_to_be_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        assert tier2_on_device(torch.ones(1000)).histogram[127].item() == 1000
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_waits_for_the_device(chunk, dtype):
    tensors = [torch.ones(5, 3, dtype=dtype), torch.ones(1, 3, dtype=dtype).expand(400, 3).t()]
    with no_waiting():
        found = [
            (tier2_on_device(each), channel_max_on_device(each, -1), sample_on_device(each, 2))
            for each in tensors
        ]
    assert [each[0].histogram[127].item() for each in found] == [15, 1200]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_no_tensor_of_another_device_takes_part(chunk, dtype):
    """A copy from the host would wait, too; and what would have to be read fails on meta."""
    ones = torch.ones(250, dtype=dtype, device="meta")
    for tensor in (ones, ones[:0], ones[:1].expand(4), ones.view(10, 25)[:, ::2], ones[0]):
        with Devices() as devices:
            tier2_on_device(tensor)
            channel_max_on_device(tensor, -1)
            sample_on_device(tensor, 3)
        assert devices.types <= {"meta"}
