"""Private names of torch stand in `torch_internals/` alone, each with a check that `modtrace doctor` runs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from modtrace.torch_internals.private_names import PRIVATE_NAMES, is_found

PACKAGE = Path(__file__).parent.parent / "src" / "modtrace"
HOUSE = PACKAGE / "torch_internals"

#: Private names that any file may use on a value, with the reason. Each has its check as well.
PUBLIC_BY_HABIT = {
    "_parameters": "what `register_parameter` fills; torch's own FSDP and every library of layers reads it",
    "_buffers": "the same of `register_buffer`",
    "_modules": "the same of `add_module`",
    "_sequence_nr": "a method of autograd nodes, called for every node: a function around it takes as long again",
}

_BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}

#: Our functions that take the name of a local of a function of torch's.
_OF_LOCALS = {"frame_local", "_captured"}

#: Every part of a name that has a check.
_CHECKED = {part for name in PRIVATE_NAMES for part in name.split(".")}
_PRIVATE = {part for part in _CHECKED if part.startswith("_") and not part.startswith("__")}


def private_names(source: str) -> Iterator[str]:
    """Yields the private names of torch that a source uses: imported, as attributes, or as texts."""
    tree = ast.parse(source)
    aliases = dict(_aliases(tree))
    for node in ast.walk(tree):
        path = _path_of(node, aliases)
        if path is not None and path.startswith("torch.") and _is_private(path):
            yield path
        elif isinstance(node, ast.Attribute) and node.attr in _PRIVATE and not _is_own(node):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
            yield from (word for word in _texts(node.args[1:2]) if word in _PRIVATE)
        elif isinstance(node, ast.Constant) and _is_path_of_torch(node.value) and _is_private(node.value):
            yield node.value
    yield from (path for path in aliases.values() if path.startswith("torch.") and _is_private(path))


def _aliases(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield (
                    (each.asname, each.name)
                    if each.asname
                    else (each.name.split(".")[0], each.name.split(".")[0])
                )
                yield each.name, each.name  # `import torch._ops` names it, whatever is done with it
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def _path_of(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """Returns "torch.a.b" for the expressions `torch.a.b` and `getattr(torch.a, "b")`."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        above = _path_of(node.value, aliases)
        return None if above is None or node.attr.startswith("__") else f"{above}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        above, name = _path_of(node.args[0], aliases), _texts(node.args[1:2])
        return None if above is None or not name else f"{above}.{name[0]}"
    return None


def _is_path_of_torch(value: object) -> bool:
    """Tells paths from prose: `"torch._guards"`, and not a docstring."""
    return isinstance(value, str) and value.startswith("torch.") and value.replace(".", "").isidentifier()


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _texts(nodes: list[ast.expr]) -> list[str]:
    return [each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def test_private_names_of_torch_stand_in_torch_internals() -> None:
    assert [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if HOUSE not in path.parents
        for name in private_names(path.read_text())
        if name not in PUBLIC_BY_HABIT
    ] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch._C._current_graph_task_id()", "torch._C._current_graph_task_id"),
        ("import torch._ops", "torch._ops"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        (
            "def f():\n    import torch._guards as guards\n    guards.CompileContext",
            "torch._guards.CompileContext",
        ),
        ("import torch as t\ngetattr(t, '_neg_view')", "torch._neg_view"),
        ("import sys\nsys.modules.get('torch._guards')", "torch._guards"),
        ("tensor._backward_hooks", "_backward_hooks"),
        ("getattr(func, '_schema', None)", "_schema"),
    ],
)
def test_private_name_is_found(source: str, expected: str) -> None:
    assert expected in set(private_names(source))


@pytest.mark.parametrize("path", sorted(HOUSE.glob("*.py")), ids=lambda path: path.name)
def test_each_private_name_has_a_check(path: Path) -> None:
    """Also the names of locals of torch's functions, and what is public in a private module."""
    source = path.read_text()
    named = {each for each in private_names(source) if "." in each}
    looked_for = [f"{name}." for name in PRIVATE_NAMES]
    assert {each for each in named if not any(name.startswith(f"{each}.") for name in looked_for)} == set()
    assert {word for word in _private_words(ast.parse(source)) if not _is_checked(word)} == set()


def _is_checked(word: str) -> bool:
    """A word that ends in "_" is the beginning of several names, such as `_raw_saved_`."""
    return word in _CHECKED or (word.endswith("_") and any(each.startswith(word) for each in _CHECKED))


def _private_words(tree: ast.Module) -> Iterator[str]:
    """Yields what looks like a private name: attributes, texts, and the names of locals that are read."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr not in own and not _is_own(node):
            yield from [node.attr] if _is_private(node.attr) else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in own:
            yield from [node.value] if _is_private(node.value) and node.value.isidentifier() else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _OF_LOCALS:
            yield from _texts(node.args[1:2])


def test_every_check_is_found_on_the_torch_that_is_pinned() -> None:
    assert [name for name in PRIVATE_NAMES if not is_found(name)] == []


def test_no_name_has_two_checks() -> None:
    [table] = [
        node.value
        for node in ast.parse((HOUSE / "private_names.py").read_text()).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "PRIVATE_NAMES"
    ]
    assert isinstance(table, ast.Dict)
    assert len(table.keys) == len(PRIVATE_NAMES)
