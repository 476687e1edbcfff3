"""Measures the tensors that optimizers change: parameters, with their gradients, updates and optimizer states."""

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from operator import or_
from typing import Any, NamedTuple

import torch

from ...measure.measurers.differences import Before
from ...measure.measurers.measurer import Measurement, not_asked_for
from ...measure.measurers.want import Want
from ...recording.phase import OPTIMIZER
from ...recording.role import OPTIMIZER_STATE, PARAMETER, PARAMETER_GRAD, UPDATE
from ...torch_internals.dynamo import keep_out_of_dynamo
from ...torch_internals.modes import DisableTorchFunction, unseen
from ...torch_internals.tensors import grad_of
from ..identity_map import IdentityMap
from ..log.segments import Segment
from ..names.module_names import NamedModule, ParameterOwner
from ..structures.find import Slot, find_slots
from .capture_masks import Mask
from .measured import Measured, MeasuredParameters, free_rows, not_measured
from .parameter_sites import ParameterSite, wanted_by
from .source import Measuring, ValueSource

_SCALED = "still scaled by the GradScaler"

#: Keys that are identifiers are written in slots like attributes: `weight.exp_avg`.
_NAMED_KEY = re.compile(r"\['([A-Za-z_]\w*)'\]")

#: The position of a parameter in an optimizer: the number of its group, and its number there.
_Position = tuple[int, int]


class ParameterTaps(ValueSource):
    """Measures the parameters of an optimizer around each of its steps."""

    def __init__(self, measuring: Measuring, *, active: Callable[[], Mask]) -> None:
        """Starts idle, until an optimizer steps.

        Args:
            active: returns the captures that may want the step to which an optimizer belongs now.
        """
        super().__init__(measuring)
        self._active = active
        self._wanted = {role: self._capture_masks.of_role(role) for role in _OF_OPTIMIZERS}
        self._wanted_of_any = functools.reduce(or_, self._wanted.values())
        self._stepping: dict[int, _Stepping] = {}  # by thread, the optimizer step that runs
        self._optimizers: IdentityMap[Any, _Optimizer] = IdentityMap()
        self._optimizers_seen = 0
        keep_out_of_dynamo(ParameterTaps.before_optimizer, ParameterTaps.after_optimizer)

    def take_optimizer(self, thread: int) -> MeasuredParameters | None:
        stepping = self._stepping.pop(thread, None)
        return None if stepping is None else stepping.measured

    def taken_later(self, segments: Sequence[Segment], thread: int) -> list[Measured]:
        stepping = self._stepping.get(thread)
        return [] if stepping is None else [stepping.measured]

    def step_ended(self) -> None:
        self._optimizers.sweep()  # their copies use as much memory as the parameters

    def stop(self) -> None:
        """Drops all copies."""
        free_rows([stepping.measured for stepping in self._stepping.values()])
        self._stepping = {}
        self._optimizers.clear()

    # Measuring around an optimizer's step: weights that the step used, clipped gradients, updates and states.

    def before_optimizer(self, optimizer: Any, has_closure: bool) -> None:
        """Measures the parameters before the step changes them, and their gradients."""
        self._settle()
        thread = self._tracker.logs.current.number
        raised = self._stepping.pop(thread, None)
        if raised is not None:
            free_rows([raised.measured])
        active = 0 if self._is_abandoned else self._active() & self._wanted_of_any
        if active:
            stepping = self._stepping[thread] = _Stepping(
                MeasuredParameters(thread, OPTIMIZER, active), copied={}
            )
            self._measure_all(stepping, optimizer, self._measure_before, has_closure)
            self._settle()  # a parameter whose copy is pending is about to be written to

    def after_optimizer(self, optimizer: Any, has_closure: bool) -> None:
        """Measures what the step changed, and gradients that a closure computed during it."""
        stepping = self._stepping.get(self._tracker.logs.current.number)
        if stepping is None or self._is_abandoned:
            return
        wanted = self._wanted[UPDATE] | self._wanted[OPTIMIZER_STATE]
        wanted |= self._wanted[PARAMETER_GRAD] if has_closure else 0
        if stepping.measured.active & wanted:
            self._measure_all(stepping, optimizer, self._measure_after, has_closure)

    def _measure_all(
        self, stepping: "_Stepping", optimizer: Any, measure_one: Callable[..., None], has_closure: bool
    ) -> None:
        measured = stepping.measured
        start_ns = time.perf_counter_ns()
        try:
            with ExitStack() as stack:
                stack.enter_context(DisableTorchFunction())
                if measured.active & self._wanted[UPDATE]:  # takes 10 us, but copies need it
                    stack.enter_context(unseen())
                    stack.enter_context(torch.inference_mode(False))
                    stack.enter_context(torch.no_grad())
                # Updates are measured one by one, since all of them together would use as much memory as the
                # parameters.
                with self._together() if measure_one == self._measure_before else nullcontext():
                    for place, tensor in self._parameters_of(optimizer, measured.active):
                        measure_one(stepping, optimizer, place, tensor, has_closure)
        except Exception as error:
            self._failed(error, f"the parameters of {type(optimizer).__name__}")
        measured.intervals += (start_ns, time.perf_counter_ns())

    def _parameters_of(self, optimizer: Any, active: Mask) -> Iterator[tuple["_Place", torch.Tensor]]:
        """Yields the parameters that a capture wants, with their places; 0.6 us for each parameter that is known."""
        known, names = self._known(optimizer), self._tracker.names
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        key = active, names.revision, names.owners_revision, list(map(id, given))
        if key != known.key or not all(owner.holds(given[at]) for at, owner in known.owners):
            known.key, known.owners, known.places = None, [], []  # Ctrl-C may interrupt the search
            if self._find_places(known, optimizer, given, active):
                known.key = key
        for at, place in known.places:
            yield place, given[at]

    def _find_places(
        self, known: "_Optimizer", optimizer: Any, given: Sequence[torch.Tensor], active: Mask
    ) -> bool:
        """Finds the places of all parameters. Returns False if no module owns one, as one may in the next step."""
        groups = enumerate(optimizer.param_groups)
        positions = [(number, at) for number, group in groups for at in range(len(group["params"]))]
        owners_of_all = self._owners_of(given)
        for count, ((number, at), owners) in enumerate(zip(positions, owners_of_all, strict=True)):
            if owners:
                sites = self._sites.of_owners(owners)
            else:
                sites = self._sites.of_unowned(f"{known.prefix}param_groups[{number}].params[{at}]")
            known.owners += [(count, owner) for owner in owners]
            if wanted_by(sites, active):
                known.places.append((count, self._place_at((number, at), sites, active)))
        return all(owners_of_all)

    def _owners_of(self, parameters: Sequence[torch.Tensor]) -> list[list[ParameterOwner]]:
        """Returns the owners of each parameter. If one has none, all modules are searched once more."""
        owners_of = self._tracker.names.owners_of
        found = [owners_of(parameter) for parameter in parameters]
        if all(found):
            return found
        owners_of(parameters[0], learn=True)  # a parameter that no module owns is never found
        return [owners_of(parameter) for parameter in parameters]

    def _place_at(self, position: _Position, sites: list[ParameterSite], active: Mask) -> "_Place":
        of_roles = {role: self._of_role(role, sites, self._wanted[role] & active) for role in _OF_OPTIMIZERS}
        return _Place(position, {role: found for role, found in of_roles.items() if found.sites})

    def _of_role(self, role: str, sites: list[ParameterSite], active: Mask) -> "_OfRole":
        wanted = [(site, site.mask & active) for site in sites if site.mask & active]
        want = self._capture_masks.want(wanted_by(sites, active))
        return _OfRole(
            want, sites[0].path if sites else "", [(site.slot, site.owner, mask) for site, mask in wanted]
        )

    def _known(self, optimizer: Any) -> "_Optimizer":
        known = self._optimizers.get(optimizer)
        if known is None:
            number, self._optimizers_seen = self._optimizers_seen, self._optimizers_seen + 1
            known = self._optimizers[optimizer] = _Optimizer(f"optimizer#{number}." if number else "")
        return known

    def _measure_before(
        self, stepping: "_Stepping", optimizer: Any, place: "_Place", tensor: torch.Tensor, has_closure: bool
    ) -> None:
        self._measure_at(stepping, place, PARAMETER, tensor)
        if not has_closure:
            self._measure_gradient(stepping, optimizer, place, tensor)
        if UPDATE in place.of_roles:
            stepping.copied[place.position] = id(tensor)
            self._before_of(optimizer, place.position).take(tensor)

    def _measure_after(
        self, stepping: "_Stepping", optimizer: Any, place: "_Place", tensor: torch.Tensor, has_closure: bool
    ) -> None:
        if has_closure:
            self._measure_gradient(stepping, optimizer, place, tensor)
        if stepping.copied.get(place.position) == id(tensor):
            self._measure_update(stepping, optimizer, place, tensor)
        if OPTIMIZER_STATE in place.of_roles:
            self._measure_state(stepping, optimizer, place, tensor)

    def _measure_at(
        self,
        stepping: "_Stepping",
        place: "_Place",
        role: str,
        tensor: Any,
        below: str = "",
        found: Measurement | None = None,
    ) -> Measurement | None:
        """Measures a tensor, unless `found` is given, and stores what was found under each of its sites."""
        of_role = place.of_roles.get(role)
        if of_role is None:
            return None
        if found is None:
            found = self._measure(tensor, of_role.want, f"{of_role.path}{below}.{role}")
        for slot, owner, mask in of_role.sites:
            stepping.measured.sites += (found, role, slot + below, owner, mask)
        return found

    def _measure_gradient(
        self, stepping: "_Stepping", optimizer: Any, place: "_Place", tensor: torch.Tensor
    ) -> None:
        gradient = grad_of(tensor)
        if gradient is None:
            return
        found = self._measure_at(stepping, place, PARAMETER_GRAD, gradient)
        if found is not None and getattr(optimizer, "grad_scale", None) is not None:
            found.note = found.note or _SCALED

    # Updates need a copy of each parameter from before; its memory is reused in the next step.

    def _before_of(self, optimizer: Any, position: _Position) -> Before:
        return self._known(optimizer).copies.setdefault(position, Before())

    def _measure_update(
        self, stepping: "_Stepping", optimizer: Any, place: "_Place", tensor: torch.Tensor
    ) -> None:
        want = place.of_roles[UPDATE].want
        keep = want.lazy or bool(want.functions)  # the user may keep the copy
        moved = self._before_of(optimizer, place.position).difference(tensor, keep=keep)
        if moved.tensor is None:
            nothing = not_asked_for(tensor)
            nothing.shape, nothing.note, nothing.start_ns = moved.shape, moved.note, time.perf_counter_ns()
            self._measure_at(stepping, place, UPDATE, None, found=nothing)
            return
        found = self._measure_at(stepping, place, UPDATE, moved.tensor)
        if found is not None:
            found.shape, found.note = moved.shape, found.note or moved.note

    # States that an optimizer keeps for a parameter.

    def _measure_state(
        self, stepping: "_Stepping", optimizer: Any, place: "_Place", parameter: torch.Tensor
    ) -> None:
        for slot, tensor, note in _state_of(optimizer, parameter):
            below = _dotted(slot)
            found = None if tensor is not None else not_measured(note)
            self._measure_at(stepping, place, OPTIMIZER_STATE, tensor, below, found)


_OF_OPTIMIZERS = (PARAMETER, PARAMETER_GRAD, UPDATE, OPTIMIZER_STATE)


class _Place(NamedTuple):
    """A parameter in an optimizer, with its sites and the captures that want it."""

    position: _Position
    of_roles: "dict[str, _OfRole]"  # those roles in which a capture wants it


class _OfRole(NamedTuple):
    """What captures want of a parameter in one role."""

    want: Want
    path: str  # the first part of the names of whole tensors
    sites: list[tuple[str, NamedModule | None, Mask]]  # slot, owner, and the captures that want it there


class _Optimizer:
    """What is remembered of an optimizer from step to step."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix  # distinguishes unowned parameters of several optimizers
        self.copies: dict[_Position, Before] = {}
        #: The captures, names and parameters (by weak references) for which the places are valid; None if none are.
        self.key: tuple[Mask, int, int, list[int]] | None = None
        self.owners: list[tuple[int, ParameterOwner]] = []  # owners, each with its parameter's number
        self.places: list[tuple[int, _Place]] = []  # the places of wanted parameters, with their numbers


class _Stepping(NamedTuple):
    """An optimizer's step on one thread, while it runs."""

    measured: MeasuredParameters
    copied: dict[_Position, int]  # ids of the copied parameters


def _state_of(optimizer: Any, parameter: torch.Tensor) -> list[Slot]:
    """Returns the tensors that an optimizer keeps for a parameter; none if a wrapper stores them elsewhere.

    `ZeroRedundancyOptimizer` has them in an optimizer of its own, for the parameters that its rank updates.
    """
    try:
        state = getattr(optimizer, "state", None)
        kept = state.get(parameter) if isinstance(state, Mapping) else None
        if kept is None and isinstance(inner := vars(optimizer).get("optim"), torch.optim.Optimizer):
            kept = inner.state.get(parameter)
    except Exception as error:  # a wrapper may have a mapping of its own
        return [Slot("", None, f"not measured: reading it raised {type(error).__name__}")]
    return [] if kept is None else find_slots(kept)


@functools.lru_cache(maxsize=1024)  # caches texts only; an unknown one takes 10 us
def _dotted(slot: str) -> str:
    return _NAMED_KEY.sub(r".\1", slot)
