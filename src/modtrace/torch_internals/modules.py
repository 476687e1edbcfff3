"""The private parts of torch's modules: hooks, and the replicas of DataParallel."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .autograd import EngineEntry
from .modes import count_dispatch_modes, has_function_modes
from .patches import replace

#: The attributes in which a module keeps its hooks.
MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
)


def is_replica(module: nn.Module) -> bool:
    """Returns whether `torch.nn.parallel.replicate` has made the module, as DataParallel does for each device."""
    return bool(module.__dict__.get("_is_replica", False))  # `getattr` may run a `__getattr__` of the user


def id_of_hooks(module: nn.Module) -> int:
    """Returns the `id` of the dictionary of a module's hooks, which a replica shares with its original."""
    return id(module._forward_hooks)


class GlobalHooks:
    """Our hooks around the calls of all modules, which `torch.compile(module)` does not treat as the user's.

    A module from `torch.compile` warns at each call while global hooks exist, because these also run for the wrapper
    (2.13). Our hooks handle the wrapper, and the user cannot remove them. So the function by which torch looks for
    global hooks is replaced by one that ignores ours and still reports others.

    Compiled code that was traced while global hooks existed checks their numbers (2.13). So ours always have the same
    numbers; otherwise each recording would compile again, and the eighth would exceed Dynamo's limit.
    """

    _numbers: ClassVar[list[int]] = []  # the numbers that they had first

    def __init__(self, enter: Callable[..., None], leave: Callable[..., None]) -> None:
        """Registers both hooks; `leave` receives keyword arguments, and is called without them if the call raises."""
        hooks = torch.nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, with_kwargs=True, always_call=True),
        ]
        self._numbers.extend(handle.id for handle in self._handles[len(self._numbers) :])
        for handle, number in zip(self._handles, self._numbers, strict=True):
            _renumber(handle, number)
        self._ids = {handle.id for handle in self._handles}
        self._original: Any = getattr(hooks, "_has_any_global_hook", None)
        self._patches = ExitStack()
        if self._original is not None:
            replace(hooks, "_has_any_global_hook", self._are_there_others, self._patches)

    def remove(self) -> None:
        """Removes the hooks before and behind calls, and puts torch's function back that looks for global hooks.

        If somebody else has wrapped ours since, ours stays in there, and returns what torch's does.
        """
        hooks: Any = torch.nn.modules.module
        for handle in self._handles:
            handle.remove()
            # torch's own handle would leave its number in the list of hooks with keyword arguments (2.13).
            getattr(hooks, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)
        self._ids = set()
        self._patches.close()

    def _are_there_others(self) -> bool:
        return bool(self._original()) and any(hooks.keys() - self._ids for hooks in _tables_of_call_hooks())


def _renumber(handle: RemovableHandle, number: int) -> None:
    """Gives a global hook another number, unless that is in use."""
    tables = [hooks for hooks in _tables_of_call_hooks() if handle.id in hooks]
    if not any(number in hooks for hooks in tables):
        for hooks in tables:
            hooks[number] = hooks.pop(handle.id)
        handle.id = number


def _tables_of_call_hooks() -> Iterator[dict[int, Any]]:
    for name, hooks in vars(torch.nn.modules.module).items():
        if name.startswith("_global_") and "registration" not in name and isinstance(hooks, dict):
            yield hooks


def hooks_and_modes() -> dict[str, Any]:
    """Returns, by name, torch's state for the whole process that a recording must restore.

    The values compare by equality.
    """
    module, optimizer = torch.nn.modules.module, sys.modules[torch.optim.Optimizer.__module__]
    hooks = {
        f"{holder.__name__}.{name}": [*vars(holder)[name]]
        for holder in (module, optimizer)
        for name in sorted(vars(holder))
        if name.startswith("_global_") and isinstance(vars(holder)[name], dict)
    }
    return {
        **hooks,
        "the function that tells whether there are global hooks": getattr(
            module, "_has_any_global_hook", None
        ),
        "the function that enters the autograd engine": EngineEntry.functions(),
        "the number of dispatch modes": count_dispatch_modes(),
        "the number of function modes": has_function_modes(),
    }
