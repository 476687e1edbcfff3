"""Times torchlens on the forward of a work, for `ops.py`: prints the CPU seconds a step of every round as JSON.

A process of its own, because torchlens replaces torch's functions at its first trace, for good. A plain forward takes
twice as long from then on, so that a ratio to it would be half the price: the plain forward is timed before that, and
again beside torchlens.
"""

import argparse
import json
import sys
from collections.abc import Sequence

import numpy as np
import torchlens
from op_rows import Row, check, fraction, measure, plain
from op_works import CASES, Counted, set_up
from torchlens.options import CaptureOptions


def measure_torchlens(forward: Counted) -> dict[str, np.ndarray]:
    """Returns the seconds of the rows as `measure()` does, those of the plain forward first."""
    untouched = measure({"forward: plain": Row(forward, plain)})
    slow = forward.with_steps(fraction(forward, 25))
    return untouched | measure(
        {
            "forward: plain after torchlens": Row(forward, plain),
            "forward: torchlens": Row(slow, _traced),
        }
    )


def _traced(counted: Counted) -> None:
    """Without values, as in the other rows: by default it copies all of them."""
    options = CaptureOptions(layers_to_save="none")
    for _ in range(counted.work.steps):
        trace = torchlens.trace(counted.work.model, counted.tokens, capture=options)
        check(trace.num_edges, counted.calls, "edges")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    args = parser.parse_args(argv)
    set_up()
    seconds = measure_torchlens(CASES[args.case](args.quick).forward)
    json.dump({name: each.tolist() for name, each in seconds.items()}, sys.stdout)


if __name__ == "__main__":
    main()
