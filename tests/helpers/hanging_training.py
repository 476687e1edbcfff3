"""Trains on two ranks of which one stops coming: run as a program, with the ways to hang and a folder.

The ranks are forks of it, all at once. Each prints `hangs` when it waits, or lets the other one wait.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import modtrace

LAYERS, STEP, LAYER = 4, 7, 2


class Layer(nn.Module):
    """A layer that, of rank 1, does not go on in one step."""

    def __init__(self, number: int, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.number, self.how, self.step = number, how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how != "buckets" and self.step == STEP and self.number == LAYER:
            stop(self.how)
        self.step += 1
        x = self.linear(x).relu()
        if self.how == "python":
            dist.all_reduce(x.detach().sum())
        return x


def stop(how: str) -> None:
    """Rank 1 sleeps, in a message rank 0 forgets to send; the other one goes on to wait."""
    os.write(1, b"hangs\n")  # at once: ranks share the pipe
    rank = dist.get_rank()
    if how == "message" and rank == 1:
        dist.recv(torch.ones(3), 0)
    elif how == "message" or rank == 1:
        time.sleep(1000)


def train(how: str, rank: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", TORCHELASTIC_RUN_ID="hangs")
    torch.manual_seed(0)
    files = dist.FileStore(f"{folder}/{how}-store", 2)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=2, timeout=timedelta(seconds=300))
    model: nn.Module = nn.Sequential(*(Layer(number, how) for number in range(LAYERS)))
    if how == "buckets":
        model = DistributedDataParallel(model, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, to=f"{folder}/{how}.modtrace"):
        for step in range(STEP + 1):
            if how == "buckets" and step == STEP:
                os.write(1, b"hangs\n")
                time.sleep(1000 * rank)
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)
    *ways, where = sys.argv[1:]
    for way in ways:
        for number in (0, 1):
            if not os.fork():
                train(way, number, where)
                os._exit(1)
    os.wait()
