"""What the checks say of healthy trainings, and how often: `make bench`.

python benchmarks/healthy_runs.py [--steps 40] [--only NAME] [--quick]
"""

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from helpers.healthy_training import RUNS, record_run

#: The runs of `--quick`.
_QUICK = ("MLP, images, SGD", "GAN, images", "policy gradient, a pole on a cart")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the findings of each run, and how many runs have some."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="the number of steps of each run")
    parser.add_argument("--only", help="the runs whose names have this text")
    parser.add_argument("--quick", action="store_true", help="three runs of 12 steps")
    chosen = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = [name for name in RUNS if not chosen.only or chosen.only in name]
    rows, counts, unchecked = [], Counter[str](), Counter[str]()
    for name in _QUICK if chosen.quick else names:
        started = time.perf_counter()
        found = record_run(name, 12 if chosen.quick else chosen.steps).findings()
        took = time.perf_counter() - started
        severities = Counter(finding.severity for finding in found.findings)
        worst = "error" if severities["error"] else "several" if severities["warning"] > 1 else ""
        counts[worst or ("one warning" if severities["warning"] else "nothing")] += 1
        unchecked.update(one.check for one in found.unchecked)
        said = [f"{finding.severity}: {finding.text}" for finding in found.findings]
        rows.append((name, f"{took:.1f} s", ""))
        print(
            f"{name} ({took:.1f} s)",
            *(f"    {line}" for line in said or ["nothing found"]),
            sep="\n",
            flush=True,
        )
    print()
    print(", ".join(f"{what}: {count}" for what, count in counts.items()), f"of {len(rows)} runs")
    print("not checked:", ", ".join(f"{check} in {count}" for check, count in unchecked.items()) or "nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
