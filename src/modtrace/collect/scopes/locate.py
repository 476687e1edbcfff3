"""Finds out what is running on the current thread: forward, backward, recompute or an optimizer."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch

from ...recording.phase import BACKWARD, OPTIMIZER, RECOMPUTE
from ...torch_internals.autograd import (
    ACCUMULATE_SEQUENCE_NR,
    current_node,
    graph_task_id,
    is_custom_function,
)
from ...torch_internals.call_frames import is_in_module_call, running_module
from ...torch_internals.checkpoint import checkpoint_being_recomputed
from ..backward.watcher import BackwardWatcher
from ..log.segments import CallRef
from ..log.thread_log import ThreadLog, ThreadLogs
from .optimizer_watch import OptimizerWatch


class Location(NamedTuple):
    """The running call and phase at one moment.

    `call` is None outside of any module, and if it is unknown (`known` is False).
    """

    call: CallRef | None
    phase: str | None
    known: bool = True
    parameter: torch.Tensor | None = None  # the parameter whose gradient is being accumulated
    accumulation: bool | None = None  # whether the engine is adding gradients; None if unknown
    nested_in: CallRef | None = None  # for a leaf in a backward that a node runs, the call of that node
    met_in: CallRef | None = None  # for gradients of different calls, the innermost call around them all
    numbered_by: int | None = None  # the number of the thread that made the running node


NOWHERE = Location(None, None)


def locate(
    logs: ThreadLogs,
    backwards: BackwardWatcher,
    optimizers: OptimizerWatch,
    close_dead_calls: Callable[[ThreadLog, FrameType | None], None],
) -> Location:
    """Returns what runs now on this thread, in forward, backward or recompute."""
    log = logs.current
    task = graph_task_id()
    segment = log.segment
    if (
        segment is not None
        and log.task == task
        and not log.pinned
        and not is_in_module_call(sys._getframe(1))
    ):
        close_dead_calls(log, sys._getframe(1))  # no hook runs when a KeyboardInterrupt leaves a call
        segment = log.segment
    if segment is not None and log.task == task:
        return Location(CallRef(segment, segment.open_calls.innermost), segment.phase)
    if task < 0:
        stepping = optimizers.is_stepping(sys._getframe(1))
        return Location(None, OPTIMIZER if stepping else None)
    if log.hooked is not None and log.hooked_task == task:
        return Location(log.hooked, BACKWARD)
    return _locate_in_backward(backwards, optimizers, log, task)


def _locate_in_backward(
    backwards: BackwardWatcher, optimizers: OptimizerWatch, log: ThreadLog, task: int
) -> Location:
    node = current_node()
    backward = backwards.running(log, task)
    if backward is not None and optimizers.stepping_since(sys._getframe(2)) > backward.start_ns:
        return Location(None, OPTIMIZER)  # in a hook after the accumulation of a parameter's gradient
    if node is None:
        return Location(None, BACKWARD)
    number = node._sequence_nr()
    if number == ACCUMULATE_SEQUENCE_NR:
        return Location(
            None,
            BACKWARD,
            parameter=node.variable,
            nested_in=None if backward is None else backwards.caller(backward),
        )
    owner = backwards.owner(log, task, node)
    if (
        torch.is_grad_enabled()
        and backward is not None
        and not backward.create_graph
        and (is_custom_function(node) or checkpoint_being_recomputed(sys._getframe(2)) is not None)
    ):
        call = _recomputing_call(owner, node, sys._getframe(2))
        return Location(call, RECOMPUTE, known=call is not None)
    added = None if backward is None else backward.is_adding(number)
    if owner is None:
        return Location(None, BACKWARD, known=False, accumulation=added)
    met_in = backward.adding_in if added and backward is not None else None
    span = owner.span_of(number)
    if span is not None:
        call = span.call_at(number)
        known = call is not None
        return Location(call, BACKWARD, known, accumulation=added, met_in=met_in, numbered_by=owner.number)
    call = backwards.recomputed_by(owner, backward, number)
    known = call is not None or number >= owner.forgotten_seq
    return Location(call, BACKWARD, known, accumulation=added, met_in=met_in, numbered_by=owner.number)


def _recomputing_call(owner: ThreadLog | None, node: Any, frame: FrameType | None) -> CallRef | None:
    """Returns the forward call whose own ops a checkpoint runs again without a module hook around them.

    This happens if `forward` itself is checkpointed, as in transformers.
    """
    call = None if owner is None else owner.call_of(node._sequence_nr())
    if is_custom_function(node):
        return call
    module = running_module(frame)
    while call is not None:
        if module is not None and call.context.module is module:
            return call
        call = call.parent
    return None
