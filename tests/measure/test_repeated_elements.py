"""Tensors that have far more elements than lie in memory: no measurement goes through all of them."""

import numpy as np
import pytest
import torch

from helpers import kernels
from helpers.float64_reference import measure, statistics
from modtrace.collect.values.whole_tensors import KeptTensors
from modtrace.measure import memory
from modtrace.measure.fingerprints import fingerprints
from modtrace.measure.measurers import measurer
from modtrace.measure.measurers.differences import Before
from modtrace.measure.measurers.extras import Extras
from modtrace.measure.measurers.user_functions import UserFunctions
from modtrace.measure.measurers.want import Extra, Want
from modtrace.measure.memory import too_many
from modtrace.measure.tier2 import tier2
from modtrace.torch_internals.modes import DisableTorchFunction, unseen

kernel = kernels.both_kernels((measurer, "measure_into"), (fingerprints, "compiled"), (tier2, "tier2_into"))


def numel(tensor: torch.Tensor) -> int:
    return tensor.numel()


EVERYTHING = Want(stats=2, channel_dim=0, hash=True, sketch=True, sample=3, functions=(numel,))


def expanded() -> torch.Tensor:
    return torch.tensor([[1.0], [-4.0], [0.0]]).expand(3, 1 << 40)


def overlapping() -> torch.Tensor:
    """Windows of 500,000 numbers, each one further on."""
    return torch.zeros(1_000_000).unfold(0, 500_000, 1)


def extras_of(tensor: torch.Tensor, want: Want = EVERYTHING) -> Extra:
    def raised(what, error):
        raise error

    extra = Extra()
    with DisableTorchFunction():
        Extras(UserFunctions(raised)).measure(tensor, want, extra)
    return extra


def test_an_expanded_tensor_has_statistics_of_all_its_elements():
    times = 2**40
    assert statistics(expanded()) == (3 * times, -4.0, 1.0, -3.0 * times, 17.0 * times, 0, 0)


def test_an_expanded_tensor_has_tier_2_of_all_its_elements_and_notes_in_place_of_hash_and_sketch():
    extra, times = extras_of(expanded()), 2**40
    assert (extra.sumabs, extra.zero_count, extra.sum4, extra.argmax) == (
        5 * times,
        times,
        257 * times,
        times,
    )
    assert {int(at): int(extra.histogram[at]) for at in np.flatnonzero(extra.histogram)} == {
        127: times,
        129: times,
    }
    assert extra.channel_max[0].tolist() == [1.0, 4.0, 0.0]
    assert extra.sample[3].tolist() == [1.0, -4.0, 0.0]
    assert (extra.hash, extra.sketch, extra.user) == (None, None, [])
    why = "3,298,534,883,328 elements that lie in memory as 3 are too many"
    assert [note.text for note in extra.notes] == [
        f"no hash: {why}", f"no sketch: {why}", f"function numel not called: {why}"
    ]  # fmt: skip


def test_overlapping_windows_have_a_row_that_says_why():
    found, why = (
        measure(overlapping()),
        "250,000,500,000 elements that lie in memory as 1,000,000 are too many",
    )
    assert (found.rows, found.note, found.shape) == (None, f"not measured: {why}", (500_001, 500_000))
    extra = extras_of(overlapping())
    assert (extra.histogram, extra.channel_max, extra.hash, extra.sketch) == (None, {}, None, None)
    assert extra.sample[3].tolist() == [0.0, 0.0, 0.0]
    assert [note.text for note in extra.notes][:2] == [f"no histogram: {why}", f"no channel_max: {why}"]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_a_conjugate_is_not_copied_to_be_measured(dtype):
    found = measure(torch.ones(1, dtype=dtype).expand(1 << 40).conj())
    why = "not measured: 1,099,511,627,776 elements that lie in memory as 1 are too many"
    assert (found.rows, found.note) == (None, why)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("make", [expanded, overlapping])
def test_no_copy_is_made_of_one(make, lazy):
    extra = Extra()
    kept = KeptTensors(lambda *args: pytest.fail("it was put"))
    with DisableTorchFunction():
        kept.keep(extra, make(), "x", lazy=lazy)
        kept.settle()
    assert extra.notes[0].text.startswith("not kept: ")
    assert "are too many" in extra.notes[0].text


@pytest.mark.parametrize("make", [expanded, overlapping])
def test_how_far_one_moves_is_not_measured(make):
    before = Before()
    with unseen(), torch.no_grad():
        before.take(make())
        found = before.difference(make(), keep=False)
    assert found.tensor is None
    assert found.note.endswith("are too many")


def test_up_to_the_bound_everything_is_measured(monkeypatch):
    monkeypatch.setattr(memory, "MOST_ELEMENTS", 96)
    x = torch.arange(6.0).view(6, 1)
    for size, is_measured in ((16, True), (17, False)):
        extra = extras_of(x.expand(6, size))
        assert (extra.hash is None, extra.sketch is None, len(extra.user)) == (
            (False, False, 1) if is_measured else (True, True, 0)
        )
    dense = extras_of(x.expand(6, 16).contiguous())
    same = extras_of(x.expand(6, 16))
    assert (same.hash, same.sketch.tolist()) == (dense.hash, dense.sketch.tolist())


@pytest.mark.parametrize(
    "times, why", [(16, None), (17, "2,281,701,376 elements that lie in memory as 134,217,728 are too many")]
)
def test_a_large_tensor_is_gone_through_if_each_element_is_there_16_times(times, why):
    x = torch.empty(2**27, device="meta").expand(times, -1)
    assert (too_many(x), too_many(x, once=True)) == (why, None)


def test_tensors_of_no_elements_and_of_one_size_that_is_0_are_not_too_many():
    x = torch.empty(0, 1, device="meta").expand(0, 1 << 60)
    assert too_many(x) is None
    assert statistics(torch.zeros(0, 1).expand(0, 1 << 60)).count == 0
