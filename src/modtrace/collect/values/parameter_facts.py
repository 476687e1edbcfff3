"""Records of each parameter of a model that trains whether it requires gradients, and which optimizer updates it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ...measure.special import shape_of
from ...recording.arrow.arrays import Coded
from ...recording.failure_reporter import FailureReporter
from ...recording.role import PARAMETER
from ...torch_internals.gradients import read_gradients
from ...torch_internals.modes import DisableTorchFunction
from ...torch_internals.tensors import grad_of, requires_grad_of, version_of
from ..identity_map import IdentityMap
from ..names.module_names import ModuleNames
from ..names.walk import walk
from ..steps.cleared_gradients import MAX_ELEMENTS, is_zero
from ..steps.step import Step
from .sites import SiteIds

#: After so many training steps all parameters are read again, as a program may freeze some.
_READ_EVERY = 64


class _Fact(NamedTuple):
    """What a row says of a parameter."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    optimizer: str | None
    group: int | None
    has_gradient: bool | None


class ParameterFacts:
    """Makes the rows of the table `parameters`, in which a parameter stands again only if something has changed.

    An optimizer's parameters are looked at as it has stepped, 0.1 us each; all parameters are walked, at 2 us each,
    when that shows a change, when modules got names, and every 64th step. An internal error ends this table alone.
    """

    def __init__(self, sites: SiteIds, reporter: FailureReporter) -> None:
        self._sites = sites
        self._reporter = reporter
        self._names: ModuleNames | None = None  # set while it records
        self._optimizers: IdentityMap[Any, _Optimizer] = IdentityMap()
        self._kinds: dict[str, int] = {}  # the number of optimizers seen, by class
        self._known: dict[tuple[int, str], _Fact] = {}
        self._rows: list[tuple[int, tuple[int, str], _Fact]] = []  # not written yet
        self._is_stale = True
        self._read_at: tuple[object, ...] = ()
        self._steps_since = 0
        self._must_read = False  # as another thread could replace them
        self._uncleared: bool | None = None
        #: The modules and names of parameters that had a gradient when an optimizer stepped and they were looked at.
        self._with_gradient: frozenset[tuple[int, str]] = frozenset()

    def start(self, names: ModuleNames) -> None:
        """Starts recording."""
        self._names = names

    def read_optimizer(self, optimizer: Any) -> None:
        """Reads the parameters of an optimizer that has stepped."""
        with self._guard() as names:
            if names is not None:
                known = self._find(optimizer)
                self._is_stale |= known.read(optimizer)
                self._uncleared = known.watch_gradient(optimizer)
                if self._must_read or self._steps_since in (0, _READ_EVERY - 1):
                    self._read_gradients(names)

    def backward_began(self) -> None:
        """Notes which gradients are still as the last step of their optimizer left them."""
        with self._guard() as names:
            for optimizer, known in self._optimizers.items() if names is not None else ():
                known.check_gradient(optimizer)

    def backward_ended(self) -> None:
        """Notes the gradients to which a backward has added."""
        with self._guard() as names:
            for optimizer, known in self._optimizers.items() if names is not None else ():
                known.note_addition(optimizer)

    @contextmanager
    def _guard(self) -> Iterator[ModuleNames | None]:
        """Hides what we ask of tensors from the user's modes, and ends this table after an internal error.

        Gives the names of modules; None if nothing is recorded.
        """
        try:
            with DisableTorchFunction():
                yield self._names
        except Exception as error:
            self._names = None
            self._reporter.rows_failed("parameters", error)

    def take_uncleared(self) -> bool | None:
        """Returns whether the last optimizer's step used gradients that were not cleared; None if it was its first."""
        uncleared, self._uncleared = self._uncleared, None
        return uncleared

    def _read_gradients(self, names: ModuleNames) -> None:
        self._must_read = read_gradients(()) is None
        if self._must_read:
            return
        owners = [
            ((named.module_id, name), parameter)
            for named in [*names.modules]
            if (module := named.module) is not None
            for name, parameter in [*module._parameters.items()]
        ]
        gradients = read_gradients(parameter for _, parameter in owners)
        read = zip(owners, gradients or (), strict=False)  # another thread may have begun meanwhile
        found = {owner for (owner, _), gradient in read if gradient is not None}
        self._is_stale |= not found <= self._with_gradient
        self._with_gradient |= found

    def _find(self, optimizer: Any) -> "_Optimizer":
        known = self._optimizers.get(optimizer)
        if known is None:
            name = type(optimizer).__name__
            number = self._kinds[name] = self._kinds.get(name, -1) + 1
            known = self._optimizers[optimizer] = _Optimizer(f"{name}#{number}" if number else name)
        return known

    def settle(self, step: Step, *, is_recorded: bool) -> None:
        """Reads what has changed by the end of a training step. Callers hold the lock over the tracker's events."""
        if is_recorded and (step.stepped or step.accumulated):
            with self._guard() as names:
                if names is not None:
                    self._settle(step, names)

    def _settle(self, step: Step, names: ModuleNames) -> None:
        called = dict.fromkeys(segment.named.module_id for segment in step.segments)
        roots = [root for one in called if (root := names.modules[one].module) is not None]
        read_at = (names.revision, *map(id, roots))
        self._steps_since += 1
        if self._is_stale or read_at != self._read_at or self._steps_since >= _READ_EVERY:
            self._is_stale, self._read_at, self._steps_since = False, read_at, 0
            for owner, parameter in _walk(roots, names):
                fact = self._read(owner, parameter)
                if fact is not None and self._known.get(owner) != fact:
                    self._known[owner] = fact
                    self._rows.append((step.number or 0, owner, fact))

    def _read(self, owner: tuple[int, str], parameter: torch.Tensor) -> _Fact | None:
        """Returns the facts of a parameter; None if a subclass of the user's raises when asked for its dtype."""
        try:
            shape, dtype = shape_of(parameter), str(parameter.dtype).removeprefix("torch.")
        except Exception:
            return None
        for _, optimizer in self._optimizers.items():
            place = optimizer.places.get(id(parameter))
            if place is not None:
                return _Fact(shape, dtype, place.requires_grad, optimizer.name, place.group, None)
        return _Fact(shape, dtype, requires_grad_of(parameter), None, None, owner in self._with_gradient)

    def take_columns(self) -> dict[str, Any] | None:
        """Returns the rows since the last call; None if there are none."""
        rows, self._rows = self._rows, []
        if not rows:
            return None
        steps, owners, facts = zip(*rows, strict=True)
        names = self._sites.names((PARAMETER, slot, None, -1) for _, slot in owners)
        modules = [module_id for module_id, _ in owners]
        return {
            "step": list(steps),
            "site_id": self._sites.get(modules, [-1] * len(rows), names.tolist()),
            "shape": Coded([fact.shape for fact in facts], np.arange(len(facts))),
            "dtype": [fact.dtype for fact in facts],
            "requires_grad": [fact.requires_grad for fact in facts],
            "optimizer": [fact.optimizer for fact in facts],
            "param_group": [fact.group for fact in facts],
            "has_gradient": [fact.has_gradient for fact in facts],
        }


class _Gradient:
    """A gradient as an optimizer's step, or a backward after it, has left it. The tensor is not kept alive."""

    def __init__(self, group: int, at: int, gradient: torch.Tensor) -> None:
        self._place = group, at
        self._id = id(gradient)
        self._version = version_of(gradient)
        self.was_added_to = False

    def _find(self, optimizer: Any) -> torch.Tensor | None:
        group, at = self._place
        read = read_gradients([optimizer.param_groups[group]["params"][at]])
        return None if read is None else read[0]

    def is_as_it_was(self, optimizer: Any) -> bool:
        """Returns whether nothing has replaced the gradient, or written to it."""
        gradient = self._find(optimizer)
        if gradient is None or id(gradient) != self._id or version_of(gradient) != self._version:
            return False
        return not is_zero(gradient)  # `gradient.data.zero_()` leaves the version as it is

    def note_addition(self, optimizer: Any) -> None:
        """Notes that a backward has added to the gradient, if it has."""
        gradient = self._find(optimizer)
        if gradient is not None and id(gradient) == self._id and version_of(gradient) != self._version:
            self._version, self.was_added_to = version_of(gradient), True


def _find_gradient(optimizer: Any) -> _Gradient | None:
    """Returns a gradient of an optimizer's parameters, the first that can be read; None if they have none."""
    first = None
    for number, group in enumerate(optimizer.param_groups):
        for at, parameter in enumerate(group["params"]):
            gradient = grad_of(parameter)
            if gradient is not None and not gradient.is_inference():
                found = _Gradient(number, at, gradient)
                if gradient.numel() <= MAX_ELEMENTS:
                    return found
                first = first or found
    return first


def _walk(roots: list[nn.Module], names: ModuleNames) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
    """Yields each parameter of some models once, with the id of its module and its name there.

    What a model calls and has not registered, as modules in a plain list, counts as its own.
    """
    seen, walked = set[int](), set[int]()
    waiting = [*roots]
    while waiting:
        root = waiting.pop(0)
        for module in (root, *(below for below, *_ in walk(root, "", ""))):
            named = names.get(module)
            if named is None or named.module_id in walked:
                continue
            walked.add(named.module_id)
            unregistered = [one.module for of_type in [*named.slots.values()] for one in [*of_type]]
            waiting += [one for one in unregistered if one is not None]
            for name, parameter in [*module._parameters.items()]:
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield (named.module_id, name), parameter


class _Place(NamedTuple):
    """A parameter in an optimizer."""

    group: int
    requires_grad: bool


class _Optimizer:
    """The parameters of an optimizer, as its last step found them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.places: dict[int, _Place] = {}  # by the parameter's id
        self._key: tuple[list[int], list[bool]] = [], []
        self._watched: _Gradient | None = None
        self._has_stepped = False

    # Whether gradients are cleared between two steps. One parameter stands for all, as for all are cleared at once.

    def watch_gradient(self, optimizer: Any) -> bool | None:
        """Watches a gradient from now on, as the optimizer has stepped.

        Returns:
            whether backwards had added to the one watched before, and nothing else had written to it; None at first.
        """
        uncleared = (
            None if not self._has_stepped else self._watched is not None and self._watched.was_added_to
        )
        self._has_stepped, self._watched = True, _find_gradient(optimizer)
        return uncleared

    def check_gradient(self, optimizer: Any) -> None:
        """Stops watching a gradient that was cleared, or written to, before a backward begins."""
        if self._watched is not None and not self._watched.is_as_it_was(optimizer):
            self._watched = None

    def note_addition(self, optimizer: Any) -> None:
        """Notes that a backward has added to the gradient that is watched."""
        if self._watched is not None:
            self._watched.note_addition(optimizer)

    def read(self, optimizer: Any) -> bool:
        """Reads the parameters again. Returns whether something has changed."""
        groups = [group["params"] for group in optimizer.param_groups]
        given = [parameter for group in groups for parameter in group]
        key = [*map(id, given)], [*map(requires_grad_of, given)]
        if key == self._key:
            return False
        self._key = key
        numbers = [number for number, group in enumerate(groups) for _ in group]
        self.places = {
            parameter: _Place(number, flag) for parameter, flag, number in zip(*key, numbers, strict=True)
        }
        return True
