"""Makes the rows of ended steps: their times, and what the user logged in them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...torch_internals.graph_captures import BEING_CAPTURED, graph_captures
from ...torch_internals.modes import unseen
from .call_rows import intervals_of
from .step import Step


def step_columns(steps: Sequence[Step]) -> dict[str, Any]:
    """Returns the columns of `steps`.

    Call it before the values of the steps are freed, since it reads the overhead there.
    """
    columns = {
        "step": [step.number for step in steps],
        "kind": [step.kind for step in steps],
        "start_ns": [step.start_ns for step in steps],
        "end_ns": [step.end_ns for step in steps],
    }
    if any(step.values for step in steps):
        columns["overhead_ns"] = [_overhead_ns(step) for step in steps]
    return columns


def scalar_columns(steps: Sequence[Step]) -> dict[str, Any] | None:
    """Returns the columns of `scalars`; None if nothing was logged."""
    scalars = [(step.number, name, value) for step in steps for name, value in step.scalars]
    if not scalars:
        return None
    number, name, value = (list(column) for column in zip(*scalars, strict=True))
    return {"step": number, "name": name, "value": value}


def to_scalars(scalars: Mapping[str, Any], warn: Callable[[str], None]) -> dict[str, float]:
    """Converts a user's scalars to floats.

    A tensor on a device that cannot be read is left out. It waits a while for captures of CUDA graphs on other threads.

    Args:
        scalars: numbers, or tensors or arrays with one element, by name.
        warn: warns of what is left out.

    Raises:
        TypeError: a value is something else, or no float of 64 bits can hold it.
    """
    found = {name: _to_scalar(name, value) for name, value in scalars.items()}
    for name in [name for name, value in found.items() if value is None]:
        warn(f"log({name}=...) is left out: {BEING_CAPTURED}, which reading a number on a GPU would end")
    return {name: value for name, value in found.items() if value is not None}


def _to_scalar(name: str, value: Any) -> float | None:
    try:
        if isinstance(value, torch.Tensor):
            with unseen(), graph_captures.device_work(value, waits=True) as is_allowed:
                return float(value.detach()) if is_allowed else None
        return float(value)
    # The text of such an integer may itself be refused (sys.set_int_max_str_digits).
    except OverflowError as error:
        raise TypeError(
            f"log({name}=...): the number is too large for a float of 64 bits, which reaches 1.8e308. "
            "Log its logarithm."
        ) from error
    except Exception as error:  # a user's class may raise any
        raise TypeError(
            f"log({name}={_shown(value)!r}): a scalar is a number or a tensor with one element, "
            f"not {type(value).__name__}"
        ) from error


def _shown(value: Any) -> str:
    try:
        return str(value)[:60]
    except Exception:
        return "..."


def _overhead_ns(step: Step) -> int:
    """Returns the time spent measuring between the step's start and end, on all threads."""
    _, begin, end = intervals_of([step])
    within = np.minimum(end, step.end_ns) - np.maximum(begin, step.start_ns)
    return int(np.maximum(within, 0).sum())
