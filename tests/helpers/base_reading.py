"""Asks a recording everything that can be asked, by modtrace and the standard library alone: a program of its own."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import modtrace
from modtrace.cli.main import COMMANDS, main
from modtrace.recording.schema import schemas

#: By the name of what is asked of a recording; `write...` is asked for the files it writes.
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "data": lambda rec: rec.data.meta.complete,
    "findings": lambda rec: rec.findings(),
    "first_nonfinite": lambda rec: rec.first_nonfinite(),
    "frame": lambda rec: len(rec.frame("calls")),
    "graph": lambda rec: _ask_graph(rec.graph()),
    "history": lambda rec: rec.history("**", stat="std"),
    "memory_table": lambda rec: rec.memory_table(ops=True),
    "meta": lambda rec: (rec.meta.marks, rec.meta.complete),
    "module_tree": lambda rec: rec.module_tree(),
    "nonfinite": lambda rec: list(rec.nonfinite()),
    "op_table": lambda rec: [rec.op_table(by=by) for by in ("module", "op", "call")],
    "paths": lambda rec: rec.paths(),
    "plot": lambda rec: rec.plot("**"),
    "recompute_check": lambda rec: rec.recompute_check(),
    "stack": lambda rec: rec.stack("*", step=1).values.tolist(),
    "table": lambda rec: {name: rec.table(name).to_pylist() for name in schemas()},
    "tensor": lambda rec: _numbers(rec.tensor("0", 1)),
    "tensors": lambda rec: [(step, _numbers(each)) for step, each in rec.tensors("0")],
    "to_polars": lambda rec: len(rec.to_polars()),
    "triggers": lambda rec: rec.triggers,
    "view": lambda rec: rec.view()._repr_html_()[:60],
    "write": lambda rec: rec.write("copy.modtrace"),
    "write_html": lambda rec: rec.write_html("report.html"),
    "write_plot": lambda rec: rec.write_plot("plot.png"),
    "write_timeline": lambda rec: rec.write_timeline("api.trace.json"),
    "__str__": str,
}

#: What each command is given; a command stands here several times where parts of it read other things.
ARGUMENTS = [
    "show run.modtrace",
    "show run.modtrace --step 0 --slots --sort total --no-fold",
    "show run.modtrace --json",
    "ops run.modtrace --by op",
    "ops run.modtrace --json",
    "memory run.modtrace --ops",
    "memory run.modtrace --json",
    "paths run.modtrace",
    "paths run.modtrace --modules --json",
    "graph run.modtrace -o graph.dot --color time",
    "graph run.modtrace -o graph.json --tensors",
    "graph run.modtrace --json",
    "view run.modtrace -o run.html",
    "timeline run.modtrace -o run.trace.json --op-flows",
    "plot run.modtrace -o plot.png",
    "plot run.modtrace --json",
    "plot run.modtrace --kind histogram --step 1 --json",
    "export run.modtrace -o run.parquet",
    "export run.modtrace -o run.csv",
    "export run.modtrace -o export.trace.json",
    "export run.modtrace -o explorer.json --format model-explorer",
    "export run.modtrace -o export.dot",
    "check run.modtrace",
    "check run.modtrace --json",
    "nonfinite run.modtrace",
    "nonfinite run.modtrace --json",
    "nonfinite run.modtrace --all --json",
    "compare run.modtrace run.modtrace",
    "compare run.modtrace run.modtrace --step 0:1 --json",
    "compare run.modtrace run.modtrace --step 0:1 -o growth.png",
    "recompute run.modtrace",
    "recompute run.modtrace --json",
    "ranks run.modtrace",
    "ranks run.modtrace --json",
    "query run.parquet missing-steps",
    "verify factory:make",
    "record --quiet --to recorded.modtrace script.py",
    "doctor --json",
]

#: What the commands that run a model are given.
FACTORY = """
import torch
def make():
    return torch.nn.Linear(2, 2), (torch.ones(1, 2),), {}
"""


def _ask_graph(graph: Any) -> Any:
    small = graph.collapse(depth=1).fold().without_views()
    return len(graph.nodes), len(graph.edges), graph.columns, small.render_dot()


def _numbers(tensor: Any) -> Any:
    """The same of a `RawTensor` as of torch's."""
    return (tensor.to_numpy() if hasattr(tensor, "to_numpy") else tensor.numpy()).tolist()


def _answer(ask: Callable[[], Any]) -> str:
    try:
        return str(ask())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _run(arguments: str) -> str:
    """The exit code and what the command prints."""
    sys.argv[1:] = arguments.split()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main()
    except SystemExit as raised:
        return f"{raised.code}\n{printed.getvalue()}"


def ask_all(recording: Path) -> dict[str, str]:
    """What is answered, by the question, in an empty folder of its own. The recording gets a link there."""
    Path("run.modtrace").symlink_to(recording)
    Path("script.py").write_text("print('ran')")
    Path("factory.py").write_text(FACTORY)
    asked = modtrace.open_recording("run.modtrace")
    answers = {name: _answer(lambda ask=ask: ask(asked)) for name, ask in QUESTIONS.items()}
    answers |= {arguments: _run(arguments) for arguments in ARGUMENTS}
    assert {each.split()[0] for each in ARGUMENTS} == set(COMMANDS)
    return {**answers, "written": " ".join(sorted(os.listdir()))}


if __name__ == "__main__":
    json.dump({"answers": ask_all(Path(sys.argv[1])), "where": modtrace.__file__}, sys.stdout)
