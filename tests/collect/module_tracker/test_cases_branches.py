"""Small models in which PyTorch's trackers were tried: what they say of them, and what ours says of additions.

Whatever else ours says of these models is right in test_tracker_architectures.py.
"""

import pytest

from helpers.small_models import SMALL, loss_in
from helpers.tracker_case_models import MARKS, WEIGHT_GRADIENT, x
from helpers.tracker_cases import BOTH, MODULE_TRACKER, ours, theirs

pytestmark = MARKS

#: Of the ops of a name in a phase the modules around, as PyTorch's ModuleTracker says, and ModTracker if otherwise.
PYTORCHS_ANSWERS = {
    "branches": ("backward mm", ["M M.b M.b.0", "M M.a M.a.0 M.b M.b.0"]),
    "residual": ("backward add", ["M M.block M.block.l"]),
    "inner output in the loss": ("backward mm", ["M.b", "M.b", "M M.a"], ["M M.b", "M M.b", "M M.a"]),
    "input given back": ("backward mm", ["M M.b", "M M.b", "M M.a M.i"]),
    "module that calls itself": ("forward neg", ["M", ""], ["M", "M"]),
    "dataclass returned": ("backward neg", ["M"]),
    "ModelOutput returned": ("backward neg", ["M"]),
    "called by keyword": ("backward mm", ["M M.i M.i.l", "M M.i M.i.l", "M M.i M.j"]),
    "dataclass given": ("backward mm", ["M M.i M.i.l", "M M.i M.i.l", "M M.i M.j"]),
    "reentrant checkpoint": (
        "backward mm",
        ["M M.i M.i.a", "M M.i M.i.b", "M", "M", "M M.i.a", "M M.i.a", "M M.a"],
        ["M M.i M.i.a", "M M.i M.i.b", "M", "M", "M", "M", "M M.a"],
    ),
}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", PYTORCHS_ANSWERS)
def test_pytorchs_trackers_are_wrong_or_miss_modules_in(name, kind):
    """c02b, c05, c06, c06b, c06c, c07, c07b, c08b, c10, d02"""
    model = SMALL[name]()
    with theirs(kind) as ops:
        loss_in(model(x())).backward()
    asked_for, *expected = PYTORCHS_ANSWERS[name]
    phase, op = asked_for.split()
    found = [each.replace(type(model).__name__, "M") for each in ops.at(op, phase)]
    assert found == expected[0 if kind is MODULE_TRACKER else -1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (  # added by the block
            "residual",
            [
                ("backward", "Residual > Residual.block > Residual.block.l", "t mm t t mm"),
                ("backward", "Residual > Residual.block +", "add"),
                ("backward", "Residual > Residual.block > Residual.block.l", "t"),
            ],
        ),
        (  # of one weight
            "module called twice",
            [
                ("backward", "CallsTwice > CallsTwice.a", WEIGHT_GRADIENT),
                ("backward", "CallsTwice +", "add"),
                ("backward", "CallsTwice > CallsTwice.a -> a.weight", "detach"),
            ],
        ),
        (  # outside, where the loss is
            "inner output in the loss",
            [
                ("backward", "GivesInnerOutput > GivesInnerOutput.b", "t mm t t mm"),
                ("backward", "+", "add"),
                ("backward", "GivesInnerOutput > GivesInnerOutput.b", "t"),
            ],
        ),
    ],
)
def test_gradients_that_meet_are_added_by_the_innermost_module_around_all_of_them(name, expected):
    """c02, c07b, c08b"""
    model = SMALL[name]()
    with ours(additions=True) as ops:
        loss_in(model(x())).backward()
        lines = ops.lines
    at = next(at for at, (_, said, _) in enumerate(lines) if said.endswith("+"))
    assert lines[at - 1 : at + 2] == expected
    assert sum(said.endswith("+") for _, said, _ in lines) == 1
