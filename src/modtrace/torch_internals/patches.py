"""Replaces attributes of torch and of models while modtrace needs that, and restores them."""

from contextlib import ExitStack
from types import ModuleType
from typing import Any

#: Stands for the value of an attribute that the holder itself does not have.
MISSING: Any = object()


def replace(holder: Any, name: str, new: Any, patches: ExitStack) -> None:
    """Sets an attribute of a Python module, a class or an object until `patches` is closed, which restores it.

    If other code has replaced the attribute since, it stays: a wrapper around `new` stays, and `new` has to pass calls
    on then. What a class or an object inherits is inherited again.
    """
    before = vars(holder).get(name, MISSING)
    # Of a model: its `__setattr__` would register what it is given.
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

    patches.callback(restore)  # first: a KeyboardInterrupt may come behind any line
    if is_object:
        holder.__dict__[name] = new
    else:
        setattr(holder, name, new)
