"""What `record(on_nonfinite=...)` adds to measuring values, where nothing is wrong: `make bench ONLY=on_nonfinite`.

A step of the reference GPT in CPU time, as the ratio to the plain step, and the differences of these ratios to those of
the same rounds without `on_nonfinite`.
"""

from collections.abc import Sequence
from typing import Any

from scopes import Work, cells, reference_gpt, repeat

import modtrace
from measure import Round, begin, estimate, machine, render_table, time_rounds

VALUES = "modtrace, values"


def variants(work: Work) -> dict[str, Round]:
    """The rows of the table."""
    return {
        "plain": lambda: repeat(work),
        VALUES: lambda: recorded(work),
        'on_nonfinite="report"': lambda: recorded(work, on_nonfinite="report"),
        'on_nonfinite="stop"': lambda: recorded(work, on_nonfinite="stop"),
    }


def recorded(work: Work, **options: Any) -> None:
    """Records the steps, in which nothing may be found."""
    with modtrace.record(work.model, **options) as recording:
        repeat(work)
    if recording.triggers or not recording.table("values").num_rows:
        raise RuntimeError("something was found, or nothing measured: the benchmark times something else")


def cost_table(work: Work) -> str:
    """Times the GPT's steps and returns the table."""
    seconds = time_rounds(variants(work), rounds=work.rounds)
    plain = seconds["plain"]
    rows = [[name, *cells(estimate(taken / plain), 3)] for name, taken in seconds.items()]
    rows[0][1:] = [f"({estimate(plain / work.steps * 1e3).median:.1f} ms a step)", "", "", ""]
    rows[1] += ["", ""]
    for row in rows[2:]:
        row += cells(estimate((seconds[row[0]] - seconds[VALUES]) / plain), 3)
    return render_table([work.name, "ratio", "95 %", f"beyond {VALUES}", "95 %"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    quick = begin(__doc__, argv)
    print(machine(), flush=True)
    if quick:
        gpt = reference_gpt(width=32, layers=2, batch=1, steps=1, rounds=3)
    else:
        gpt = reference_gpt(width=256, layers=6, batch=8, steps=1, rounds=320)
    print(cost_table(gpt))


if __name__ == "__main__":
    main()
