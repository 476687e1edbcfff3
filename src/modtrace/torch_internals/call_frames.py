"""Reads the Python frames in which torch runs module calls, optimizers and data loaders."""

import os
import sys
from collections.abc import Iterator
from itertools import takewhile
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

_CALL_IMPL: CodeType = nn.Module._call_impl.__code__
_MODULE_FILE = _CALL_IMPL.co_filename
TORCH_FOLDER = os.path.dirname(torch.__file__)

#: The code objects around the call of a graph module.
_CALLING_FILES = (_MODULE_FILE, os.path.join(TORCH_FOLDER, "fx") + os.sep)
_STAGE_FILE = os.path.join(TORCH_FOLDER, "distributed", "pipelining", "stage.py")
_LOADER_FILE = os.path.join(TORCH_FOLDER, "utils", "data", "dataloader.py")
_OPTIMIZER_FILE = torch.optim.Optimizer.profile_hook_step.__code__.co_filename

#: The name of the function that calls the engine, which is torch's or ours (`autograd.EngineEntry`).
_ENGINE_CALL = "_engine_run_backward"

#: The code with which inductor starts processes that compile, or that test its compiler.
_COMPILER = "torch._inductor"
#: The code with which the standard library starts processes.
_STARTERS = ("subprocess", "multiprocessing", "concurrent")

_UNSHARED = 3  # references to a dictionary by the frame, by a local of ours and by the call of `getrefcount`
_CO_VARARGS = 0x4
_CO_OPTIMIZED = 0x1  # set for functions, whose f_locals is a copy, unlike that of a Python module


def frames(start: FrameType | None) -> Iterator[FrameType]:
    """Yields the Python frames from `start` outwards."""
    frame = start
    while frame is not None:
        yield frame
        frame = frame.f_back


def frames_in_backward(start: FrameType | None) -> Iterator[FrameType]:
    """Yields the Python frames from `start` outwards, up to the running backward."""
    return takewhile(lambda frame: frame.f_code.co_name != _ENGINE_CALL, frames(start))


def frame_local(frame: FrameType, name: str) -> Any:
    """Returns a local of a running frame, without prolonging the life of anything in the frame.

    Before Python 3.13 `f_locals` leaves a copy of all locals in the frame until the frame ends, which would keep
    activations alive that the function has dropped, so that copy is emptied again. It is not emptied if the function
    has called `locals()` and keeps the result, which is the same dictionary.
    """
    values = frame.f_locals
    value = values.get(name)
    if (
        sys.version_info < (3, 13)
        and frame.f_code.co_flags & _CO_OPTIMIZED
        and sys.getrefcount(values) <= _UNSHARED
    ):
        values.clear()
    return value


# Frames of module calls.


def find_call(start: FrameType | None) -> FrameType | None:
    """Returns the frame of the innermost module call."""
    return next((frame for frame in frames(start) if frame.f_code is _CALL_IMPL), None)


def around_call(start: FrameType | None) -> FrameType | None:
    """Returns the frame that encloses the innermost module call."""
    call = find_call(start)
    return None if call is None else call.f_back


def caller_of_module(start: FrameType | None) -> FrameType | None:
    """Returns the frame of the code that makes the innermost module call."""
    around = frames(around_call(start))
    return next((frame for frame in around if frame.f_code.co_filename != _MODULE_FILE), None)


def file_that_calls(start: FrameType | None) -> str:
    """Returns the file of the code that calls a module or graph module in these frames; "" if there is none."""
    files = (frame.f_code.co_filename for frame in frames(start))
    return next((name for name in files if not name.startswith(_CALLING_FILES)), "")


def is_in_module_call(start: FrameType | None) -> bool:
    """Returns whether a module call is among the frames. It takes 0.5 us if one is, because it is near."""
    frame = start
    while frame is not None:
        if frame.f_code.co_filename == _MODULE_FILE:
            return True
        frame = frame.f_back
    return False


def running_modules(start: FrameType | None) -> list[int]:
    """Returns the `id` of each module whose call is among the Python frames, outermost first."""
    calls = [frame for frame in frames(start) if frame.f_code is _CALL_IMPL]
    return [id(frame_local(frame, "self")) for frame in reversed(calls)]


def call_arguments(call_frame: FrameType | None) -> tuple[Any, Any]:
    """Returns the arguments of the module call whose pre-hooks run in this frame; none if a method is running."""
    if call_frame is None or call_frame.f_code.co_filename != _MODULE_FILE:
        return (), {}
    args, kwargs = frame_local(call_frame, "args"), frame_local(call_frame, "kwargs")
    return args if isinstance(args, tuple) else (), kwargs if isinstance(kwargs, dict) else {}


def call_kwargs(call_frame: FrameType) -> dict[str, Any] | None:
    """Returns the keyword arguments of the module call whose hooks run in this frame.

    torch passes none to global hooks.
    """
    kwargs = frame_local(call_frame, "kwargs")
    return kwargs if isinstance(kwargs, dict) else None


class PipelineChunk(NamedTuple):
    """What a stage of a pipeline runs: a micro-batch, both counted from 0; no micro-batch if torch infers shapes."""

    stage: int
    micro_batch: int | None


def find_pipeline_chunk(start: FrameType | None) -> PipelineChunk | None:
    """Returns what a stage of torch's pipelines runs in these frames; None outside of pipelines.

    It takes 40 ns a frame where pipelines are imported.
    """
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return None
    for frame in frames(start):
        if frame.f_code.co_filename == _STAGE_FILE and frame.f_code.co_name in _STAGE_METHODS:
            stage = getattr(frame_local(frame, "self"), "stage_index", None)
            chunk = _STAGE_METHODS[frame.f_code.co_name]
            micro_batch = None if chunk is None else frame_local(frame, chunk)
            return PipelineChunk(stage, micro_batch) if isinstance(stage, int) else None
    return None


#: The methods in which torch runs the module of a stage, and the local with the micro-batch; None where it runs the
#: module only to learn the shapes that the stages hand on (2.13, and under another name 2.11).
_STAGE_METHODS = {
    "forward_one_chunk": "fwd_chunk_id",
    "_forward_metadata_inference": None,
    "_shape_inference": None,
}


# Frames of modules' methods.


def running_module(start: FrameType | None) -> nn.Module | None:
    """Returns the module with the innermost running method in these frames, up to the running backward."""
    for frame in frames_in_backward(start):
        owner = module_of_method(frame)
        owner = _module_of_closure(frame) if owner is None else owner
        if owner is not None:
            return owner
    return None


def module_given_first(frame: FrameType) -> nn.Module | None:
    """Returns the first positional argument of the function that a frame runs, if it is a module. It takes 1 us."""
    code = frame.f_code
    if code.co_argcount:
        return _to_module(frame_local(frame, code.co_varnames[0]))
    if code.co_flags & _CO_VARARGS:
        given = frame_local(frame, code.co_varnames[code.co_kwonlyargcount])
        return _to_module(given[0]) if isinstance(given, tuple) and given else None
    return None


def module_of_method(frame: FrameType) -> nn.Module | None:
    """Returns the module whose method a frame runs.

    It is the first argument, if that is named `self` or has the class of the code. Python 3.10 does not show the class
    in which code was written, so only `self` counts there. It takes 1 us for a method, else 0.5 us.
    """
    code = frame.f_code
    is_method = has_self(code)
    if not is_method and "." not in _qualname(code):
        return None
    owner = module_given_first(frame)
    return owner if owner is not None and (is_method or _is_written_in_class(frame, owner)) else None


def has_self(code: CodeType) -> bool:
    """Returns whether the first parameter of a function is named `self`."""
    return code.co_argcount > 0 and code.co_varnames[0] == "self"


def _module_of_closure(frame: FrameType) -> nn.Module | None:
    """Returns the module in whose method the function of a frame was defined.

    Checkpoints are often given such functions.
    """
    modules = {name: _to_module(frame_local(frame, name)) for name in frame.f_code.co_freevars}
    if modules.get("self") is not None:
        return modules["self"]
    own = [
        module for module in modules.values() if module is not None and _is_written_in_class(frame, module)
    ]
    return own[0] if len(own) == 1 else None


def _qualname(code: CodeType) -> str:
    return getattr(code, "co_qualname", "")  # new in Python 3.11


def _is_written_in_class(frame: FrameType, owner: nn.Module) -> bool:
    """Returns whether the code of a frame is in the body of a class of the module, or in a function there."""
    name, file = _qualname(frame.f_code), frame.f_globals.get("__name__")
    kinds = type(owner).__mro__
    return any(kind.__module__ == file and name.startswith(f"{kind.__qualname__}.") for kind in kinds)


def _to_module(value: Any) -> nn.Module | None:
    """Returns the value if it is a module whose `nn.Module.__init__` has run."""
    # `isinstance` would run a `__class__` of the user
    return value if issubclass(type(value), nn.Module) and "_modules" in vars(value) else None


# Frames of training loops.


def is_in_data_loader(start: FrameType | None) -> bool:
    """Returns whether a `DataLoader` with `num_workers=0` fetches a batch in these frames."""
    return any(frame.f_code.co_filename == _LOADER_FILE for frame in frames(start))


def is_in_optimizer_step(start: FrameType | None) -> bool:
    """Returns whether an `Optimizer.step` is among the frames. If it raised, its post hook has not run."""
    return any(
        frame.f_code.co_filename == _OPTIMIZER_FILE and frame.f_code.co_name == "wrapper"
        for frame in frames(start)
    )


# Frames that start processes.


def is_started_by_compiler(start: FrameType | None) -> bool:
    """Returns whether inductor is starting a process in these frames."""
    names = (str(frame.f_globals.get("__name__")) for frame in frames(start))
    return next((name for name in names if name.partition(".")[0] not in _STARTERS), "").startswith(_COMPILER)
