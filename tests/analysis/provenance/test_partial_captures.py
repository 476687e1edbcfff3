"""Where ops were measured in some modules only, the others are searched by what their modules returned."""

import math

import pytest
import torch
from torch import nn

import modtrace
from helpers.nonfinite_models import Applied

MODULES = modtrace.Capture(roles=("output", "grad_output", "parameter", "parameter_grad"))


def ops_of(path: str) -> modtrace.Capture:
    return modtrace.Capture(include=[path, f"{path}.*"], roles=("op_output", "leaf", "parameter"))


def record_with(captures: list[modtrace.Capture], *functions: object) -> modtrace.Recording:
    """Returns the recording of a forward of layers with these functions behind them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Applied(function) for function in functions))  # type: ignore[arg-type]
    with modtrace.record(model, ops=True, values=captures) as rec:
        model(torch.randn(4, 8))
    return rec


def told(rec: modtrace.Recording) -> tuple[str | None, str | None, str | None] | None:
    found = rec.first_nonfinite()
    return None if found is None else (found.path, found.op, found.kind)


@pytest.mark.parametrize("measured", ["0", "2"], ids=["before it", "behind it"])
def test_module_whose_ops_nobody_measured_is_found_beside_one_whose_ops_were(measured: str) -> None:
    rec = record_with([MODULES, ops_of(measured)], torch.tanh, torch.log, torch.neg)
    assert told(rec) == ("1", None, None)


def test_op_that_comes_first_is_named_before_a_module_whose_ops_nobody_measured() -> None:
    rec = record_with([MODULES, ops_of("0")], torch.log, torch.log)
    assert told(rec) == ("0", "aten.log.default", "producer")


def test_module_of_which_some_ops_alone_were_measured_is_found() -> None:
    chosen = modtrace.Capture(roles=("op_output",), ops="aten.tanh.default")
    rec = record_with([MODULES, chosen], torch.tanh, lambda x: x.tanh().log())
    assert told(rec) == ("1", None, None)


def test_mask_of_a_followed_module_is_no_fault_where_the_module_around_it_returns_it_too() -> None:
    rec = record_with([MODULES, ops_of("1")], torch.tanh, lambda x: x.masked_fill(x > 0, -math.inf))
    assert told(rec) is None
    assert (rec.table("values")["inf_count"].to_numpy() > 0).any()
