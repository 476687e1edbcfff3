"""Reads every import of the package: they point down the layers, and heavy libraries wait until needed.

The layers are drawn in docs/how-it-works.md. If you need something from above, it belongs lower or should
arrive as an argument.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "modtrace"

_GROUND = {"errors", "optional"}
_ENGINE = _GROUND | {
    "recording",
    "torch_internals",
    "measure",
    "collect",
    "store",
    "analysis",
    "replay",
    "query",
    "views",
}

#: What each layer may import besides itself. `__init__` is the package's own file, `import modtrace`.
MAY_IMPORT = {
    "errors": set(),
    "optional": {"errors"},
    "recording": _GROUND,
    "torch_internals": set(),
    "measure": _GROUND | {"recording", "torch_internals"},
    "collect": _GROUND | {"recording", "measure", "torch_internals"},
    "store": _GROUND | {"recording"},
    "analysis": _GROUND | {"recording"},
    "replay": _GROUND | {"recording", "analysis", "measure", "collect", "store", "torch_internals"},
    "query": _GROUND | {"recording", "store"},
    "views": _GROUND | {"recording", "analysis"},
    "api": _ENGINE,
    "tensor_tracker": {"collect"},
    "cli": _ENGINE | {"api", "__init__"},
    "integrations": _ENGINE | {"api", "__init__"},
    "__main__": {"cli"},
    "__init__": _ENGINE | {"api", "tensor_tracker"},
}

#: What each package inside a layer may import of that layer besides itself and the files that lie in the layer's own
#: folder. Those import only each other.
MAY_IMPORT_INSIDE: dict[str, dict[str, set[str]]] = {
    "recording": {
        "arrow": set(),
        "options": set(),
        "statistics": {"arrow"},
        "triggers": {"options", "statistics", "arrow"},
        "in_memory": {"options", "arrow"},
    },
    "measure": {
        "moments": set(),
        "tier2": set(),
        "fingerprints": set(),
        "cuda": {"moments", "tier2"},
        "measurers": {"moments", "tier2", "fingerprints", "cuda"},
    },
    "collect": {
        "structures": set(),
        "tensor_ids": set(),
        "flops": set(),
        "names": set(),
        "fx": {"names"},
        "log": {"names", "structures"},
        "backward": {"log", "structures"},
        "steps": {"backward", "log", "names"},
        "scopes": {"backward", "log", "names"},
        "compile": {"scopes", "steps", "log", "names", "structures"},
        "values": {"compile", "steps", "scopes", "backward", "log", "names", "structures"},
        "module_tracker": {"scopes", "steps", "backward", "log", "names", "compile"},
        "stash": {"compile", "scopes", "steps", "backward", "log", "structures", "names"},
        "ops": {
            "values",
            "steps",
            "scopes",
            "backward",
            "log",
            "names",
            "structures",
            "tensor_ids",
            "flops",
        },
        "collectives": {"steps", "scopes", "log", "names"},
        "recorder": {"ops", "values", "compile", "collectives", "steps", "scopes", "log", "names"},
    },
    "store": {"flight_recorder": set()},
    "analysis": {
        "tables": set(),
        "compile": {"tables"},
        "modules": {"compile", "tables"},
        "ops": {"compile", "tables"},
        "values": {"tables"},
        "graph": {"tables"},
        "graph_view": {"graph", "tables"},
        "timeline": {"tables"},
        "alignment": {"tables"},
        "provenance": {"values", "graph", "alignment", "tables"},
        "divergence": {"alignment", "graph", "ranks", "tables"},
        "ranks": {"provenance", "values", "tables"},
        "findings": {"ranks", "provenance", "values", "tables"},
        "report": {
            "findings",
            "divergence",
            "provenance",
            "timeline",
            "values",
            "graph_view",
            "graph",
            "ops",
            "modules",
            "compile",
            "tables",
        },
    },
    "views": {
        "common": set(),
        "text": {"common"},
        "dot": {"common"},
        "plot": {"common"},
        "formats": {"common"},
        "html": {"common", "text"},
    },
}
MAY_IMPORT_TORCH = {"torch_internals", "measure", "collect", "replay", "integrations"}
MAY_IMPORT_CLICK = {"cli"}  # recording and reading import nothing of the command line
NEVER_AT_IMPORT = {"pandas", "matplotlib", "triton", "transformers", "lightning", "pytorch_lightning"}


class Import(NamedTuple):
    """One imported name. `when`: "import" (at import time), "call" (inside a function) or "typing"."""

    target: str
    line: int
    when: str


def faults(source: str, module: str) -> list[str]:
    """Returns what is wrong with the imports of `source`, the text of `module` ("modtrace.store.reader")."""
    layer = module.split(".")[1]
    if layer not in MAY_IMPORT:
        return [f"{module}: the layer {layer!r} is not in MAY_IMPORT of tests/test_layers.py"]
    found = []
    for imported in _imports(ast.parse(source), module):
        why = _fault(layer, _package_in(layer, module), imported) or _fault_inside_layer(
            module, imported.target
        )
        if why is not None:
            found.append(f"{module}:{imported.line}: {imported.target}: {why}")
    return found


def _fault(layer: str, package: str, imported: Import) -> str | None:
    library = imported.target.split(".")[0]
    if library == "modtrace":
        return _fault_inside(layer, _layer_of(imported.target), imported.when)
    if library == "torch" and layer not in MAY_IMPORT_TORCH:
        return f"{layer} must work without torch"
    if library == "click" and layer not in MAY_IMPORT_CLICK:
        return f"{layer} must work without click"
    if library == "pyarrow" and layer == "analysis" and package != "tables":
        return "analysis/tables reads Arrow, and builds it"
    if library in NEVER_AT_IMPORT and imported.when == "import":
        return "import it in the function that needs it"
    return None


def _fault_inside(layer: str, target: str, when: str) -> str | None:
    if layer == "__init__" and when == "import":
        return "the package's names load lazily"
    if target != layer and target not in MAY_IMPORT[layer]:
        return f"{layer} must not know {target}"
    return None


def _fault_inside_layer(module: str, target: str) -> str | None:
    """Compares the packages of a layer; "" is the layer's own folder."""
    layer = module.split(".")[1]
    packages = MAY_IMPORT_INSIDE.get(layer, {})
    if not target.startswith(f"modtrace.{layer}."):
        return None
    at, other = (_package_in(layer, name) for name in (module, target))
    for each in (at, other):
        if each and each not in packages:
            return f"the package {layer}/{each} is not in MAY_IMPORT_INSIDE of tests/test_layers.py"
    if other and other != at and other not in packages.get(at, set()):
        return f"{layer}/{at or ''} must not know {layer}/{other}"
    return None


def _package_in(layer: str, name: str) -> str:
    """Returns "graph" for "modtrace.analysis.graph.columns", and "" for what lies in the layer's own folder."""
    parts = name.split(".")
    return parts[2] if len(parts) > 2 and (PACKAGE / layer / parts[2]).is_dir() else ""


def _layer_of(target: str) -> str:
    """Returns "store" for "modtrace.store.reader" and "__init__" for "modtrace" and its attributes."""
    _, first, *_ = [*target.split("."), "__init__"]
    return first if first in MAY_IMPORT else "__init__"


def _imports(tree: ast.AST, module: str, when: str = "import") -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(name.name, node.lineno, when) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(target, node.lineno, when) for target in _targets(node, module))
        else:
            yield from _imports(node, module, _when_inside(node, when))


def _targets(node: ast.ImportFrom, module: str) -> list[str]:
    """Returns what `from <base> import <names>` reaches; a name may be a module of its own, so it is kept."""
    above = module.split(".")[: -node.level] if node.level else []
    base = ".".join([*above, node.module] if node.module else above)
    return [f"{base}.{name.name}" for name in node.names]


def _when_inside(node: ast.AST, when: str) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return "call"
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return "typing"
    return when


def _module_of(path: Path) -> str:
    """Returns the dotted name; a package's own file keeps its `__init__`, so `.` means the same in each."""
    return ".".join(["modtrace", *path.relative_to(PACKAGE).with_suffix("").parts])


def test_imports_point_down() -> None:
    assert [
        fault
        for path in sorted(PACKAGE.rglob("*.py"))
        for fault in faults(path.read_text(), _module_of(path))
    ] == []


def test_no_circle_is_among_files() -> None:
    imported = {
        _module_of(path): {
            file
            for each in _imports(ast.parse(path.read_text()), _module_of(path))
            for file in _files_of(each)
        }
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert _left_in_circles(imported) == []


def _left_in_circles(arrows: Mapping[Any, set[Any]]) -> list[str]:
    """The files of circles and what lies between circles: what has arrows to it and from it, whatever is taken away."""
    left = {name: targets - {name} for name, targets in arrows.items()}
    while True:
        reached = set().union(*left.values())
        kept = {name: found for name in left if name in reached and (found := left[name] & left.keys())}
        if kept == left:
            return sorted(map(str, left))
        left = kept


def _files_of(imported: Import) -> Iterator[str]:
    """The file that an import reaches: the module named, or the one that the name is taken from."""
    for name in (imported.target, imported.target.rpartition(".")[0]):
        if PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py").is_file():
            yield name
            return


def test_no_circle_is_among_files_of_c() -> None:
    """An arrow goes to the file that defines what another one calls, and includes go to headers."""
    names = {path: path.read_text() for path in PACKAGE.rglob("*.[ch]")}
    defined: dict[str, Path] = {}
    for path, text in names.items():
        if path.suffix == ".c":
            for name in re.findall(
                r"^(?!static\b)[A-Za-z_][\w \*]*?\b(\w+)\([^;{]*\)\s*\{", text, re.MULTILINE
            ):
                defined[name] = path
    called = {
        path: {
            defined[word]
            for word in set(re.findall(r"\b(\w+)\b", text)) & defined.keys()
            if defined[word] != path and not re.search(rf"^static\b[^;{{]*\b{word}\(", text, re.MULTILINE)
        }
        for path, text in names.items()
        if path.suffix == ".c"
    }
    assert _left_in_circles(called) == []


def test_importing_modtrace_imports_no_library() -> None:
    script = "import modtrace, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert {"torch", "numpy", "pyarrow", "rich", "click", *NEVER_AT_IMPORT}.isdisjoint(loaded.split())
    assert [name for name in loaded.split() if name.startswith("modtrace.")] == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("store.reader", "from ..collect.scopes import ScopeTracker", "store must not know collect"),
        ("store.reader", "from .. import collect", "store must not know collect"),
        ("store.__init__", "from ..collect import scopes", "store must not know collect"),
        ("store.reader", "import modtrace.analysis.graph", "store must not know analysis"),
        ("analysis.graph", "from modtrace import store", "analysis must not know store"),
        ("analysis.graph.build", "import pyarrow as pa", "analysis/tables reads Arrow, and builds it"),
        ("analysis.graph", "def f():\n    from ..views import text", "analysis must not know views"),
        (
            "recording.meta",
            "if TYPE_CHECKING:\n    from ..api.recording import Recording",
            "recording must not know api",
        ),
        (
            "recording.meta",
            "if typing.TYPE_CHECKING:\n    from .. import api",
            "recording must not know api",
        ),
        ("errors", "from .optional import require", "errors must not know optional"),
        ("views.text", "from .. import __version__", "views must not know __init__"),
        ("cli.show", "from ..integrations import trainer", "cli must not know integrations"),
        ("views.plot", "def f():\n    import torch.nn", "views must work without torch"),
        ("views.text", "def f():\n    import click", "views must work without click"),
        ("api.recording", "if TYPE_CHECKING:\n    from torch import Tensor", "api must work without torch"),
        ("views.frame", "import pandas as pd", "import it in the function that needs it"),
        (
            "views.frame",
            "try:\n    import pandas\nexcept ImportError: ...",
            "import it in the function that needs it",
        ),
        (
            "views.plot",
            "class A:\n    from matplotlib import pyplot",
            "import it in the function that needs it",
        ),
        ("__init__", "from .api.record import record", "the package's names load lazily"),
    ],
)
def test_fault_is_found(module: str, source: str, expected: str) -> None:
    [fault] = faults(source, f"modtrace.{module}")
    assert fault.endswith(expected)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "collect.scopes",
            "import torch\nfrom ..measure import tap\nfrom . import names\nfrom ..errors import MisuseError",
        ),
        ("replay.verify", "from ..store.reader import open_recording\nfrom ..collect import ops"),
        ("views.frame", "def f():\n    import pandas"),
        ("views.frame", "if TYPE_CHECKING:\n    import pandas"),
        (
            "cli.show",
            "import modtrace\nfrom modtrace import open_recording\nfrom ..api.recording import Recording",
        ),
        ("__init__", "import importlib\nif TYPE_CHECKING:\n    from .api.record import record"),
        ("store.writer", "import torchlike, json"),
    ],
)
def test_import_that_points_down_is_fine(module: str, source: str) -> None:
    assert faults(source, f"modtrace.{module}") == []


def test_layer_that_nobody_named_is_a_fault() -> None:
    assert faults("import json", "modtrace.plugins.json") == [
        "modtrace.plugins.json: the layer 'plugins' is not in MAY_IMPORT of tests/test_layers.py"
    ]
