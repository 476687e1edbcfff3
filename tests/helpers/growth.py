"""Counts the work of a function without a clock: the lines of Python that it runs."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_lines(function: Callable[[], object]) -> int:
    """Returns how many lines run in this thread while a function does, those in generators and loops each time."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
