"""Walks the modules below a module without running any of their code, and counts their elements."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...recording.module_path import join
from ...torch_internals.modes import unseen
from .wrappers import is_wrapped

#: The largest number of paths of one module that are walked, as nested sharing may multiply them.
MAX_PATHS = 64


def walk(top: nn.Module, path: str, raw_path: str) -> Iterator[tuple[nn.Module, nn.Module, str, str]]:
    """Yields (module, parent, path, raw path) for every registration below a module, depth first in order.

    A shared module is yielded once for each of its paths. The walk is iterative, and safe if a module contains itself.
    """
    visits: dict[int, int] = {}
    above = {id(top)}
    pending = [(top, iter(list(top._modules.items())), path, raw_path)]
    while pending:
        parent, children, parent_path, parent_raw = pending[-1]
        for part, module in children:
            if module is None or id(module) in above:
                continue
            visits[id(module)] = visits.get(id(module), 0) + 1
            if visits[id(module)] > MAX_PATHS:
                continue
            child_path = parent_path if is_wrapped(parent, part) else join(parent_path, part)
            child_raw = join(parent_raw, part)
            yield module, parent, child_path, child_raw
            if module._modules:
                above.add(id(module))
                pending.append((module, iter(list(module._modules.items())), child_path, child_raw))
                break
        else:
            above.discard(id(parent))
            pending.pop()


def named_modules(top: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields what `top.named_modules()` does, which fails if a module has no hash."""
    yield "", top
    seen = {id(top)}
    for module, _, _, raw_path in walk(top, "", ""):
        if id(module) not in seen:
            seen.add(id(module))
            yield raw_path, module


def descendants(top: nn.Module) -> Iterator[nn.Module]:
    """Yields every module below `top` once."""
    seen = {id(top)}
    pending = [top]
    while pending:
        for module in pending.pop()._modules.values():
            if module is not None and id(module) not in seen:
                seen.add(id(module))
                pending.append(module)
                yield module


def parameter_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """Returns a parameter of the module itself, or None. The dict of a scripted module has no `get`."""
    held = module._parameters
    return held[name] if name in held else None  # noqa: SIM401


def count_elements(top: nn.Module) -> dict[int, tuple[int, int]]:
    """Counts the elements of parameters and buffers in `top` and in each module below it, by `id` of the module.

    Shared tensors count once. The walk is iterative, so models nested deeper than Python's recursion limit are counted
    too.
    """
    parameters: dict[int, dict[int, int]] = {}
    buffers: dict[int, dict[int, int]] = {}
    with unseen():  # a function mode would see `numel`, and torch.jit.trace would record it
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
            except Exception:  # an uninitialised lazy parameter has no size yet, and a subclass may refuse
                sizes[id(tensor)] = 0
    return sizes
