"""Runs the benchmarks one after the other, and says on standard error which of them runs: `make bench`.

python benchmarks/all.py [--only ops,values]
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent

#: Each part is a script, with what it measures and about how many minutes that takes on two shared cores.
PARTS = {
    "scopes": ("following the modules, beside torch's own trackers", 7),
    "values": ("measuring values, beside hooks and torch's DebugMode", 5),
    "on_nonfinite": ("what looking for NaN adds while a run goes on", 13),
    "collectives": ("recording what ranks send each other", 1),
    "compiled": ("measuring inside of compiled code", 5),
    "captures": ("what a Capture adds to a step", 10),
    "tier2": ("histograms of one tensor", 1),
    "fingerprints": ("hashes and sketches of one tensor", 1),
    "tensors": ("whole tensors, in memory and to the disk", 1),
    "ops": ("recording every op, beside torch's modes", 5),
    "op_tracers": ("tracing the ops of a forward, beside other tracers", 3),
    "graph": ("the graph of 200,000 ops: building, drawing, exporting", 3),
    "report": ("the page of a large report in Chromium", 4),
    "planted": ("whom each tool names for planted NaN and infinities", 1),
    "compare": ("whom each tool names where two runs part", 3),
    "healthy_runs": ("what the checks say of healthy trainings", 8),
    "growth": ("time and memory of recordings of 1,000,000 calls or ops", 15),
    "datasets": ("questions about datasets of 10 million rows, by DuckDB", 3),
    "open_large": ("who made the first NaN in recordings of 10 million rows", 15),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the first part that fails, after the others have run; 2 for a part that is not there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="PARTS", help="these, with commas or spaces; help lists them"
    )
    chosen = parser.parse_args(argv).only.replace(",", " ").split()
    if "help" in chosen:
        print(describe_parts())
        return 0
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        print(f"bench: there is no part {unknown[0]!r}. The parts are:\n{describe_parts()}", file=sys.stderr)
        return 2
    return run_parts([name for name in PARTS if name in chosen or not chosen])


def describe_parts() -> str:
    """Returns a line for each part, with the minutes that it takes."""
    lines = [
        f"  {name:<13} about {minutes:>2} min   {measured}" for name, (measured, minutes) in PARTS.items()
    ]
    return "\n".join(
        [*lines, f"  {'all of them':<13} about {sum(minutes for _, minutes in PARTS.values())} min"]
    )


def run_parts(names: Sequence[str]) -> int:
    """Runs these parts, and returns 0 or the exit code of the first one that failed."""
    codes = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # each table is seen as soon as it is there
    for number, name in enumerate(names, 1):
        measured, minutes = PARTS[name]
        _say(f"{number} of {len(names)}: {name} (about {minutes} min): {measured}")
        start = time.monotonic()
        codes.append(subprocess.run([sys.executable, FOLDER / f"{name}.py"], env=environment).returncode)
        ended = "done" if codes[-1] == 0 else f"failed with exit code {codes[-1]}"
        _say(f"{name} {ended} after {(time.monotonic() - start) / 60:.1f} min")
    return next((code for code in codes if code), 0)


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
