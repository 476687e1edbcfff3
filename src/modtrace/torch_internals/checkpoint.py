"""Reads activation checkpoints: the regions that torch recomputes, and what it keeps for that."""

import functools
from contextlib import nullcontext
from types import FrameType
from typing import Any

import torch.utils.checkpoint

from .call_frames import frame_local, frames_in_backward, has_self, module_of_method
from .modes import tree_leaves

StopRecomputation: type[BaseException] | tuple[()] = getattr(
    torch.utils.checkpoint, "_StopRecomputationError", ()
)
_ReentrantCheckpointNode: type | tuple[()] = getattr(
    torch.utils.checkpoint.CheckpointFunction, "_backward_cls", ()
)
_SelectiveContext: Any = getattr(torch.utils.checkpoint, "_CachedTorchDispatchMode", ())
_UNPACK_NAME = "unpack_hook"
_CHECKPOINT_FILE = torch.utils.checkpoint.CheckpointFunction.forward.__code__.co_filename


def is_reentrant_checkpoint(node: Any) -> bool:
    """Returns whether an autograd node is torch's own reentrant checkpoint, which certainly runs a recompute."""
    return isinstance(node, _ReentrantCheckpointNode)


def checkpoint_being_recomputed(start: FrameType | None) -> Any:
    """Returns the region that a non-reentrant checkpoint is recomputing in these frames, or None.

    The region is torch's own record (`_CheckpointFrame`), one object for each region, which allows weak references.
    Frames outside of the running backward are not searched.
    """
    for frame in frames_in_backward(start):
        code = frame.f_code
        if code.co_name == _UNPACK_NAME and code.co_filename == _CHECKPOINT_FILE:
            return frame_local(frame, "frame")
    return None


def is_repeating_forward(start: FrameType | None) -> bool:
    """Returns whether the innermost recompute in these frames runs the whole `forward` of a module again."""
    for frame in frames_in_backward(start):
        code = frame.f_code
        if code.co_name == _UNPACK_NAME:
            return False
        if has_self(code) or module_of_method(frame) is not None:
            return code.co_name == "forward"
    return False


def checkpoint_of_hook(unpack_hook: Any) -> Any:
    """Returns the region (`_CheckpointFrame`) whose non-reentrant checkpoint packed a tensor; None for others.

    Such a checkpoint packs a placeholder without memory.
    """
    code = getattr(unpack_hook, "__code__", None)
    if code is None or code.co_filename != _CHECKPOINT_FILE:
        return None
    return _captured(unpack_hook, "frame")


def held_by_checkpoint(region: Any) -> tuple[list[Any], bool]:
    """Returns what a non-reentrant checkpoint keeps to recompute a region, and whether it may keep more.

    It keeps the arguments as saved variables, the keyword arguments, those of a `functools.partial`, the outputs that a
    selective checkpoint keeps, and what a recompute restored for a backward that took only a part. The state of the
    random generators is not included.

    Raises:
        AttributeError: this version of torch (unlike 2.11 and 2.13) keeps these elsewhere.
    """
    again = region.recompute_fn
    held = [*_saved_arguments(region), _captured(again, "kwargs"), *bound_arguments(_captured(again, "fn"))]
    held += [tensor for tensors in region.recomputed.values() for tensor in tensors.values()]
    context = _captured(again, "recompute_context")
    if isinstance(context, _SelectiveContext):
        wrapped = tree_leaves(list(context.storage.values()))
        return held + [getattr(wrapper, "val", None) for wrapper in wrapped], False
    return held, not isinstance(context, nullcontext)


def _saved_arguments(region: Any) -> list[Any]:
    """Returns the arguments of a region: tensors as saved variables, and the others in lists and dicts."""
    if hasattr(region, "saved_args"):
        return list(region.saved_args)
    # The Function saves an empty tensor of its own before them, and has the keyword arguments among them.
    node = node_of_arguments(region)
    return [*node._raw_saved_tensors[1:], _captured(node.get_args, "args")]


def node_of_arguments(region: Any) -> Any:
    """Returns the node of the Function by which torch 2.11 saves a region's arguments; None in later versions (2.13).

    It is in no graph of the user's.
    """
    return getattr(getattr(region, "input_saver", None), "grad_fn", None)


def bound_arguments(function: Any) -> list[Any]:
    """Returns the arguments that a `functools.partial` holds, and nothing for another function."""
    return [function.args, function.keywords] if isinstance(function, functools.partial) else []


def _captured(function: Any, name: str) -> Any:
    """Returns a variable that a function captures from the enclosing one; None if there is none or it is unset."""
    names = function.__code__.co_freevars
    try:
        return function.__closure__[names.index(name)].cell_contents if name in names else None
    except ValueError:
        return None


def allow_effects_in_checkpoints() -> None:
    """Lets ops that have an effect pass selective checkpoints, whose modes have no rule for them (2.13).

    Otherwise compiled code with such ops raises inside of them. The ops run again when a checkpoint recomputes.
    """
    from torch._higher_order_ops.effects import with_effects

    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode"):
        mode = getattr(torch.utils.checkpoint, name, None)
        if mode is not None and mode not in with_effects.python_key_table:
            with_effects.py_impl(mode)(lambda _, *args, **kwargs: with_effects(*args, **kwargs))
