"""The first use of anything in a process changes nothing there: no generator, no filter of warnings, no signal."""

from pathlib import Path

import pytest

import modtrace
from helpers.first_use import Change, changes_of
from modtrace.cli.main import COMMANDS

MODEL = """
import torch, modtrace
def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    return model, (torch.ones(3, 4),), {}
model = make()[0]
def run():
    model(torch.randn(3, 4)).sum().backward()
def train():
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        run()
        optimizer.step()
"""
CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint
def run():
    checkpoint(model, torch.randn(3, 4, requires_grad=True), use_reentrant=False).sum().backward()
"""
ALL_VALUES = "modtrace.Capture(roles='all', stats=2, hash=True, sketch=True, sample=4, tensors=True)"
ALL_OPS = "modtrace.Ops(saved=True, source=True, python_names=True)"

#: Of torch's own: its first optimizer imports its compiler, and the first gradient that it is given imports sympy.
OF_TORCH = f"{MODEL}train(); torch.autograd.backward([model(torch.ones(1, 4))], [torch.ones(1, 2)])"

#: Each has `train()` in it, with something of ours around it or behind it.
RECORDED = {
    "in memory, and asked": "with modtrace.record(model, ops=True) as rec:\n rec.log(a=1); train(); rec.step()\n"
    "print(rec); print(rec.graph()); rec.write_plot('p.png')\n"
    "rec.first_nonfinite(); rec.op_table(); rec.memory_table(); rec.paths(); rec.history(); rec.frame('values')\n"
    "rec.write('copy.modtrace'); print(modtrace.open_recording('copy.modtrace'))\n"
    "rec.write_timeline('t.json'); rec.graph().write_dot('g.dot'); rec.graph().write_model_explorer('g.json')",
    "everything": f"with modtrace.record(to='all.modtrace', ops={ALL_OPS}, values={ALL_VALUES}, "
    "backward_times=True): train()",
    "flight recorder": "with modtrace.record(to='held.modtrace', keep_last=2, ops=True, "
    "triggers=[modtrace.OnSignal('SIGUSR1'), modtrace.NonFinite()]) as rec:\n train()\n rec.dump()",
    "tracked": "with modtrace.ModuleTracker(), modtrace.track(model) as tracker: train()\ntracker.to_frame()",
    "traced, drawn and verified": "train()\nmodtrace.ModulePathTracer().trace(model)\n"
    "model.train(); print(modtrace.graph(model, torch.ones(3, 4)))\n"
    "modtrace.verify(model, (torch.ones(3, 4),))",
}

UNCHANGED: dict[str, object] = {"moved": [], "imported": [], "error": None}

#: What each command is given behind its name.
ARGUMENTS = {
    "record": "--quiet --to new.modtrace script.py",
    "show": "run.modtrace",
    "ops": "run.modtrace",
    "memory": "run.modtrace",
    "paths": "run.modtrace",
    "graph": "run.modtrace -o graph.json",
    "view": "run.modtrace -o run.html",
    "timeline": "run.modtrace -o run.trace.json",
    "plot": "run.modtrace -o run.png",
    "export": "run.modtrace -o run.parquet",
    "check": "run.modtrace",
    "nonfinite": "run.modtrace",
    "recompute": "run.modtrace",
    "compare": "run.modtrace run.modtrace",
    "ranks": "run.modtrace",
    "query": "run.parquet slowest-modules",
    "verify": "factory:make",
    "doctor": "",
}


def test_first_use_of_public_names_and_a_first_recording_change_nothing(tmp_path: Path) -> None:
    """Nor does what they import of torch."""
    names = [*modtrace.__all__, "tensor_tracker"]
    recorded = f"with modtrace.record(ops={ALL_OPS}) as rec: run()\nprint(rec)"
    programs = {
        "names": f"import modtrace; print({', '.join(f'modtrace.{name}' for name in names)})",
        "run": f"{MODEL}run()",
        "recorded": f"{MODEL}{recorded}",
    }
    changes = changes_of(programs, tmp_path)
    assert told(changes["names"]) == UNCHANGED
    assert told(changes["recorded"]) == {**UNCHANGED, "moved": ["torch"]}  # by the data
    assert changes["recorded"]["state"] == changes["run"]["state"]


#: Each is a process: the script and the factory make a model, and the others read one recording.
PROCESSES = {
    "record": ["record"],
    "verify": ["verify"],
    "others": [name for name in COMMANDS if name not in ("record", "verify")],
}


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Change]:
    """What all that behind a first training changes."""
    folder = tmp_path_factory.mktemp("first_use")
    (folder / "script.py").write_text(f"{MODEL}train()")
    (folder / "factory.py").write_text(MODEL)
    programs = {how: f"{MODEL}{code}" for how, code in RECORDED.items()}
    recording = f"{MODEL}{CHECKPOINTED}with modtrace.record(model, to='run.modtrace', ops=True): train()"
    commands = {process: "".join(map(_command, names)) for process, names in PROCESSES.items()}
    return changes_of(
        {"unrecorded": f"{MODEL}train()", **programs, "recording": recording, **commands},
        folder,
        before=OF_TORCH,
    )


def test_first_recording_leaves_the_process_as_the_unrecorded_run_does(changes: dict[str, Change]) -> None:
    assert {how: changes[how] for how in RECORDED} == dict.fromkeys(RECORDED, changes["unrecorded"])


def test_first_use_of_a_command_changes_nothing(changes: dict[str, Change]) -> None:
    assert {name: (changes[name]["error"], changes[name]["moved"]) for name in PROCESSES} == {
        "record": (None, ["torch"]),
        "verify": (None, ["torch"]),
        "others": (None, []),
    }


def told(change: Change) -> dict[str, object]:
    """The change without the state behind it."""
    return {name: value for name, value in change.items() if name != "state"}


def _command(name: str) -> str:
    return (
        f"import sys; sys.argv[1:] = {[name, *ARGUMENTS[name].split()]}\n"
        "from modtrace.cli.main import main\n"
        "try: main()\n"
        f"except SystemExit as ended: assert not ended.code, ({name!r}, ended.code)\n"
    )
