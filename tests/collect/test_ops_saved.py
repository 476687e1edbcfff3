"""What recorded ops and calls are charged with for backward adds up to what `saved_tensors_hooks` counts."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import modtrace

GPT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_gpt.py"))["GPT"]

pytestmark = pytest.mark.usefixtures("seeded")


def counted_by_hooks(run, alive_anyway):
    """The bytes of the storages that a run of its own saves for backward, each once."""
    kept = []

    def pack(tensor):
        kept.append(tensor.detach())
        return kept[-1]

    with saved_tensors_hooks(pack, lambda packed: packed):
        output = run()
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    for each in alive_anyway:
        sizes.pop(each.untyped_storage().data_ptr(), None)
    assert output.requires_grad
    return sum(sizes.values())


def recorded(model, run):
    """The tables of one forward and backward."""
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        run().backward()
    return rec


def saved_by_ops(rec):
    return sum(row["saved_bytes"] or 0 for row in rec.table("ops").to_pylist())


def saved_by_calls(rec):
    """By module path; of all calls inside of each too."""
    paths = {row["module_id"]: row["path"] for row in rec.table("modules").to_pylist()}
    calls = rec.table("calls").to_pylist()
    return {paths[row["module_id"]]: row["saved_bytes"] for row in calls if row["phase"] == "forward"}


def test_mlp_keeps_what_hooks_count():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(3, 4)
    expected = counted_by_hooks(lambda: model(x).sum(), [x, *model.parameters()])
    rec = recorded(model, lambda: model(x).sum())
    assert saved_by_ops(rec) == expected == 192
    assert saved_by_calls(rec) == {"": 192, "0": 0, "1": 96, "2": 96}


@pytest.mark.parametrize(
    ("checkpointing", "expected", "inside"),
    [(None, 36484, 16768), ("non-reentrant", 4996, 1024), ("reentrant", 4996, 0)],
)
def test_gpt_keeps_what_hooks_count_and_less_with_checkpoints(checkpointing, expected, inside):
    """Parameters and tokens, which the user keeps, left out."""
    model = GPT(11, layers=2, width=16, heads=2, context=8, checkpointing=checkpointing)
    tokens = torch.randint(11, (2, 8))

    def run():
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    assert counted_by_hooks(run, [tokens, *model.parameters()]) == expected
    rec = recorded(model, run)
    calls = saved_by_calls(rec)
    outside = sum(
        row["saved_bytes"] or 0
        for row in rec.table("ops").to_pylist()
        if row["call_id"] is None and row["saved_bytes"]
    )
    assert calls[""] + outside == expected
    assert calls["blocks.0"] == inside
