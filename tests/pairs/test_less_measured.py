"""Sketches and statistics name the same first site as whole tensors do, or say that they cannot tell."""

from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn

import modtrace
from helpers.all_pairs import TABLE, compare, first_of, noise_of, second_of
from helpers.pairs import GPT, Run, record, seeded, train
from modtrace.analysis.divergence.answer import Comparison, Divergence
from modtrace.recording.protocols import RecordingData
from modtrace.recording.statistics.fingerprints import SKETCH_FLOOR

pytest.importorskip("transformers")

#: What is left of a recording with everything, and what is hidden for that.
LESS = {"sketches": ("blob", "hash"), "statistics": ("blob", "hash", "sketch")}

#: Pairs of each kind: dtypes, names, recomputes, wholes and their parts, no ops, training, an optimizer, noise that was
#: measured, a port; the others run with `make soak`.
SAMPLE = {
    "sketches": (
        "float32 and bfloat16",
        "GPT-2, gelu",
        "checkpoints that lose the RNG's state",
        "fused projection",
        "compiled blocks, by modules",
        "accumulation of means",
        "copied AdamW",
        "head in float32",
        "training script, learning rate",
        "ResNet in another order, momentum",
    ),
    "statistics": ("U-Net in another order, order of the skip", "GPT-2, transposed", "fused projection"),
}

#: Channels change places, and statistics see that where groups of them are normalized.
UNSEEN = "U-Net in another order, order of the skip"


class Hidden:
    """A recording whose values lack some columns."""

    def __init__(self, data: RecordingData, columns: tuple[str, ...]) -> None:
        self._data = data
        values = data.table("values")
        for name in columns:
            at = values.schema.get_field_index(name)
            values = values.set_column(
                at, values.schema.field(name), pa.nulls(len(values), values.schema.types[at])
            )
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def table(self, name: str) -> pa.Table:
        return self._values if name == "values" else self._data.table(name)


def hide(rec: modtrace.Recording, left: str) -> modtrace.Recording:
    return modtrace.Recording(Hidden(rec.data, LESS[left]))


@pytest.mark.parametrize(
    ("name", "left"),
    [
        pytest.param(name, left, marks=[] if name in SAMPLE[left] else pytest.mark.soak)
        for name in TABLE
        for left in LESS
    ],
)
def test_first_site_is_that_of_whole_tensors(name: str, left: str) -> None:
    whole = compare(name, is_planted=True).first
    answer = modtrace.compare(
        hide(first_of(name), left),
        hide(second_of(name, is_planted=True), left),
        noise=[hide(each, left) for each in noise_of(name)],
        **TABLE[name].options,
    )
    found = answer.first
    assert whole is not None
    assert found is not None
    if left == "statistics" and name == UNSEEN:
        assert "elements that changed places before it" in str(answer)
        return
    truth = TABLE[name].truth
    assert place_of(found) == place_of(whole) or (truth.also and found.path in (truth.path, *truth.also))
    assert found.op == whole.op or None in (found.op, whole.op) or truth.also


def place_of(found: Divergence) -> tuple[Any, ...]:
    """Where it is; of the parts of a whole, whose statistics are compared together, where the whole is."""
    place = found.other if found.other and found.other.endswith(".qkv") else found.path
    return found.root, place, found.phase, found.step


class Shaken(nn.Module):
    """Adds noise of a relative size to what a GELU returns."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(x)
        noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
        return torch.add(y, (y * noise).detach(), alpha=self.size)


def shaken(size: float) -> Run:
    model = seeded(GPT)
    model.blocks[1].act = Shaken(size)
    return train(model)


@pytest.fixture(scope="module")
def still() -> modtrace.Recording:
    return record(shaken(0.0))


@pytest.mark.parametrize("size", [1e-1, 1e-4, 1e-5, 1e-6, 1e-7])
def test_small_difference_is_found_at_its_site_or_not_at_all(still: modtrace.Recording, size: float) -> None:
    rec = record(shaken(size))
    whole = modtrace.compare(still, rec, tolerance=0.0).first
    assert whole is not None
    assert (whole.path, whole.op) == ("blocks.1.act", "aten.add.Tensor")
    limit = 4 * max(SKETCH_FLOOR, noise_at(modtrace.compare(still, rec), "blocks.1.act", "aten.add.Tensor"))
    for left in LESS:
        found = modtrace.compare(hide(still, left), hide(rec, left)).first
        assert found is not None or whole.error < limit
        assert found is None or (found.path, found.op) == (whole.path, whole.op)


def noise_at(found: Comparison, path: str, op: str) -> float:
    rows = found.to_frame().query("phase == 'forward' and path == @path and op == @op")
    return float(rows["noise"].iloc[-1])
