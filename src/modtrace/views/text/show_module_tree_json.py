"""Renders the module tree as JSON, with times in nanoseconds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ...analysis.findings.finding import Findings
from ...analysis.modules.module_tree import ModuleNode, ModuleTree
from ...analysis.modules.type_table import build_type_table
from ...analysis.modules.value_summary import ValueSummary
from ...recording.statistics.moments import Stats
from ..common.numbers import to_json_number

#: Properties that are written in addition to the fields of a class.
_DERIVED: Mapping[type, Sequence[str]] = {
    Stats: ("mean", "std", "rms", "l2", "abs_max"),
    ValueSummary: ("gradient_to_parameter",),
}


def render_module_tree_json(tree: ModuleTree, findings: Findings | None = None) -> str:
    """Returns the fields of the tree, its nodes nested in `roots` and `children`, the table of `types` and `findings`.

    JSON has no numbers that are not finite; they are written "NaN", "Infinity" and "-Infinity", which Python's
    `float()` and JavaScript's `Number()` read.
    """
    head = {
        field.name: _to_json(getattr(tree, field.name)) for field in fields(tree) if field.name != "roots"
    }
    if findings is not None:
        head["findings"] = _to_json(findings)
    head["types"] = _to_json(build_type_table(tree))
    return f'{json.dumps(head)[:-1]}, "roots": {_render_nodes(tree.roots)}}}\n'


def _to_json(value: Any) -> Any:
    """Returns a value as JSON has it, without fields of which `repr` is False: the times in each of many steps."""
    if hasattr(value, "__dataclass_fields__"):
        names = (*(field.name for field in fields(value) if field.repr), *_DERIVED.get(type(value), ()))
        return {name: _to_json(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [_to_json(part) for part in value]
    return to_json_number(value)


def _render_nodes(roots: Sequence[ModuleNode]) -> str:
    """Returns the nodes as a JSON list.

    It does not recurse, unlike `json.dumps`, because models may be deep.
    """
    parts: list[str] = []
    waiting: list[ModuleNode | str] = ["]", *_with_commas(roots), "["]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            parts.append(item)
            continue
        own = {
            field.name: _to_json(getattr(item, field.name))
            for field in fields(item)
            if field.name not in ("children", "members")
        }
        parts.append(f'{json.dumps(own)[:-1]}, "children": ')
        waiting += ["]}", *_with_commas(item.children), "["]
    return "".join(parts)


def _with_commas(nodes: Sequence[ModuleNode]) -> list[ModuleNode | str]:
    """Returns the nodes from last to first, with commas between them."""
    separated: list[ModuleNode | str] = [part for node in reversed(nodes) for part in (node, ", ")]
    return separated[:-1]
