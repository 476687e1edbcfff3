"""Keeps what modtrace adds to a module out of pickles, copies and scripted versions of the module."""

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from .patches import MISSING, replace

#: The attributes with a module's forward hooks, and with what it knows of each, by the number of the hook.
_TABLES_OF_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class Attribute(NamedTuple):
    """An attribute that modtrace added to the `__dict__` of a module."""

    name: str
    own: Any
    before: Any  # the former value, or MISSING


class _Ours:
    """What modtrace added to one module."""

    def __init__(self) -> None:
        self.attributes: list[Attribute] = []  # a later attribute may replace an earlier one
        self.hooks: set[int] = set()  # the numbers of our hooks

    def clean(self, state: dict[str, Any], copied: Callable[[Any], Any] = lambda before: before) -> None:
        """Removes our additions from the `__dict__` of a copy. Tables of hooks are replaced, never changed."""
        self.clean_attributes(state, self.attributes, copied)
        for name in _TABLES_OF_HOOKS:
            table = state.get(name)
            if table and not self.hooks.isdisjoint(table):
                state[name] = type(table)((key, hook) for key, hook in table.items() if key not in self.hooks)

    def is_in(self, state: dict[str, Any]) -> bool:
        """Returns whether a dictionary has any of our additions."""
        return any(
            name in state and _function_of(state[name]) is _function_of(own)
            for name, own, _ in self.attributes
        ) or any(not self.hooks.isdisjoint(state.get(name) or ()) for name in _TABLES_OF_HOOKS)

    @staticmethod
    def clean_attributes(
        state: dict[str, Any],
        attributes: Iterable[Attribute],
        copied: Callable[[Any], Any] = lambda before: before,
    ) -> None:
        """Restores the former values of our attributes, where ours are still set."""
        for name, own, before in reversed([*attributes]):
            if name in state and _function_of(state[name]) is _function_of(own):
                del state[name]
                if before is not MISSING:
                    state[name] = copied(before)

    @contextmanager
    def without_hooks(self, module: nn.Module) -> Iterator[None]:
        """Removes our hooks from the module while the block runs."""
        tables = [table for name in _TABLES_OF_HOOKS if (table := module.__dict__.get(name))]
        before = [[*table.items()] for table in tables]
        for table in tables:
            for key in self.hooks.intersection(table):
                del table[key]
        try:
            yield
        finally:
            for table, entries in zip(tables, before, strict=True):
                table.clear()
                table.update(entries)


def _function_of(value: Any) -> Any:
    """Returns the function of a method, by which a copied method is recognized."""
    return value.__func__ if isinstance(value, MethodType) else value


#: Keyed by the `id` of the module, which lives as long as it has additions of ours.
_ours: dict[int, _Ours] = {}
_while_any = ExitStack()  # closed when no module has additions of ours
_wrapped: set[tuple[type, str]] = set()


def leave_out_of_copies(
    module: nn.Module, *, hooks: Iterable[Any] = (), attributes: Iterable[Attribute] = ()
) -> Callable[[], None]:
    """Leaves our hooks and attributes out of all copies of a module, until the returned function is called.

    Copies are made by `pickle`, by `copy`, by what uses them (`torch.save`, multiprocessing, `AveragedModel`), by
    DataParallel and by `torch.jit.script`. A table of hooks in a copy is never shared with the module.

    Args:
        module: the module, which must live until then.
        hooks: handles of forward hooks and forward pre-hooks.
        attributes: our attributes in the module's `__dict__`.
    """
    ours = _ours.setdefault(id(module), _Ours())
    numbers, attributes = {handle.id for handle in hooks}, [*attributes]
    ours.hooks |= numbers
    ours.attributes += attributes
    for kind in (nn.Module, type(module)):
        for name in _CLEANERS:
            _wrap(kind, name)
    _wrap_scripting()

    def end() -> None:
        ours.hooks -= numbers
        ours.attributes = [
            attribute for attribute in ours.attributes if not any(attribute is one for one in attributes)
        ]
        if not ours.hooks and not ours.attributes:
            _ours.pop(id(module), None)
        if not _ours:
            _wrapped.clear()
            _while_any.close()

    return end


# Copiers are the methods by which a class makes copies of its modules, including those that users define.


def _wrap(kind: type, name: str) -> None:
    """Wraps a copier of a class so that its copies are cleaned, unless it is nn.Module's."""
    copier = getattr(kind, name, None)
    if (
        copier is None
        or (kind, name) in _wrapped
        or (kind is not nn.Module and copier is getattr(nn.Module, name, None))
    ):
        return
    clean = _CLEANERS[name]

    @functools.wraps(copier)
    def copy_without_ours(self: nn.Module, *args: Any) -> Any:
        made, ours = copier(self, *args), _ours.get(id(self))
        return made if ours is None or made is self else clean(ours, self, made, *args)

    _wrapped.add((kind, name))
    replace(kind, name, copy_without_ours, _while_any)


def _clean_reduced(ours: _Ours, module: nn.Module, value: Any, protocol: Any = None) -> Any:
    """Cleans the state from which a module is rebuilt, by `__reduce_ex__`, which pickle and most copies call."""
    if isinstance(value, dict) and ours.is_in(value):  # other dictionaries are the user's own
        value = value.copy()
        ours.clean(value)
    elif type(value) is tuple:
        parts = [_clean_reduced(ours, module, part) for part in value]
        if any(part is not before for part, before in zip(parts, value, strict=True)):
            value = tuple(parts)
    return value


def _clean_copy(ours: _Ours, module: nn.Module, made: Any) -> Any:
    if isinstance(made, nn.Module):  # a user's copier may return anything
        ours.clean(made.__dict__)
    return made


def _clean_deepcopy(ours: _Ours, module: nn.Module, made: Any, memo: Any = None) -> Any:
    if isinstance(made, nn.Module):
        ours.clean(made.__dict__, lambda before: copy.deepcopy(before, memo))
    return made


def _clean_replica(ours: _Ours, module: nn.Module, made: Any) -> Any:
    """Removes methods bound to the original from a replica, which shares the hooks of its original."""
    bound = [attribute for attribute in ours.attributes if getattr(attribute.own, "__self__", None) is module]
    ours.clean_attributes(made.__dict__, bound)
    return made


_CLEANERS: dict[str, Callable[..., Any]] = {
    "__reduce_ex__": _clean_reduced,
    "__copy__": _clean_copy,
    "__deepcopy__": _clean_deepcopy,
    "_replicate_for_data_parallel": _clean_replica,
}


# TorchScript would compile the hooks of a module.


def _wrap_scripting() -> None:
    """Removes our hooks from a module and the modules below it while they are scripted."""
    holder: Any = sys.modules.get("torch.jit._recursive")
    script = getattr(holder, "create_script_module", None)
    if script is None or (nn.Module, "script") in _wrapped:
        return

    @functools.wraps(script)
    def script_without_ours(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for inner in module.modules():
                if (ours := _ours.get(id(inner))) is not None:
                    stack.enter_context(ours.without_hooks(inner))
            return script(module, *args, **kwargs)

    _wrapped.add((nn.Module, "script"))
    replace(holder, "create_script_module", script_without_ours, _while_any)
