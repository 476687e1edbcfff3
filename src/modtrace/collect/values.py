"""Taps: measures what modules return, its gradients, and parameters, at the moment they come by."""

import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..measure.measurer import Measurement, Measurer
from ..recording.path_pattern import PathFilter
from ..torch_internals import (
    DisableTorchFunction,
    graph_task_id,
    is_batched_tensor,
    is_dynamo_compiling,
    keep_out_of_dynamo,
    tracing_state,
    unseen,
)
from .backward import Backward
from .names import ModuleNames, NamedModule, ParameterOwner
from .scopes import ScopeTracker
from .segments import Place, Segment
from .slots import find_slots
from .thread_log import ThreadLog

OUTPUT, GRAD_OUTPUT = "output", "grad_output"
PARAMETER, PARAMETER_GRAD = "parameter", "parameter_grad"


class Sample:
    """One tensor measured once, shared by all sites where it was seen."""

    __slots__ = ("measurement", "start_ns")

    def __init__(self, measurement: Measurement, start_ns: int) -> None:
        self.measurement = measurement
        self.start_ns = start_ns


class ValueRow(NamedTuple):
    """A sample at one site. It belongs to a call, by the exit event in its segment, or to a parameter's owner."""

    sample: Sample
    role: str
    slot: str
    segment: Segment | None = None
    event: int = -1
    owner: NamedModule | None = None


class Taken(NamedTuple):
    """What was measured in a part of a step."""

    rows: list[ValueRow]
    intervals: list[tuple[int, int, int]]  # thread, start_ns, end_ns of measuring


class _Known:
    """A tensor that was measured in this segment, with the sites that its gradient will be stored under."""

    __slots__ = ("ref", "sample", "sites", "version")

    def __init__(self, tensor: torch.Tensor, version: int | None, sample: Sample) -> None:
        self.ref = weakref.ref(tensor)
        self.version = version
        self.sample = sample
        self.sites: list[tuple[int, str]] = []  # exit event and slot


class _Held:
    """What was measured in one segment, until its step is written."""

    __slots__ = ("handles", "intervals", "known", "rows")

    def __init__(self) -> None:
        self.rows: list[ValueRow] = []
        self.intervals: list[tuple[int, int, int]] = []
        self.known: dict[int, _Known] = {}  # by id; only while the segment runs
        self.handles: list[Any] = []


class ValueTaps:
    """The taps of one recorder."""

    def __init__(
        self, tracker: ScopeTracker, chosen: PathFilter, failed: Callable[[Exception, str], None]
    ) -> None:
        self._tracker = tracker
        self._names: ModuleNames = tracker.names
        self._chosen = chosen
        self._failed = failed
        self._measurer = Measurer()
        self._running: dict[Segment, _Held] = {}
        self._closed: dict[Segment, _Held] = {}
        self._of_backward: dict[Backward | None, Taken] = {}
        self._of_optimizers: dict[int, Taken] = {}  # by thread
        self._selected: dict[Place, bool] = {}
        self._selected_at = -1
        self.watches_parameters: Callable[[], bool] = lambda: True
        keep_out_of_dynamo(ValueTaps.returned, ValueTaps.optimizer_begins, ValueTaps._measure_gradient)
        keep_out_of_dynamo(GradientTap.__call__)

    # What the recorder says.

    def open(self, segment: Segment) -> None:
        """What runs in this segment is to be measured."""
        self._running[segment] = _Held()

    def close(self, segment: Segment) -> None:
        """It has ended."""
        held = self._running.pop(segment, None)
        if held is not None:
            held.known = {}
            self._closed[segment] = held

    def take_backward(self, backward: Backward | None) -> Taken | None:
        """What was measured in a backward that has ended; None: in those that did not come through the door."""
        return self._of_backward.pop(backward, None)

    def take_optimizer(self, thread: int) -> Taken | None:
        """What was measured before the optimizer step of a thread."""
        return self._of_optimizers.pop(thread, None)

    def take_segments(self, segments: Iterable[Segment]) -> list[Taken]:
        """What was measured in segments whose step has ended; no hook stays on their tensors."""
        found = [
            held for held in (self._closed.pop(segment, None) for segment in segments) if held is not None
        ]
        for held in found:
            _remove(held.handles)
        return [Taken(held.rows, held.intervals) for held in found]

    def stop(self) -> None:
        """Takes every hook off every tensor."""
        for held in (*self._running.values(), *self._closed.values()):
            _remove(held.handles)

    # Outputs. Called for each call of a module: measured for a small tensor, 12 us in all, of which 8 are the kernel.

    def returned(self, log: ThreadLog, place: Place, output: Any) -> None:
        held = None if log.segment is None else self._running.get(log.segment)
        if held is None or log.segment is None or not self._selects(place):
            return
        start_ns, event = log.times[-1], len(log.places) - 1
        try:
            if tracing_state() is not None:  # reading a shape would be traced
                with unseen():
                    self._measure_output(held, log.segment, event, output)
            else:
                self._measure_output(held, log.segment, event, output)
        except Exception as error:
            self._failed(error, place.path)
        held.intervals.append((log.number, start_ns, time.perf_counter_ns()))

    def _measure_output(self, held: _Held, segment: Segment, event: int, output: Any) -> None:
        with DisableTorchFunction(), np.errstate(all="ignore"):
            if type(output) is torch.Tensor:
                self._measure_slot(held, segment, event, "", output)
                return
            for slot, tensor, note in find_slots(output):
                if tensor is not None:
                    self._measure_slot(held, segment, event, slot, tensor)
                else:
                    sample = Sample(Measurement(None, -1, (), None, note), time.perf_counter_ns())
                    held.rows.append(ValueRow(sample, OUTPUT, slot, segment, event))

    def _measure_slot(
        self, held: _Held, segment: Segment, event: int, slot: str, tensor: torch.Tensor
    ) -> None:
        version = self._measurer.version_of(tensor)
        known = held.known.get(id(tensor))
        if known is None or known.ref() is not tensor or version is None or known.version != version:
            start_ns = time.perf_counter_ns()
            sample = Sample(self._measurer.measure(tensor), start_ns)
            held.known[id(tensor)] = known = _Known(tensor, version, sample)
            self._watch_gradient(held, segment, known, tensor)
        known.sites.append((event, slot))
        held.rows.append(ValueRow(known.sample, OUTPUT, slot, segment, event))

    # Gradients.

    def _watch_gradient(self, held: _Held, segment: Segment, known: _Known, tensor: torch.Tensor) -> None:
        """One hook a tensor, whatever the number of its sites; in a graph that never runs it is never called."""
        try:
            if not tensor.requires_grad or is_batched_tensor(tensor):
                return
            tap = GradientTap(partial(self._measure_gradient, segment, known.sites))
            held.handles.append(_register(tensor, tap))
        except (
            RuntimeError
        ):  # a view whose base was written to; torch gives it no gradient that could be heard of
            return

    def _measure_gradient(self, segment: Segment, sites: list[tuple[int, str]], gradient: Any) -> None:
        log = self._tracker.log
        start_ns = time.perf_counter_ns()
        backward = self._tracker.backwards.running(log, graph_task_id())
        try:
            taken = self._of_backward.get(backward)
            if taken is None:
                taken = self._of_backward.setdefault(backward, Taken([], []))
            if isinstance(gradient, torch.Tensor):
                with DisableTorchFunction(), np.errstate(all="ignore"):
                    sample = Sample(self._measurer.measure(gradient), start_ns)
                for event, slot in reversed(sites):  # root first
                    taken.rows.append(ValueRow(sample, GRAD_OUTPUT, slot, segment, event))
            taken.intervals.append((log.number, start_ns, time.perf_counter_ns()))
        except Exception as error:
            self._failed(error, segment.place.path)

    # Parameters: the weights that this step used, and their gradients after clipping.

    def optimizer_begins(self, optimizer: Any) -> None:
        if not self.watches_parameters():
            return
        log = self._tracker.log
        start_ns = time.perf_counter_ns()
        taken = self._of_optimizers[log.number] = Taken([], [])
        try:
            with DisableTorchFunction(), np.errstate(all="ignore"):
                self._measure_parameters(optimizer, taken.rows)
        except Exception as error:
            self._failed(error, f"the parameters of {type(optimizer).__name__}")
        taken.intervals.append((log.number, start_ns, time.perf_counter_ns()))

    def _measure_parameters(self, optimizer: Any, rows: list[ValueRow]) -> None:
        scaled = (
            "still scaled by the GradScaler" if getattr(optimizer, "grad_scale", None) is not None else None
        )
        has_learnt = False
        for at, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                owners = self._names.owners_of(parameter)
                if not owners and not has_learnt:  # once a step: what nobody owns is never found
                    owners, has_learnt = self._names.owners_of(parameter, learn=True), True
                sites = self._sites_of(owners, f"param_groups[{at}].params[{place}]")
                if sites:
                    self._measure_parameter(parameter, PARAMETER, sites, rows, None)
                    if parameter.grad is not None:
                        self._measure_parameter(parameter.grad, PARAMETER_GRAD, sites, rows, scaled)

    def _sites_of(
        self, owners: Iterable[ParameterOwner], otherwise: str
    ) -> list[tuple[str, NamedModule | None]]:
        """Where a parameter is stored under; `otherwise` is what it is called if no module owns it."""
        owners = list(owners)
        if not owners:
            return [(otherwise, None)] if self._chosen.selects(otherwise) else []
        return [(owner.name, owner.module) for owner in owners if self._selects_parameter(owner)]

    def _measure_parameter(
        self,
        tensor: torch.Tensor,
        role: str,
        sites: Iterable[tuple[str, NamedModule | None]],
        rows: list[ValueRow],
        note: str | None,
    ) -> None:
        start_ns = time.perf_counter_ns()
        measurement = self._measurer.measure(tensor)
        if note is not None and measurement.note is None:
            measurement = measurement._replace(note=note)
        sample = Sample(measurement, start_ns)
        for slot, owner in sites:
            rows.append(ValueRow(sample, role, slot, owner=owner))

    # Selection.

    def _selects(self, place: Place) -> bool:
        if self._chosen.is_all:
            return True
        if self._selected_at != self._names.revision:  # a name learnt late may select what was not selected
            self._selected, self._selected_at = {}, self._names.revision
        selected = self._selected.get(place)
        if selected is None:
            selected = self._selected[place] = self._chosen.selects(place.path)
        return selected

    def _selects_parameter(self, owner: Any) -> bool:
        path = owner.module.path
        return self._chosen.is_all or self._chosen.selects(
            path, f"{path}.{owner.name}" if path else owner.name
        )


class GradientTap:
    """A hook on a tensor. A class, to tell torch that `torch.save` need not warn of it."""

    __slots__ = ("_measure",)

    __torch_unserializable__ = True  # torch.utils.hooks.warn_if_has_hooks

    def __init__(self, measure: Callable[[Any], None]) -> None:
        self._measure = measure

    def __call__(self, gradient: Any) -> None:
        if not is_dynamo_compiling():
            self._measure(gradient)


_register: Callable[[torch.Tensor, Any], Any] = torch.Tensor.register_hook


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
