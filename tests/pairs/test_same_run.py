"""A recording of any architecture equals itself, op by op, and a second recording of the same."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modtrace
from helpers.more_architectures import TWENTY

pytest.importorskip("transformers")

SAMPLE = ["GPT-2", "Mixtral", "T5"]


@pytest.mark.parametrize("name", SAMPLE)
def test_sample_of_architectures_equals_itself(name: str) -> None:
    check(name)


@pytest.mark.zoo
@pytest.mark.parametrize("name", TWENTY)
def test_architecture_equals_itself(name: str) -> None:
    check(name)


def check(name: str) -> None:
    rec, again = record_step(name), record_step(name)
    for other in (rec, again):
        found = modtrace.compare(rec, other, tolerance=0.0)
        assert found.ok, str(found)
        assert (found.first, found.divergences, found.firsts) == (None, (), ())
        assert not found.missing and not found.extra
        compared = rec.table("values").num_rows - uninitialized(rec) - losses(rec)
        assert found.compared == found.equal == compared
        assert found.beyond == found.within == 0


def record_step(name: str) -> modtrace.Recording:
    """A forward and, where there is a loss, a backward of a tiny model, with the usual values of all ops."""
    torch.manual_seed(0)
    np.random.seed(0)  # Wav2Vec2 draws from it what it masks
    model, inputs = TWENTY[name]()
    captured = modtrace.Capture(roles="all", hash=True)
    with modtrace.record(model, ops=True, values=captured, strict=True) as rec:
        loss = model(**inputs).loss
        if loss is not None:
            loss.backward()
    return rec


def losses(rec: modtrace.Recording) -> int:
    """Returns how many losses were measured, which are not compared."""
    of_losses = {row["site_id"] for row in rec.table("sites").to_pylist() if row["role"] == "loss"}
    return sum(site in of_losses for site in rec.table("values")["site_id"].to_pylist())


def uninitialized(rec: modtrace.Recording) -> int:
    """How many measured tensors are memory that nothing was written to, which is not compared."""
    ops = rec.table("sites").filter(rec.table("sites")["op"].is_valid())
    empty = {
        each["site_id"] for each in ops.to_pylist() if ".empty" in each["op"] or ".new_empty" in each["op"]
    }
    return sum(site in empty for site in rec.table("values")["site_id"].to_pylist())


@pytest.mark.parametrize("more", [{"ops": True}, {"backward_times": True}])
@pytest.mark.parametrize("has_first_more", [True, False])
def test_what_one_of_two_equal_runs_was_not_asked_to_record_is_no_difference(
    more: dict[str, Any], has_first_more: bool
) -> None:
    def run(scale: float = 1.0, **options: Any) -> modtrace.Recording:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
        model[0].weight.data *= scale
        roles = ["output", "grad_output", *(["op_output"] if "ops" in options else [])]
        with modtrace.record(model, values=modtrace.Capture(roles=roles), **options) as rec:
            model(torch.randn(3, 4)).sum().backward()
        return rec

    first, second = run(**more), run()
    found = modtrace.compare(first, second) if has_first_more else modtrace.compare(second, first)
    assert found.ok
    assert not found.missing.tensors
    assert not found.extra.calls
    other = run(1.01)
    found = modtrace.compare(first, other) if has_first_more else modtrace.compare(other, first)
    assert not found.ok
    assert found.first is not None
    assert found.first.path == "0"
