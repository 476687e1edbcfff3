"""What the checks say of healthy trainings, and how often: `make bench`.

python benchmarks/healthy_runs.py [--steps 40] [--seed 0] [--only TEXT] [--quick]
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
    """Prints what is found in each run, and in how many runs how much is. Returns 1 if an error is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="the number of steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="what decides the weights and the data")
    parser.add_argument("--only", default="", help="the runs with this text in their names")
    parser.add_argument("--quick", action="store_true", help="three runs of 12 steps")
    chosen = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = _QUICK if chosen.quick else [name for name in RUNS if chosen.only in name]
    answers, accused, unchecked = Counter[str](), Counter[str](), Counter[str]()
    for name in names:
        started = time.perf_counter()
        recording = record_run(name, 12 if chosen.quick else chosen.steps, chosen.seed)
        found = recording.findings()
        print(f"{name}  ({time.perf_counter() - started:.1f} s)", flush=True)
        for finding in found.findings:
            print(f"    {finding.severity}: {finding.text}  ({finding.check})", flush=True)
        severities = Counter(finding.severity for finding in found.findings)
        answers[_judge(severities["error"], severities["warning"])] += 1
        accused.update(finding.check for finding in found.findings if finding.severity != "note")
        unchecked.update(one.check for one in found.unchecked)
    print(f"\n{len(names)} runs: {_list(answers)}")
    print(f"errors and warnings: {_list(accused) or 'none'}")
    print(f"not checked: {_list(unchecked) or 'nothing'}")
    return int(answers["with an error"] > 0)


def _judge(errors: int, warned: int) -> str:
    if errors:
        return "with an error"
    return ("without a warning", "with one warning", "with several warnings")[min(warned, 2)]


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
