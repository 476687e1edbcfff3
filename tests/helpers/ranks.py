"""A small distributed model, and what a tracker says while it trains: in this process, or in several."""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from helpers.asked import OPS, Asked
from helpers.rank_processes import run_ranks
from modtrace import ModuleTracker

COMMUNICATION = {
    "allreduce_",
    "_allgather_base_",
    "_reduce_scatter_base_",
    "all_gather_copy_in",
    "chunk_cat",
}


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        return self.l(x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Part()
        self.b = Part()

    def forward(self, x):
        return self.b(self.a(x))


def ddp() -> nn.Module:
    return DistributedDataParallel(Net())


def fsdp2() -> nn.Module:
    return _sharded(Net())


def fsdp2_with_checkpoints() -> nn.Module:
    model = Net()
    model.a, model.b = checkpoint_wrapper(model.a), checkpoint_wrapper(model.b)
    return _sharded(model)


def fsdp1() -> nn.Module:
    policy = ModuleWrapPolicy({Part})
    return FullyShardedDataParallel(Net(), auto_wrap_policy=policy, device_id=torch.device("cpu"))


def _sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (model.a, model.b, model):
        fully_shard(each, mesh=mesh)
    return model


MODELS = {each.__name__: each for each in (ddp, fsdp2, fsdp2_with_checkpoints, fsdp1)}


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group that only this process is in; it needs no port."""
    excepthook = sys.excepthook  # torch puts its own there
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # a model in a cycle that outlives the group may wait for ever
        dist.destroy_process_group()
        sys.excepthook = excepthook


def with_parameter(tracker: ModuleTracker) -> str:
    """The answer, with the parameter whose gradient is being accumulated."""
    where = tracker.where()
    assert where.known
    of = f" [{where.parameter}]" if where.parameter is not None else ""
    return f"{where.phase}: {' '.join(where.stack)}{of}".rstrip()


def ask(model: nn.Module, tracker: Any, answer: Callable[[Any], str] | None = None) -> list[str]:
    """What an entered tracker says while the model trains once."""
    with Asked(tracker, answer, OPS | COMMUNICATION) as seen:
        model(torch.ones(2, 4)).sum().backward()
    return seen.lines


def in_processes(world: int, names: list[str], folder: Path) -> list[dict[str, list[str]]]:
    """For each rank what modtrace says of each of the models, while as many processes train them together."""
    run_ranks(_run_rank, (world, names, str(folder)), world)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _run_rank(rank: int, world: int, names: list[str], folder: str) -> None:
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = {}
    for name in names:
        model = MODELS[name]()
        with ModuleTracker(strict=True) as tracker:
            found[name] = ask(model, tracker, with_parameter)
        del model
        gc.collect()  # no model outlives the group: its reducer may wait for ever then
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
