"""Finds and replaces tensors in what modules take and return, in plain Python that Dynamo can trace.

Dynamo cannot trace `find_slots` and `rmap_tensor`, because they bypass the methods of containers' classes.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

#: The greatest depth of nesting that is searched, since a list may contain itself.
_MAX_DEPTH = 32


def find_in_graph(
    value: Any, in_tuple: bool, found: list[torch.Tensor], in_tuples: list[bool], depth: int
) -> None:
    """Appends the tensors in a value to `found`, and to `in_tuples` whether only tuples are around each.

    It searches tuples, lists, dicts and dataclasses.
    """
    if isinstance(value, torch.Tensor):
        found.append(value)
        in_tuples.append(in_tuple)
        return
    parts: Any = ()
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    for each in parts:
        find_in_graph(each, in_tuple and type(value) is tuple, found, in_tuples, depth + 1)


def name_in_graph(value: Any, slot: str, slots: list[str], depth: int) -> None:
    """Appends the slot of each tensor that `find_in_graph` finds, in the words of `find_slots`."""
    if isinstance(value, torch.Tensor):
        slots.append(slot)
        return
    parts: Any = ()
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, dict):
        fields = getattr(type(value), "__dataclass_fields__", ())
        parts = [
            (f".{key}" if key in fields else f"[{key!r}]".replace("\n", " "), each)
            for key, each in value.items()
        ]
    elif isinstance(value, (tuple, list)):
        names = getattr(type(value), "_fields", None)
        parts = [(f"[{at}]" if names is None else f".{names[at]}", each) for at, each in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(f".{each.name}", getattr(value, each.name, None)) for each in dataclasses.fields(value)]
    for name, each in parts:
        name_in_graph(each, slot + name, slots, depth + 1)


def with_fresh(value: Any, fresh: Iterator[torch.Tensor]) -> Any:
    """Returns the value with its tensors replaced by the next ones of `fresh`.

    Lists and dicts stay the same objects, because the module may change them.
    """
    if isinstance(value, torch.Tensor):
        return next(fresh)
    if type(value) is tuple:
        return tuple([with_fresh(each, fresh) for each in value])
    return value
