"""No capture changes a bit of a run: every role, tier, hash, sketch, sample and whole tensor."""

import gc
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import modtrace
from collect.recorder.test_bit_identity import CHECKPOINTS, train_gpt
from collect.recorder.test_bit_identity import RUNS as RUNS_OF_CALLS
from collect.values.test_values_bit_identity import EVERYTHING, OVER_RUNS, WARNINGS_OF_TORCH
from collect.values.test_values_bit_identity import RUNS as RUNS_OF_VALUES
from helpers.rank_processes import run_ranks
from helpers.ranks import Net
from helpers.twins import assert_untouched, bits, state
from modtrace import Capture

LAZILY = [
    Capture(roles="all", tensors="lazy", micro_batches=True),
    Capture(roles="output", stats=0, hash=True),
]

OTHER_RUNS = {run.__name__: run for run in RUNS_OF_CALLS}
for run_of_values in RUNS_OF_VALUES:
    OTHER_RUNS.pop(run_of_values.__name__, None)


@OVER_RUNS
@WARNINGS_OF_TORCH
def test_capturing_changes_no_bit_of(run: Any, tmp_path: Path) -> None:
    everything = assert_untouched(run, values=EVERYTHING, ops=True, to=tmp_path / "run.modtrace")
    lazily = assert_untouched(run, values=LAZILY)
    for rec in (everything, lazily):
        assert rec.table("values").num_rows > 0


@pytest.mark.parametrize("run", OTHER_RUNS.values(), ids=[name.replace("_", " ") for name in OTHER_RUNS])
@WARNINGS_OF_TORCH
def test_capturing_everything_changes_no_bit_of(run: Any) -> None:
    assert assert_untouched(run, values=EVERYTHING).table("values").num_rows > 0


@CHECKPOINTS
def test_training_a_gpt_gives_the_same_bits_whatever_is_captured(reentrant: bool | None) -> None:
    for values in (EVERYTHING, LAZILY):
        rec = assert_untouched(lambda: train_gpt(reentrant=reentrant), values=values)
        roles = {site["role"] for site in rec.table("sites").to_pylist()}
        assert roles >= {
            "input", "output", "grad_output", "grad_input", "parameter", "parameter_grad", "update"
        }  # fmt: skip


def test_a_function_that_runs_ops_and_draws_numbers_changes_no_bit() -> None:
    def largest(tensor: torch.Tensor) -> float:
        return float(tensor.detach().float().abs().sum() + torch.rand(()) * 0)

    capture = Capture(roles=("output", "grad_output"), function=largest)
    assert_untouched(lambda: train_gpt(reentrant=False), values=capture)


# Two processes.


def train_together(model: torch.nn.Module) -> list[Any]:
    """Three steps of two micro-batches, and all that they have computed."""
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):  # micro-batches
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            losses.append(loss)
        optimizer.step()
    return [losses, state(model), optimizer.state_dict()["state"]]


def run_rank(rank: int, folder: str) -> None:
    """Writes what one of two ranks computes without and with a recording, and what was recorded."""
    store = dist.FileStore(str(Path(folder, "store")), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    outcomes = []
    rec = modtrace.record(strict=True, values=EVERYTHING)
    for recording in (nullcontext(), rec):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net())
        with recording:
            outcome = train_together(model)
        del model
        gc.collect()  # no model outlives the group: its reducer may wait for ever then
        outcomes.append([str(bits(leaf)) for leaf in tree_leaves(outcome)])
    roles = sorted(set(rec.frame("values")["role"]))
    report = {
        "outcomes": outcomes,
        "rows": rec.table("values").num_rows,
        "roles": roles,
        "marks": rec.meta.marks,
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.soak  # the usual runs train so in one process
def test_ranks_that_train_together_have_the_same_bits_with_everything_captured(tmp_path: Path) -> None:
    run_ranks(run_rank, (str(tmp_path),), 2)
    for rank in range(2):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        plain, recorded = report["outcomes"]
        assert recorded == plain
        assert len(plain) > 20
        assert report["rows"] > 100
        assert report["roles"] == [
            "grad_input", "grad_output", "input", "loss", "optimizer_state", "output", "parameter", "parameter_grad",
            "update",
        ]  # fmt: skip
        assert report["marks"] == []
