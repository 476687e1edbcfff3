"""Measures the losses of a backward when it begins: the tensors of one element that it begins with."""

import time
from collections.abc import Iterator
from typing import Any

import torch

from ...recording.phase import FORWARD
from ...recording.role import LOSS
from ...torch_internals.dynamo import keep_out_of_dynamo
from ...torch_internals.modes import DisableTorchFunction, tracing_state, unseen
from ...torch_internals.transforms import is_functorch_tensor, wrapped_by_functorch
from ..log.thread_log import Backward
from .capture_masks import Mask
from .measured import MeasuredParameters, free_rows
from .parameter_sites import ParameterSite, store
from .source import Measuring, ValueSource


class LossTaps(ValueSource):
    """Measures the roots of each backward of the program, of which a loss is the last that the forward has computed.

    A loss is the last root that the forward computed. A root with more elements is the output of a module, as in a
    stage of a pipeline, and is measured there. A backward inside a node of another one, as in a reentrant checkpoint,
    has no losses. Measuring a loss takes less time than measuring the output of a module.
    """

    def __init__(self, measuring: Measuring) -> None:
        super().__init__(measuring)
        self._wanted = self._capture_masks.of_role(LOSS)
        self._of_backward: dict[Backward, MeasuredParameters] = {}
        keep_out_of_dynamo(LossTaps.backward_opened)

    def backward_opened(self, backward: Backward, active: Mask) -> None:
        """Measures the losses. Their phase is that of the computation before, so that they precede gradients."""
        active &= self._wanted
        if not active or backward.outer is not None or self._is_abandoned:
            return
        measured = MeasuredParameters(backward.log.number, FORWARD, active)
        start_ns = time.perf_counter_ns()
        try:
            with DisableTorchFunction() if tracing_state() is None else unseen():
                for slot, root in _slots_of(backward.outputs):
                    if _has_one_element(root):
                        found = self._measure(root, self._capture_masks.want(active), LOSS + slot)
                        store(measured, found, LOSS, [ParameterSite(slot, None, "", active)], active)
        except Exception as error:
            self._failed(error, "the loss of a backward")
        if measured.sites:
            measured.intervals += (start_ns, time.perf_counter_ns())
            self._of_backward[backward] = measured

    def take_backward(self, backward: Backward | None) -> MeasuredParameters | None:
        return None if backward is None else self._of_backward.pop(backward, None)

    def stop(self) -> None:
        """Frees the rows that have not been taken."""
        free_rows(self._of_backward.values())
        self._of_backward = {}


def _slots_of(outputs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that a backward begins with, and their slots; other roots may be edges of the graph."""
    roots = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
    for at, root in enumerate(roots):
        if isinstance(root, torch.Tensor):
            yield f"[{at}]" if len(roots) > 1 else "", root


def _has_one_element(root: torch.Tensor) -> bool:
    """Returns whether a root is a single number; inside of `vmap` a tensor that looks so is one number per example."""
    try:
        while is_functorch_tensor(root):
            root = wrapped_by_functorch(root)
        return root.numel() == 1
    except Exception:  # a tensor subclass of the user may raise
        return False
