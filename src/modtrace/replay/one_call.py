"""Records one call of a model, and leaves the model, its arguments and the process unchanged."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from ..recording.protocols import RecordingData
from ..torch_internals.dynamo import is_compiled
from .failing_place import find_failing_place
from .model_state import ModelState, copy_arguments
from .quiet_recorder import every_row, recording_ops
from .write_guard import WriteGuard

_VALUES = (None, "stats")


@dataclass(frozen=True)
class OneCall:
    """The recording of one call."""

    data: RecordingData  # ends where the model raised, if it did
    error: Exception | None  # what it raised, with a note that names the module and the op


def record_call(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    values: str | None = None,
) -> RecordingData:
    """Records one call with every op. What the model returns is dropped.

    Raises:
        TypeError, ValueError: as `try_call`.
        Exception: what the model raises, with a note (Python 3.11) that names the module and the op.
    """
    call = try_call(model, args, kwargs, values=values)
    if call.error is not None:
        raise call.error
    return call.data


def try_call(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    values: str | None = None,
) -> OneCall:
    """Records one call of a model that may raise. Nothing of the model changes, also if the call is interrupted.

    Parameters, buffers, gradients, attributes of modules, the contents of the arguments, random generators and the grad
    mode are restored. Containers and caches among the arguments are copied for the call. Parameters are copied only
    when an op is about to write to them; all of them are if a part of the model is compiled. A model with lazy
    parameters is copied for the call. Of a `DistributedDataParallel`, the wrapped module is called, so that the call
    waits for no other process.

    Args:
        model: the module to call, in its present mode (training or not) and the present grad mode.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
        values: "stats" measures every tensor; None measures none.

    Raises:
        TypeError: `model` is not a module, `args` is not a tuple or list, or `kwargs` is not a dict.
        ValueError: `values` is something else, or the model has lazy parameters and cannot be copied.
        KeyboardInterrupt: the call was interrupted.
    """
    kwargs = {} if kwargs is None else kwargs
    _check_arguments(model, args, kwargs, values)
    model = _to_call(model)
    data = every_row(values)
    # Ops of compiled regions bypass the dispatcher, so nothing would see what they write to.
    may_write_unseen = any(map(is_compiled, model.modules()))
    state = ModelState(model, args, kwargs, clones_parameters=may_write_unseen)
    error: Exception | None = None
    try:
        state.clear_gradients()
        own_args, own_kwargs, _ = copy_arguments(args, kwargs)
        with WriteGuard(state.about_to_write), recording_ops(data, model, values=values):
            model(*own_args, **own_kwargs)
    except Exception as raised:
        error = raised
    finally:
        state.put_back()
    if error is not None:
        _add_note(error, data)
    return OneCall(data, error)


def _check_arguments(model: object, args: object, kwargs: object, values: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: give a torch.nn.Module, not a {type(model).__name__}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args=...: give a tuple, (x,) for one argument, not a {type(args).__name__}")
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs=...: give a dict of names and values, not a {type(kwargs).__name__}")
    if values not in _VALUES:
        raise ValueError(f'values={values!r}: give "stats" or None')


def _to_call(model: nn.Module) -> nn.Module:
    """Returns the module to call in place of `model` so that `model` does not change; most often `model` itself."""
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    named = chain(model.named_parameters(), model.named_buffers())
    lazy = next((name for name, each in named if is_lazy(each)), None)
    if lazy is None:
        return model
    blanks = {id(each): _blank(each) for each in model.buffers() if is_lazy(each)}
    try:
        return copy.deepcopy(model, blanks)
    except Exception as error:
        raise ValueError(
            f"{lazy}: this parameter has no shape yet, and the model cannot be copied "
            f"({type(error).__name__}: {error}). Call the model once."
        ) from error


def _blank(buffer: torch.Tensor) -> torch.Tensor:
    """Returns a new lazy buffer. torch 2.13 copies lazy parameters but refuses to copy lazy buffers."""
    make: Any = UninitializedBuffer  # torch's stub does not know its arguments
    blank: torch.Tensor = make(dtype=buffer.dtype, device=buffer.device)
    return blank


def _add_note(error: Exception, data: RecordingData) -> None:
    place = find_failing_place(data)
    if place is not None and hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"modtrace: raised in {place}")
