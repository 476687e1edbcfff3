"""Finds the line of the user's code that an op comes from, and the function of torch that was called."""

import os
import sys
import traceback
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...torch_internals.autograd import graph_task_id
from ...torch_internals.call_frames import frames, frames_in_backward
from ...torch_internals.dynamo import keep_out_of_dynamo
from ...torch_internals.own_frames import leave_out_own_frames

#: Code in these folders is not the user's.
_NOT_THE_USERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep,
)


def is_in_engine() -> bool:
    """Returns whether the engine itself runs the op, and not a recompute."""
    return graph_task_id() >= 0 and not torch.is_grad_enabled()


class SourceLines:
    """Finds the innermost line outside of torch, as `file:line`: in a backward that of a hook or a custom Function.

    It takes 1 us an op, more below many frames of torch.
    """

    def __init__(self) -> None:
        self.found: dict[int, str] = {}  # by op
        self._is_users: dict[CodeType, bool] = {}
        self._texts: dict[tuple[CodeType, int], str] = {}

    def begins(self, op: int, schema: Any, args: Any, kwargs: Any) -> None:
        """Receives an op that is about to run. The frame below, if there is one, called the op: the mode has none.

        On a thread of the engine, as each accelerator has one, nothing of Python called it.
        """
        caller = sys._getframe().f_back
        # Below the engine's frame is the line that called `backward()`.
        around = frames_in_backward(caller) if is_in_engine() else frames(caller)
        frame = next((outer for outer in around if self._is_of_user(outer.f_code)), None)
        if frame is not None:
            key = (frame.f_code, frame.f_lineno)
            text = self._texts.get(key)
            if text is None:
                text = self._texts[key] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self.found[op] = text

    def take(self) -> dict[int, str]:
        """Returns the lines found since the last call."""
        found, self.found = self.found, {}
        return found

    def _is_of_user(self, code: CodeType) -> bool:
        found = self._is_users.get(code)
        if found is None:
            found = self._is_users[code] = is_of_user(code)
        return found


def is_of_user(code: CodeType) -> bool:
    """Returns whether code is neither torch's, nor ours, nor Python's own."""
    return not code.co_filename.startswith((*_NOT_THE_USERS, "<frozen"))


def find_line(error: BaseException) -> str | None:
    """Returns the innermost line of the user's in the traceback of an error, as `train.py:31`; None for none."""
    lines = traceback.walk_tb(error.__traceback__)
    found = [(frame.f_code, line) for frame, line in lines if is_of_user(frame.f_code)]
    if not found:
        return None
    code, line = found[-1]
    return f"{os.path.basename(code.co_filename)}:{line}"


class PythonNames(TorchFunctionMode):
    """Finds the outermost function of torch that was called: `linear` above `aten.addmm`. It takes 1 us a call."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, str] = {}  # by op
        self._running: str | None = None
        keep_out_of_dynamo(PythonNames.__torch_function__, with_callees=False)

    def begins(self, op: int, schema: Any, args: Any, kwargs: Any) -> None:
        """Receives an op that is about to run."""
        if self._running is not None and not is_in_engine():
            self.found[op] = self._running

    def take(self) -> dict[int, str]:
        """Returns the names found since the last call."""
        found, self.found = self.found, {}
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self._running = self._running, getattr(func, "__name__", None)
        try:
            return func(*args, **(kwargs or {}))
        except BaseException as error:
            leave_out_own_frames(error)
            raise
        finally:
            self._running = before
