"""A small model that one process trains, or several in a kind of parallel training; each records it."""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import modtrace
from helpers.rank_processes import run_ranks
from modtrace import Capture

STEPS, BATCH, WIDTH, OUTPUTS = 3, 8, 16, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, OUTPUTS)  # uneven shards

    def forward(self, x, targets):
        for block in self.blocks:
            x = block(x)
        returned = self.head(x)
        return {"loss": ((returned - targets) ** 2).mean(), "returned": returned}


class Run(NamedTuple):
    """One training."""

    kind: str = "single"  # single, ddp, fsdp1, fsdp2, hsdp, tp, fsdp2 x tp
    fault: str = ""
    """Of rank 1: own eps, weights, gradient, inf, lost (a gradient that did not arrive), unclipped (norms are left out
    of the clipping). Of all: eps, unreduced, evaluates (the same batches; rank 0 one more), moved (to other parameters
    behind DDP's back), unwrapped (called without DDP)."""
    ops: bool = False


def train(run: Run, to: str, rank: int = 0, world: int = 1) -> None:
    """Trains and records; the ranks of a process group call it together."""
    torch.manual_seed(0)
    model = Net()
    if run.fault == "eps" or (run.fault == "own eps" and rank == 1):
        model.blocks[1].norm.eps = 1e-3
    trained, parts, part = _parallel(run.kind, model, rank, world)
    if run.fault == "weights" and rank == 1:
        with torch.no_grad():
            model.blocks[1].up.weight[3, 2] += 1e-3
    if run.fault == "moved":
        for module in [*model.modules()]:
            for name, parameter in [*module.named_parameters(recurse=False)]:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(STEPS, BATCH, width, generator=numbers) for width in (WIDTH, OUTPUTS))
    mine = slice(part * BATCH // parts, (part + 1) * BATCH // parts)
    roles = ("output", "grad_output", *(["op_output"] if run.ops else []))
    captures = [
        Capture(roles=("parameter", "parameter_grad", "optimizer_state"), hash=True),
        Capture(roles=roles),
    ]
    with modtrace.record(trained, to=to, values=captures, ops=run.ops, strict=True):
        for step in range(STEPS):
            given = inputs[step][mine].clone()
            if run.fault == "inf" and rank == 1 and step == 1:
                given[0, 0] = float("inf")
            optimizer.zero_grad()
            with trained.no_sync() if run.fault == "unreduced" and step == 1 else nullcontext():
                called = model if run.fault == "unwrapped" and step == 1 else trained
                called(given, targets[step][mine])["loss"].backward()
            if run.fault == "gradient" and rank == 1 and step == 1:
                model.blocks[0].down.weight.grad.mul_(1.01)
            if run.fault == "lost" and rank == 1 and step == 1:
                model.blocks[0].down.weight.grad.zero_()
            if run.fault == "unclipped":
                names = [name for name, _ in model.named_parameters() if rank == 0 or "norm" not in name]
                nn.utils.clip_grad_norm_([model.get_parameter(name) for name in names], 1e-3)
            optimizer.step()
            if run.fault == "evaluates":
                with torch.no_grad():
                    for batch in range(3 if rank == 0 else 2):
                        model(inputs[batch], targets[batch])


def _parallel(kind: str, model: Net, rank: int, world: int) -> tuple[nn.Module, int, int]:
    """The model as it is trained, into how many parts the batch is divided, and which of them is this rank's."""
    if kind == "ddp":
        return DistributedDataParallel(model), world, rank
    if kind == "fsdp1":
        sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        return sharded, world, rank
    if kind in ("fsdp2", "hsdp"):
        sizes, names = ((world,), ("dp",)) if kind == "fsdp2" else ((2, world // 2), ("copies", "dp"))
        _shard(model, init_device_mesh("cpu", sizes, mesh_dim_names=names))
        return model, world, rank
    if kind == "tp":
        _split(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    if kind == "fsdp2 x tp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        _split(model, mesh["tp"])
        _shard(model, mesh["dp"])
        return model, 2, rank // (world // 2)
    return model, 1, 0


def _shard(model: Net, mesh: Any) -> None:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)


def _split(model: Net, mesh: Any) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def record_runs(folder: Path, runs: Mapping[str, Run], world: int) -> dict[str, str]:
    """Trains each of the runs in as many processes, one after the other; gives the paths of the recordings."""
    paths = {name: str(folder / f"{name.replace(' ', '-')}.modtrace") for name in runs}
    several = {paths[name]: run for name, run in runs.items() if run.kind != "single"}
    run_ranks(_train_all, (world, str(folder), tuple(several.items())), world)
    for name, run in runs.items():
        if run.kind == "single":
            train(run, paths[name])
    return paths


def _train_all(rank: int, world: int, folder: str, runs: Sequence[tuple[str, Run]]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), TORCHELASTIC_RUN_ID="parallel-training")
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for path, run in runs:
        train(run, path, rank, world)
        dist.barrier()
    dist.destroy_process_group()
