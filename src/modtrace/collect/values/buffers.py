"""Measures the buffers of a root when an outermost call has ended."""

import time
from collections.abc import Sequence

import torch
from torch import nn

from ...recording.phase import FORWARD
from ...recording.role import BUFFER
from ...torch_internals.modes import DisableTorchFunction, tracing_state, unseen
from ..log.segments import Segment
from ..names.module_names import ParameterOwner
from ..names.walk import descendants
from .capture_masks import Mask
from .measured import Measured, MeasuredParameters, free_rows
from .parameter_sites import name_of, store, wanted_by
from .source import Measuring, ValueSource


class BufferTaps(ValueSource):
    """Measures the buffers after each outermost call."""

    def __init__(self, measuring: Measuring) -> None:
        super().__init__(measuring)
        self._wanted = self._capture_masks.of_role(BUFFER)
        self._of_segment: dict[Segment, MeasuredParameters] = {}

    def closed(self, segment: Segment, active: Mask) -> None:
        """Measures the chosen buffers of the module whose call has ended, unless the call was a recompute."""
        active &= self._wanted
        if not active or segment.phase != FORWARD or self._is_abandoned:
            return
        module = segment.named.module
        if module is None:
            return
        start_ns = time.perf_counter_ns()
        measured = MeasuredParameters(segment.log.number, FORWARD, active)
        try:
            with DisableTorchFunction() if tracing_state() is None else unseen(), self._together():
                self._measure_below(measured, module)
        except Exception as error:
            self._failed(error, f"the buffers of {segment.named.shown}")
        if measured.sites:
            if self._capture_masks.want(measured.active).lazy:
                self._settle()  # batch norm's writes are not counted (torch 2.13)
            measured.intervals += (start_ns, time.perf_counter_ns())
            self._of_segment[segment] = measured

    def take_segment(self, segment: Segment) -> MeasuredParameters | None:
        return self._of_segment.pop(segment, None)

    def taken_later(self, segments: Sequence[Segment], thread: int) -> list[Measured]:
        return [self._of_segment[segment] for segment in segments if segment in self._of_segment]

    def stop(self) -> None:
        """Frees the rows that have not been taken."""
        free_rows(self._of_segment.values())
        self._of_segment = {}

    def _measure_below(self, measured: MeasuredParameters, top: nn.Module) -> None:
        for buffer, owners in self._buffers_of(top):
            sites = self._sites.of_owners(owners)
            mask = wanted_by(sites, measured.active)
            if mask:
                found = self._measure(buffer, self._capture_masks.want(mask), name_of(sites, BUFFER))
                store(measured, found, BUFFER, sites, measured.active)

    def _buffers_of(self, top: nn.Module) -> list[tuple[torch.Tensor, list[ParameterOwner]]]:
        """Returns the buffers of a module and of all below it, each once, with the modules that hold it.

        This takes 0.5 us for each module.
        """
        found: dict[int, tuple[torch.Tensor, list[ParameterOwner]]] = {}
        for module in (top, *descendants(top)):
            for name, buffer in module._buffers.items():
                named = None if buffer is None else self._tracker.names.get(module)
                if buffer is not None and named is not None:
                    found.setdefault(id(buffer), (buffer, []))[1].append(ParameterOwner(named, name))
        return list(found.values())
