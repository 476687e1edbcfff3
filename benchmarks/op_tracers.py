"""What tracing the ops of a forward costs, with modtrace and with other tracers: `make bench`.

The others see no training step. torchlens has a process and a plain forward of its own: see `op_torchlens.py`.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from op_rows import NOT_INSTALLED, cells_of, forward_rows, measure
from op_works import CASES

from measure import begin, machine, render_table

TORCHLENS_SCRIPT = Path(__file__).parent / "op_torchlens.py"


def table(case: str, *, quick: bool) -> str:
    """Measures all rows of one work."""
    forward = CASES[case](quick).forward
    rows = forward_rows(forward)
    column = {**cells_of(list(rows), measure(rows)), "torchlens": _torchlens_cells(case, quick=quick)}
    header = (f"{forward.work.name}, {forward.ops} ops in forward", "ratio", "95 %")
    return render_table(header, [(name, *cells) for name, cells in column.items()])


def _torchlens_cells(case: str, *, quick: bool) -> tuple[str, str]:
    if find_spec("torchlens") is None:
        return NOT_INSTALLED
    command = [sys.executable, str(TORCHLENS_SCRIPT), case, *(["--quick"] if quick else [])]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    seconds = {name: np.array(timed) for name, timed in json.loads(printed).items()}
    return cells_of(list(seconds), seconds)["torchlens"]


def main(argv: Sequence[str] | None = None) -> None:
    quick = begin(__doc__, argv)
    print(machine(), flush=True)
    for case in ("reference", "tiny"):
        print(f"\n{table(case, quick=quick)}", flush=True)


if __name__ == "__main__":
    main()
