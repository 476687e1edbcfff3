"""Measures what each backward adds to the gradients of parameters, by a hook on each parameter."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...measure.special import is_uninitialized
from ...recording.phase import BACKWARD, FORWARD
from ...recording.role import PARAMETER_GRAD
from ...torch_internals.autograd import graph_task_id
from ...torch_internals.dynamo import keep_out_of_dynamo
from ...torch_internals.modes import DisableTorchFunction
from ...torch_internals.tensors import (
    GradientHook,
    forget_removed_hooks,
    insides_of,
    is_leaf,
    requires_grad_of,
    was_hooked,
)
from ..identity_map import IdentityMap
from ..log.segments import Segment
from ..log.thread_log import Backward
from ..names.module_names import NamedModule
from ..names.walk import descendants, parameter_of
from .capture_masks import Mask
from .measured import MeasuredParameters, free_rows
from .parameter_sites import ParameterSite, name_of, store, wanted_by
from .source import Measuring, ValueSource


class MicroBatchTaps(ValueSource):
    """Hooks on the parameters of the running roots, from the beginning of a call until the step ends."""

    def __init__(self, measuring: Measuring) -> None:
        super().__init__(measuring)
        self._wanted = self._capture_masks.in_micro_batches
        self._on_gradient = self._measure_gradient  # bound once, because each hook refers to it
        self._hooks: dict[int, _GradientHook] = {}  # keyed by the `id` of the parameter
        #: By segment, the ids of the hooked parameters, with the captures that may want the step.
        self._needed: IdentityMap[Segment, tuple[set[int], Mask]] = IdentityMap()
        #: Segments of ended steps whose graphs may live. Their number is limited for runs that never go backward.
        self._left: IdentityMap[Segment, Mask] = IdentityMap()
        self._resumed: dict[Backward, set[int]] = {}  # ids hooked again for a running backward
        self._is_leaving = False  # whether a step has ended while the backward in it still runs
        self._of_backward: dict[Backward | None, MeasuredParameters] = {}
        keep_out_of_dynamo(MicroBatchTaps._measure_gradient)
        keep_out_of_dynamo(GradientHook.__call__, with_callees=False)

    def opened(self, segment: Segment, active: Mask) -> None:
        """Registers hooks on the parameters of a module whose call begins, once a step."""
        active &= self._wanted
        if not active or segment.phase != FORWARD or not segment.with_grad or self._is_abandoned:
            return
        self._needed[segment] = self._hook_those_of(segment, active), active

    def take_segment(self, segment: Segment) -> None:
        """Releases the hooks of a segment, unless a later backward may run its graph."""
        needed = self._needed.pop(segment)
        if needed is not None and needed[0]:
            self._left[segment] = needed[1]

    def backward_began(self, backward: Backward) -> None:
        """Hooks parameters of earlier steps whose graphs live, as when a generator is trained after its critic."""
        for segment, _ in self._left.items():
            if self._is_abandoned or not segment.has_graph():
                self._left.pop(segment)
        living = list(self._left.items())
        if not living:
            return
        # The program may keep the graphs of all steps, so each module is searched only once.
        of_module: dict[NamedModule, tuple[Segment, Mask]] = {}
        for segment, active in living:
            _, others = of_module.get(segment.named, (segment, 0))
            of_module[segment.named] = segment, active | others
        resumed = [self._hook_those_of(segment, active) for segment, active in of_module.values()]
        self._resumed[backward] = set().union(*resumed)

    def step_ended(self) -> None:
        """Removes the hooks that no open step needs, unless a backward runs."""
        self._is_leaving = bool(self._hooks)
        self._unhook()

    def take_backward(self, backward: Backward | None) -> MeasuredParameters | None:
        if backward is not None and self._resumed.pop(backward, None) is not None:
            self._is_leaving = True
        self._unhook()
        return self._of_backward.pop(backward, None)

    def stop(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self._resumed = {}, {}
        self._needed.clear()
        self._left.clear()
        free_rows(self._of_backward.values())
        self._of_backward = {}

    # These are hooks on tensors, not on AccumulateGrad nodes. A hook on such a node needs the node to be held, and
    # `torch.utils.swap_tensors` (`Module.to`) refuses a parameter with a living node.

    def _hook_those_of(self, segment: Segment, active: Mask) -> set[int]:
        """Registers hooks on the parameters of the called module, and returns their ids."""
        module = segment.named.module
        if module is not None:
            try:
                with DisableTorchFunction():
                    return self._hook_below(module, active)
            except Exception as error:
                self._failed(error, f"the parameters of {segment.named.shown}")
        return set()

    def _hook_below(self, top: nn.Module, active: Mask) -> set[int]:
        """Registers hooks on the parameters without one, and returns the ids of all parameters that have one then."""
        hooked: set[int] = set()
        has_learnt = False
        for module in (top, *descendants(top)):
            for parameter in module._parameters.values():
                if parameter is None or not _can_be_hooked(parameter):
                    continue
                hooked.add(id(parameter))
                known = self._hooks.get(id(parameter))
                if known is not None and not known.is_on(parameter):
                    known.remove()  # otherwise torch would consider the tensor as hooked
                    known = None
                if known is not None:
                    known.active |= active
                else:
                    owners = self._tracker.names.owners_of(parameter)
                    if not owners and not has_learnt:
                        owners = self._tracker.names.owners_of(parameter, learn=True)
                        has_learnt = True
                    self._hook(parameter, self._sites.of_owners(owners), active)
        return hooked

    def _hook(self, parameter: torch.Tensor, sites: list[ParameterSite], active: Mask) -> None:
        if wanted_by(sites, self._wanted):
            hook, is_first = _GradientHook(sites, active, self._on_gradient), not was_hooked(parameter)
            hook.insides = insides_of(parameter)
            try:
                hook.hook(parameter)
            except Exception:  # a user's subclass raised: the parameter has no micro-batches
                return
            hook.was_first = is_first or hook.stands_behind_ours()
            self._hooks[id(parameter)] = hook

    def _unhook(self) -> None:
        """Removes hooks that no step needs, but never while a backward runs on any thread."""
        if self._is_leaving and not self._tracker.backwards.is_running():
            self._is_leaving = False
            needed = set().union(*(ids for _, (ids, _) in self._needed.items()), *self._resumed.values())
            for key in [key for key in self._hooks if key not in needed]:
                self._hooks.pop(key).remove()

    def _measure_gradient(self, hook: "_GradientHook", gradient: Any) -> None:
        if self._is_abandoned or not isinstance(gradient, torch.Tensor):
            return
        start_ns, log = time.perf_counter_ns(), self._tracker.logs.current
        try:
            backward = self._tracker.backwards.running(log, graph_task_id())
            if backward is not None and not backward.accumulate:
                return  # `autograd.grad` returns the gradient without adding it
            mask = wanted_by(hook.sites, hook.active)
            with DisableTorchFunction():
                found = self._measure(
                    gradient, self._capture_masks.want(mask), name_of(hook.sites, PARAMETER_GRAD)
                )
            measured = self._of_backward.get(backward)
            if measured is None:  # two devices use two threads
                new = MeasuredParameters(log.number, BACKWARD, hook.active)
                measured = self._of_backward.setdefault(backward, new)
            store(measured, found, PARAMETER_GRAD, hook.sites, hook.active)
            measured.intervals += (start_ns, time.perf_counter_ns())
        except Exception as error:
            self._failed(error, hook.sites[0].path)


def _can_be_hooked(parameter: torch.Tensor) -> bool:
    """Returns whether a hook can receive the parameter's gradient; a user's subclass that raises gets no hook."""
    try:
        insides_of(parameter)
        return requires_grad_of(parameter) and is_leaf(parameter) and not is_uninitialized(parameter)
    except Exception:
        return False


class _GradientHook(GradientHook):
    """The hook of a parameter, which receives the gradient of each backward before it is added."""

    __slots__ = ("__weakref__", "active", "hooks_ref", "insides", "receive", "sites", "was_first")

    def __init__(
        self, sites: list[ParameterSite], active: Mask, receive: Callable[["_GradientHook", Any], None]
    ) -> None:
        self.receive, self.hooks_ref = receive, None
        self.sites = sites
        self.active = active  # the captures that may want the step
        #: Identifies the parameter's insides, which `swap_tensors` exchanges for others without hooks.
        self.insides: int | None = None
        self.was_first = False  # whether only recorders have ever hooked the parameter

    def is_on(self, parameter: torch.Tensor) -> bool:
        """Returns whether the hook is on this parameter, and not on an earlier one with the same `id`."""
        return self.living_hooks() is not None and self.insides == insides_of(parameter)

    def stands_behind_ours(self) -> bool:
        """Returns whether only hooks of other recorders were registered on the parameter before this one."""
        others = [hook for hook in self.living_hooks() or () if hook is not self]
        return bool(others) and all(isinstance(other, _GradientHook) and other.was_first for other in others)

    def remove(self) -> None:
        """Removes the hook, and leaves the parameter's hooks as they were before."""
        hooks = self.living_hooks()
        self.unhook()
        if not self.was_first or hooks is None or hooks:
            return
        for site in self.sites:
            module = None if site.owner is None else site.owner.module
            parameter = None if module is None else parameter_of(module, site.slot)
            if parameter is not None:  # the dict may be one that a user has set since
                with DisableTorchFunction():
                    forget_removed_hooks(parameter)
