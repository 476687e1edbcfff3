"""Runs the ranks of launches: run as a program, which imports what they need.

Each launch has an agent of its own, as under torchrun: a fork of this program, and the ranks are its forks.

It reads lines of JSON, each a launch: for each rank its variables, the arguments of `modtrace`, and a delay. It answers
with the exit code of each rank and what it has written; None is the code of one that had to be killed.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

import modtrace
from modtrace.cli.main import main as command

TIMEOUT_S = 90.0
TICK_S = 0.02  # the system tells when a process has started to 10 ms

#: What a rank of `modtrace record` runs: as many steps of DDP as it is told, over gloo.
TRAIN = """
import os, sys, datetime
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps, store, world_size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
rank = int(next(os.environ[name] for name in names if name in os.environ))
files, limit = dist.FileStore(store, world_size), datetime.timedelta(seconds=60)
dist.init_process_group("gloo", store=files, rank=rank, world_size=world_size, timeout=limit)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps):
    optimizer.zero_grad()
    model(torch.full((1, 2), float(rank))).sum().backward()
    optimizer.step()
dist.barrier()
print("trained", flush=True)
"""


def start(rank: dict[str, Any], output: str) -> int:
    """Returns the pid of the fork."""
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    time.sleep(rank.get("delay_s", 0.0))
    os.environ.update(rank["env"])
    sys.argv = ["modtrace", *rank["argv"]]
    code: Any = 0
    try:
        RUN[rank.get("run", "command")]()
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        print(repr(error))
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _train_and_record(rank: int, path: str, steps: int, store: str, world_size: int, when: str) -> None:
    """What a worker of torch.multiprocessing does that gets its rank as an argument."""
    options = {"to": path, "overwrite": "overwrite" in when}
    recording = modtrace.record(**options) if "before" in when else None
    if recording is not None:
        recording.start()
    files = torch.distributed.FileStore(store, world_size)
    limit = timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", store=files, rank=rank, world_size=world_size, timeout=limit)
    if recording is None:
        recording = modtrace.record(**options)
        recording.start()
    model = torch.nn.Linear(2, 2)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        recording.step()
    torch.distributed.barrier()
    recording.stop()
    print("trained", flush=True)


def start_workers(method: str = "fork") -> None:
    """Starts as many workers as it is told, whose ranks are arguments and not in the environment."""
    path, steps, store, world_size, when = sys.argv[1:]
    torch.multiprocessing.start_processes(
        _train_and_record,
        (path, int(steps), store, int(world_size), when),
        nprocs=int(world_size),
        start_method=method,
    )


RUN: dict[str, Callable[[], Any]] = {"command": command, "workers": start_workers}


def wait_for(children: list[int], until_s: float) -> list[int | None]:
    codes: dict[int, int | None] = {}
    while len(codes) < len(children):
        for child in children:
            if child in codes:
                continue
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until_s:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[child] = None
        time.sleep(0.01)
    return [codes[child] for child in children]


def run(launch: dict[str, Any]) -> list[tuple[int | None, str]]:
    folder = Path(launch["folder"])
    outputs = [str(folder / f"output-{number}") for number, _ in enumerate(launch["ranks"])]
    children = [start(rank, output) for rank, output in zip(launch["ranks"], outputs, strict=True)]
    codes = wait_for(children, time.monotonic() + launch.get("timeout_s", TIMEOUT_S))
    return [(code, Path(output).read_text()) for code, output in zip(codes, outputs, strict=True)]


def import_what_ranks_need() -> None:
    """Trains and records a little: what that imports takes five seconds in each fork."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    with modtrace.record():
        model(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(model.parameters()).step()
    torch.distributed.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    import_what_ranks_need()
    for line in sys.stdin:
        launch = json.loads(line)
        os.chdir(launch["folder"])
        time.sleep(TICK_S)
        agent = os.fork()
        if not agent:
            print(json.dumps(run(launch)), flush=True)
            os._exit(0)
        os.waitpid(agent, 0)


if __name__ == "__main__":
    if sys.argv[1:]:
        start_workers("spawn")
    else:
        main()
