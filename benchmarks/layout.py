"""Measures how long it takes to lay out a view of many nodes.

    python benchmarks/layout.py [--repeats 5]

Budget: 200 ms for 50,000 nodes and 62,500 edges. Every figure is the median of several runs, in CPU time.
"""

import argparse
import gc
import time
from statistics import median

from modtrace.analysis.graph.columns import DATA, MODULE, OP
from modtrace.analysis.graph_view.records import GraphView, ViewBox, ViewEdge, ViewNode
from modtrace.analysis.layout.layout import lay_out

SIZES = (1_000, 10_000, 50_000, 200_000)
NODES_PER_BOX = 20
BUDGET_NODES, BUDGET_MS = 50_000, 200


def main() -> None:
    """Prints a line for each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs of each size")
    repeats = parser.parse_args().repeats
    for size in SIZES:
        view = make_view(size)
        budget = f"   (budget {BUDGET_MS} ms)" if size == BUDGET_NODES else ""
        print(f"{size:8,} nodes {len(view.edges):8,} edges {measure_ms(view, repeats):8.1f} ms{budget}")


def measure_ms(view: GraphView, repeats: int) -> float:
    """The median time of a layout in milliseconds."""
    times = []
    for _ in range(repeats):
        gc.collect()
        start = time.process_time()
        lay_out(view)
        times.append(1000 * (time.process_time() - start))
    return median(times)


def make_view(size: int) -> GraphView:
    """A chain through boxes of 20 nodes, where every fourth node also reads the end of the box before."""
    nodes = [_node(at) for at in range(size)]
    chain = [_edge(at - 1, at) for at in range(1, size)]
    skips = [
        _edge(at - at % NODES_PER_BOX - 1, at) for at in range(NODES_PER_BOX, size, 4) if at % NODES_PER_BOX
    ]
    return GraphView(
        command=(),
        marks=(),
        step=None,
        has_ops=True,
        boxes=tuple(_box(at) for at in range(-(-size // NODES_PER_BOX))),
        nodes=tuple(nodes),
        edges=tuple(sorted(chain + skips, key=lambda each: each.target)),
    )


def _node(number: int) -> ViewNode:
    return ViewNode(
        key=f"op{number}", kind=OP, name="aten.mul.Tensor", label="mul", type="", path=None, root=None, call=None,
        phase="forward", box=number // NODES_PER_BOX, repeats=1, ops=1, shape=None, dtype=None, args="", start_ns=0,
        duration_ns=0, flops=None, bytes_read=None, bytes_written=None, saved_bytes=None, nonfinite=None, rms=None,
        raised=False, twin=-1, first=0,
    )  # fmt: skip


def _box(number: int) -> ViewBox:
    return ViewBox(
        key=f"box{number}", kind=MODULE, name=f"layers.{number}", label=f"{number}", type="Layer", path=None,
        root=None, call=0, phase="forward", box=-1, depth=0, repeats=1, ops=NODES_PER_BOX, start_ns=0, duration_ns=0,
        flops=None, bytes_read=None, bytes_written=None, saved_bytes=None, nonfinite=None, rms=None, raised=False,
        first=0,
    )  # fmt: skip


def _edge(source: int, target: int) -> ViewEdge:
    return ViewEdge(source, target, DATA, "", None, None, 1, 0, False)


if __name__ == "__main__":
    main()
