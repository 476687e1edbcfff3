"""Makes Dynamo compile modules with our hooks separately from modules without them."""

from contextlib import ExitStack
from types import FunctionType, MethodType

from torch import nn

from ...torch_internals.dynamo import nested_regions_traced_again
from ...torch_internals.module_copies import Attribute, leave_out_of_copies
from ...torch_internals.patches import MISSING, replace


class _Stale:
    """A module that has a `forward` attribute set by us."""

    def __init__(self, module: nn.Module, forward: FunctionType) -> None:
        self.blocks = 0  # the number of blocks that need it, each of which holds the module
        own = MethodType(forward, module)
        self._patches = ExitStack()
        replace(module, "forward", own, self._patches)
        self._end = leave_out_of_copies(module, attributes=[Attribute("forward", own, MISSING)])

    def end(self) -> None:
        """Removes our `forward`, unless the user has set another."""
        self._end()
        self._patches.close()


_stale: dict[int, _Stale] = {}  # keyed by the `id` of the module
_while_stale = ExitStack()  # closed when no module has one


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
            _while_stale.enter_context(nested_regions_traced_again())
        _stale[id(module)] = _Stale(module, forward)
    _stale[id(module)].blocks += 1
    stack.callback(_make_fresh, module)


def _make_fresh(module: nn.Module) -> None:
    stale = _stale[id(module)]
    stale.blocks -= 1
    if not stale.blocks:
        del _stale[id(module)]
        stale.end()
    if not _stale:
        _while_stale.close()
