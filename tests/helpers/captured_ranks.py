"""Trains a model in several processes, with and without everything captured, and compares the bits."""

import gc
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import modtrace
from helpers.ranks import Net
from helpers.twins import bits, state
from modtrace import Capture

EVERYTHING = Capture(
    roles="all",
    stats=2,
    hash=True,
    sketch=True,
    sample=8,
    tensors=True,
    micro_batches=True,
    function=lambda x: x.dim(),
)


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
    """Writes what one of two ranks found: whether the bits are the same, and what was recorded."""
    store = dist.FileStore(str(Path(folder, "store")), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = []
    rows = roles = None
    for recording in (nullcontext(), modtrace.record(strict=True, values=EVERYTHING)):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net())
        with recording:
            outcome = train_together(model)
        del model
        gc.collect()  # no model outlives the group: its reducer may wait for ever then
        found.append([str(bits(each)) for each in tree_leaves(outcome)])
        if isinstance(recording, modtrace.Recording):
            rows = recording.table("values").num_rows
            roles = sorted(set(recording.frame("values")["role"]))
            marks = recording.meta.marks
    same = found[0] == found[1]
    Path(folder, f"{rank}.json").write_text(json.dumps([same, len(found[0]), rows, roles, marks]))
    dist.barrier()
    dist.destroy_process_group()
