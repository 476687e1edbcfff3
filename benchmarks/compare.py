"""Whom each tool names as the place where two runs part, beside torch's DebugMode and a script of hooks: `make bench`.

The pairs of runs are those of the tests, each healthy and with one planted fault. A tool that tells of less than
module, op and phase is judged by what it tells: DebugMode by the op, the script by the module.
"""

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._debug_mode import DebugMode

import modtrace
from measure import machine, render_table

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from helpers.all_pairs import HEALTHY, TABLE
from helpers.pairs import Pair, Run, Truth, record

#: What the tools without a notion of noise are given: the relative tolerance of torch.testing.assert_close.
CLOSE = {torch.float32: 1.3e-6, torch.bfloat16: 1.6e-2}
#: Characters of what a tool says when it fails.
_SHOWN = 32

QUICK = ("written-out attention",)


class Named(NamedTuple):
    """What a tool says is the first that differs; None: it does not tell that."""

    path: str | None = None
    op: str | None = None
    phase: str | None = None


def ask_modtrace(pair: Pair, first: Run, second: Run) -> Named | None:
    noise = [record(pair.first(), ops=pair.ops)] if pair.noise else []
    runs = (record(run, ops=pair.ops) for run in (first, second))
    found = modtrace.compare(*runs, noise=noise, **pair.options).first
    return None if found is None else Named(found.path, found.op, found.phase)


def ask_hashes(pair: Pair, first: Run, second: Run) -> Named | None:
    """Returns the op of the first output whose L1 norm differs by more than rounding."""
    logs = []
    for run in (first, second):
        with DebugMode() as mode, DebugMode.log_tensor_hashes():
            run.work()
        logs.append(mode.logs)
    for each in DebugMode.check_hash_mismatches(*logs):
        if each["rel_diff"] > CLOSE[torch.float32]:
            return Named(op=each["call"])
    return None


def ask_hooks(pair: Pair, first: Run, second: Run) -> Named | None:
    """Returns the first module, as the first run calls it, whose output or gradient is not close.

    Raises:
        ValueError: no module is called the same in both.
    """
    one, other = keep_outputs(first), keep_outputs(second)
    common = [name for name in one if name in other]
    if len(common) < 2:  # the root is called "" in every model
        raise ValueError("no name in common")
    for name in common:
        if not are_close(one[name], other[name]):
            return Named(name.removesuffix(".grad").rpartition(".")[0] if name.endswith(".grad") else name)
    return None


def keep_outputs(run: Run) -> dict[str, torch.Tensor]:
    """Returns the outputs of all modules by their names, and the gradients of the parameters."""
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                kept.setdefault(name, output.detach().clone())

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in run.model.named_modules()]
    for name, parameter in run.model.named_parameters():
        handles.append(
            parameter.register_post_accumulate_grad_hook(
                lambda given, name=name: kept.__setitem__(f"{name}.grad", given.grad.clone())
            )
        )
    try:
        run.work()
    finally:
        for each in handles:
            each.remove()
    return kept


def are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    relative = max(CLOSE.get(each.dtype, 0.0) for each in (one, other))
    return torch.allclose(one.double(), other.double(), rtol=relative, atol=1e-5)


TOOLS: dict[str, Callable[[Pair, Run, Run], Named | None]] = {
    "modtrace": ask_modtrace,
    "check_hash_mismatches": ask_hashes,
    "hooks and allclose": ask_hooks,
}


def ask(tool: str, name: str, *, is_planted: bool) -> str:
    """Returns what a tool says of a pair, and whether that is right."""
    pair = TABLE[name]
    try:
        named = TOOLS[tool](pair, pair.first(), pair.second(is_planted))
    except Exception as error:
        return f"failed: {' '.join(str(error).split()).partition(':')[0][:_SHOWN]}"
    if named is None:
        return "silent"
    told = " in ".join(each for each in (named.op, named.path) if each) or "outside of modules"
    if not is_planted:
        return f"false alarm: {told}"
    return "exactly" if is_right(tool, named, pair.truth) else f"wrongly: {told}"


def is_right(tool: str, named: Named, truth: Truth) -> bool:
    if tool == "modtrace":
        is_there = named.path in (truth.path, *truth.also) and named.phase == truth.phase
        return is_there and (not truth.ops or named.op in truth.ops)
    if tool == "hooks and allclose":
        return named.path in (truth.path, *truth.also)
    ops = [each.removeprefix("aten.").partition(".")[0] for each in truth.ops if each]
    return (named.op or "").removeprefix("aten::") in ops


def pairs_table(planted: Sequence[str], healthy: Sequence[str]) -> str:
    """Returns what every tool says of these pairs, and how often it was right."""
    said = {name: [ask(tool, name, is_planted=True) for tool in TOOLS] for name in planted}
    alarms = {
        f"{name}, healthy": [ask(tool, HEALTHY[name], is_planted=False) for tool in TOOLS] for name in healthy
    }
    rows = [[name, *cells] for name, cells in (said | alarms).items()]
    return render_table(["planted", *TOOLS], rows + totals(said, alarms))


def totals(said: Mapping[str, Sequence[str]], alarms: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Returns one row for each kind of answer."""
    of_planted = {
        "named exactly": "exactly",
        "named wrongly": "wrongly",
        "silent": "silent",
        "failed": "failed",
    }
    of_healthy = {
        "silent, healthy": "silent",
        "false alarms, healthy": "false alarm",
        "failed, healthy": "failed",
    }
    return [
        [f"{title}, of {len(cells)}", *map(str, count_kinds(cells, kind))]
        for kinds, cells in ((of_planted, said), (of_healthy, alarms))
        for title, kind in kinds.items()
    ]


def count_kinds(said: Mapping[str, Sequence[str]], kind: str) -> list[int]:
    """Returns how often each tool gave this kind of answer."""
    return [
        Counter(cells[column].partition(":")[0] for cells in said.values())[kind]
        for column in range(len(TOOLS))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one pair: does it run?")
    is_quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(machine())
    print(pairs_table(QUICK if is_quick else list(TABLE), QUICK if is_quick else list(HEALTHY)))


if __name__ == "__main__":
    main()
