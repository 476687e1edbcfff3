"""Wraps torch's modes, which see operators and functions, and the tracers of `torch.jit.trace` and `torch.export`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.utils._python_dispatch
import torch.utils._pytree
from torch.utils._python_dispatch import TorchDispatchMode

#: A context in which function modes and `__torch_function__` of subclasses are off; it takes 0.2 us.
DisableTorchFunction: Any = torch._C.DisableTorchFunction

#: Returns the trace of a running `torch.jit.trace`, which would include the reading of a shape.
tracing_state: Callable[[], Any] = torch._C._get_tracing_state

#: Returns whether `torch.export` traces, also in code that Dynamo traces: there torch 2.11 takes its own function to be
#: true whatever traces. To read the flag adds a guard.
is_exporting: Callable[[], bool] = (
    torch.compiler.is_exporting if torch.__version__ >= "2.12" else lambda: torch.compiler._is_exporting_flag
)

#: Returns the number of function modes that would see an attribute of a tensor being read, in 30 ns.
has_function_modes: Callable[[], int] = torch._C._len_torch_function_stack

#: Returns the number of dispatch modes on this thread's stack, in 30 ns.
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

#: Returns all objects in nested lists, tuples and dictionaries.
tree_leaves: Callable[[Any], list[Any]] = torch.utils._pytree.tree_leaves


class UnwrappedMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """The base of our dispatch modes, which leaves compiled code compiled.

    Call `keep_out_of_dynamo` with the `__torch_dispatch__` of such a mode, or with all that it calls if it is in C.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True, so that compiled code stays compiled while the mode is on."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False.

        With True, torch wraps `__torch_dispatch__` (1.3 us an op), and imports its compiler (a second).
        """
        return False


def unseen() -> AbstractContextManager[None]:
    """Hides operations on tensors in the block from every mode, tensor subclass and `torch.jit.trace`."""
    is_plain = tracing_state() is None and not count_dispatch_modes()
    return DisableTorchFunction() if is_plain else _unseen_by_any()


@contextmanager
def _unseen_by_any() -> Iterator[None]:
    tracing = tracing_state()
    with ExitStack() as stack:
        stack.enter_context(DisableTorchFunction())
        disable = getattr(torch.utils._python_dispatch, "_disable_current_modes", None)
        if disable is not None:
            stack.enter_context(disable())
        set_tracing: Any = getattr(torch._C, "_set_tracing_state", None)
        if tracing is not None and set_tracing is not None:
            stack.callback(set_tracing, tracing)
            set_tracing(None)
        yield


def leave_function_mode(mode: Any) -> None:
    """Removes a function mode from the stack of this thread, at any position."""
    above: list[Any] = []
    while has_function_modes() and torch._C._get_function_stack_at(has_function_modes() - 1) is not mode:
        above.append(torch._C._pop_torch_function_stack())
    if has_function_modes():
        mode.__exit__(None, None, None)
    for other in reversed(above):
        torch._C._push_on_torch_function_stack(other)


#: Flags of torch, beside the stack, that show whether a mode is on.
_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)

#: The attributes in which a mode saves these flags when it is entered.
_SAVED_FLAGS = (
    "old_dispatch_mode_flags",
    "old_non_infra_dispatch_mode_flags",
    "old_without_ignore_compile_internals_dispatch_mode_flags",
)


def is_dispatch_mode_on(mode: Any) -> bool:
    """Returns whether a dispatch mode is on the stack of this thread."""
    return any(torch._C._get_dispatch_stack_at(at) is mode for at in range(count_dispatch_modes()))


def leave_dispatch_mode(mode: Any) -> None:
    """Removes a dispatch mode from the stack of this thread, at any position.

    A mode that the user entered later is above ours, while `__exit__` removes only the top one.
    """
    size = count_dispatch_modes
    above: list[Any] = []
    while size() and torch._C._get_dispatch_stack_at(size() - 1) is not mode:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    for name in _SAVED_FLAGS if above else ():  # the mode above saved that ours was on
        ours, theirs = getattr(mode, name, None), getattr(above[-1], name, None)
        if ours and theirs:
            theirs[-1] = ours[-1]
    flags = vars(torch.utils._python_dispatch)
    before = {name: flags[name] for name in _MODE_FLAGS if name in flags}
    if size():
        mode.__exit__(None, None, None)
    for other in reversed(above):
        torch._C._push_on_torch_dispatch_stack(other)
    if above:
        # `__exit__` restored the flags from before ours, but a mode of the user is on.
        flags.update(before)
        set_flag: Any = flags.get("set_is_in_mode_without_ignore_compile_internals", lambda is_on: None)
        set_flag(before.get(_MODE_FLAGS[-1], True))
