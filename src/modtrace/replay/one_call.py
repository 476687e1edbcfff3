"""Records one call of a model, and leaves the model, its arguments and the process unchanged."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from ..collect.ops.mode import tensors_in
from ..collect.ops.schemas import OpSchema
from ..recording.protocols import RecordingData
from ..torch_internals.dynamo import is_compiled, keep_out_of_dynamo
from ..torch_internals.modes import UnwrappedMode
from .model_state import ModelState, copy_arguments
from .recorded_run import every_row, recording_ops

_VALUES = (None, "stats")


@dataclass(frozen=True)
class OneCall:
    """The recording of one call, with the error that ended it."""

    data: RecordingData  # ends where the model raised, if it did
    error: Exception | None  # the model's exception, with a note that names module and op


def record_call(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    values: str | None = None,
) -> RecordingData:
    """Records one call of a model with every op; the model's output is dropped.

    Raises:
        TypeError, ValueError: as `try_call`.
        Exception: the exception of the model, with a note (Python 3.11) that names the module and the op.
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
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: give a torch.nn.Module, not a {type(model).__name__}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args=...: give a tuple, (x,) for one argument, not a {type(args).__name__}")
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs=...: give a dict of names and values, not a {type(kwargs).__name__}")
    if values not in _VALUES:
        raise ValueError(f'values={values!r}: give "stats" or None')
    model = _to_call(model)
    data = every_row(values)
    # Compiled regions bypass the dispatcher, so writes of their ops would not be seen.
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
        state.restore()
    place = None if error is None else find_failing_place(data)
    if error is not None and place is not None and hasattr(error, "add_note"):  # new in Python 3.11
        error.add_note(f"modtrace: raised in {place}")
    return OneCall(data, error)


def _to_call(model: nn.Module) -> nn.Module:
    """Returns the module to call in place of `model`, so that `model` does not change; most often `model` itself."""
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    named = chain(model.named_parameters(), model.named_buffers())
    lazy = next((name for name, parameter in named if is_lazy(parameter)), None)
    if lazy is None:
        return model
    make_blank: Any = UninitializedBuffer  # torch's stub lacks its arguments
    # torch 2.13 copies lazy parameters but refuses to copy lazy buffers.
    blanks = {
        id(buffer): make_blank(dtype=buffer.dtype, device=buffer.device)
        for buffer in model.buffers()
        if is_lazy(buffer)
    }
    try:
        return copy.deepcopy(model, blanks)
    except Exception as error:
        raise ValueError(
            f"{lazy}: this parameter has no shape yet, and the model cannot be copied "
            f"({type(error).__name__}: {error}). Call the model once."
        ) from error


_Row = dict[str, Any]


def find_failing_place(data: RecordingData) -> str | None:
    """Returns where the exception that left the last outermost call was raised; None if that call returned.

    The place is the path of a module, or the name of a root, and the op: `layers.3.attn, at its op aten.mm.default`.

    An exception that the model caught itself is skipped: something ran after it in the enclosing call.
    """
    calls: list[_Row] = [row for row in data.table("calls").to_pylist() if row["phase"] == "forward"]
    ops: list[_Row] = sorted(data.table("ops").to_pylist(), key=lambda row: int(row["start_ns"]))
    outermost = [row for row in calls if row["parent_call_id"] is None]
    if not outermost or not outermost[-1]["raised"]:
        return None
    call = outermost[-1]
    while (inner := _left_with(call, calls, ops)) is not None:
        call = inner
    own = [row for row in ops if row["call_id"] == call["call_id"]]
    modules = data.table("modules").to_pylist()
    paths = {row["module_id"]: row["path"] or row["name"] or row["type"] for row in modules}
    path: str = paths.get(call["module_id"], "an unknown module")
    return f"{path}, at its op {own[-1]['name']}" if own and own[-1]["raised"] else path


def _left_with(call: _Row, calls: Sequence[_Row], ops: Sequence[_Row]) -> _Row | None:
    """Returns the call directly inside `call` that ended with the same exception; None if there is none."""
    inside = [row for row in calls if row["parent_call_id"] == call["call_id"]]
    if not inside or not inside[-1]["raised"]:
        return None
    end_ns = inside[-1]["end_ns"]
    after = any(row["call_id"] == call["call_id"] and row["start_ns"] > end_ns for row in ops)
    return None if after else inside[-1]


class WriteGuard(UnwrappedMode):
    """Reports each tensor that an op is about to write, so that its contents can be copied before.

    It is a mode below the recorder, and continues if the recorder has failed. It does not see writes by compiled code
    or on other threads.
    """

    def __init__(self, about_to_write: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        keep_out_of_dynamo(WriteGuard.__torch_dispatch__)
        self._about_to_write = about_to_write
        self._schemas: dict[int, OpSchema] = {}  # keyed by the `id` of the op, which the schema keeps alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = self._schemas.get(id(func))
        if schema is None:
            schema = self._schemas[id(func)] = OpSchema(func, len(self._schemas))
        kwargs = kwargs or {}
        if schema.writes or schema.is_collective:
            for tensor in _written(schema, args, kwargs):
                self._about_to_write(tensor)
        return schema.call(*args, **kwargs)


def _written(schema: OpSchema, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that an op writes. For a collective these are all, as its schema lists no writes."""
    arguments: list[Any] = [args, kwargs]
    if not schema.is_collective:
        arguments = [
            args[write.key]
            if isinstance(write.key, int) and write.key < len(args)
            else kwargs.get(write.name)
            for write in schema.written
        ]
    for tensor, _ in tensors_in(arguments, ""):
        yield tensor
