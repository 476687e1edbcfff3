"""Draws docs/packages.svg: a box for each package, and the arrows that tests/test_layers.py allows between them.

An arrow that others imply is left out: `cli` may import `recording` because each package on the way may. It needs the
program `dot` of Graphviz.
"""

import runpy
import subprocess
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from modtrace.views.dot.fixed_labels import FixedLabels
from modtrace.views.dot.text import Html

PROJECT = Path(__file__).parent.parent
DRAWING = PROJECT / "docs" / "packages.svg"

#: What a package is for, in few words.
ABOUT = {
    "cli": "the command line",
    "api": "record(), Recording, graph(), compare()",
    "integrations": "callbacks of Trainer and Lightning",
    "tensor_tracker": "tensor_tracker's names",
    "replay": "proves a recording",
    "query": "asks many runs, in SQL",
    "measure": "numbers of one tensor",
    "measure/measurers": "measures as is wanted",
    "measure/cuda": "launches kernels",
    "measure/moments": "counts, extremes, sums",
    "measure/tier2": "histograms, samples",
    "measure/fingerprints": "hashes and sketches",
    "errors": "",
    "optional": "libraries that may be missing",
    "torch_internals": "private names of torch",
    "collect/recorder": "what record() keeps running",
    "collect/ops": "sees operators",
    "collect/values": "measures tensors",
    "collect/module_tracker": "ModuleTracker",
    "collect/stash": "track()",
    "collect/compile": "compiled code: taps, hooks",
    "collect/collectives": "what ranks send each other",
    "collect/scopes": "which call runs now",
    "collect/steps": "which step it belongs to",
    "collect/backward": "engine runs, recompute",
    "collect/log": "what ran, per thread",
    "collect/fx": "paths for torch.fx",
    "collect/names": "paths of modules",
    "collect/structures": "tensors in outputs",
    "collect/tensor_ids": "which tensor is which",
    "collect/flops": "FLOPs of an op",
    "recording/arrow": "Arrow batches",
    "recording/options": "captures, schedules, filters",
    "recording/statistics": "moments, tier 2, hashes",
    "recording/triggers": "when held steps are written",
    "recording/in_memory": "a recording in memory",
    "store/flight_recorder": "holds the last steps",
    "analysis/tables": "columns: calls, ops, tensors, values",
    "analysis/compile": "what torch.compile did",
    "analysis/modules": "module tree",
    "analysis/ops": "tables of ops and memory",
    "analysis/values": "histories, statistics",
    "analysis/graph": "nodes, edges, layers",
    "analysis/graph_view": "what is visible of it",
    "analysis/timeline": "lanes and spans",
    "analysis/provenance": "who made a NaN",
    "analysis/alignment": "which rows of two runs are the same",
    "analysis/divergence": "who made a difference",
    "analysis/ranks": "which rank is unlike others",
    "analysis/findings": "what is wrong with a run",
    "analysis/report": "tables of a report",
    "views/common": "numbers, columns",
    "views/text": "tables for a terminal",
    "views/html": "tables and reports",
    "views/dot": "pictures of graphs",
    "views/plot": "plots of values",
    "views/formats": "Perfetto, Model Explorer",
}

#: What lies in the folder of a layer that also has packages.
OWN_FILES = {
    "measure": "memory, dtypes, special tensors",
    "recording": "schema, meta, roles, paths",
    "store": "writers and readers of files",
}

_COLORS = {
    "measure": "#fef9c3",
    "collect": "#e0f2fe",
    "analysis": "#dcfce7",
    "views": "#fef3c7",
    "recording": "#f1f5f9",
    "store": "#fae8ff",
}

_HEAD = """digraph packages {
  compound=true; rankdir=TB; newrank=true; nodesep=0.18; ranksep=0.38; bgcolor="white";
  fontname="Helvetica,Arial,sans-serif";
  node [shape=box, style="rounded,filled", fillcolor="white", color="#64748b", fontname="Helvetica,Arial,sans-serif",
        fontsize=11, margin="0.10,0.05", height=0.3];
  edge [color="#94a3b8", arrowsize=0.6];
"""


def tables() -> tuple[Mapping[str, Set[str]], Mapping[str, Mapping[str, Set[str]]]]:
    """What layers may import, without those that have no code yet, and what packages inside them may."""
    rules = runpy.run_path(str(PROJECT / "tests" / "test_layers.py"))
    package = PROJECT / "src" / "modtrace"
    layers = {
        name
        for name in rules["MAY_IMPORT"]
        if not name.startswith("__") and ((package / name).is_dir() or (package / f"{name}.py").is_file())
    }
    outer = {name: others & layers for name, others in rules["MAY_IMPORT"].items() if name in layers}
    return outer, rules["MAY_IMPORT_INSIDE"]


def arrows() -> set[tuple[str, str]]:
    """The arrows of the drawing, from above to below; packages are called `collect/steps`."""
    outer, inside = tables()
    found = {(one, other) for one, others in outer.items() for other in _nearest(one, outer)}
    for layer, packages in inside.items():
        for one in packages:
            found |= {(f"{layer}/{one}", f"{layer}/{other}") for other in _nearest(one, packages)}
    return found


def boxes() -> set[str]:
    """The names of all layers and packages."""
    outer, inside = tables()
    return {*outer, *(f"{layer}/{each}" for layer, packages in inside.items() for each in packages)}


def _nearest(one: str, may_import: Mapping[str, Set[str]]) -> set[str]:
    """What `one` may import and none of its other imports may."""
    others = may_import[one] - {one}
    return {
        each for each in others if not any(each in _below(other, may_import) for other in others - {each})
    }


def _below(one: str, may_import: Mapping[str, Set[str]]) -> set[str]:
    below = set(may_import[one])
    for each in may_import[one]:
        below |= _below(each, may_import)
    return below


def render_drawing(labels: FixedLabels) -> str:
    """The drawing in the language of Graphviz, with room for the labels."""
    outer, inside = tables()
    lines = [_HEAD]
    for layer in outer:
        lines += (
            _cluster(layer, inside[layer], labels) if layer in inside else [f"  {_box(layer, layer, labels)}"]
        )
    lines += [f"  {_arrow(*each, inside)}" for each in sorted(arrows())]
    return "\n".join([*lines, "}\n"])


def _cluster(layer: str, packages: Mapping[str, Set[str]], labels: FixedLabels) -> Iterator[str]:
    title = labels.reserve(Html(f"<b>{layer}/</b>"), size=13, align="left")
    yield f'  subgraph "cluster_{layer}" {{ id="{layer}"; label=<{title}>; labeljust=l;'
    yield f'    style="rounded,filled"; fillcolor="{_COLORS[layer]}"; color="#cbd5e1"; fontsize=13;'
    for each in packages:
        yield f"    {_box(f'{layer}/{each}', each, labels)}"
    if layer in OWN_FILES:
        about = labels.reserve(Html(f"<i>{OWN_FILES[layer]}</i>"), size=11, margin=12)
        yield f'    "{layer}" [id="files of {layer}", label=<{about}>, style="rounded,dashed"];'
        yield from (
            f'    "{layer}/{each}" -> "{layer}" [style=invis];' for each in packages if not packages[each]
        )
    yield "  }"


def _box(name: str, label: str, labels: FixedLabels) -> str:
    about = f'<br/><font point-size="9" color="#475569">{ABOUT[name]}</font>' if ABOUT[name] else ""
    text = labels.reserve(Html(f"<b>{label}</b>{about}"), size=11, margin=12)
    return f'"{name}" [id="{name}", label=<{text}>];'


def _arrow(one: str, other: str, inside: Mapping[str, Mapping[str, Set[str]]]) -> str:
    """An arrow; one of a layer with packages begins at its lowest and ends at its highest package."""
    start = end = ""
    tail, head = one, other
    if one in inside:
        lowest = one if one in OWN_FILES else f"{one}/{_lowest(inside[one])}"
        tail, start = lowest, f', ltail="cluster_{one}"'
    if other in inside:
        head, end = f"{other}/{_highest(inside[other])}", f', lhead="cluster_{other}"'
    style = ', color="#475569", penwidth=1.4' if "/" not in one else ""
    return f'"{tail}" -> "{head}" [id="{one} to {other}"{start}{end}{style}];'


def _lowest(packages: Mapping[str, Set[str]]) -> str:
    return next(each for each in packages if not packages[each])


def _highest(packages: Mapping[str, Set[str]]) -> str:
    imported = set().union(*packages.values())
    return next(each for each in reversed(packages) if each not in imported)


if __name__ == "__main__":
    labels = FixedLabels()
    drawn = subprocess.run(
        ["dot", "-Tsvg"], input=render_drawing(labels), capture_output=True, text=True, check=True
    )
    DRAWING.write_text(labels.fill(drawn.stdout), encoding="utf-8")
