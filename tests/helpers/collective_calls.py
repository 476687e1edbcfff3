"""Collectives of every kind on two ranks, and what was recorded of them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import all_reduce as bound_early

import modtrace
from helpers.rank_processes import run_ranks


class Calls(nn.Module):
    """Calls what it is given, in a module of that name."""

    def __init__(self, call: Callable[[torch.Tensor, int], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        self.call(x, rank)
        return x


def gather(x: torch.Tensor, rank: int) -> None:
    dist.gather(x, [torch.empty_like(x) for _ in range(2)] if rank == 1 else None, dst=1)


def scatter(x: torch.Tensor, rank: int) -> None:
    dist.scatter(x, [x.clone(), x.clone()] if rank == 0 else None, src=0)


def message(x: torch.Tensor, rank: int) -> None:
    for _ in range(2):
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)


def batch(x: torch.Tensor, rank: int) -> None:
    other = 1 - rank
    ops = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty_like(x), other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def fails(x: torch.Tensor, rank: int) -> None:
    try:
        dist.group.WORLD.allreduce([torch.ones(2), torch.ones(3)])
    except (RuntimeError, ValueError):
        return
    raise AssertionError


#: For each module what it calls, and what should be recorded on rank 0, without those of before and after.
KINDS: dict[str, tuple[Callable[[torch.Tensor, int], Any], list[tuple[Any, ...]]]] = {
    "all_reduce": (lambda x, rank: dist.all_reduce(x), [("all_reduce", "sum", None, 16, 16)]),
    "sparse": (
        lambda x, rank: dist.all_reduce(torch.eye(2).to_sparse()),
        [("all_reduce", "sum", None, 40, 40)],
    ),
    "bound_early": (lambda x, rank: bound_early(x, dist.ReduceOp.MAX), [("all_reduce", "max", None, 16, 16)]),
    "asynchronous": (
        lambda x, rank: dist.all_reduce(x, async_op=True).wait(),
        [("all_reduce", "sum", None, 16, 16)],
    ),
    "broadcast": (lambda x, rank: dist.broadcast(x, 1), [("broadcast", None, 1, 16, 16)]),
    "reduce": (lambda x, rank: dist.reduce(x, 1), [("reduce", "sum", 1, 16, 16)]),
    "all_gather": (
        lambda x, rank: dist.all_gather([torch.empty_like(x) for _ in range(2)], x),
        [("all_gather", None, None, 16, 32)],
    ),
    "all_gather_into": (
        lambda x, rank: dist.all_gather_into_tensor(torch.empty(8), x),
        [("all_gather", None, None, 16, 32)],
    ),
    "reduce_scatter": (
        lambda x, rank: dist.reduce_scatter_tensor(torch.empty(2), x),
        [("reduce_scatter", "sum", None, 16, 8)],
    ),
    "all_to_all": (
        lambda x, rank: dist.all_to_all_single(torch.empty(4), x),
        [("all_to_all", None, None, 16, 16)],
    ),
    "gather": (gather, [("gather", None, 1, 16, 0)]),
    "scatter": (scatter, [("scatter", None, 0, 32, 16)]),
    "barrier": (lambda x, rank: dist.barrier(), [("barrier", None, None, 0, 0)]),
    "message": (message, [("send", None, 1, 16, 0)] * 2),
    "batch": (batch, [("send", None, 1, 16, 0), ("recv", None, 1, 0, 16)]),
    "functional": (
        lambda x, rank: functional.all_reduce(x, "sum", dist.group.WORLD) + 1,
        [("all_reduce", None, None, 16, 16)],
    ),
}


def record(folder: Path) -> list[str]:
    """Records all of them in one step for each on two ranks; gives the paths of the recordings."""
    run_ranks(_run, (str(folder),), 2)
    return [str(folder / name) for name in ("calls.modtrace", "failing.modtrace")]


def _run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", TORCHELASTIC_RUN_ID="calls")
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    message(torch.ones(3), rank)  # before the recording: not counted as collectives
    dist.barrier()
    model = nn.ModuleDict({name: Calls(call) for name, (call, _) in KINDS.items()})
    with modtrace.record(model, to=os.path.join(folder, "calls.modtrace"), strict=True) as rec:
        for module in model.values():
            module(torch.ones(4), rank)
            rec.step()
        dist.barrier()
    with modtrace.record(model, to=os.path.join(folder, "failing.modtrace"), strict=True):
        Calls(fails)(torch.ones(4), rank)
        Calls(KINDS["all_reduce"][0])(torch.ones(4), rank)
    dist.barrier()
    dist.destroy_process_group()
