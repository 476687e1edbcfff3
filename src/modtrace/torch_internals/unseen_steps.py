"""Watches steps of optimizers for which torch runs no hook: in compiled code, and steps that a GradScaler skips."""

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType, FunctionType
from typing import Any

import torch

from .call_frames import frame_local
from .checkpoint import _captured
from .dynamo import is_dynamo_compiling, keep_out_of_dynamo
from .modes import unseen
from .own_frames import leave_out_own_frames
from .patches import replace


class UnseenSteps:
    """Calls functions at such steps until `stop()`, each on the thread of the step."""

    def __init__(
        self,
        *,
        compiled: Callable[[Any, bool], None],
        traced: Callable[[], None],
        skipped: Callable[[Any], None],
    ) -> None:
        """Creates a watcher, which watches nothing before `start()`.

        Args:
            compiled: called with the optimizer, and whether it is given a closure, before a call of
                `torch.compile(optimizer.step)`. What it raises reaches the caller.
            traced: called when Dynamo traces a step in other code, which never calls `compiled`.
            skipped: called with the optimizer when a GradScaler has left out a step, because of its gradients.
        """
        self.compiled = compiled
        self.traced = traced
        self.skipped = skipped

    def start(self) -> None:
        """Starts watching. A later call also watches compiled code if the compiler has been imported since."""
        if self not in _watching:
            _watching.append(self)
        frames = sys.modules.get("torch._dynamo.eval_frame")
        _wrap(frames, "set_eval_frame", _see_compiled_call)
        _wrap(torch.amp.GradScaler, "_maybe_opt_step", _see_skipped)

    def stop(self) -> None:
        """Stops watching. After the last watcher, everything that was replaced is restored."""
        if self in _watching:
            _watching.remove(self)
        if not _watching:
            _patches.close()
            _wrapped.clear()


_watching: list[UnseenSteps] = []
_patches = ExitStack()  # closed when there is no watcher
_wrapped: set[str] = set()  # names of wrapped functions


def _wrap(holder: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Wraps a private function of torch, unless torch lacks it or it is wrapped already."""
    original = vars(holder).get(name) if holder is not None else None
    if original is not None and name not in _wrapped:
        _wrapped.add(name)
        replace(holder, name, functools.wraps(original)(make(original)), _patches)


class _Entered(threading.local):
    """Whether the compiled code that this thread entered last is exactly the step of an optimizer."""

    is_step = False


_entered = _Entered()


def _see_compiled_call(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Watches calls of compiled functions, whose wrapper in torch calls `original` first of all (2.13)."""

    def set_eval_frame(callback: Any) -> Any:
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        if callback is None and caller is not None and _is_entry(caller):
            args, kwargs = frame_local(caller, "args") or (), frame_local(caller, "kwargs") or {}
            optimizer = _optimizer_of(frame_local(caller, "fn"), args)
            _entered.is_step = optimizer is not None
            if optimizer is not None:
                has_closure = any(
                    arg is not None and arg is not optimizer for arg in (*args, *kwargs.values())
                )
                for watcher in tuple(_watching):
                    watcher.compiled(optimizer, has_closure)
        return original(callback)

    return set_eval_frame


def _is_entry(caller: FrameType) -> bool:
    """Returns whether the caller is torch.compile's wrapper, before it runs the compiled code."""
    return caller.f_code.co_name == "compile_wrapper" and frame_local(caller, "cleanups") is None


def _optimizer_of(function: Any, args: Any) -> Any:
    """Returns the optimizer whose step a function is; None for other functions."""
    while getattr(function, "__name__", "") == "step":
        bound_to = getattr(function, "__self__", None)
        if bound_to is None and isinstance(function, FunctionType):
            of_schedule = _captured(function, "opt_ref")  # a learning-rate scheduler has wrapped the step
            bound_to = of_schedule() if of_schedule is not None else _first_of(args, function)
        if isinstance(bound_to, torch.optim.Optimizer):
            return bound_to
        function = getattr(function, "__wrapped__", None)  # torch.compile may have wrapped it as well
    return None


def _first_of(args: Any, function: FunctionType) -> Any:
    """Returns the first argument, if the function is the method `step` of its class."""
    first = next(iter(args), None)
    own = getattr(type(first), "step", None)
    return first if own is not None and inspect.unwrap(own) is inspect.unwrap(function) else None


def note_traced_step() -> None:
    """Notifies the watchers, in code that Dynamo traces, that this code is an optimizer's step. It adds no node."""
    if is_dynamo_compiling():
        # Dynamo runs the argument while it traces this call.
        from torch._dynamo.comptime import (
            comptime,
        )

        comptime(_report_traced)


def _report_traced(context: Any) -> None:
    if not _entered.is_step:
        for watcher in tuple(_watching):
            watcher.traced()


def _see_skipped(original: Callable[..., Any]) -> Callable[..., Any]:
    """Watches how a GradScaler decides whether an optimizer steps (2.13)."""

    def maybe_step(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(scaler, optimizer, state, *args, **kwargs)
        except BaseException as error:
            leave_out_own_frames(error)
            raise
        if _has_overflowed(state):
            for watcher in tuple(_watching):
                watcher.skipped(optimizer)
        return result

    keep_out_of_dynamo(maybe_step, with_callees=False)
    return maybe_step


def _has_overflowed(state: Any) -> bool:
    with unseen():
        try:
            return any(bool(found_inf) for found_inf in state["found_inf_per_device"].values())
        except (KeyError, TypeError, AttributeError):  # this torch differs from 2.13
            return False
