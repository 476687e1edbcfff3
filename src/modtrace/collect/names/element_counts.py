"""Counts the elements of parameters and buffers in a module and in all modules below it."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from ...torch_internals.modes import unseen


def count_elements(top: nn.Module) -> dict[int, tuple[int, int]]:
    """Counts the elements of parameters and buffers in `top` and in each module below it, by `id` of the module.

    Shared tensors count once. The walk is iterative, so models nested deeper than Python's recursion limit are counted
    too.
    """
    parameters: dict[int, dict[int, int]] = {}
    buffers: dict[int, dict[int, int]] = {}
    with unseen():  # `numel` is an event for a function mode, and a node for torch.jit.trace
        for module in _children_first(top):
            key = id(module)
            parameters[key] = _sizes(module._parameters.values())
            buffers[key] = _sizes(module._buffers.values())
            for child in module._modules.values():
                if child is not None and id(child) in parameters:
                    parameters[key].update(parameters[id(child)])
                    buffers[key].update(buffers[id(child)])
    return {key: (sum(sizes.values()), sum(buffers[key].values())) for key, sizes in parameters.items()}


def _children_first(top: nn.Module) -> list[nn.Module]:
    order: list[nn.Module] = []
    seen = {id(top)}
    pending = [(top, iter(list(top._modules.values())))]
    while pending:
        module, children = pending[-1]
        for child in children:
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append((child, iter(list(child._modules.values()))))
                break
        else:
            pending.pop()
            order.append(module)
    return order


def _sizes(tensors: Iterable[Any]) -> dict[int, int]:
    sizes = {}
    for tensor in tensors:
        if tensor is not None:
            try:
                sizes[id(tensor)] = int(tensor.numel())
            except Exception:  # an uninitialised lazy parameter has no size yet; a subclass may refuse
                sizes[id(tensor)] = 0
    return sizes
