"""When two runs of several ranks count as laid out otherwise: their missing and further ops are then the layout's."""

from types import SimpleNamespace
from typing import Any

import pytest

from modtrace.analysis.tables.meshes import _have_other_meshes
from modtrace.analysis.tables.ranks import RanksData

WHOLE, FIRST, SECOND = (None, None), ("mesh", "S(0)"), ("mesh", "S(1)")


class Run(RanksData):
    """A run of two ranks that divide the batch, with the layout of each parameter."""

    degree: Any = 2
    layout: Any = None
    meta: Any = SimpleNamespace(world_size=2)

    def __init__(self, **layout: Any) -> None:
        self.layout = layout


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (Run(up=FIRST, down=SECOND), Run(up=FIRST, down=SECOND), False),
        (Run(up=FIRST, down=SECOND), Run(up=SECOND, down=FIRST), True),
        (Run(up=FIRST), Run(up=FIRST, bias=WHOLE), False),  # a parameter more is a difference to tell
        (Run(up=FIRST), Run(up=WHOLE), True),
        (Run(up=FIRST), Run(other=WHOLE), True),
        (Run(up=FIRST), Run(other=FIRST), False),
        (Run(up=FIRST), Run(), False),
    ],
    ids=[
        "equal",
        "exchanged",
        "one more",
        "not sharded",
        "other names",
        "other names, same layout",
        "not measured",
    ],
)
def test_layouts_are_compared_parameter_by_parameter(a: Run, b: Run, expected: bool) -> None:
    assert (_have_other_meshes(a, b), _have_other_meshes(b, a)) == (expected, expected)
