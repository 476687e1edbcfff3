"""Knows wrappers around models, whose parts are left out of paths, so that a compiled model is named as the model."""

from collections.abc import Container, Mapping
from itertools import chain, count

from torch import nn

#: The attribute under which `torch.compile(model)` registers the model.
COMPILED_PART = "_orig_mod"

#: Parts of raw paths that come from wrappers, and the classes of these wrappers; None if the part always comes from a
#: wrapper. To add one, add a row here and one in the test.
WRAPPERS: Mapping[str, frozenset[str] | None] = {
    COMPILED_PART: None,
    "_checkpoint_wrapped_module": None,  # set by checkpoint_wrapper of torch.distributed
    "_fsdp_wrapped_module": None,
    "_export_root": None,  # present while torch.export traces
    "module": frozenset({"DistributedDataParallel", "DataParallel", "AveragedModel"}),
}


def is_wrapped(parent: nn.Module, part: str) -> bool:
    """Returns whether the submodule `part` of a module is what the module wraps."""
    classes = WRAPPERS.get(part, frozenset())
    return classes is None or type(parent).__name__ in classes


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside of all wrappers, such as the model in a compiled or distributed one."""
    inner: nn.Module | None = module
    while inner is not None:
        module = inner
        inner = next((inner for part, inner in module._modules.items() if is_wrapped(module, part)), None)
    return module


def class_name(module: nn.Module) -> str:
    """Returns the name of a module's class. The class that FSDP2 puts in its place is skipped."""
    kind = type(module)
    if any(base.__name__ == "FSDPModule" for base in kind.__bases__):
        kind = next((base for base in kind.__bases__ if base.__name__ != "FSDPModule"), kind)
    return kind.__name__


def free_name(wanted: str, taken: Container[str | None]) -> str:
    """Returns a name that is not taken: `GPT`, `GPT#1`, `GPT#2`."""
    numbered = (f"{wanted}#{number}" for number in count(1))
    return next(name for name in chain([wanted], numbered) if name not in taken)
