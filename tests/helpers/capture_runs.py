"""Measures the memory of a process that trains with captures: each function here is a process of its own."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

import modtrace
from helpers.capture_soak import KINDS, Training, counts_of
from modtrace import Capture
from soak.test_soak import resident_bytes, without_huge_pages


def run_apart(what: str, *given: object) -> Any:
    """What a function of this file finds in a process where no other test has left anything in malloc's lists."""
    tests = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tests),
        "OMP_NUM_THREADS": "1",
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # mimalloc keeps what is freed, in pieces of 8 MB
    }
    command = [sys.executable, __file__, what, *map(str, given)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def leave(found: dict[str, Any]) -> NoReturn:
    """Ends the process without ending the recording, which would write gigabytes anew as larger batches."""
    print(json.dumps(found), flush=True)
    os._exit(0)


def run_long(kind: str, folder: str, steps: str, times: str) -> None:
    """Trains `times` times so many steps, and tells what there is after each of them."""
    counts, resident = [], []
    with KINDS[kind](Path(folder)) as rec:
        training = Training(rec, kind)
        for number in range(1, int(times) + 1):
            training.run_to(number * int(steps))
            counts.append(counts_of(training))
            resident.append(resident_bytes())
        training.close()
        rows, marks = (0, ()) if rec is None else (rec.progress.rows, rec.meta.marks)
        leave({"counts": counts, "resident": resident, "rows": rows, "marks": marks})


# A model whose parameters are most of the memory.

_ROLES = (
    "input",
    "output",
    "grad_output",
    "grad_input",
    "parameter",
    "parameter_grad",
    "buffer",
    "optimizer_state",
)

#: What is recorded of it: nothing, calls alone, statistics of all that is there, and of how it moves.
LARGE: dict[str, Any] = {
    "nothing": None,
    "calls": (),
    "all but updates": Capture(roles=_ROLES, micro_batches=True),
    "all": Capture(roles="all", micro_batches=True),
}


def run_large(what: str) -> None:
    """Trains it, and tells how much more there is than before, and how much its parameters take."""
    train_large(LARGE["all"], width=8)  # what is imported and set up once in a process is no part of it
    before = resident_bytes()
    parameter_bytes, resident = train_large(LARGE[what], width=2048)
    leave({"parameters": parameter_bytes, "grown": resident - before})


def train_large(values: Any, width: int) -> tuple[int, int]:
    """The bytes of the parameters, and what the process takes while it all lives."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    recording = nullcontext() if values is None else modtrace.record(strict=True, values=values or None)
    with recording:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()
        resident = resident_bytes()
    return sum(each.nbytes for each in model.parameters()), resident


if __name__ == "__main__":
    without_huge_pages()
    {"long": run_long, "large": run_large}[sys.argv[1]](*sys.argv[2:])
