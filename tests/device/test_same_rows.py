"""A recorded run on the simulated device has the bits of a plain one, and the rows of the same run on the CPU."""

from contextlib import nullcontext

import pytest
import torch

import modtrace
from device.canonical_rows import assert_alike, canonical_rows
from device.programs import PROGRAMS, Program, on
from device.simulated import IS_SKIPPED, WHY_MISSING, simulated

pytestmark = [pytest.mark.device, pytest.mark.skipif(IS_SKIPPED, reason=str(WHY_MISSING))]

OPTIONS = {
    "default": {},
    "backward times": {"backward_times": True},
    "ops": {"ops": True},
    "everything": {
        "ops": True,
        "values": modtrace.Capture(stats=2, hash=True, sketch=True, tensors=True),
        "backward_times": True,
    },
}


@pytest.fixture(autouse=True)
def no_violations():
    devices = simulated()
    yield
    assert devices.violations() == []


def outcome(program: Program, **options) -> "tuple[list[bytes], modtrace.Recording | None]":
    """Returns the bits of what a program leaves on the simulated device, and its recording if there are options."""
    is_recorded = options.pop("is_recorded", True)
    recording = modtrace.record(strict=True, **options) if is_recorded else None
    with on("sim"), recording or nullcontext():
        losses, model = program()
    tensors = [*losses, *model.state_dict().values()]
    tensors += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert {tensor.device.type for tensor in tensors} == {"sim"}
    raw = [tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for tensor in tensors]
    return [content.numpy().tobytes() for content in raw], recording


def check(name: str, options: dict) -> None:
    program = PROGRAMS[name]
    found, recording = outcome(program, **options)
    plain, _ = outcome(program, is_recorded=False)
    assert found == plain
    assert recording.meta.marks == ()
    with on("cpu"), modtrace.record(strict=True, **options) as on_cpu:
        _ = program()  # the model lives as long as in the other run, and so has rows of its parameters
    assert_alike(canonical_rows(recording), canonical_rows(on_cpu))
    assert recording.table("values").num_rows > 5


@pytest.mark.parametrize("options", ["default", "everything"])
def test_smallest_run_has_the_same_bits_and_rows(options):
    check("called twice", OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_run_has_the_same_bits_and_rows(name, options):
    check(name, OPTIONS[options])
