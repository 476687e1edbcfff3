"""Trains on two ranks of which one stops coming: run as a program. It prints `hangs` when the other one waits."""

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
    print("hangs", flush=True)
    rank = dist.get_rank()
    if how == "message" and rank == 1:
        dist.recv(torch.ones(3), 0)
    elif how == "message" or rank == 1:
        time.sleep(1000)


def main() -> None:
    how, to, store = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    files = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=2, timeout=timedelta(seconds=300))
    model: nn.Module = nn.Sequential(*(Layer(number, how) for number in range(LAYERS)))
    if how == "buckets":
        model = DistributedDataParallel(model, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, to=to):
        for step in range(STEP + 1):
            if how == "buckets" and step == STEP:
                print("hangs", flush=True)
                time.sleep(1000 * rank)
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
