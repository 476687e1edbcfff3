"""Measures how long it takes to build, fold, show, draw and export the graph of 200,000 ops.

    python benchmarks/graph.py [--quick] [--repeats 3]

The recording is of 2,000 equal blocks with five layers of 20 ops each. Every figure is the median of several runs, in
CPU seconds; nothing is kept from one run to the next.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from modtrace.analysis.graph_view.fold import fold_graph
from modtrace.api.graph import graph_of
from modtrace.api.model_graph import ModelGraph
from modtrace.recording.protocols import RecordingData

TESTS = Path(__file__).parent.parent / "tests"
BLOCKS, QUICK_BLOCKS, OPS_PER_BLOCK = 2_000, 20, 100


class Row(NamedTuple):
    """What is measured, and what has to be there before; that is not timed."""

    name: str
    prepare: Callable[[], ModelGraph]
    run: Callable[[ModelGraph], object]


def main() -> None:
    """Prints a line for each thing that is done with a graph."""
    options = _parse_arguments()
    data = _record(QUICK_BLOCKS if options.quick else BLOCKS)
    shown = graph_of(data)
    print(f"{len(shown.nodes):,} nodes, {len(shown.edges):,} edges, {len(shown.boxes):,} boxes")
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(data, shown, Path(folder)):
            print(f"{row.name:<28} {measure_s(row, options.repeats):8.2f} s")


def rows(data: RecordingData, shown: ModelGraph, folder: Path) -> list[Row]:
    """All of them; `shown` is a graph whose view is there."""

    def fresh() -> ModelGraph:
        return graph_of(data)

    def same() -> ModelGraph:
        return shown

    return [
        Row("build", same, lambda _: graph_of(data)),
        Row("fold", same, lambda graph: fold_graph(graph.columns)),
        Row("view", fresh, lambda graph: graph.view),
        Row("view, folded", fresh, lambda graph: graph.fold().view),
        Row("view, blocks collapsed", fresh, lambda graph: graph.collapse("blocks.*").view),
        Row("without views", fresh, lambda graph: graph.without_views()),
        Row("DOT", same, lambda graph: graph.render_dot()),
        Row("Model Explorer", same, lambda graph: graph.write_model_explorer(folder / "graph.json")),
    ]


def measure_s(row: Row, repeats: int) -> float:
    """The median CPU time in seconds."""
    times = []
    for _ in range(repeats):
        graph = row.prepare()
        gc.collect()
        start = time.process_time()
        row.run(graph)
        times.append(time.process_time() - start)
    return median(times)


def _record(blocks: int) -> RecordingData:
    sys.path.append(str(TESTS))
    from helpers.large_graphs import record_blocks

    return record_blocks(blocks, OPS_PER_BLOCK)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_BLOCKS * OPS_PER_BLOCK:,} ops")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
