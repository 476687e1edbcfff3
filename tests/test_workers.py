"""Child processes of a recorded run, forked or spawned, run their modules undisturbed and record nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

import modtrace
from helpers.command_ends import end_of_modtrace

RECORD = ("record", "--quiet", "--to", "run.modtrace", "script.py")


def run(folder: Path, script: str, *, is_recorded: bool = False) -> str:
    """Runs a script in a folder, and gives what it printed."""
    (folder / "script.py").write_text(script)
    if is_recorded:
        done = end_of_modtrace(folder, *RECORD)
    else:
        done = end_of_modtrace(folder, before=f"{script}\nraise SystemExit")
    assert done.status == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "modtrace" not in done.stderr
    return done.stdout


def run_here(script: str) -> dict[str, Any]:
    """What a script defines."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(script, names)
    return names


def calls_of(path: Path) -> list[tuple[str, str]]:
    """The type and phase of each call in a recording, which is whole."""
    recording = modtrace.open_recording(path)
    assert recording.meta.marks == ()
    assert recording.meta.complete is True
    types = {row["module_id"]: row["type"] for row in recording.table("modules").to_pylist()}
    return [
        (types.get(row["module_id"], "optimizer"), row["phase"])
        for row in recording.table("calls").to_pylist()
    ]


# Workers that transform data. Every item comes through a module, in the worker.

DATA = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Transformed(Dataset):
    def __init__(self):
        self.transform = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def __len__(self):
        return 8

    def __getitem__(self, at):
        module = self.transform
        out = module(torch.full((4,), float(at)))
        out.sum().backward()
        return out.detach(), module[0].weight.grad is not None

def train(context, rec=None):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workers = {"fork": 2, "spawn": 1, None: 0}[context]
    loader = DataLoader(Transformed(), batch_size=2, num_workers=workers, multiprocessing_context=context)
    total = 0.0
    for batch, had_gradient in loader:
        assert had_gradient.all()
        optimizer.zero_grad()
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        if rec is not None:
            rec.log(loss=loss)
        total += loss.item()
    return total
"""

WITH_BLOCK = """
if __name__ == "__main__":
    import modtrace

    with modtrace.record(to="run.modtrace", strict=True, backward_times=True) as rec:
        print(train("fork", rec))
"""

AS_SCRIPT = """
if __name__ == "__main__":
    print(train({context!r}))
"""


def test_workers_of_a_data_loader_inside_the_with_block(tmp_path):
    total = run_here(DATA)["train"](None)
    assert run(tmp_path, DATA + WITH_BLOCK) == f"{total}\n"
    assert sorted(calls_of(tmp_path / "run.modtrace")) == sorted(
        4 * [("Linear", "forward"), ("Linear", "backward"), ("optimizer", "optimizer")]
    )
    recording = modtrace.open_recording(tmp_path / "run.modtrace")
    assert recording.table("scalars").column("step").to_pylist() == [0, 1, 2, 3]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader_in_a_recorded_script(tmp_path, context):
    total = run_here(DATA)["train"](None)
    assert run(tmp_path, DATA + AS_SCRIPT.format(context=context), is_recorded=True) == f"{total}\n"
    assert sorted(calls_of(tmp_path / "run.modtrace")) == sorted(
        4 * [("Linear", "forward"), ("optimizer", "optimizer")]
    )


POOLED = """
import multiprocessing
import torch
from torch import nn

def work(seed):
    torch.manual_seed(seed)
    return float(nn.Sequential(nn.Linear(4, 4), nn.Tanh())(torch.ones(4)).sum().detach())

if __name__ == "__main__":
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        print(pool.map(work, range(4)))
    nn.Tanh()(torch.ones(4))
"""


def test_pool_of_a_fork_server_in_a_recorded_script_gives_the_same(tmp_path):
    work = run_here(POOLED)["work"]
    assert run(tmp_path, POOLED, is_recorded=True) == f"{[work(seed) for seed in range(4)]}\n"
    assert calls_of(tmp_path / "run.modtrace") == [("Tanh", "forward")]


# Children that are forked in the middle of the training. One process forks them all, each from a recording.

FORKING = """
import json, os, sys
import torch
from torch import nn
import modtrace

def step():
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.item()

def wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
optimizer = torch.optim.AdamW(model.parameters())
codes = []
for number, code in enumerate(json.loads({children!r})):
    with modtrace.record(to=f"run{{number}}.modtrace", strict=True, backward_times=True) as rec:
        step()
        child = os.fork()
        if not child:
            sys.stdout = open(os.devnull, "w")  # what is buffered is the parent's
            exec(code)
        codes.append(wait(child))
        for _ in range(2):
            rec.log(loss=step())
print(json.dumps(codes))
"""

CHILDREN = {
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("step(); os._exit(4)", 4),
    "an exception": ("sys.stderr = open(os.devnull, 'w'); raise RuntimeError('in the child')", 1),
    "training on": ("losses = [step() for _ in range(20)]; sys.exit(losses[-1] >= losses[0])", 0),
    "training on and logging": ("for _ in range(3): rec.log(loss=step()); rec.step()\nsys.exit(0)", 0),
    "reading the recording": ("rec.data, str(rec.meta), rec.progress; sys.exit(0)", 0),
    "making a recording of its own": (
        "with modtrace.record(to='child.modtrace', strict=True) as own: step(); step()\n"
        "sys.exit(modtrace.open_recording('child.modtrace').table('steps').num_rows != 2)",
        0,
    ),
    "forking again": ("grandchild = os.fork(); step(); sys.exit(wait(grandchild) if grandchild else 5)", 5),
}


@pytest.fixture(scope="module")
def forked(tmp_path_factory) -> tuple[Path, list[int]]:
    """Where the recordings of all children's parents are, and how the children ended."""
    folder = tmp_path_factory.mktemp("forked")
    children = json.dumps([code for code, _ in CHILDREN.values()])
    return folder, json.loads(run(folder, FORKING.format(children=children)))


@pytest.mark.parametrize("child", CHILDREN)
def test_recording_is_whole_when_a_forked_child_ends_by(forked, child):
    folder, codes = forked
    number = list(CHILDREN).index(child)
    assert codes[number] == CHILDREN[child][1]
    step = [
        *[("Sequential", "forward"), ("Linear", "forward"), ("Tanh", "forward")],
        *[("Sequential", "backward"), ("Tanh", "backward"), ("Linear", "backward")],
        ("optimizer", "optimizer"),
    ]
    assert sorted(calls_of(folder / f"run{number}.modtrace")) == sorted(3 * step)
    steps = modtrace.open_recording(folder / f"run{number}.modtrace").table("steps")
    assert steps.column("kind").to_pylist() == ["train", "train", "train"]


FORKED_INSIDE = """
import os, sys
import torch
from torch import nn
import modtrace

class Forks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x = self.layer(x)
        self.child = os.fork()
        return self.layer(x)

model = Forks()
with modtrace.record(to="run.modtrace", strict=True, backward_times=True) as rec:
    model(torch.ones(2, 4)).sum().backward()
    if not model.child:
        model.layer(torch.ones(2, 4)).sum().backward()
        sys.exit(0)
    assert os.waitpid(model.child, 0)[1] == 0
"""


def test_child_forked_inside_of_a_forward_finishes_it(tmp_path):
    run(tmp_path, FORKED_INSIDE)
    assert calls_of(tmp_path / "run.modtrace") == [
        *[("Forks", "forward"), ("Linear", "forward"), ("Linear", "forward")],
        *[("Forks", "backward"), ("Linear", "backward"), ("Linear", "backward")],
    ]
