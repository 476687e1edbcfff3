"""Makes the recordings that a fuzzer damages: small ones with everything on. Runs in a process of its own."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace import Capture, Ops, TensorOptions

EVERYTHING = Capture(
    roles="all",
    stats=2,
    hash=True,
    sketch=True,
    sample=4,
    tensors=True,
    micro_batches=True,
    function=lambda x: {"mean": x.float().mean(), "dim": x.dim()},
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x)).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.again = self.blocks[0]
        self.dropout = nn.Dropout()

    def forward(self, x):
        for each in self.blocks:
            x = checkpoint(each, x, use_reentrant=False)
        return self.dropout(self.again(x))


def train(rec: Any, model: nn.Module, steps: int) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            loss = model(torch.randn(2, 4)).square().mean()
            if step == steps - 1:
                loss = loss * float("inf")
            loss.backward()
        optimizer.step()
        rec.log(loss=float(loss), rate=0.1)


def record(path: Path, model: nn.Module, **options: Any) -> Any:
    return modtrace.record(
        model,
        to=path,
        values=EVERYTHING,
        ops=Ops(source=True, python_names=True),
        backward_times=True,
        tensors=TensorOptions(shard_bytes=2**16),
        strict=True,
        **options,
    )


def record_ranks(path: Path) -> None:
    """Two ranks of one run, one after the other."""
    for rank in range(2):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", TORCHELASTIC_RUN_ID="fuzzed")
        model = Net()
        with record(path, model) as rec:
            train(rec, model, 2)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]


def record_last_steps(path: Path) -> None:
    model = Net()
    with record(path, model, keep_last=2) as rec:
        train(rec, model, 4)


def record_compiled(path: Path) -> None:
    """A compiled region in a process group, and too large a tensor: the tables that the others leave empty."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(Block(), nn.Linear(4, 2))
    model[0].compile(backend="aot_eager")
    with record(path, model) as rec:
        train(rec, model, 2)
        distributed.all_reduce(torch.ones(2))
        with suppress(RuntimeError):
            model[1](torch.empty(2**50, 4))
    distributed.destroy_process_group()


def record_until_killed(path: Path) -> None:
    if os.fork() == 0:
        model = Net()
        rec = record(path, model)
        rec.__enter__()
        train(rec, model, 2)
        train(rec, model, 1)
        time.sleep(1)  # the timer writes what the last step left
        while not any(path.rglob("values.arrow")):  # later where much else runs
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    record_until_killed(folder / "killed")
    record_ranks(folder / "closed")
    record_last_steps(folder / "kept")
    record_compiled(folder / "compiled")


if __name__ == "__main__":
    main()
