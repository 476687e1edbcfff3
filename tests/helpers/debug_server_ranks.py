"""Two ranks under torch's debug server, of which one sleeps in a module: run as a program, with a folder and two ports.

Each rank prints `hangs` when it sleeps, or is about to wait for the other one.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.debug import start_debug_server

import modtrace
from modtrace.integrations.debug_server import add_handler

STEP = 2


class Layer(nn.Module):
    """A layer that adds up over the ranks, to which rank 1 does not come in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.step == STEP:
            os.write(1, b"hangs\n")
            if dist.get_rank() == 1:
                time.sleep(1000)
        self.step += 1
        x = self.linear(x)
        dist.all_reduce(x.detach())
        return x


def train(rank: int, folder: str, port: int) -> None:
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo")
    assert add_handler()
    start_debug_server(
        port=port, start_method="spawn", dump_dir=f"{folder}/dumps", enabled_dumps={"modtrace"}
    )
    model = nn.Sequential(nn.Linear(4, 4), Layer())
    with modtrace.record(model, to=f"{folder}/run.modtrace"):
        for _ in range(STEP + 1):
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, store_port, server_port = sys.argv[1:]
    Path(where).mkdir(exist_ok=True)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=store_port, WORLD_SIZE="2")
    if "RANK" not in os.environ:  # the server's own process imports this file, too
        for number in (0, 1):
            if not os.fork():
                train(number, where, int(server_port))
                os._exit(1)
        os.wait()
