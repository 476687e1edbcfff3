"""Replaces attributes of torch and of models while modtrace needs it, and restores them."""

from contextlib import ExitStack
from types import ModuleType
from typing import Any

#: Stands for the value of an attribute that the holder itself does not have.
MISSING: Any = object()


def replace(holder: Any, name: str, new: Any, patches: ExitStack) -> None:
    """Sets an attribute of a Python module, a class or an object until `patches` is closed, which restores it.

    If other code has replaced the attribute since, it stays: a wrapper around `new` remains, and `new` must then pass
    calls on. An attribute that a class or object inherits is inherited again.
    """
    before = vars(holder).get(name, MISSING)
    # `__setattr__` of a model would register the value.
    is_object = not isinstance(holder, (type, ModuleType))

    def restore() -> None:
        if vars(holder).get(name) is not new:
            return
        if is_object and before is MISSING:
            del holder.__dict__[name]
        elif is_object:
            holder.__dict__[name] = before
        elif before is MISSING:
            delattr(holder, name)
        else:
            setattr(holder, name, before)

    patches.callback(restore)  # first, as a KeyboardInterrupt may come after any line
    if is_object:
        holder.__dict__[name] = new
    else:
        setattr(holder, name, new)
