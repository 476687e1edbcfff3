"""What measuring values costs, beside what people do by hand for the same answer: `make bench`.

* a step of the reference GPT, as the ratio of CPU time to the plain step.
* the kernel alone, as a multiple of `x.sum()` on the same tensor, on one thread.

Recording is timed as a whole, from entering `record()` to having the rows as an Arrow table.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from scopes import Work, cells, reference_gpt, repeat
from torch import Tensor, nn
from torch.utils._debug_mode import DebugMode

import modtrace
from measure import Round, begin, estimate, machine, render_table, time_rounds
from modtrace.measure.measurers.measurer import Measurer
from modtrace.measure.moments import cpu_kernel
from modtrace.torch_internals.modes import DisableTorchFunction

#: Parameters by their names, so that outputs and gradients alone are left.
PARAMETERS = ["**.weight", "**.bias"]


def variants(work: Work) -> dict[str, Round]:
    """The rows of the table."""
    return {
        "plain": lambda: repeat(work),
        "modtrace, calls alone": lambda: _recorded(work, values=None),
        "modtrace, outputs and gradients": lambda: _recorded(work, exclude=PARAMETERS),
        "modtrace, parameters too": lambda: _recorded(work),
        "hooks taking std()": lambda: hooked(work, lambda tensor: tensor.detach().std()),
        "hooks keeping copies": lambda: hooked(work, lambda tensor: tensor.detach().clone()),
        "torch DebugMode with hashes": lambda: debugged(work),
    }


def _recorded(work: Work, **options: Any) -> None:
    with modtrace.record(work.model, **options) as recording:
        repeat(work)
    rows = recording.table("values").num_rows
    if (rows < 2 * work.calls * 0.75) != (options.get("values", "stats") is None):
        raise RuntimeError(
            f"{rows} values of {work.calls} calls were recorded: the benchmark times something else"
        )


def hooked(work: Work, take: Callable[[Tensor], Tensor]) -> None:
    """What a careful user writes: a forward hook on each module, and a hook on what it returned."""
    for _ in range(work.steps):
        with _hooks(work.model, take):
            work.step()


@contextmanager
def _hooks(model: nn.Module, take: Callable[[Tensor], Tensor]) -> Iterator[None]:
    kept: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(take(output))
        if output.requires_grad:
            output.register_hook(lambda gradient: kept.append(take(gradient)))

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def debugged(work: Work) -> None:
    """torch's own: hashes of every op's output."""
    for _ in range(work.steps):
        with DebugMode(), DebugMode.log_tensor_hashes():
            work.step()


def gpt_table(work: Work) -> str:
    """Times the GPT's steps and returns the table."""
    seconds = time_rounds(variants(work), rounds=work.rounds)
    rows = [[name, *cells(estimate(seconds[name] / seconds["plain"]), 3)] for name in seconds]
    rows[0][1:] = [f"({estimate(seconds['plain'] / work.steps * 1e3).median:.1f} ms a step)", ""]
    return render_table([work.name, "ratio", "95 %"], rows)


def kernel_table(sizes: Sequence[int], *, repeats: int) -> str:
    """Times the kernel and `x.sum()` in turn; the best of several, for both are disturbed by other processes."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for size in sizes:
            tensor = torch.randn(size).to(dtype)
            measurer = Measurer()

            def measure(tensor: Tensor = tensor, measurer: Measurer = measurer) -> None:
                found = measurer.measure(tensor)
                found.rows.free([found.row])

            with DisableTorchFunction():
                ours, theirs = _best_us([measure, tensor.sum], size, repeats)
            kind = str(dtype).removeprefix("torch.")
            rows.append([kind, f"{size:,}", f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"])
    return render_table(["kernel", "elements", "us", "x.sum() us", "ratio"], rows)


def _best_us(runs: Sequence[Callable[[], object]], size: int, repeats: int) -> list[float]:
    loops = max(1, min(1000, 1_000_000 // size))
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        for at, run in enumerate(runs):
            start = time.perf_counter()
            for _ in range(loops):
                run()
            best[at] = min(best[at], (time.perf_counter() - start) / loops * 1e6)
    return best


def main(argv: Sequence[str] | None = None) -> None:
    quick = begin(__doc__, argv)
    print(
        f"{machine()}, {'compiled kernel' if cpu_kernel.measure_into is not None else 'numpy kernel'}",
        flush=True,
    )
    print(
        kernel_table([1000] if quick else [10_000, 1_000_000, 20_000_000], repeats=2 if quick else 9),
        flush=True,
    )
    if quick:
        gpt = reference_gpt(width=32, layers=2, batch=1, steps=1, rounds=3)
    else:
        gpt = reference_gpt(width=256, layers=6, batch=8, steps=4, rounds=20)
    print()
    print(gpt_table(gpt))


if __name__ == "__main__":
    main()
