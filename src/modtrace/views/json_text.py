"""The module tree as JSON; times are nanoseconds."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from ..analysis.module_tree import ModuleNode, ModuleTree
from ..analysis.type_table import build_type_table


def render_module_tree_json(tree: ModuleTree) -> str:
    """The fields of the tree, its nodes nested in `roots` and `children`, and the table of `types`."""
    head = {each.name: _to_json(getattr(tree, each.name)) for each in fields(tree) if each.name != "roots"}
    head["types"] = [asdict(row) for row in build_type_table(tree)]
    return f'{json.dumps(head)[:-1]}, "roots": {_render_nodes(tree.roots)}}}\n'


def _to_json(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


def _render_nodes(roots: Sequence[ModuleNode]) -> str:
    """The nodes as a JSON list, written from left to right: `json.dumps` would recurse into deep models."""
    parts: list[str] = []
    waiting: list[ModuleNode | str] = ["]", *_with_commas(roots), "["]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            parts.append(item)
            continue
        own = {
            each.name: _to_json(getattr(item, each.name)) for each in fields(item) if each.name != "children"
        }
        parts.append(f'{json.dumps(own)[:-1]}, "children": ')
        waiting += ["]}", *_with_commas(item.children), "["]
    return "".join(parts)


def _with_commas(nodes: Sequence[ModuleNode]) -> list[ModuleNode | str]:
    """The nodes from last to first, with commas between them."""
    separated: list[ModuleNode | str] = [each for node in reversed(nodes) for each in (node, ", ")]
    return separated[:-1]
