"""Finds and replaces tensors in what modules take and return, in plain Python that Dynamo can trace.

Dynamo cannot trace `find_slots` and `rmap_tensor`, because they bypass the methods of containers' classes.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

#: The greatest depth of nesting that is searched, since a list may contain itself.
_MAX_DEPTH = 32

# Lines of a layout: a tensor, what is neither a tensor nor a container, or a container's class with its names.
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
    """Appends the tensors in a value to `found`, and to `in_tuples` whether only tuples are around each.

    It searches tuples, lists, dicts and dataclasses. `slots` receives their slots, in the words of `find_slots`; `slot`
    is that of the value. `layout` receives the lines that `build_from_layout` reads.
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
    for name, each in parts:
        find_in_graph(each, in_tuple, found, in_tuples, depth + 1, slots, slot + name, layout)


def _layout_of(value: Any, names: list[str]) -> str:
    kind = type(value)
    if isinstance(value, (tuple, list, dict)) or dataclasses.is_dataclass(kind):
        return SEPARATOR.join([f"{kind.__module__}:{kind.__qualname__}", *names])
    return OTHER


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        fields = getattr(type(value), "__dataclass_fields__", ())  # a ModelOutput of transformers is both
        return [
            (f".{key}" if key in fields else f"[{key!r}]".replace("\n", " "), each)
            for key, each in value.items()
        ]
    if isinstance(value, (tuple, list)):
        names = getattr(type(value), "_fields", None)
        return [(f"[{at}]" if names is None else f".{names[at]}", each) for at, each in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{each.name}", getattr(value, each.name, None)) for each in dataclasses.fields(value)]
    return []


def with_fresh(value: Any, fresh: Iterator[torch.Tensor]) -> Any:
    """Returns the value with its tensors replaced by the next ones of `fresh`.

    Lists and dicts stay the same objects, because the module may change them.
    """
    if isinstance(value, torch.Tensor):
        return next(fresh)
    if type(value) is tuple:
        return tuple([with_fresh(each, fresh) for each in value])
    return value
