"""What `Capture` costs on the reference GPT, beside what people do by hand for the same answer: `make bench`.

Each row is a run of ten steps, as the ratio of CPU time to ten plain ones: "every 10th step" is one of them.
Recording is timed as a whole, from entering `record()` to having the rows as an Arrow table.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from scopes import Work, cells, reference_gpt, repeat
from values import debugged, hooked

import modtrace
from measure import Round, estimate, machine, render_table, time_rounds
from modtrace import Capture

#: All that is not ops'.
MODULE_ROLES = (
    "input", "output", "grad_output", "grad_input", "parameter", "parameter_grad", "buffer", "optimizer_state",
    "update",
)  # fmt: skip


def variants(work: Work) -> dict[str, Round]:
    """The rows of the table."""
    tier2 = Capture(stats=2, steps="::10")
    rows: dict[str, Callable[[], object]] = {
        "plain": lambda: repeat(work),
        "tier 1 of all module, parameter and optimizer roles": lambda: _recorded(
            work, Capture(roles=MODULE_ROLES)
        ),
        "tier 1 of all those but updates": lambda: _recorded(work, Capture(roles=MODULE_ROLES[:-1])),
        "tier 1 of op outputs": lambda: _recorded(work, Capture(roles="op_output"), ops=True),
        "what naming the op of a NaN needs: tier 1 of op outputs, no saved memory": lambda: _recorded(
            work, Capture(roles="op_output"), ops=modtrace.Ops(saved=False)
        ),
        "ops, no values": lambda: _recorded(work, None, ops=True),
        "tier 2 every 10th step": lambda: _recorded(work, tier2),
        "tier 1, and tier 2 every 10th step": lambda: _recorded(work, ["stats", tier2]),
        "hash and sketch of outputs, no statistics": lambda: _recorded(
            work, Capture(roles="output", stats=0, hash=True, sketch=True)
        ),
        "hash and sketch of outputs, tier 1": lambda: _recorded(
            work, Capture(roles="output", hash=True, sketch=True)
        ),
        "idle": lambda: _recorded(work, Capture(roles="all", steps=[10**6]), is_idle=True),
        "calls alone": lambda: _recorded(work, None, is_idle=True),
        "whole tensors of one block, to disk": lambda: _on_disk(work),
        "hooks taking std()": lambda: hooked(work, lambda tensor: tensor.detach().std()),
        "hooks keeping copies": lambda: hooked(work, lambda tensor: tensor.detach().clone()),
        "torch DebugMode with hashes": lambda: debugged(work),
    }
    return rows


def _recorded(work: Work, values: Any, *, is_idle: bool = False, **options: Any) -> None:
    with modtrace.record(work.model, values=values, **options) as recording:
        repeat(work)
    _check(recording, is_idle or values is None)


def _on_disk(work: Work) -> None:
    capture = Capture(roles=("output", "grad_output"), include="blocks.0.**", tensors=True)
    with tempfile.TemporaryDirectory() as folder:
        with modtrace.record(work.model, Path(folder, "run"), values=capture) as recording:
            repeat(work)
        _check(recording, False)


def _check(recording: modtrace.Recording, is_idle: bool) -> None:
    if (recording.table("values").num_rows == 0) is not is_idle:
        raise RuntimeError("the benchmark times something else: look at the table 'values'")


def gpt_table(work: Work, only: str) -> str:
    """Times the GPT's steps and returns the table."""
    chosen = {name: run for name, run in variants(work).items() if only in name or name == "plain"}
    seconds = time_rounds(chosen, rounds=work.rounds)
    rows = [[name, *cells(estimate(seconds[name] / seconds["plain"]), 3)] for name in seconds]
    rows[0][1:] = [f"({estimate(seconds['plain'] / work.steps * 1e3).median:.1f} ms a step)", ""]
    return render_table([work.name, "ratio", "95 %"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a small model, few rounds: shows only that it runs"
    )
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(machine(), flush=True)
    if options.quick:
        work = reference_gpt(width=32, layers=2, batch=1, steps=10, rounds=2)
    else:
        work = reference_gpt(width=256, layers=6, batch=8, steps=10, rounds=options.rounds)
    print(gpt_table(work, options.only))


if __name__ == "__main__":
    main()
