"""The first use of anything in a process changes nothing there: no generator, no filter of warnings, no signal."""

from pathlib import Path

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
    "in memory": "with modtrace.record(model) as rec: train()",
    "to a folder": "with modtrace.record(model, to='here.modtrace') as rec: train()",
    "found by itself": "with modtrace.record() as rec: train()",
    "everything": f"with modtrace.record(to='all.modtrace', ops={ALL_OPS}, values={ALL_VALUES}, "
    "backward_times=True): train()",
    "flight recorder": "with modtrace.record(to='held.modtrace', keep_last=2, ops=True) as rec:\n train()\n rec.dump()",
    "trigger": "with modtrace.record(triggers=[modtrace.OnSignal('SIGUSR1'), modtrace.NonFinite()]): train()",
    "numbers and steps": "with modtrace.record(model) as rec:\n rec.log(a=1)\n train()\n rec.step()",
    "printed": "with modtrace.record(model, ops=True) as rec: train()\nprint(rec); print(rec.graph())",
    "asked": "with modtrace.record(model, ops=True) as rec: train()\n"
    "rec.first_nonfinite(); rec.op_table(); rec.memory_table(); rec.paths(); rec.history(); rec.frame('values')",
    "written": "with modtrace.record(model, ops=True) as rec: train()\n"
    "rec.write('copy.modtrace'); print(modtrace.open_recording('copy.modtrace'))\n"
    "rec.write_timeline('t.json'); rec.graph().write_dot('g.dot'); rec.graph().write_model_explorer('g.json')",
    "plotted": "with modtrace.record(model) as rec: train()\nrec.write_plot('p.png')",
    "tracked": "with modtrace.ModuleTracker() as tracker: train()",
    "stashed": "with modtrace.track(model) as tracker: train()\ntracker.to_frame()",
    "traced": "train()\nmodtrace.ModulePathTracer().trace(model)",
    "drawn": "train()\nmodel.train(); print(modtrace.graph(model, torch.ones(3, 4)))",
    "verified": "train()\nmodtrace.verify(model, (torch.ones(3, 4),))",
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
    "nonfinite": "run.modtrace",
    "recompute": "run.modtrace",
    "compare": "run.modtrace run.modtrace",
    "verify": "factory:make",
    "doctor": "",
}


def test_first_use_of_a_public_name_changes_nothing(tmp_path: Path) -> None:
    names = [*modtrace.__all__, "tensor_tracker"]
    changes = changes_of({name: f"import modtrace; modtrace.{name}" for name in names}, tmp_path)
    assert {name: told(change) for name, change in changes.items()} == dict.fromkeys(names, UNCHANGED)


def test_first_recording_imports_nothing_of_torch_that_changes_the_process(tmp_path: Path) -> None:
    recorded = f"with modtrace.record(ops={ALL_OPS}) as rec: run()\nprint(rec)"
    changes = changes_of({"run": f"{MODEL}run()", "recorded": f"{MODEL}{recorded}"}, tmp_path)
    assert told(changes["recorded"]) == {**UNCHANGED, "moved": ["torch"]}  # by the data
    assert changes["recorded"]["state"] == changes["run"]["state"]


def test_first_recording_leaves_the_process_as_the_unrecorded_run_does(tmp_path: Path) -> None:
    programs = {how: f"{MODEL}{code}" for how, code in RECORDED.items()}
    changes = changes_of({"unrecorded": f"{MODEL}train()", **programs}, tmp_path, before=OF_TORCH)
    expected = changes.pop("unrecorded")
    assert changes == dict.fromkeys(programs, expected)


def test_first_use_of_a_command_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"{MODEL}train()")
    (tmp_path / "factory.py").write_text(MODEL)
    recording = f"{MODEL}{CHECKPOINTED}with modtrace.record(model, to='run.modtrace', ops=True): train()"
    changes = changes_of(
        {"recording": recording} | {name: _command(name) for name in COMMANDS}, tmp_path, before=OF_TORCH
    )
    draws = {"record", "verify"}  # the script and the factory make a model
    assert {name: (changes[name]["error"], changes[name]["moved"]) for name in COMMANDS} == {
        name: (None, ["torch"] if name in draws else []) for name in COMMANDS
    }


def told(change: Change) -> dict[str, object]:
    """The change without the state behind it."""
    return {name: value for name, value in change.items() if name != "state"}


def _command(name: str) -> str:
    return (
        f"import sys; sys.argv[1:] = {[name, *ARGUMENTS[name].split()]}; "
        "from modtrace.cli.main import main; main()"
    )
