"""Wraps the autograd engine: nodes, their numbers, the running backward, and the function that starts one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.autograd.graph

from .call_frames import frame_local, frames
from .patches import replace

#: The `_sequence_nr()` of AccumulateGrad nodes, which the engine runs as soon as they are ready, in no order.
ACCUMULATE_SEQUENCE_NR = 2**64 - 1

# Plain C functions for the hot path, at 30-40 ns each. torch has had all three since 2.1.
sequence_nr: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr")  # noqa: B009 (not exported, says mypy)
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
current_node: Callable[[], Any] = torch._C._current_autograd_node

will_engine_execute: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)

#: The class of nodes that run a Python Function; () if torch lacks it.
CustomFunctionNode: type | tuple[()] = getattr(torch.autograd.function, "BackwardCFunction", ())

#: Code objects seen in frames, and whether each is the forward of a custom Function. Forwards are searched for
#: themselves, because `Function.apply`, which calls them, has a frame of its own only before torch 2.14.
_forwards: WeakKeyDictionary[CodeType, bool] = WeakKeyDictionary()


def is_custom_function(node: Any) -> bool:
    """Returns whether an autograd node runs a Python `torch.autograd.Function`."""
    return isinstance(node, CustomFunctionNode)


def is_in_custom_function(start: FrameType | None) -> bool:
    """Returns whether the frames include the forward of a custom Function that a backward may reach.

    Such a forward runs with grad mode off. So does the first forward of a reentrant checkpoint. If grad mode was off
    before, the node of the Function has no next node (2.13).
    """
    for frame in frames(start):
        code = frame.f_code
        if not _is_forward(code):
            continue
        names = code.co_varnames[: code.co_argcount]
        node: Any = frame_local(frame, names[0]) if names else None
        if not is_custom_function(node) or node.next_functions:  # without `ctx`, which is set up later
            return True
    return False


def _is_forward(code: CodeType) -> bool:
    found = _forwards.get(code)
    if found is None:
        functions = _subclasses(torch.autograd.Function)
        found = any(getattr(function.forward, "__code__", None) is code for function in functions)
        _forwards[code] = found
    return found


def _subclasses(of: type[torch.autograd.Function]) -> Iterator[type[torch.autograd.Function]]:
    for subclass in of.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def queue_callback(callback: Callable[[], None]) -> bool:
    """Makes the engine call `callback` at the end of the running backward. Returns False if torch cannot do that."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        return False
    engine.queue_callback(callback)
    return True


class EngineEntry:
    """The only Python function that enters the autograd engine; it is wrapped while a tracker runs.

    `torch.autograd.backward`, `torch.autograd.grad` and `Tensor.backward` all call `_engine_run_backward`, which two
    modules hold; torch.compiler itself replaces it in these two.
    """

    _HOLDERS: tuple[Any, ...] = (torch.autograd.graph, torch.autograd)

    def __init__(self) -> None:
        self._patches = ExitStack()
        self._is_wrapped = False

    def wrap(self, wrapper_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces the function by `wrapper_of(original)`. It does nothing if torch lacks the function."""
        original = getattr(torch.autograd.graph, "_engine_run_backward", None)
        if original is not None and not self._is_wrapped:
            self._is_wrapped, wrapper = True, wrapper_of(original)
            for holder in self._HOLDERS:
                replace(holder, "_engine_run_backward", wrapper, self._patches)

    def restore(self) -> None:
        """Restores the original."""
        self._patches.close()
        self._is_wrapped = False

    @classmethod
    def functions(cls) -> list[Any]:
        """Returns the function that each of the two modules holds now."""
        return [getattr(holder, "_engine_run_backward", None) for holder in cls._HOLDERS]
