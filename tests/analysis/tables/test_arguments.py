"""In what the arguments of two runs of an op differ."""

from collections.abc import Callable

import pytest
import torch

import modtrace
from helpers.pairs import WHOLE
from modtrace.analysis.tables.arguments import compare_arguments


@pytest.mark.parametrize(
    ("args", "args_b", "ranks", "told"),
    [
        ('{"dim": 1}', '{"dim": -1}', (2, 2), ()),
        ('{"dim": 1}', '{"dim": -1}', (3, 3), ("dim 1 against -1",)),
        ('{"dim": 1}', '{"dim": -1}', None, ("dim 1 against -1",)),
        ('{"dim": [0, 1]}', '{"dim": [-2, 1]}', (2, 2), ()),
        ('{"dim0": 0, "dim1": 1}', '{"dim0": -2, "dim1": 1}', (2, 3), ("dim1 1 against 1",)),
        ('{"eps": 1e-05, "device": "cpu"}', '{"eps": 0.001}', (2, 2), ("eps 1e-05 against 0.001",)),
        ('{"other": 2}', "{}", (2, 2), ("other 2 against (default)",)),
        (None, "{}", (2, 2), ()),
    ],
)
def test_arguments_are_told_as_they_are_given(
    args: str | None, args_b: str, ranks: tuple[int, int] | None, told: tuple[str, ...]
) -> None:
    assert compare_arguments(args, args_b, ranks) == told


@pytest.mark.parametrize(("join", "axis"), [(torch.stack, 2), (torch.cat, 1)])
def test_axis_that_is_counted_from_the_end_is_no_other_argument(join: Callable, axis: int) -> None:
    model, runs = torch.nn.Identity(), []
    for is_wrong in (False, True):
        with modtrace.record(model, ops=True, values=WHOLE, strict=True) as rec:
            x = model(torch.linspace(-1, 1, 12).reshape(3, 4))
            parts = x.sin(), x.cos()
            join([parts[0], parts[not is_wrong]], -1 if is_wrong else axis)
        runs.append(rec)
    found = modtrace.compare(*runs, allow_missing=True)
    assert found.first is not None and found.first.op == f"aten.{join.__name__}.default", str(found)
    assert found.first.arguments == (), str(found)
