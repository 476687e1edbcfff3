"""Tells compiled code that has our hooks in it from compiled code without them."""

from contextlib import ExitStack
from types import FunctionType, MethodType

from torch import nn

from ...torch_internals.dynamo import nested_regions_traced_anew

#: How many blocks have put their `forward` on a module, by its `id`; each block holds its modules.
_stale: dict[int, int] = {}
_while_stale = ExitStack()  # is closed when no module has one


def make_stale(module: nn.Module, stack: ExitStack) -> None:
    """Sets the class's `forward` as an attribute of the module, so that code compiled without hooks is not used for it.

    Dynamo does not check for hooks when it decides whether compiled code may be used (`skip_nnmodule_hook_guards`), and
    it keeps code per class: hooks on a model whose class was compiled before would not run. But it does check that the
    module has no `forward` in its `__dict__`. Code with hooks checks for these hooks, so it is not used after the
    block, and is used again in the next one (torch 2.13, measured).
    """
    if id(module) not in _stale:
        forward = getattr(type(module), "forward", None)
        if "forward" in module.__dict__ or type(forward) is not FunctionType or forward is nn.Module.forward:
            return
        if not _stale:
            _while_stale.enter_context(nested_regions_traced_anew())
        module.__dict__["forward"] = MethodType(forward, module)
    _stale[id(module)] = _stale.get(id(module), 0) + 1
    stack.callback(_make_fresh, module)


def _make_fresh(module: nn.Module) -> None:
    _stale[id(module)] -= 1
    if not _stale[id(module)]:
        del _stale[id(module)]
        if (
            getattr(module.__dict__.get("forward"), "__func__", None) is type(module).forward
        ):  # not the user's
            del module.__dict__["forward"]
    if not _stale:
        _while_stale.close()
