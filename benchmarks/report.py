"""Measures how quickly the page of a large report opens and answers in Chromium.

    python benchmarks/report.py [--quick]

One report has a graph of 50,000 nodes, another one the values of 502 tensors in 1,000 steps. Times are in milliseconds
of wall time, so they say nothing while something else runs: the load of the machine is printed first. It needs Chromium
and what `make test-browser` installs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

import modtrace

sys.path.append(str(Path(__file__).parent.parent / "tests"))
sys.path.append(str(Path(__file__).parent.parent / "examples"))

import train_gpt

from helpers.driven import DrivenPage

OPENINGS, GROUPS, FRAMES = 5, 12, 200

#: Resolves when the frame after the next one begins: what was asked for has been drawn then.
_DRAWN = "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"
_OPEN_GROUP = f"""(async () => {{
    const press = key => document.body.dispatchEvent(new KeyboardEvent("keydown", {{key, bubbles: true}}));
    press("c"); await {_DRAWN};
    const start = performance.now();
    press("e"); await new Promise(r => requestAnimationFrame(r));
    return performance.now() - start;
}})()"""
_PAN = f"""(async () => {{
    const canvas = document.querySelector(".graph .canvasbox canvas");
    const send = (type, x, y) => canvas.dispatchEvent(
        new PointerEvent(type, {{pointerId: 1, clientX: x, clientY: y, bubbles: true, buttons: 1}}));
    canvas.setPointerCapture = () => {{}};
    send("pointerdown", 500, 400);
    const times = [];
    let before = performance.now();
    for (let at = 0; at < {FRAMES}; at++) {{
        send("pointermove", 500 + 100 * Math.sin(at / 10), 400 - at * 3);
        await new Promise(r => requestAnimationFrame(r));
        times.push(performance.now() - before);
        before = performance.now();
    }}
    send("pointerup", 500, 400);
    return times;
}})()"""
_FIRST_PAINT = "performance.getEntriesByType('paint')[0].startTime"
_READY = (
    "document.documentElement.dataset.ready !== undefined && performance.getEntriesByType('paint').length > 0"
)


def main() -> None:
    """Prints a line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small recordings, to try the script")
    quick = parser.parse_args().quick
    chromium = subprocess.run(["chromium", "--version"], capture_output=True, text=True).stdout.strip()
    print(f"{chromium}, torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder, DrivenPage() as page:
        graph = write(lambda to: record_graph(to, 4 if quick else 370), Path(folder) / "graph")
        measure_opening(page, graph, "graph", 1000)
        measure_graph(page, graph)
        values = write(lambda to: record_values(to, 20 if quick else 1000), Path(folder) / "values")
        measure_opening(page, values, "values", 1000)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


def record_graph(to: Path, layers: int) -> None:
    """Trains a small GPT of many layers for two steps, with all ops."""
    torch.manual_seed(0)
    text = train_gpt.Text()
    model = train_gpt.GPT(len(text.characters), layers=layers, width=16, heads=2, context=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with modtrace.record(model, to, backward_times=True, ops=True):
        for _ in range(2):
            tokens, targets = text.batch(1, 16)
            optimizer.zero_grad()
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()


def record_values(to: Path, steps: int) -> None:
    """Trains 125 linear layers, and measures their outputs and gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(125)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    roles = ["output", "grad_output", "parameter_grad"]
    with modtrace.record(model, to, values=modtrace.Capture(roles=roles)) as rec:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(torch.randn(4, 8)) ** 2).mean()
            loss.backward()
            optimizer.step()
            rec.log(loss=loss)


def write(record: Callable[[Path], None], name: Path) -> Path:
    """Records, writes the report, and prints its size."""
    record(name.with_suffix(".modtrace"))
    page = name.with_suffix(".html")
    modtrace.open_recording(name.with_suffix(".modtrace")).write_html(page)
    print(f"{name.name}: {page.stat().st_size / 1e6:.1f} MB")
    return page


def measure_opening(page: DrivenPage, file: Path, view: str, budget_ms: int) -> None:
    """Prints when the view was painted first, and when its script had drawn it, from the start of the navigation."""
    paints, drawn = [], []
    for _ in range(OPENINGS):
        page.open(file, f"view={view}")
        page.ask("wait", code=_READY)
        paints.append(page.evaluate(_FIRST_PAINT))
        drawn.append(float(page.evaluate("document.documentElement.dataset.ready")))
    tell(f"{view}: first paint", paints, budget_ms)
    tell(f"{view}: script until drawn", drawn, budget_ms)


def measure_graph(page: DrivenPage, file: Path) -> None:
    """Prints how long a group takes to open as the graph opens, and how long frames take while all of it is moved."""
    page.open(file, "view=graph&node=60")
    tell("graph: open a group", [page.evaluate(_OPEN_GROUP) for _ in range(GROUPS)], 50)
    for label in ("Open all", "Unfold"):
        page.ask("click", role="button", name=label)
        page.settle()
    tell("graph: open a group, all open", [page.evaluate(_OPEN_GROUP) for _ in range(GROUPS)], 50)
    tell("graph: a frame of panning, all open", page.evaluate(_PAN), 50)
    page.press(" ")
    tell("graph: the same, fit to the view", page.evaluate(_PAN), 50)


def tell(what: str, times_ms: Sequence[float], budget_ms: int) -> None:
    """Prints the median, the 95th percentile and the worst."""
    ordered = sorted(times_ms)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
    print(
        f"{what:<38} median {median(ordered):7.1f}   p95 {p95:7.1f}   worst {ordered[-1]:7.1f} ms "
        f"of {len(ordered)} (budget {budget_ms})"
    )


if __name__ == "__main__":
    main()
