"""Takes outputs of modules apart, and builds the same structures with other objects in place of tensors."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

#: Containers nested more deeply, or inside themselves, are not rebuilt.
_MAX_DEPTH = 100


def rmap_tensor(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """Returns the same structure with `fn(tensor)` in place of each tensor.

    Tuples and named tuples, lists, dicts with their keys, and dataclasses are built without running any code of
    their classes. A dict of another class becomes a plain one, unless it is a dataclass too (a ModelOutput). Any other
    object stays the same, together with the tensors that it may hold.
    """
    return _map(value, fn, ())


def _map(value: Any, fn: Callable[[torch.Tensor], Any], inside: tuple[int, ...]) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    parts = _open(value, inside)
    if parts is None:
        return value
    inside = (*inside, id(value))
    keys = [_map(key, fn, inside) for key in parts.keys]
    return parts.make(keys, [_map(part, fn, inside) for part in parts.values])


class GradientTree:
    """The structure of an output without its tensors. Their gradients can be filled in."""

    __slots__ = ("_below",)

    def __init__(self, output: Any, slot_of: Callable[[torch.Tensor], int | None]) -> None:
        """Builds the tree.

        Args:
            slot_of: returns the position of a tensor's gradient among those given to `fill`; None if it has none.
        """
        if type(output) in (tuple, list):
            self._below = [_grow_member(part, slot_of) for part in output]
        else:
            self._below = [_grow(output, slot_of, ())]

    def fill(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the gradients as torch passes them to a backward hook.

        The result is a tuple, with one entry if the structure is not a tuple or list.
        """
        return tuple([_fill(tree, gradients) for tree in self._below])


class _Slot(NamedTuple):
    """The position of a gradient."""

    number: int | None


class _Branch(NamedTuple):
    """A container without its contents, in a gradient tree."""

    make: "_Make"
    keys: list[Any]
    below: list[Any]


def _grow_member(value: Any, slot_of: Callable[[torch.Tensor], int | None]) -> Any:
    """Adds an entry of a plain tuple or list; an entry without gradients becomes None, as in torch."""
    is_part = isinstance(value, torch.Tensor) or _open(value, ()) is not None
    return _grow(value, slot_of, ()) if is_part else None


def _grow(value: Any, slot_of: Callable[[torch.Tensor], int | None], inside: tuple[int, ...]) -> Any:
    if isinstance(value, torch.Tensor):
        return _Slot(slot_of(value))
    parts = _open(value, inside)
    if parts is None:
        return value if isinstance(value, _KEPT) else None  # other values might keep a tensor alive
    inside = (*inside, id(value))
    keys = [at if isinstance(key, torch.Tensor) else key for at, key in enumerate(parts.keys)]
    return _Branch(parts.make, keys, [_grow(part, slot_of, inside) for part in parts.values])


def _fill(tree: Any, gradients: Sequence[Any]) -> Any:
    if isinstance(tree, _Slot):
        return None if tree.number is None else gradients[tree.number]
    if isinstance(tree, _Branch):
        return tree.make(tree.keys, [_fill(inner, gradients) for inner in tree.below])
    return tree


#: Types of values that are kept in the gradient structure, besides tensors.
_KEPT = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type(None))


# Containers and their parts.

_Make = Callable[[Sequence[Any], list[Any]], Any]


class _Parts(NamedTuple):
    keys: Sequence[Any]
    values: Sequence[Any]
    make: _Make  # makes a container of the same kind from other keys and values


def _open(value: Any, inside: tuple[int, ...]) -> _Parts | None:
    """Returns the contents of a container; None if the value is not a container or must not be entered."""
    kind = type(value)
    if issubclass(kind, tuple):
        found = _Parts((), tuple(tuple.__iter__(value)), partial(make_tuple, kind))
    elif issubclass(kind, list):
        found = _Parts((), tuple(list.__iter__(value)), partial(make_list, kind))
    elif dataclasses.is_dataclass(kind) and not issubclass(kind, nn.Module):
        found = _open_dataclass(value)
    elif issubclass(kind, dict):
        found = _Parts(list(dict.keys(value)), list(dict.values(value)), make_dict)
    else:
        return None
    return None if id(value) in inside or len(inside) >= _MAX_DEPTH else found


def _open_dataclass(value: Any) -> _Parts:
    attributes = {field.name: getattr(value, field.name, _UNSET) for field in dataclasses.fields(value)}
    attributes.update(getattr(value, "__dict__", {}))
    attributes = {name: attribute for name, attribute in attributes.items() if attribute is not _UNSET}
    items = tuple(dict.keys(value)) if isinstance(value, dict) else ()
    attributes.update({key: value[key] for key in items if key not in attributes})
    return _Parts([*attributes], [*attributes.values()], partial(make_dataclass, type(value), items))


_UNSET = object()


def make_tuple(kind: type[Any], keys: Sequence[Any], values: list[Any]) -> Any:
    if kind is tuple:
        return tuple(values)
    try:
        return tuple.__new__(kind, values)
    except TypeError:  # C types such as torch.return_types.max raise this
        return kind(values)


def make_list(kind: type[Any], keys: Sequence[Any], values: list[Any]) -> Any:
    if kind is list:
        return values
    made = list.__new__(kind)
    list.extend(made, values)
    return made


def make_dict(keys: Sequence[Any], values: list[Any]) -> Any:
    return dict(zip(keys, values, strict=True))


def make_dataclass(kind: type[Any], items: Sequence[Any], keys: Sequence[Any], values: list[Any]) -> Any:
    """Creates a dataclass without calling `__init__`, which may check its arguments and gets no tensors here.

    Args:
        items: the keys of the object as a dict, since a ModelOutput of transformers is both.
    """
    made: Any = kind.__new__(kind)  # type: ignore[call-overload]  # mypy takes `__new__` for that of `type`
    for key, value in zip(keys, values, strict=True):
        if key in items:
            (OrderedDict if issubclass(kind, OrderedDict) else dict).__setitem__(made, key, value)
        if isinstance(key, str):
            object.__setattr__(made, key, value)
    return made
