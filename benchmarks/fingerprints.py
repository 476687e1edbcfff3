"""What hashes and sketches cost: beside `x.sum()` and beside the statistics that are always taken, on one thread.

    python benchmarks/fingerprints.py [--quick]

Every figure is the best of several runs, in turn: other processes on shared cores only ever make a run slower.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from measure import machine, render_table
from modtrace.measure.dtypes import format_of
from modtrace.measure.fingerprints import fingerprints
from modtrace.measure.fingerprints.fingerprints import Shard, fingerprint_array
from modtrace.measure.measurers.measurer import Measurer
from modtrace.measure.memory import logical_array
from modtrace.torch_internals.modes import DisableTorchFunction

SIZES, QUICK_SIZES = [10_000, 100_000, 1_000_000, 4_000_000, 20_000_000], [1000]
DTYPES = [torch.float32, torch.bfloat16]

Run = Callable[[], object]


def runs_on(tensor: Tensor, measurer: Measurer) -> dict[str, Run]:
    """What is timed, by the name of its column."""
    form = format_of(tensor.dtype)
    if form is None:
        raise RuntimeError(f"{tensor.dtype} cannot be measured: the benchmark times something else")

    def statistics() -> None:
        found = measurer.measure(tensor)
        if found.rows is None:
            raise RuntimeError(f"not measured: {found.note}: the benchmark times something else")
        found.rows.free([found.row])

    return {
        "x.sum()": tensor.sum,
        "statistics": statistics,
        "hash": lambda: fingerprint_array(_array(tensor), None).hash,
        "sketch": lambda: fingerprint_array(_array(tensor), form, is_hashed=False).sketch,
        "both": lambda: fingerprint_array(_array(tensor), form),
    }


def _array(tensor: Tensor) -> fingerprints.Raw:
    array = logical_array(tensor)
    if array is None:
        raise RuntimeError("the tensor has no memory: the benchmark times something else")
    return array


def size_table(sizes: Sequence[int], repeats: int) -> str:
    """Dense tensors of several sizes."""
    rows = []
    for dtype in DTYPES:
        for size in sizes:
            best = _best_us(runs_on(torch.randn(size).to(dtype), Measurer()), size, repeats)
            rows.append([f"{_name(dtype)}, {size:,}", *_cells(best)])
    return render_table(["us", *_columns()], rows)


def stride_table(side: int, repeats: int) -> str:
    """A million elements as they may lie: what is taken is the same."""
    dense = torch.randn(side, side)
    wide = torch.randn(side, 2 * side)
    views = {
        "dense": dense,
        "slice of columns": wide[:, :side],
        "every second": wide[:, ::2],
        "transposed": dense.t(),
    }
    rows = [
        [name, *_cells(_best_us(runs_on(view, Measurer()), side * side, repeats))]
        for name, view in views.items()
    ]
    form = format_of(torch.float32)
    if form is not None:
        shards = {
            "columns of 4 x as many": (4 * side, side),
            "columns, not aligned": (4 * side + 3, side + 1),
        }
        for name, (columns, start) in shards.items():
            shard = Shard((side, columns), (0, start))
            both = {"both": lambda shard=shard: fingerprint_array(_array(dense), form, shard=shard)}
            best = _best_us(both, side * side, repeats)["both"]
            rows.append([name, *[""] * (len(_columns()) - 1), f"{best:.1f}"])
    return render_table([f"us, float32, {side} x {side}", *_columns()], rows)


def _columns() -> list[str]:
    return ["x.sum()", "statistics", "hash", "sketch", "both", "both / statistics"]


def _cells(best: dict[str, float]) -> list[str]:
    return [*(f"{us:.1f}" for us in best.values()), f"{best['both'] / best['statistics']:.2f}"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _best_us(runs: dict[str, Run], size: int, repeats: int) -> dict[str, float]:
    loops = max(1, min(300, 300_000 // size))
    best = dict.fromkeys(runs, float("inf"))
    with DisableTorchFunction():
        for _ in range(repeats + 1):  # the first ones make tables and scratch
            for name, run in runs.items():
                start = time.perf_counter()
                for _ in range(loops):
                    run()
                best[name] = min(best[name], (time.perf_counter() - start) / loops * 1e6)
    return best


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, few runs: shows only that it runs")
    quick = parser.parse_args(argv).quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{machine()}, {'numpy' if fingerprints.compiled is None else 'compiled'} kernel", flush=True)
    repeats = 2 if quick else 15
    print(size_table(QUICK_SIZES if quick else SIZES, repeats), flush=True)
    print()
    print(stride_table(32 if quick else 1024, repeats))


if __name__ == "__main__":
    main()
