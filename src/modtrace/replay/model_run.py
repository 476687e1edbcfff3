"""Runs a model as a user does, and keeps digests of its results, and what the run left behind."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..collect.scopes import process
from ..torch_internals.modes import DisableTorchFunction
from ..torch_internals.modules import MODULE_HOOKS, hooks_and_modes
from ..torch_internals.tensors import TENSOR_HOOKS
from .contents import aside, digest
from .generators import AllGenerators
from .model_state import ModelState, copy_arguments, tensors_in

#: Stands for the digest of a tensor whose bits cannot be read.
_NO_BITS = b""


@dataclass
class Results:
    """The results of one run, as digests by name."""

    outputs: dict[str, bytes] = field(default_factory=dict)  # digests of outputs and buffers
    gradients: dict[str, bytes] = field(default_factory=dict)
    generators: AllGenerators | None = None  # their states after the run
    #: What the run left behind (`read_surroundings`).
    surroundings: dict[str, Any] = field(default_factory=dict)
    modules: set[tuple[str, str]] = field(default_factory=set)  # paths and class names after the run
    unchecked: list[tuple[str, str]] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)  # differences that remain after everything was restored


def run_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    backward: bool = True,
) -> Results:
    """Runs one forward and one backward, and restores the model afterwards, also after an exception.

    Args:
        around: returns a context manager that is entered around the run.
        backward: whether a backward runs too.
    """
    state = ModelState(model, args, kwargs)
    results = Results()
    try:
        state.clear_gradients()
        own_args, own_kwargs, why_not = copy_arguments(args, kwargs)
        if why_not is not None:
            results.unchecked.append(("a copy of the arguments for each run", why_not))
        with around():
            output = model(*own_args, **own_kwargs)
            if backward:
                _run_backward(output, results)
        results.surroundings = read_surroundings(model)
        results.modules = modules_of(model)
        _keep_results(model, output, (own_args, own_kwargs), results)
        del output
    finally:
        state.restore()
    results.changes = state.differences()
    return results


def modules_of(model: nn.Module) -> set[tuple[str, str]]:
    """Returns the path and the class name of each module, under all of its paths."""
    return {(path, type(module).__name__) for path, module in model.named_modules(remove_duplicate=False)}


def _run_backward(output: Any, results: Results) -> None:
    """Runs backward from `output.loss` if there is one, else from the sum of all outputs that require a gradient."""
    with DisableTorchFunction():
        outputs = tensors_in(output)
    targets = _targets(output, outputs)
    if not targets:
        results.unchecked.append(("backward", "no output with real numbers requires a gradient"))
        return
    torch.autograd.backward(targets, [torch.ones_like(target) for target in targets])


def _targets(output: Any, found: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return [loss]
    tensors = {id(tensor): tensor for _, tensor in found}
    real = [tensor for tensor in tensors.values() if tensor.is_floating_point() and tensor.requires_grad]
    return [tensor for tensor in real if tensor.layout is torch.strided]


def _keep_results(model: nn.Module, output: Any, given: Any, results: Results) -> None:
    results.generators = AllGenerators()
    with aside():
        for slot, tensor in tensors_in(output):
            results.outputs[f"output{slot}"] = _bits(tensor)
        for name, buffer in model.named_buffers():
            results.outputs[f"buffer {name}"] = _bits(buffer)
        for name, parameter in model.named_parameters():
            results.gradients[name] = _bits(parameter.grad)
        for slot, tensor in tensors_in(given):
            if tensor.is_leaf and tensor.requires_grad:
                results.gradients[f"argument {slot}"] = _bits(tensor.grad)


def _bits(tensor: torch.Tensor | None) -> bytes:
    if tensor is None:
        return b"none"
    try:
        dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        return digest(dense) or _NO_BITS
    except (RuntimeError, NotImplementedError):
        return _NO_BITS


def read_surroundings(model: nn.Module) -> dict[str, Any]:
    """Returns, by name, the state that a recording must leave as an unrecorded run does."""
    state: dict[str, Any] = {
        **hooks_and_modes(),
        "the tracker of the process": id(process.current()),
        "grad mode": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
    }
    for path, module in model.named_modules():
        state[f"hooks on the module {path!r}"] = _hooks(module, MODULE_HOOKS)
        state[f"the mode (training or not) of the module {path!r}"] = module.training
    for path, parameter in model.named_parameters():
        state[f"hooks on the parameter {path!r}"] = _hooks(parameter, TENSOR_HOOKS)
    return state


def differences(plain: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """Returns the names of entries that differ."""
    return [name for name in {**plain, **recorded} if plain.get(name) != recorded.get(name)]


def _hooks(owner: Any, names: tuple[str, ...]) -> list[str]:
    """Returns the qualified names of the hooks.

    The ids of hooks differ between runs if a model registers them in its first call.
    """
    hooks = [hook for name in names for hook in (getattr(owner, name, None) or {}).values()]
    return [
        f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', type(hook))}" for hook in hooks
    ]
