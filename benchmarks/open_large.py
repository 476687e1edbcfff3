"""Measures how long a recording of 10 million stat rows takes to open and to say who made the first NaN.

    python benchmarks/open_large.py [--rows 10000000] [--folder DIR] [--kind KIND]

Of modules alone, the rows are random numbers. With ops, the steps of a small attention model are repeated: with a NaN
in the first step, in the last, or in the last with masks of -inf in every step. Budget: 2 s, and 500 MB beyond mapped
pages.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import nn

import modtrace
from modtrace.recording.meta import RunMeta
from modtrace.recording.phase import PHASES
from modtrace.store.writer import FolderWriter

ROWS_PER_STEP = 1000
ROWS_PER_BATCH = 65_536
NONFINITE = 20
BUDGET_S, BUDGET_MB = 2.0, 500
FUTURE = torch.ones(8, 8, dtype=torch.bool).triu(1)

#: Columns with ids, by what they number: the next repetition has others.
IDS = {
    "op": ("op_id", "forward_op_id", "consumer_op", "producer_op"),
    "call": ("call_id", "parent_call_id", "forward_call_id", "recompute_of", "consumer_call"),
    "tensor": ("tensor_id",),
    "storage": ("storage",),
    "step": ("step",),
}
OF_COLUMN = {column: kind for kind, columns in IDS.items() for column in columns}


def main() -> None:
    options = _parse_arguments()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    for kind in [options.kind] if options.kind else KINDS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            path = Path(folder) / "large.modtrace"
            expected = KINDS[kind](path, options.rows)
            for attempt in ("first", "again"):
                figures = _measure_in_new_process(path)
                assert figures["step"] == expected, (figures, expected)
                _report(f"{kind}, {attempt}", path, options.rows, figures)


def write_modules(path: Path, rows: int) -> int:
    """Writes `rows` random stat rows in steps of 1,000; returns the first step with a non-finite one."""
    rng = np.random.default_rng(0)
    bad = np.sort(rng.choice(np.arange(rows // 2, rows), NONFINITE, replace=False))
    writer = FolderWriter(path, RunMeta(run_id="open_large"))
    for start in range(0, rows, ROWS_PER_BATCH):
        row = np.arange(start, min(start + ROWS_PER_BATCH, rows))
        writer.write("values", _values(row, np.isin(row, bad), rng))
        writer.end_step(start, force=True)
    writer.close()
    return int(bad[0]) // ROWS_PER_STEP


def _values(row: np.ndarray, is_bad: np.ndarray, rng: np.random.Generator) -> dict[str, object]:
    n = len(row)
    numel = np.full(n, 8 * 128 * 256)
    scale = rng.lognormal(size=n)
    return {
        "step": (row // ROWS_PER_STEP).astype(np.int32),
        "phase": (row % len(PHASES)).astype(np.int8),
        "site_id": (row % ROWS_PER_STEP).astype(np.int32),
        "call_id": row // 2,
        "order": row % ROWS_PER_STEP,
        "shape": np.tile(np.array([8, 128, 256], np.int32), (n, 1)),
        "dtype": ["bfloat16" if each else "float32" for each in row % 3],
        "numel": numel,
        "count": numel,
        "min": np.where(is_bad, np.nan, -4 * scale),
        "max": np.where(is_bad, np.nan, 4 * scale),
        "sum": rng.normal(size=n),
        "sumsq": scale**2 * numel,
        "nan_count": np.where(is_bad, 7, 0),
        "inf_count": np.zeros(n, np.int64),
    }


class Attention(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.query, self.key, self.out = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).mT
        scores = scores.masked_fill(FUTURE, -math.inf) if self.masked else scores
        return x + self.out(scores.softmax(-1) @ x)


def record_steps(masked: bool) -> modtrace.Recording:
    """Returns the recording of three training steps with ops and their values."""
    model = nn.Sequential(*(Attention(masked) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters())
    with modtrace.record(model, ops=True) as rec:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 8, 16)).square().mean().backward()
            optimizer.step()
    return rec


def write_ops(path: Path, rows: int, *, in_last: bool, masked: bool = False) -> int:
    """Writes the steps of a recording again and again; returns the step in which an output of an op has NaN."""
    rec = record_steps(masked)
    tables = {
        name: rec.table(name)
        for name in ("modules", "sites", "steps", "calls", "ops", "uses", "tensors", "values")
    }
    counts = {
        kind: 1 + max(_largest(table, column) for column in columns for table in tables.values())
        for kind, columns in IDS.items()
    }
    times = -(-rows // tables["values"].num_rows)
    bad = times - 1 if in_last else 0
    writer = FolderWriter(path, RunMeta(run_id="open_large"))
    for nth in range(times):
        for name, table in tables.items():
            if nth and name in ("modules", "sites"):
                continue
            columns = _repeat(table, nth, counts)
            if name == "values" and nth == bad:
                columns["nan_count"] = _plant(table, rec.table("sites"))
            writer.write(name, columns)
        writer.end_step(nth * 10**9)
    writer.close()
    return bad * counts["step"]


def _largest(table: pa.Table, column: str) -> int:
    return (pc.max(table[column]).as_py() or 0) if column in table.column_names else 0


def _repeat(table: pa.Table, nth: int, counts: Mapping[str, int]) -> dict[str, Any]:
    """Returns the columns of the n-th repetition of a table."""
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    return {
        name: pc.add(each, pa.scalar(nth * counts[OF_COLUMN[name]], each.type)) if name in OF_COLUMN else each
        for name, each in columns.items()
    }


def _plant(values: pa.Table, sites: pa.Table) -> pa.Array:
    """Returns the counts of NaN with some in the last output of an op in the forward of the first step."""
    of_ops = [row["site_id"] for row in sites.to_pylist() if row["role"] == "op_output"]
    is_chosen = np.isin(values["site_id"].to_numpy(), of_ops) & (values["step"].to_numpy() == 0)
    is_chosen &= np.array([phase == "forward" for phase in values["phase"].to_pylist()])
    counts = values["nan_count"].to_numpy().copy()
    counts[np.flatnonzero(is_chosen)[-1]] = 3
    return pa.array(counts)


KINDS = {
    "modules": write_modules,
    "ops, NaN in the first step": lambda path, rows: write_ops(path, rows, in_last=False),
    "ops, NaN in the last step": lambda path, rows: write_ops(path, rows, in_last=True),
    "ops, masks in every step": lambda path, rows: write_ops(path, rows, in_last=True, masked=True),
}


def measure(path: Path) -> dict[str, float | int | None]:
    """Asks the recording; returns seconds, MB of anonymous memory that it took, and the step of the answer."""
    before = _anonymous_mb()
    begin, busy = time.perf_counter(), time.process_time()
    found = modtrace.open_recording(path).first_nonfinite()
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - busy,
        "mb": _anonymous_mb() - before,
        "step": found.step if found else None,
    }


def _anonymous_mb() -> float:
    """What this process holds beyond mapped files."""
    [line] = [
        each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon")
    ]
    return int(line.split()[1]) / 1024


def _measure_in_new_process(path: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", str(path)]
    figures: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return figures


def _report(attempt: str, path: Path, rows: int, figures: dict[str, float]) -> None:
    size_mb = sum(each.stat().st_size for each in path.rglob("*.arrow")) / 2**20
    print(
        f"{attempt}: {rows:,} value rows, {size_mb:,.0f} MB on disk: "
        f"{figures['seconds']:.2f} s (budget {BUDGET_S:g}; {figures['cpu_seconds']:.2f} s of the processor), "
        f"{figures['mb']:.0f} MB (budget {BUDGET_MB})"
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="where to put the recording while it is measured")
    parser.add_argument("--kind", choices=KINDS, help="one of the recordings alone")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
