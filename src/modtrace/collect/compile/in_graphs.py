"""Finds and replaces tensors in what modules take and return, in plain Python that Dynamo can trace.

Dynamo cannot trace `find_slots` and `rmap_tensor`, because they bypass the methods of containers' classes.
"""

import ast
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..structures.rebuild import make_dataclass, make_dict, make_list, make_tuple

#: The greatest depth of nesting that is searched, since a list may contain itself.
_MAX_DEPTH = 32

# The kinds of lines in a layout: a tensor, another value, or a container's class with the names of its entries.
TENSOR = "tensor"
OTHER = "other"
SEPARATOR = "\t"


def find_in_graph(
    value: Any,
    in_tuple: bool,
    found: list[torch.Tensor],
    in_tuples: list[bool],
    depth: int,
    slots: list[str] | None = None,
    slot: str = "",
    layout: list[str] | None = None,
) -> None:
    """Appends the tensors in a value to `found`, and to `in_tuples` whether each is only inside of tuples.

    It searches tuples, lists, dicts and dataclasses. `slots` receives their slots in the form of `find_slots`, below
    the value's own `slot`. `layout` receives the lines that `build_from_layout` reads.
    """
    if isinstance(value, torch.Tensor):
        found.append(value)
        in_tuples.append(in_tuple)
        if slots is not None:
            slots.append(slot)
        if layout is not None:
            layout.append(TENSOR)
        return
    parts = _parts_of(value) if depth <= _MAX_DEPTH else []
    if layout is not None:
        layout.append(_layout_of(value, [name for name, _ in parts]))
    in_tuple = in_tuple and type(value) is tuple
    for name, part in parts:
        find_in_graph(part, in_tuple, found, in_tuples, depth + 1, slots, slot + name, layout)


def _layout_of(value: Any, names: list[str]) -> str:
    kind = type(value)
    if isinstance(value, (tuple, list, dict)) or _is_dataclass(kind):
        return SEPARATOR.join([f"{kind.__module__}:{kind.__qualname__}", *names])
    return OTHER


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        # A ModelOutput of transformers is both a dict and a dataclass.
        fields = getattr(type(value), "__dataclass_fields__", ())
        return [
            (f".{key}" if key in fields else f"[{key!r}]".replace("\n", " "), part)
            for key, part in value.items()
        ]
    if isinstance(value, (tuple, list)):
        names = getattr(type(value), "_fields", None)
        return [(f"[{at}]" if names is None else f".{names[at]}", part) for at, part in enumerate(value)]
    if _is_dataclass(type(value)):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def _is_dataclass(kind: type) -> bool:
    """Returns whether a class is a dataclass. Dynamo of torch 2.11 cannot trace `hasattr` of classes such as None's."""
    return getattr(kind, "__dataclass_fields__", None) is not None


def with_fresh(value: Any, fresh: Iterator[torch.Tensor]) -> Any:
    """Returns the value with its tensors replaced by the next ones of `fresh`.

    Lists and dicts stay the same objects, because the module may change them.
    """
    if isinstance(value, torch.Tensor):
        return next(fresh)
    if type(value) is tuple:
        return tuple([with_fresh(part, fresh) for part in value])
    return value


def build_from_layout(layout: Iterator[str], tensors: Iterator[torch.Tensor]) -> Any:
    """Returns the output of a module inside of compiled code, rebuilt from the lines that `find_in_graph` wrote.

    Values other than tensors and containers become None. A class that its module does not have under its name is
    replaced by a plain tuple or dict.
    """
    line = next(layout)
    if line == TENSOR:
        return next(tensors)
    if line == OTHER:
        return None
    where, *names = line.split(SEPARATOR)
    values = [build_from_layout(layout, tensors) for _ in names]
    keys = [name[1:] if name.startswith(".") else _read_key(name[1:-1]) for name in names]
    kind = _find_class(where)
    if kind is None:
        kind = dict if any(isinstance(key, str) for key in keys) else tuple
    if issubclass(kind, tuple):
        return make_tuple(kind, (), values)
    if issubclass(kind, list):
        return make_list(kind, (), values)
    if dataclasses.is_dataclass(kind):
        return make_dataclass(kind, keys if issubclass(kind, dict) else (), keys, values)
    return make_dict(keys, values)


def _read_key(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _find_class(where: str) -> type | None:
    module, _, name = where.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None
