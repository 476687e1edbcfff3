"""Measures what 20,000 small steps cost to write, to read, from an open recording and from a closed one, and to show.

    python benchmarks/open_small_steps.py [--steps 20000] [--calls 200]

Each step is written by itself, as if it had taken 200 ms. Reading is to take less than 1 s, and showing the medians
of the newest steps less than 3 s for 10,000 of them.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from modtrace.analysis.modules.module_tree import build_module_tree
from modtrace.recording.meta import RunMeta
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter
from modtrace.views.text.show_module_tree import render_module_tree


def main() -> None:
    options = _parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.modtrace"
        writer = FolderWriter(path, RunMeta())
        begin = time.process_time()
        for step in range(options.steps):
            _write_step(writer, step, options.calls)
        print(f"write: {(time.process_time() - begin) / options.steps * 1e6:.0f} us of CPU a step")
        _report("open", path)
        begin = time.perf_counter()
        writer.close()
        print(f"close: {time.perf_counter() - begin:.2f} s")
        _report("closed", path)
        begin, busy = time.perf_counter(), time.process_time()
        render_module_tree(build_module_tree(FolderReader(path)))
        took = f"{time.perf_counter() - begin:.3f} s ({time.process_time() - busy:.3f} s of the processor)"
        print(f"show: medians of {options.steps:,} steps in {took}")


def _write_step(writer: FolderWriter, step: int, calls: int) -> None:
    ids = np.arange(step * calls, (step + 1) * calls)
    columns = {
        "call_id": ids,
        "step": np.full(calls, step),
        "module_id": ids % calls,
        "parent_call_id": np.ma.MaskedArray(ids - 1, mask=ids % 5 == 0),
        "phase": (ids % 2).astype(np.int8),
        "start_ns": ids * 1000,
        "end_ns": ids * 1000 + 500,
    }
    writer.write("calls", columns)
    writer.write("steps", {"step": [step], "kind": ["train"], "start_ns": [step], "end_ns": [step]})
    writer.end_step(step * 200_000_000)


def _report(state: str, path: Path) -> None:
    begin = time.perf_counter()
    calls = FolderReader(path).table("calls")
    seconds = time.perf_counter() - begin
    ratio = (path / "rank-00000/calls.arrow").stat().st_size / calls.combine_chunks().nbytes
    batches = calls.column(0).num_chunks
    print(
        f"{state}: {calls.num_rows:,} calls in {batches:,} batches read in {seconds:.3f} s, "
        f"{ratio:.3f} times the size of their columns"
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--calls", type=int, default=200)
    return parser.parse_args()


if __name__ == "__main__":
    main()
