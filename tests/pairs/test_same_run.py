"""A recording of any architecture equals itself, op by op, and a second recording of the same."""

import numpy as np
import pytest
import torch

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
        assert found.compared == found.equal == rec.table("values").num_rows - uninitialized(rec)
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


def uninitialized(rec: modtrace.Recording) -> int:
    """How many measured tensors are memory that nothing was written to, which is not compared."""
    ops = rec.table("sites").filter(rec.table("sites")["op"].is_valid())
    empty = {
        each["site_id"] for each in ops.to_pylist() if ".empty" in each["op"] or ".new_empty" in each["op"]
    }
    return sum(site in empty for site in rec.table("values")["site_id"].to_pylist())
