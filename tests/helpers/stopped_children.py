"""Training loops of child processes, of which one meets NaN; each writes what came of it."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import modtrace


class Batches(Dataset[torch.Tensor]):
    """Batches of which one is infinite."""

    def __init__(self, bad: int | None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float("inf") if index == self.bad else 1.0)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def train(model: nn.Module, batches: Any) -> Iterator[bool]:
    """Yields before each step of the optimizer; the last yield tells whether the weights are as they were then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        before = [each.detach().clone() for each in model.parameters()]
        try:
            optimizer.step()
        except modtrace.NonFiniteError:
            yield all(map(torch.equal, before, model.parameters()))
            raise
        yield True


def run(model: nn.Module, batches: Any, *, recorded: bool = True) -> dict[str, Any]:
    """Trains, and returns how many steps were made, whether the run was stopped, and how the weights are."""
    found: dict[str, Any] = {"steps": 0, "told": None, "as before": True}
    recording = (
        modtrace.record(model, on_nonfinite="stop", strict=True) if recorded else warnings.catch_warnings()
    )
    try:
        with recording:
            for is_same in train(model, batches):
                found["as before"] = is_same
                found["steps"] += 1
    except modtrace.NonFiniteError as error:
        found["steps"] -= 1
        found["told"] = str(error).splitlines()[0]
    found["finite"] = all(bool(each.isfinite().all()) for each in model.parameters())
    return found


def run_rank(rank: int, folder: str) -> None:
    """One of two ranks of DDP. The second has an infinite batch; the gradients of both are NaN then."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        found = run(DistributedDataParallel(make_model()), DataLoader(Batches(2 if rank else None)))
    finally:
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def run_child(folder: str, name: str, recorded: bool) -> None:
    """A child that meets an infinite batch, with a recording of its own, or with none."""
    found = run(make_model(), DataLoader(Batches(2)), recorded=recorded)
    Path(folder, f"{name}.json").write_text(json.dumps(found))
