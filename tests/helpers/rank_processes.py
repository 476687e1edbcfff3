"""Runs the ranks of a test in processes, which are forks of one that has imported what ranks need."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

#: A process of its own takes five seconds of a processor to import these.
_IMPORTED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "modtrace.cli.record",
)


def run_ranks(function: Callable[..., None], args: tuple[Any, ...], world: int) -> None:
    """Calls `function(rank, *args)` in as many processes as `world` says, and raises what one of them raises."""
    multiprocessing.set_forkserver_preload([*_IMPORTED])
    torch.multiprocessing.start_processes(function, args, nprocs=world, start_method="forkserver")
