"""What recording every op costs, beside PyTorch's own modes: `make bench`.

Five works, because the cost is a cost per op: the reference GPT, the same with small ops, a GPT of many tiny ops, cells
of an LSTM that are unrolled, and a model of transformers. Ratios are to the plain step of the same round. Recording is
timed as a whole, from entering `record()` to having its Arrow tables, and always has shapes and edges. What other
tracers of ops cost is in `op_tracers.py`.
"""

from collections.abc import Sequence

from op_rows import cells_of, measure, training_rows
from op_works import CASES

from measure import begin, machine, render_table


def table(case: str, *, quick: bool) -> str:
    """Measures all rows of one work."""
    training = CASES[case](quick).training
    rows = training_rows(training)
    column = cells_of(list(rows), measure(rows))
    header = (f"{training.work.name}, {training.ops} ops", "ratio", "95 %")
    return render_table(header, [(name, *cells) for name, cells in column.items()])


def main(argv: Sequence[str] | None = None) -> None:
    quick = begin(__doc__, argv)
    print(machine(), flush=True)
    for case in CASES:
        print(f"\n{table(case, quick=quick)}", flush=True)


if __name__ == "__main__":
    main()
