"""What torch stores in modules and beside them: hooks, and the replicas of DataParallel."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .autograd import EngineEntry
from .modes import count_dispatch_modes, has_function_modes

_ALL = "names of modules: nothing can be recorded"
_LEFT = "telling whether a recording has left a hook on a model (modtrace verify)"

PRIVATE_NAMES = {
    "torch.nn.Module._modules": _ALL,
    "torch.nn.Module._parameters": _ALL,
    "torch.nn.Module._buffers": _ALL,
    "torch.nn.modules.module._global_forward_hooks_with_kwargs": "one number in a list of torch's after a recording",
    "torch.nn.Module._replicate_for_data_parallel._is_replica": "paths in replicas of DataParallel",
    "torch.nn.Module._forward_hooks": "paths in replicas of DataParallel",
    "torch.nn.Module._forward_pre_hooks": _LEFT,
    "torch.nn.Module._backward_hooks": _LEFT,
    "torch.nn.Module._backward_pre_hooks": _LEFT,
    "torch.nn.Module._state_dict_hooks": _LEFT,
}

#: Where a module keeps its hooks.
MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
)


def is_replica(module: nn.Module) -> bool:
    """Tells whether `torch.nn.parallel.replicate` has made the module, as DataParallel does for each device."""
    return bool(module.__dict__.get("_is_replica", False))  # `getattr` may run a `__getattr__` of the user's


def id_of_hooks(module: nn.Module) -> int:
    """Returns the `id` of the dictionary of a module's hooks, which a replica shares with its original."""
    return id(module._forward_hooks)


def register_leave_hook(hook: Callable[..., None]) -> Any:
    """Registers a global forward hook that gets keyword arguments, and without them is called if the call raises.

    Removing torch's own handle (2.13) leaves the number of the hook in the list of those that take keyword arguments.
    """
    handle = torch.nn.modules.module.register_module_forward_hook(hook, with_kwargs=True, always_call=True)
    return _LeaveHook(handle)


class _LeaveHook:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def remove(self) -> None:
        self._handle.remove()
        with_kwargs = getattr(torch.nn.modules.module, "_global_forward_hooks_with_kwargs", {})
        with_kwargs.pop(self._handle.id, None)


def hooks_and_modes() -> dict[str, Any]:
    """Returns what torch holds for the whole process and a recording must give back; compares by equality."""
    module, optimizer = torch.nn.modules.module, sys.modules[torch.optim.Optimizer.__module__]
    hooks = {
        f"{holder.__name__}.{name}": [*vars(holder)[name]]
        for holder in (module, optimizer)
        for name in sorted(vars(holder))
        if name.startswith("_global_") and isinstance(vars(holder)[name], dict)
    }
    return {
        **hooks,
        "the function that enters the autograd engine": EngineEntry.functions(),
        "the number of dispatch modes": count_dispatch_modes(),
        "the number of function modes": has_function_modes(),
    }
