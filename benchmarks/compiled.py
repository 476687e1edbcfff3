"""What measuring inside of compiled code adds to a compiled step: `make bench ONLY=compiled`.

Steps of two copies of the reference GPT, both compiled by inductor, one beside the other in one process. In one copy
what each module returns, and its gradient, is measured inside (`compiled="inside"`). The other is called from a
compiled function, so that nothing of it is recorded. Recording begins and ends outside of what is timed. Both are
compiled in full, with empty caches, after inductor has compiled something else.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from scopes import cells, reference_gpt
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import modtrace
from measure import begin, estimate, machine, render_table, time_rounds

#: Parameters by their names: they are measured at the optimizer's step, outside of compiled code.
PARAMETERS = ["**.weight", "**.bias"]


def make_step(model: nn.Module, call: Callable[[Tensor], Tensor], batch: int) -> Callable[[], None]:
    """Returns a step of training: forward, loss and backward, on random tokens."""
    passages = torch.randint(2000, (batch, 129))

    def step() -> None:
        loss = F.cross_entropy(call(passages[:, :-1]).flatten(0, 1), passages[:, 1:].flatten())
        model.zero_grad()
        loss.backward()

    return step


def cost_table(width: int, layers: int, batch: int, *, steps: int, rounds: int) -> str:
    """Times both copies in turn, and returns the table."""
    torch._dynamo.reset()
    plain, inside = (
        reference_gpt(width=width, layers=layers, batch=batch, steps=1, rounds=1).model for _ in range(2)
    )
    plain_step = make_step(plain, torch.compile(lambda x: plain(x), fullgraph=True), batch)
    inside.compile(fullgraph=True)
    inside_step = make_step(inside, inside, batch)
    recording = modtrace.record(inside, compiled="inside", exclude=PARAMETERS)
    with recording:
        with fresh_cache():
            torch.compile(lambda x: x.exp().sum())(torch.ones(9, requires_grad=True)).backward()
            first = {"as it is": _seconds_of(plain_step), "measured inside": _seconds_of(inside_step)}
        seconds = time_rounds(
            {
                "as it is": lambda: _repeat(plain_step, steps),
                "measured inside": lambda: _repeat(inside_step, steps),
            },
            rounds=rounds,
        )
    rows = recording.table("values").num_rows
    wanted = 1.5 * len(list(inside.modules())) * steps * rounds
    if rows < wanted:
        raise RuntimeError(
            f"{rows} values were measured, not {wanted:.0f}: the benchmark times something else"
        )
    ratio = estimate(seconds["measured inside"] / seconds["as it is"])
    step_ms = estimate(seconds["as it is"] / steps * 1e3).median
    title = f"{layers} blocks of width {width}, {batch} x 128 tokens"
    return render_table(
        [title, "ratio", "95 %", "first step"],
        [
            ["as it is", f"({step_ms:.1f} ms a step)", "", f"{first['as it is']:.1f} s"],
            ["measured inside", *cells(ratio, 3), f"{first['measured inside']:.1f} s"],
        ],
    )


def _seconds_of(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _repeat(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()


def main(argv: Sequence[str] | None = None) -> None:
    quick = begin(__doc__, argv)
    print(machine(), flush=True)
    if quick:
        print(cost_table(32, 2, 1, steps=1, rounds=3), flush=True)
        return
    print(cost_table(256, 6, 8, steps=1, rounds=80), flush=True)
    print(cost_table(128, 2, 2, steps=4, rounds=40), flush=True)


if __name__ == "__main__":
    main()
