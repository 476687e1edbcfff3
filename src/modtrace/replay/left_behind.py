"""Finds what a recording has left behind in torch, on the model and in the process."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..collect.scopes import process
from ..torch_internals.modules import MODULE_HOOKS, hooks_and_modes
from ..torch_internals.tensors import TENSOR_HOOKS


def look_around(model: nn.Module) -> dict[str, Any]:
    """Returns, by name, what a recording must leave as an unrecorded run leaves it."""
    found: dict[str, Any] = {
        **hooks_and_modes(),
        "the tracker of the process": id(process.current()),
        "grad mode": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
    }
    for path, module in model.named_modules():
        found[f"hooks on the module {path!r}"] = _hooks(module, MODULE_HOOKS)
        found[f"the mode (training or not) of the module {path!r}"] = module.training
    for path, parameter in model.named_parameters():
        found[f"hooks on the parameter {path!r}"] = _hooks(parameter, TENSOR_HOOKS)
    return found


def differences(plain: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """Returns the names of the entries that differ."""
    return [name for name in {**plain, **recorded} if plain.get(name) != recorded.get(name)]


def _hooks(owner: Any, names: tuple[str, ...]) -> list[str]:
    """Returns the qualified names of the hooks.

    Hooks that a model registers in its first call get other ids in each run.
    """
    found = [hook for name in names for hook in (getattr(owner, name, None) or {}).values()]
    return [
        f"{getattr(each, '__module__', '')}.{getattr(each, '__qualname__', type(each))}" for each in found
    ]
