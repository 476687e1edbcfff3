"""Healthy programs with NaN and infinities are accused of nothing, and the fault planted in each is named."""

import functools
from typing import Any

import pytest
import torch

import modtrace
from analysis.provenance.healthy_programs import PROGRAMS, Net, names_of

pytestmark = pytest.mark.filterwarnings("ignore:std.*degrees of freedom")  # of a group of one

_VIEW = "what an op in place left in a view is taken for all of the memory in the next step"
_HOOK = "what the outermost call returned is read before the hooks of the module itself have replaced it"
_SKIPPED = "gradients of steps that a GradScaler skips are told from others with ops alone"
_RETURNED = "without ops +inf in what a model returns is not known to be meant"

#: What is wrong today, by program and whether ops are recorded.
ACCUSED: dict[tuple[str, bool], str] = {
    ("distances", False): _RETURNED,
    ("hook that cleans", True): _HOOK,
    ("hook that cleans", False): _HOOK,
}
MISNAMED: dict[tuple[str, bool], str] = {
    **ACCUSED,
    ("cache", True): _VIEW,
    ("scaled gradients", False): _SKIPPED,
    ("kept table", True): _VIEW,
}


#: Programs that are recorded without ops in the usual tests, too: some of each kind. `make soak` runs the others.
WITHOUT_OPS = {*list(PROGRAMS)[::3], *(name for name, ops in MISNAMED if not ops)}


def cases(wrong: dict[tuple[str, bool], str]) -> list[Any]:
    return [
        pytest.param(
            name, ops, id=f"{name}-{'ops' if ops else 'modules'}",
            marks=[
                *([pytest.mark.xfail(strict=True, reason=wrong[name, ops])] if (name, ops) in wrong else []),
                *([] if ops or name in WITHOUT_OPS else [pytest.mark.soak]),
            ],
        )
        for name in PROGRAMS
        for ops in (True, False)
    ]  # fmt: skip


@functools.cache
def record(name: str, ops: bool, *, has_fault: bool) -> tuple[modtrace.Recording, bool]:
    """Returns the recording of a program, and whether it was stopped."""
    program = PROGRAMS[name]
    torch.manual_seed(0)
    model = program.make()
    try:
        with modtrace.record(model, strict=True, ops=ops, on_nonfinite="stop") as rec:
            program.train(program, model, has_fault)
    except modtrace.NonFiniteError:
        return rec, True
    return rec, False


@pytest.mark.parametrize(("name", "ops"), cases(ACCUSED))
def test_healthy_program_is_accused_of_nothing_and_runs_to_its_end(name: str, ops: bool) -> None:
    rec, is_stopped = record(name, ops, has_fault=False)
    assert (list(rec.nonfinite()), is_stopped) == ([], False)


@pytest.mark.parametrize(("name", "ops"), cases(MISNAMED))
def test_fault_in_a_program_that_means_such_values_is_named_and_without_ops_seen(
    name: str, ops: bool
) -> None:
    program, found = PROGRAMS[name], record(name, ops, has_fault=True)[0].first_nonfinite()
    assert found is not None
    if not ops:
        assert found.step >= program.step
        return
    assert names_of(found) & set(program.culprits)
    assert (found.step, found.phase) == (program.step, program.phase)


@pytest.mark.parametrize(("name", "ops"), cases({}))
def test_run_with_a_fault_is_stopped(name: str, ops: bool) -> None:
    assert record(name, ops, has_fault=True)[1]


def test_output_of_log_probabilities_is_no_fault_and_one_of_nan_is() -> None:
    for made, is_fault in ((0.0, False), (-1.0, True)):
        model = Net(lambda x, _, made=made: (x * 0 + made).log())
        with modtrace.record(model, ops=True) as rec, torch.no_grad():
            model(torch.randn(2, 8), False)
        assert (rec.first_nonfinite() is not None) == is_fault


@pytest.mark.parametrize("name", ["cache", "kept table"])
def test_no_op_is_said_to_make_what_a_dropped_step_may_have_left_in_memory(name: str) -> None:
    program = PROGRAMS[name]
    torch.manual_seed(0)
    model = program.make()
    with (
        pytest.raises(modtrace.NonFiniteError, match="first seen at mm"),
        modtrace.record(model, ops=True, on_nonfinite="stop"),
    ):
        program.train(program, model, True)
