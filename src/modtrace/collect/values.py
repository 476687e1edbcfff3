"""Taps: measures what modules return, its gradients, and parameters, at the moment they come by."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..measure.measurer import Measurement, Measurer
from ..recording.module_path import join
from ..recording.path_pattern import PathFilter
from ..recording.role import PARAMETER, PARAMETER_GRAD
from ..torch_internals import (
    DisableTorchFunction,
    graph_task_id,
    is_batched_tensor,
    keep_out_of_dynamo,
    tracing_state,
    unseen,
)
from .backward import Backward
from .measured import (
    GradientTap,
    MeasuredGradients,
    MeasuredOutputs,
    MeasuredParameters,
    free_rows,
    hook_sleeping_taps,
)
from .names import ModuleNames, NamedModule, ParameterOwner
from .places import Place
from .scopes import ScopeTracker
from .segments import Segment
from .slots import find_slots
from .thread_log import ThreadLog

_SCALED = "still scaled by the GradScaler"

#: Segments of ended steps that are kept without looking whether their graphs live.
_KEPT_ASLEEP = 16


class ValueTaps:
    """The taps of one recorder."""

    def __init__(
        self,
        tracker: ScopeTracker,
        chosen: PathFilter,
        *,
        wants_parameters: Callable[[], bool],
        failed: Callable[[Exception, str], None],
    ) -> None:
        self._tracker = tracker
        self._names: ModuleNames = tracker.names
        self._chosen = chosen
        self._wants_parameters = wants_parameters  # whether what is measured now may be kept
        self._failed = failed
        self._measurer = Measurer()
        self.measured_by_ops: Callable[[torch.Tensor], Measurement | None] | None = None
        self._on_gradient = self._measure_gradient  # bound once: a hook for each tensor refers to it
        self._running: dict[Segment, MeasuredOutputs] = {}
        self._closed: dict[Segment, MeasuredOutputs] = {}
        self._of_backward: dict[Backward | None, MeasuredGradients] = {}
        self._of_optimizer: dict[int, MeasuredParameters] = {}  # by thread
        self._leaving: list[tuple[Segment, list[GradientTap]]] = []  # of steps that have ended, hooked still
        self._asleep: list[tuple[Segment, list[GradientTap]]] = []  # without hooks, in graphs that may live
        self._prune_at = _KEPT_ASLEEP
        self._optimizers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._optimizers_seen = 0
        self._is_abandoned = False
        self._parameter_paths: dict[str, None] = {}
        self._selected: dict[Place, bool] = {}
        self._selected_at = -1
        keep_out_of_dynamo(ValueTaps.returned, ValueTaps.optimizer_begins)
        keep_out_of_dynamo(GradientTap.__call__, ValueTaps._measure_gradient)

    # What the recorder says.

    def open(self, segment: Segment) -> None:
        """What runs in this segment is to be measured."""
        self._running[segment] = MeasuredOutputs(segment)

    def close(self, segment: Segment) -> None:
        """It has ended."""
        measured = self._running.pop(segment, None)
        if measured is not None:
            measured.close()
            self._closed[segment] = measured

    def drop(self, segment: Segment) -> None:
        """It has not begun after all."""
        self._running.pop(segment, None)

    def abandon(self) -> None:
        """Measures nothing any more: this process is a fork, or something has failed. Takes no lock."""
        self._is_abandoned = True

    def take_backward(self, backward: Backward | None) -> MeasuredGradients | None:
        """What was measured in a backward that has ended; None: in those that did not come through the door."""
        measured = self._of_backward.pop(backward, None)
        if measured is not None:
            measured.close()
        self._put_to_sleep()
        return measured

    def take_optimizer(self, thread: int) -> MeasuredParameters | None:
        """What was measured before the optimizer step of a thread."""
        return self._of_optimizer.pop(thread, None)

    def take_segments(self, segments: Iterable[Segment]) -> list[MeasuredOutputs]:
        """What was measured in segments whose step has ended; no hook stays on their tensors."""
        segments = list(segments)
        for segment in segments:
            self.close(segment)  # another thread may be about to say so
        closed = (self._closed.pop(segment, None) for segment in segments)
        found = [measured for measured in closed if measured is not None]
        self._leaving += [(measured.segment, measured.taps) for measured in found if measured.taps]
        self._put_to_sleep()
        return found

    def parameter_paths(self) -> list[str]:
        """What the parameters that came by are called, also those of models that are gone."""
        return list(self._parameter_paths)

    def stop(self) -> None:
        """Takes every hook off every tensor."""
        measured = (*self._running.values(), *self._closed.values())
        for taps in (*(each.taps for each in measured), *(taps for _, taps in self._leaving)):
            for tap in taps:
                tap.unhook()
        for gradients in self._of_backward.values():
            gradients.close()
        self._running, self._closed, self._of_backward = {}, {}, {}
        self._leaving, self._asleep = [], []

    def _put_to_sleep(self) -> None:
        """Takes off the hooks of steps that have ended, but never in the middle of a backward, on any thread."""
        if self._leaving and not self._tracker.backwards.is_running():
            for _, taps in self._leaving:
                for tap in taps:
                    tap.unhook()
            self._asleep += self._leaving
            self._leaving = []
            if len(self._asleep) > self._prune_at:
                self._prune()

    def _prune(self) -> None:
        self._asleep = [(segment, taps) for segment, taps in self._asleep if segment.has_graph()]
        self._prune_at = 2 * len(self._asleep) + _KEPT_ASLEEP

    def backward_begins(self, backward: Backward, outputs: Any) -> None:
        """Hooks in what this backward may reach of steps that have ended: a generator's call by its own step."""
        self._prune()
        if self._is_abandoned or not self._asleep:
            return
        try:
            with DisableTorchFunction():
                roots = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
                handles = hook_sleeping_taps(roots, self._on_gradient)
        except Exception as error:
            self._failed(error, "the graph of a backward")
            return
        if handles:
            measured = self._of_backward[backward] = MeasuredGradients(backward.log.number)
            measured.handles = handles

    # Outputs. For a small tensor 9 us a call, of which the kernel takes 2 and the gradient's hook 3, and as many again
    # for its gradient.

    def returned(self, log: ThreadLog, place: Place, output: Any) -> None:
        segment = log.segment
        measured = None if segment is None else self._running.get(segment)
        if measured is None or not self._selects(place):
            return
        start_ns = log.times[-1]
        try:
            if tracing_state() is None:
                with DisableTorchFunction():
                    self._measure_output(measured, len(log.places) - 1, output)
            else:  # reading a shape would become part of the trace
                with unseen():
                    self._measure_output(measured, len(log.places) - 1, output)
        except Exception as error:
            self._failed(error, place.path)
        measured.intervals += (start_ns, time.perf_counter_ns())

    def _measure_output(self, measured: MeasuredOutputs, event: int, output: Any) -> None:
        if type(output) is torch.Tensor:
            self._measure_slot(measured, event, "", output)
            return
        for slot, tensor, note in find_slots(output):
            if tensor is not None:
                self._measure_slot(measured, event, slot, tensor)
            else:
                nothing = Measurement(None, -1, (), None, note)
                nothing.start_ns = time.perf_counter_ns()
                measured.sites.append((nothing, event, slot))

    def _measure_slot(self, measured: MeasuredOutputs, event: int, slot: str, tensor: torch.Tensor) -> None:
        """Measures a tensor, unless it is one of this segment's that nobody has written to since."""
        version = self._measurer.version_of(tensor)
        tap = measured.known.get(id(tensor))
        if tap is not None and tap.is_of(tensor, version):
            measured.sites.append((tap.output, event, slot))
            if tap.handle is not None or not tensor.requires_grad:
                tap.add_site(event, slot)
                return
            found = tap.output  # a tensor that has become part of a graph since
        else:
            found = self._measure(tensor, time.perf_counter_ns())
            measured.sites.append((found, event, slot))
        tap = GradientTap(measured.segment, event, slot, self._on_gradient)
        tap.output, tap.version = found, version
        if type(tensor) is not torch.nn.Parameter:  # with a weak reference `torch.utils.swap_tensors` fails
            tap.ref = weakref.ref(tensor)
        measured.known[id(tensor)] = tap
        self._watch_gradient(measured, tap, tensor)

    def _measure(self, tensor: torch.Tensor, start_ns: int) -> Measurement:
        """Measures a tensor, unless the op that made it has just been measured."""
        found = None if self.measured_by_ops is None else self.measured_by_ops(tensor)
        if found is None:
            found = self._measurer.measure(tensor)
            found.start_ns = start_ns
        return found

    @staticmethod
    def _watch_gradient(measured: MeasuredOutputs, tap: GradientTap, tensor: torch.Tensor) -> None:
        try:
            if tensor.requires_grad and not is_batched_tensor(tensor):
                tap.hook(tensor)
                measured.taps.append(tap)
        except RuntimeError:  # a view whose base was written to: torch gives it no gradient to hear of
            return

    # Gradients.

    def _measure_gradient(self, tap: GradientTap, gradient: Any) -> None:
        if self._is_abandoned:
            return
        start_ns, log = time.perf_counter_ns(), self._tracker.log
        try:
            backward = self._tracker.backwards.running(log, graph_task_id())
            measured = self._of_backward.get(backward)
            if measured is None:
                measured = self._of_backward[backward] = MeasuredGradients(log.number)
            if isinstance(gradient, torch.Tensor):
                with DisableTorchFunction():
                    measured.sites.append((self._gradient_of(measured, gradient, start_ns), tap))
            measured.intervals += (start_ns, time.perf_counter_ns())
        except Exception as error:
            self._failed(error, tap.segment.place.path)

    def _gradient_of(self, measured: MeasuredGradients, gradient: torch.Tensor, start_ns: int) -> Measurement:
        """Measures a gradient, unless it is the last one: an addition hands its own on to what was added."""
        version = self._measurer.version_of(gradient)
        if measured.is_last(gradient, version):
            return measured.sites[-1][0]
        found = self._measure(gradient, start_ns)
        measured.last, measured.last_version = weakref.ref(gradient), version
        return found

    # Parameters: the weights that this step used, and their gradients after clipping.

    def optimizer_begins(self, optimizer: Any, has_closure: bool) -> None:
        thread = self._tracker.log.number
        raised = self._of_optimizer.pop(thread, None)
        if raised is not None:
            free_rows([raised])
        if not self._is_abandoned and self._wants_parameters():
            measured = self._of_optimizer[thread] = MeasuredParameters(thread)
            roles = (PARAMETER,) if has_closure else (PARAMETER, PARAMETER_GRAD)
            self._measure_parameters(measured, optimizer, roles)

    def optimizer_ended(self, optimizer: Any, has_closure: bool) -> None:
        """Gradients that a closure computed are there only afterwards."""
        measured = self._of_optimizer.get(self._tracker.log.number)
        if has_closure and measured is not None:
            self._measure_parameters(measured, optimizer, (PARAMETER_GRAD,))

    def _measure_parameters(self, measured: MeasuredParameters, optimizer: Any, roles: Iterable[str]) -> None:
        start_ns = time.perf_counter_ns()
        try:
            with DisableTorchFunction():
                for parameter, sites in self._parameters_of(optimizer):
                    for role in roles:
                        self._measure_parameter(measured, parameter, role, sites, optimizer)
        except Exception as error:
            self._failed(error, f"the parameters of {type(optimizer).__name__}")
        measured.intervals += (start_ns, time.perf_counter_ns())

    def _parameters_of(self, optimizer: Any) -> Iterator[tuple[torch.Tensor, "_Sites"]]:
        """The parameters that are to be measured, with what they are stored under."""
        prefix = self._optimizers.get(optimizer)
        if prefix is None:
            number, self._optimizers_seen = self._optimizers_seen, self._optimizers_seen + 1
            prefix = self._optimizers[optimizer] = f"optimizer#{number}." if number else ""
        has_learnt = False
        for at, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                owners = self._names.owners_of(parameter)
                if not owners and not has_learnt:  # once a step: what nobody owns is never found
                    owners, has_learnt = self._names.owners_of(parameter, learn=True), True
                sites = self._sites_of(owners, f"{prefix}param_groups[{at}].params[{place}]")
                if sites:
                    yield parameter, sites

    def _sites_of(self, owners: list[ParameterOwner], otherwise: str) -> "_Sites":
        """What a parameter is stored under; `otherwise` is what it is called if no module owns it."""
        if owners:
            return [(owner.name, owner.module) for owner in owners if self._selects_parameter(owner)]
        self._parameter_paths[otherwise] = None
        return [(otherwise, None)] if self._chosen.selects(otherwise) else []

    def _measure_parameter(
        self,
        measured: MeasuredParameters,
        parameter: torch.Tensor,
        role: str,
        sites: "_Sites",
        optimizer: Any,
    ) -> None:
        tensor = parameter if role == PARAMETER else parameter.grad
        if tensor is None:
            return
        start_ns = time.perf_counter_ns()
        found = self._measurer.measure(tensor)
        found.start_ns = start_ns
        if role == PARAMETER_GRAD and getattr(optimizer, "grad_scale", None) is not None:
            found.note = found.note or _SCALED
        for slot, owner in sites:
            measured.sites.append((found, role, slot, owner))

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

    def _selects_parameter(self, owner: ParameterOwner) -> bool:
        if self._chosen.is_all:
            return True
        modules = (owner.module.path, *owner.module.aliases)
        paths = [join(path, owner.name) for path in modules]
        self._parameter_paths.update(dict.fromkeys(paths))
        return self._chosen.selects(*modules, *paths)


#: Slots and owners.
_Sites = list[tuple[str, NamedModule | None]]
