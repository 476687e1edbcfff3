"""Modules that repeat are one row, which says what theirs say together."""

import pytest
import torch
from torch import nn

import modtrace
from modtrace.analysis.ops.alike import find_alike
from modtrace.analysis.ops.memory_table import build_memory_table
from modtrace.analysis.ops.op_table import build_op_table
from modtrace.recording.protocols import RecordingData
from zoo import TiedGPT


class Mixed(nn.Module):
    """Two wide layers among narrow ones, which are no block of equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 8), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def record_steps(model: nn.Module, x: torch.Tensor, steps: int = 6) -> modtrace.Recording:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, ops=True, strict=True) as rec:
        for _ in range(steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return rec


MODELS = {
    "gpt": (lambda: TiedGPT(layers=6), torch.zeros(2, 8, dtype=torch.long)),
    "mixed": (Mixed, torch.ones(2, 4)),
}


@pytest.fixture(scope="module", params=MODELS)
def data(request: pytest.FixtureRequest) -> RecordingData:
    make, x = MODELS[request.param]
    return record_steps(make(), x).data


@pytest.mark.parametrize("step", [None, 3], ids=["medians", "one step"])
def test_rows_that_are_folded_stand_for_all_that_they_name(data: RecordingData, step: int | None) -> None:
    for by in ("module", "call"):
        plain = build_op_table(data, step=step, by=by)
        folded = build_op_table(data, step=step, by=by, fold=True)
        assert sum(row.count for row in folded.rows) == len(plain.rows) > len(folded.rows)
        assert folded.sums == plain.sums
        assert sum(row.sums.together.ops for row in folded.rows) == folded.sums.together.ops
        if step is not None:
            times = [sum(row.sums.together.time_ns for row in table.rows) for table in (plain, folded)]
            assert times[0] == times[1] == folded.sums.together.time_ns
    plain, folded = (build_memory_table(data, step=step, ops=True, fold=fold) for fold in (False, True))
    assert sum(row.count for row in folded.rows) == len(plain.rows) > len(folded.rows)
    for table in (plain, folded):
        assert sum(row.saved.saved_bytes for row in table.rows) == table.saved.saved_bytes
    assert folded.saved == plain.saved


def test_layers_of_other_sizes_are_not_folded() -> None:
    table = build_op_table(record_steps(*(MODELS["mixed"][0](), MODELS["mixed"][1])).data, fold=True)
    counts = {row.name: row.count for row in table.rows if row.path and "." in row.path}
    # The first one's input needs no gradient.
    assert counts == {"layers.0": 1, "layers.1..2": 2, "layers.3": 1, "layers.4": 1}


def test_only_paths_that_count_up_in_one_root_and_are_alike_are_one() -> None:
    places = [
        ("A", "h.0"),
        ("A", "h.1"),
        ("B", "h.2"),
        (None, None),
        (None, None),
        ("A", "h.4"),
        ("A", "h.3"),
    ]
    likes = [1, 1, 1, 1, 1, 2, 2]
    assert list(find_alike(places, likes)) == [
        ("h.0..1", [0, 1]),
        ("h.2", [2]),
        (None, [3]),
        (None, [4]),
        ("h.3..4", [5, 6]),
    ]
    assert list(find_alike([("A", "h.0"), ("A", "h.2")], [1, 1])) == [("h.0", [0]), ("h.2", [1])]
