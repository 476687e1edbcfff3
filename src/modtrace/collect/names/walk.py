"""Walks the modules below a module, with their paths, without running any of their code."""

from collections.abc import Iterator

import torch
from torch import nn

from ...recording.module_path import join
from .wrappers import is_wrapped

#: Of a module registered under very many paths (nested sharing), this many are walked.
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
