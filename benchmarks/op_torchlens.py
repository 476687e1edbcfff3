"""Times torchlens on the forward of a work, for `op_tracers.py`: prints the CPU seconds a step of every round as JSON.

A process of its own, because torchlens replaces torch's functions at its first trace, for good. The plain forward
beside it goes through the replaced ones too, so that the ratio comes out somewhat low: a plain forward timed before
the first trace would not be interleaved, and on a machine whose speed changes that is worth nothing.
"""

import argparse
import json
import sys
from collections.abc import Sequence

import torchlens
from op_rows import Row, check, fraction, measure, plain
from op_works import CASES, Counted, set_up
from torchlens.options import CaptureOptions


def torchlens_rows(forward: Counted) -> dict[str, Row]:
    """Ratios are to the first of them."""
    slow = forward.with_steps(fraction(forward, 25))
    return {"plain": Row(forward, plain), "torchlens": Row(slow, _traced)}


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
    seconds = measure(torchlens_rows(CASES[args.case](args.quick).forward))
    json.dump({name: each.tolist() for name, each in seconds.items()}, sys.stdout)


if __name__ == "__main__":
    main()
