"""Reads the tensors and objects that an autograd graph keeps for backward.

The attribute `_raw_saved_x` of a node is what the node has saved as x, still packed; reading it runs no hook. Its value
points into the node's memory, so it must not be kept longer than the node.
"""

import functools
from collections.abc import Callable
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from .autograd import CustomFunctionNode
from .checkpoint import bound_arguments, is_reentrant_checkpoint

_RAW_SAVED = "_raw_saved_"
_CUSTOM_SAVED = ("_raw_saved_tensors",)
# Some nodes raise this after backward, while others have empty variables then.
_ALREADY_FREED = "already been freed"
_HIDING_NODES = (
    "CopySlices",
)  # the node of an in-place op on a view is inside this one, where Python cannot reach it
_SavedVariable: Any = getattr(torch._C._autograd, "SavedTensor", ())


#: The hooks that pack and unpack what autograd saves now (`saved_tensors_hooks`), or None; it takes 60 ns.
saved_tensors_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: None
)


def is_function(node: Any) -> bool:
    """Returns whether an autograd node is of a Function, in Python or in C++, rather than of an op.

    A C++ node for which torch has no class counts as a Function, although nodes of `_foreach` ops have no class, either
    (2.13).
    """
    kind: Any = type(node)
    if issubclass(kind, CustomFunctionNode):
        return True
    return _saved_names(kind) is None and kind.__name__ not in _HIDING_NODES


def saved_variables(node: Any) -> tuple[list[Any], bool]:
    """Returns what a node saved, still packed, and whether it may have saved more that torch does not show."""
    kind: Any = type(node)
    names = _CUSTOM_SAVED if issubclass(kind, CustomFunctionNode) else _saved_names(kind)
    found: list[Any] = []
    is_unknown = names is None
    for name in names or ():
        try:
            value = getattr(node, name)
            found.extend(value if isinstance(value, (list, tuple)) else [value])
        except Exception as error:
            is_unknown |= _ALREADY_FREED not in str(error)
    return found, is_unknown


def unpacked_variables(node: Any) -> list[torch.Tensor] | None:
    """Returns the tensors that a node of an op saved; None if it is another one, or if any of them is packed."""
    kind: Any = type(node)
    names = None if issubclass(kind, CustomFunctionNode) else _saved_names(kind)
    if names is None:
        return None
    found = []
    for name in names:
        try:
            value = getattr(node, name)
            if type(value) is not _SavedVariable or value.unpack_hook is not None:
                return None
            content = value.data
        except Exception:  # another node, one that has been freed, or another version of torch
            return None
        if content is not None:
            found.append(content)
    return found


@functools.cache  # the keys are torch's own classes, which live anyway
def _saved_names(kind: type) -> tuple[str, ...] | None:
    """Returns the attributes in which nodes of a class save tensors.

    Returns None if torch shows none of them (C++ extensions).
    """
    shown = getattr(getattr(torch._C, "_functions", None), kind.__name__, None)
    if shown is not kind or kind.__name__ in _HIDING_NODES:
        return None
    return tuple(name for name in dir(kind) if name.startswith(_RAW_SAVED))


def is_saved_variable(value: Any) -> bool:
    """Returns whether a value is a tensor in the form in which a graph saves it."""
    return issubclass(type(value), _SavedVariable)  # `isinstance` would run a `__class__` of the user


def packed_content(saved: Any) -> tuple[Any, Any]:
    """Returns the content of a saved variable, and the hook that would unpack it.

    Without a hook the content is a tensor or None.
    """
    return saved.data, saved.unpack_hook


def held_by_custom_function(node: Any) -> list[Any]:
    """Returns the attributes of a custom Function's `ctx`; for a reentrant checkpoint, the user's arguments."""
    own: dict[str, Any] = vars(node)
    if not is_reentrant_checkpoint(node):
        return [own]
    return [own.get("inputs"), *bound_arguments(own.get("run_function"))]


def attributes_of(value: Any) -> list[Any]:
    """Returns an object's attributes, and a function's closure; [] for Python modules, classes and torch's objects.

    It runs no code of a user's class.
    """
    kind = type(value)
    if issubclass(kind, (nn.Module, type, ModuleType)) or kind.__module__.startswith("torch."):
        return []
    if kind is FunctionType:
        empty = CellType()  # reading the content of an empty cell would raise
        return [cell.cell_contents for cell in value.__closure__ or () if cell != empty]
    if kind is MethodType:
        return [value.__self__, value.__func__]
    own = object.__getattribute__(value, "__dict__") if kind.__dictoffset__ else {}
    return [*bound_arguments(value), *(own.values() if type(own) is dict else ())]
