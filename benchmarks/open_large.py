"""Measures how long a recording of 10 million stat rows takes to open and to find the first non-finite value.

    python benchmarks/open_large.py [--rows 10000000] [--folder DIR]

Budget: 2 s, and 500 MB beyond mapped pages.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from modtrace.recording.meta import RunMeta
from modtrace.recording.phase import PHASES
from modtrace.recording.statistics.moments import first_nonfinite_row
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter

ROWS_PER_STEP = 1000
ROWS_PER_BATCH = 65_536
NONFINITE = 20
BUDGET_S, BUDGET_MB = 2.0, 500


def main() -> None:
    options = _parse_arguments()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "large.modtrace"
        expected = write_synthetic(path, options.rows)
        for attempt in ("first", "again"):
            figures = _measure_in_new_process(path)
            assert figures["row"] == expected, (figures, expected)
            _report(attempt, path, options.rows, figures)


def write_synthetic(path: Path, rows: int) -> int:
    """Writes `rows` random stat rows in steps of 1,000; returns the index of the first non-finite one."""
    rng = np.random.default_rng(0)
    bad = np.sort(rng.choice(np.arange(rows // 2, rows), NONFINITE, replace=False))
    writer = FolderWriter(path, RunMeta(run_id="open_large"))
    for start in range(0, rows, ROWS_PER_BATCH):
        row = np.arange(start, min(start + ROWS_PER_BATCH, rows))
        writer.write("values", _values(row, np.isin(row, bad), rng))
        writer.end_step(start, force=True)
    writer.close()
    return int(bad[0])


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


def measure(path: Path) -> dict[str, float | int | None]:
    """Opens and scans the recording; returns seconds, MB of anonymous memory that it took, and the row."""
    before = _anonymous_mb()
    begin = time.perf_counter()
    row = first_nonfinite_row(FolderReader(path).table("values"))
    return {"seconds": time.perf_counter() - begin, "mb": _anonymous_mb() - before, "row": row}


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
        f"{figures['seconds']:.2f} s (budget {BUDGET_S:g}), {figures['mb']:.0f} MB (budget {BUDGET_MB})"
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="where to put the recording while it is measured")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
