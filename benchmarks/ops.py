"""What recording every op costs, beside PyTorch's own modes and other tracers: `make bench`.

Two works, because the cost is a cost per op:

* a step of a GPT made of tiny ops, the worst case: forward, loss and backward.
* a step of the reference GPT: forward, loss, backward and optimizer.

The other tracers see no training step, so for them and for us there are rows of the forward alone, named so; their
ratio is to the plain forward. torchlens has a process and a plain forward of its own: see `op_torchlens.py`.
Recording is timed as a whole, from entering `record()` to having its Arrow tables, and always has shapes and edges.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from op_rows import forward_rows, measure, training_rows
from op_works import CASES, set_up
from scopes import cells

from measure import estimate, machine, render_table

TORCHLENS_SCRIPT = Path(__file__).parent / "op_torchlens.py"

NOT_INSTALLED = ("not installed", "")

#: The CPU seconds a step of every round, by the rows' names.
Seconds = dict[str, np.ndarray]

#: The ratio of each row and its 95 % interval, as two cells, by the rows' names; the header has an empty one.
Column = dict[str, tuple[str, str]]


def table(*, quick: bool) -> str:
    """Measures every work and returns the table, two columns of cells for each work."""
    columns = [column(case, quick=quick) for case in CASES]
    header, *rows = [[name, *(cell for each in columns for cell in each[name])] for name in columns[0]]
    return render_table(header, rows)


def column(case: str, *, quick: bool) -> Column:
    """Measures all rows of one work."""
    training, forward = CASES[case](quick)
    of_training, of_forward = training_rows(training), forward_rows(forward)
    seconds = measure({**of_training, **of_forward})
    title = f"{training.work.name}, {training.ops} ops ({forward.ops} in forward): ratio"
    return {
        "": (title, "95 %"),
        **_cells(list(of_training), seconds),
        **_cells(list(of_forward), seconds),
        "forward: torchlens": _torchlens_cells(case, quick=quick),
    }


def _cells(names: Sequence[str], seconds: Seconds) -> Column:
    """The rows as ratios to the first of them, which tells its time instead."""
    plain, *others = names
    column = {plain: (f"({estimate(seconds[plain] * 1e3).median:.1f} ms)", "")}
    for name in others:
        is_timed = name in seconds
        column[name] = cells(estimate(seconds[name] / seconds[plain]), 3) if is_timed else NOT_INSTALLED
    return column


def _torchlens_cells(case: str, *, quick: bool) -> tuple[str, str]:
    if find_spec("torchlens") is None:
        return NOT_INSTALLED
    command = [sys.executable, str(TORCHLENS_SCRIPT), case, *(["--quick"] if quick else [])]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    seconds = {name: np.array(each) for name, each in json.loads(printed).items()}
    return _cells(list(seconds), seconds)["forward: torchlens"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few rounds: shows only that it runs"
    )
    quick = parser.parse_args(argv).quick
    set_up()
    print(machine(), flush=True)
    print(table(quick=quick))


if __name__ == "__main__":
    main()
