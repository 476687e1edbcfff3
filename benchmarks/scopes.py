"""What following the modules costs, beside the trackers that come with PyTorch: `make bench`.

Two works, because a tracker's cost is a cost per module call:

* 200 tiny modules, one multiplication each: microseconds added per module call, forward plus backward.
* a step of a small GPT (the reference of the budgets): CPU time as a ratio to the plain step.

Trackers are timed from entering to leaving, without hooks and with four of the user's that count. Recording is timed
as a whole, from entering `record()` to having the calls as an Arrow table. Entering costs a few milliseconds, once; a
round has enough steps for that to be small.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.mod_tracker import ModTracker
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.module_tracker import ModuleTracker

import modtrace
from measure import Estimate, Round, begin, estimate, machine, render_table, time_rounds

EXAMPLES = Path(__file__).parent.parent / "examples"


class Work(NamedTuple):
    """Steps to be timed: `steps` of them are one round, `rounds` of these are run."""

    name: str
    model: nn.Module
    step: Callable[[], None]
    steps: int
    rounds: int

    @property
    def calls(self) -> int:
        """Forward calls of modules in a round."""
        called = [module for module in self.model.modules() if not isinstance(module, nn.ModuleList)]
        return self.steps * len(called)


class Tiny(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0001


class Chain(nn.Module):
    """Many tiny modules, one after the other, all of them on the way of a gradient."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.tiny = nn.ModuleList(Tiny() for _ in range(length))

    def forward(self) -> Tensor:
        x = self.scale * 1.0
        for module in self.tiny:
            x = module(x)
        return x


def tiny_modules(*, length: int, steps: int, rounds: int) -> Work:
    """A step is a forward and a backward; it clears the gradient, as every training loop does."""
    model = Chain(length)

    def step() -> None:
        model.scale.grad = None
        model().sum().backward()

    return Work(f"{length} tiny modules", model, step, steps, rounds)


def reference_gpt(*, width: int, layers: int, batch: int, steps: int, rounds: int) -> Work:
    """A step is forward, loss, backward and optimizer, on random tokens out of 2000."""
    sys.path.append(str(EXAMPLES))
    from train_gpt import GPT

    context = 128
    model = GPT(2000, layers=layers, width=width, heads=8, context=context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    passages = torch.randint(2000, (batch, context + 1))

    def step() -> None:
        logits = model(passages[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), passages[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Work("GPT step", model, step, steps, rounds)


def variants(work: Work) -> dict[str, Round]:
    """The rows of the table."""
    return {
        "plain": lambda: repeat(work),
        "two empty global hooks": lambda: _hooked(work),
        "modtrace ModuleTracker": lambda: _tracked(work, modtrace.ModuleTracker()),
        "modtrace ModuleTracker, 4 hooks": lambda: _tracked(work, modtrace.ModuleTracker(), hooks=True),
        "torch ModuleTracker": lambda: _tracked(work, ModuleTracker()),
        "torch ModTracker": lambda: _tracked(work, ModTracker()),
        "torch ModTracker, 4 hooks": lambda: _tracked(work, ModTracker(), hooks=True),
        "modtrace.record": lambda: _recorded(work, backward_times=False),
        "modtrace.record and a tracker": lambda: _recorded(work, backward_times=False, tracked=True),
        "modtrace.record, backward times": lambda: _recorded(work, backward_times=True),
    }


def repeat(work: Work) -> None:
    """A round without anything else."""
    for _ in range(work.steps):
        work.step()


def _recorded(work: Work, *, backward_times: bool, tracked: bool = False) -> None:
    recording = modtrace.record(work.model, values=None, backward_times=backward_times)
    with recording, modtrace.ModuleTracker() if tracked else nullcontext():
        repeat(work)
    recorded = recording.table("calls").num_rows
    if recorded < work.calls:
        raise RuntimeError(
            f"only {recorded} calls were recorded of {work.calls}: the benchmark times nothing"
        )


def _tracked(work: Work, tracker: Any, *, hooks: bool = False) -> None:
    """Four hooks: one before and after each forward, and each backward, that do nothing but count."""
    called = [0, 0, 0, 0]

    def count(kind: int) -> Callable[..., None]:
        def hook(module: nn.Module | None, *tensors: object) -> None:
            called[kind] += 1

        return hook

    if hooks:
        tracker.register_user_hooks(*map(count, range(4)))
    with tracker:
        repeat(work)
    if hooks and min(called) < work.calls:
        raise RuntimeError(f"hooks ran {called} times for {work.calls} calls: the benchmark times nothing")


def _hooked(work: Work) -> None:
    """What torch itself takes for two global hooks that do nothing: below this no tracker can come."""
    handles = [
        register_module_forward_pre_hook(lambda module, args: None),
        register_module_forward_hook(lambda module, args, output: None, always_call=True),
    ]
    repeat(work)
    for handle in handles:
        handle.remove()


def table(tiny: Work, gpt: Work) -> str:
    """Measures both works and returns the table."""
    of_tiny = time_rounds(variants(tiny), rounds=tiny.rounds)
    of_gpt = time_rounds(variants(gpt), rounds=gpt.rounds)
    rows = []
    for name in of_tiny:
        added_us = estimate((of_tiny[name] - of_tiny["plain"]) / tiny.calls * 1e6)
        ratio = estimate(of_gpt[name] / of_gpt["plain"])
        rows.append([name, *cells(added_us, 2), *cells(ratio, 3)])
    plain_us = estimate(of_tiny["plain"] / tiny.calls * 1e6).median
    plain_ms = estimate(of_gpt["plain"] / gpt.steps * 1e3).median
    rows[0][1:] = [f"({plain_us:.2f} us a call)", "", f"({plain_ms:.1f} ms a step)", ""]
    header = ["", f"{tiny.name}: us added a call", "95 %", f"{gpt.name}: ratio", "95 %"]
    return render_table(header, rows)


def cells(value: Estimate, digits: int) -> tuple[str, str]:
    """The median and its interval, as two cells."""
    return f"{value.median:.{digits}f}", f"{value.low:.{digits}f} .. {value.high:.{digits}f}"


def main(argv: Sequence[str] | None = None) -> None:
    quick = begin(__doc__, argv)
    print(machine(), flush=True)
    if quick:
        tiny = tiny_modules(length=20, steps=2, rounds=3)
        gpt = reference_gpt(width=32, layers=2, batch=1, steps=1, rounds=3)
    else:
        tiny = tiny_modules(length=200, steps=100, rounds=20)
        gpt = reference_gpt(width=256, layers=6, batch=8, steps=4, rounds=20)
    print(table(tiny, gpt))


if __name__ == "__main__":
    main()
