"""Finds parameters that an optimizer holds and that never get a gradient, and the module that is the reason."""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from ...recording.module_path import number_free
from ...recording.phase import FORWARD, PHASES, RECOMPUTE
from ...recording.role import GRAD_OUTPUT, OUTPUT, PARAMETER, PARAMETER_GRAD
from ...recording.suggestions import count_of, first_few
from ..tables.columns import Column, column_of, phase_codes
from ..tables.parameter_facts import Parameter
from ..tables.placement import Module, read_modules
from ..tables.sampled_steps import SampledSteps
from ..tables.values import PlacedValues
from .check import check
from .finding import CannotCheck, Finding, Severity
from .names import name_alike, name_steps_of
from .needs import lacks_values
from .places import place_of_module
from .readers import describe_readers

#: Roles that tell whether gradients flow.
_ROLES = (OUTPUT, GRAD_OUTPUT, PARAMETER, PARAMETER_GRAD)


@check("no-gradient", about="parameters in an optimizer that never get a gradient", needs="values")
def NO_GRADIENT(run: SampledSteps) -> Iterator[Finding]:
    """Finds where the way of the gradients ends."""
    known = run.parameters
    if not any(parameter.optimizer for parameter in known):
        raise CannotCheck("no optimizer was seen to step")
    flow = _Flow(run)
    if not len(run.sites_of(PARAMETER_GRAD)):
        raise lacks_values(run, "gradients of parameters", PARAMETER_GRAD)
    without = [parameter for parameter in known if flow.is_without(parameter)]
    ever = flow.find_ever(without)
    reasons: dict[tuple[_Kind, int], list[Parameter]] = defaultdict(list)
    for parameter in without:
        if parameter.site_id in ever:
            continue
        kind, module = flow.find_reason(parameter)
        reasons[kind, module.module_id].append(parameter)
    for kind, group in _merge(reasons, flow):
        yield group.finding(run, kind, flow.steps)


#: Why parameters get no gradient.
_Kind = Literal["no grad mode", "detaching", "not reached", "compiled", "not called", "not used"]


@dataclass(frozen=True)
class _Group:
    """Modules that are alike, and the parameters in them that get no gradient for the same reason."""

    modules: Sequence[Module]
    parameters: Sequence[Parameter]
    before: Sequence[Module] = ()  # modules called before, to which no gradient comes for that reason
    has_called_siblings: bool = (
        False  # said of modules that are not called: such of the same type beside them are
    )

    def finding(self, run: SampledSteps, kind: _Kind, steps: Column) -> Finding:
        """Returns the finding about the group."""
        said, first = _TEXTS[kind], self.parameters[0]
        names = [parameter.name for parameter in self.parameters]
        count = len(names)
        get = f"{count_of(count, 'parameter')} {'gets' if count == 1 else 'get'} no gradient"
        evidence = [f"the {'parameter' if count == 1 else 'parameters'}: {first_few(names, 4)}"]
        if self.before:
            evidence.append(f"called before it, and not reached either: {name_alike(run.data, self.before)}")
        verb, remedy = said.verbs[len(self.modules) > 1], said.remedy
        read = describe_readers(run, self.modules[0], steps) if kind == "not reached" else None
        if read is not None:
            evidence.insert(0, read[0])
            remedy = read[1]
        place = place_of_module(run, self.modules[0].module_id)
        return Finding(
            severity="warning" if self.has_called_siblings and said.severity == "note" else said.severity,
            text=said.text.format(name=name_alike(run.data, self.modules), verb=verb, get=get),
            remedy=remedy,
            evidence=tuple(evidence),
            rests_on=name_steps_of(run, steps),
            root=place.root,
            path=place.path,
            parameter=first.slot,
            step=int(steps[0]),
        )


class _Flow:
    """Where gradients were seen in the newest training steps."""

    def __init__(self, run: SampledSteps) -> None:
        self._run = run
        self.modules = read_modules(run.data)
        #: Also steps that are not comparable: a GAN's generator gets its gradients in others than those of the critic.
        self.steps = run.limit(run.newest, "values")
        self._values: PlacedValues = run.values(*_ROLES, steps=self.steps)

    def _modules_of(self, role: str, *, requiring: bool | None = None) -> frozenset[int]:
        """Returns the ids of the modules with rows of a role, and with this `requires_grad` if one is asked for."""
        rows = self._values.is_of(role)
        if requiring is not None:
            known = np.array(self._values.table["requires_grad"].to_pylist(), object)
            rows &= known == requiring
        return frozenset(self._to_merged(np.unique(self._values.module[rows]).tolist()))

    def _to_merged(self, module_ids: Sequence[int]) -> Iterator[int]:
        """Yields the ids of modules, in which a wrapper and what it wraps are one."""
        return (self.modules[one].module_id for one in module_ids if one in self.modules)

    @cached_property
    def _sites_of(self) -> dict[str, frozenset[int]]:
        values = self._values
        return {
            role: frozenset(np.unique(values.site_id[values.is_of(role)]).tolist())
            for role in (PARAMETER, PARAMETER_GRAD)
        }

    @cached_property
    def _with_gradient(self) -> frozenset[tuple[int, str]]:
        """The modules and slots of the parameters whose gradients were measured in these steps."""
        return self._owners(np.array([*self._sites_of[PARAMETER_GRAD]], np.int64))

    def _owners(self, site_ids: np.ndarray) -> frozenset[tuple[int, str]]:
        sites = [self._run.sites[site] for site in site_ids.tolist()]
        return frozenset((site.module_id, site.slot) for site in sites if site.module_id is not None)

    def is_without(self, parameter: Parameter) -> bool:
        """Returns whether an optimizer updates a parameter that requires a gradient, and none was measured."""
        is_trained = parameter.requires_grad and parameter.optimizer is not None
        was_stepped = parameter.site_id in self._sites_of[PARAMETER]
        return is_trained and was_stepped and self._key(parameter) not in self._with_gradient

    def _key(self, parameter: Parameter) -> tuple[int, str]:
        site = self._run.sites[parameter.site_id]
        return (-1 if site.module_id is None else site.module_id, parameter.slot)

    def find_ever(self, parameters: Sequence[Parameter]) -> frozenset[int]:
        """Returns the sites of those parameters that had a gradient in any step of the recording."""
        if not parameters:
            return frozenset()
        gradients = self._run.sites_of(PARAMETER_GRAD)
        keys = {self._key(parameter): parameter.site_id for parameter in parameters}
        wanted = [
            site
            for site in gradients.tolist()
            if (self._run.sites[site].module_id, self._run.sites[site].slot) in keys
        ]
        rows = self._run.find("values", ["site_id"], site_id=np.array(wanted, np.int64))
        return frozenset(keys[key] for key in self._owners(np.unique(column_of(rows, "site_id"))))

    # Why a parameter has no gradient.

    @cached_property
    def _called(self) -> dict[int, int]:
        """The modules that were called, by the order in which that first happened."""
        calls = self._run.rows("calls", self.steps)
        phase = phase_codes(calls["phase"])
        is_run = np.isin(phase, [PHASES.index(FORWARD), PHASES.index(RECOMPUTE)])
        called = column_of(calls, "module_id")[is_run]
        start_ns = column_of(calls, "start_ns")[is_run]
        modules, which = np.unique(called, return_inverse=True)
        first_ns = np.full(len(modules), np.iinfo(np.int64).max)
        np.minimum.at(first_ns, which.reshape(-1), start_ns)
        merged = dict.fromkeys(self._to_merged(modules[np.argsort(first_ns, kind="stable")].tolist()))
        return {module_id: number for number, module_id in enumerate(merged)}

    def find_caller(self, module: Module) -> int | None:
        """Returns the innermost called module that holds a module; None for a root."""
        _, *above = self._above(module)
        return next((one.module_id for one in above if one.module_id in self._called), None)

    def holder_of(self, module: Module) -> str:
        """Returns the root and the path of what holds a module, without the numbers of what repeats."""
        holder = None if module.parent_id is None else self.modules.get(module.parent_id)
        return f"{module.root_id} {number_free(holder.path) if holder else ''}"

    def has_called_siblings(self, module: Module) -> bool:
        """Returns whether a module of the same type and in the same module was called."""
        called = (self.modules[one] for one in self._called)
        return any(one.parent_id == module.parent_id and one.type == module.type for one in called)

    def order(self, module: Module) -> int:
        """Returns the number of a module in the order of first calls; -1 if it was not called."""
        return self._called.get(module.module_id, -1)

    @cached_property
    def _with_called(self) -> frozenset[int]:
        """The modules that were called, and those that hold one that was."""
        called = [self.modules[one] for one in self._called]
        return frozenset(above.module_id for module in called for above in self._above(module))

    @cached_property
    def _compiled(self) -> frozenset[int]:
        calls = self._run.rows("calls", self.steps)
        is_one = column_of(calls, "compiled").astype(bool)
        return frozenset(self._to_merged(np.unique(column_of(calls, "module_id")[is_one]).tolist()))

    @cached_property
    def _measured(self) -> frozenset[int]:
        return self._modules_of(OUTPUT)

    @cached_property
    def _requiring(self) -> frozenset[int]:
        """The modules of which an output required a gradient, in a forward or in a recompute."""
        return self._modules_of(OUTPUT, requiring=True)

    @cached_property
    def _not_requiring(self) -> frozenset[int]:
        return self._modules_of(OUTPUT, requiring=False) - self._requiring

    @cached_property
    def _reached(self) -> frozenset[int]:
        """The modules at whose outputs a gradient came."""
        return self._modules_of(GRAD_OUTPUT)

    def _above(self, module: Module) -> Iterator[Module]:
        """Yields a module and those that it is registered in, innermost first."""
        above: Module | None = module
        while above is not None:
            yield above
            above = None if above.parent_id is None else self.modules.get(above.parent_id)

    def find_reason(self, parameter: Parameter) -> "tuple[_Kind, Module]":
        """Returns why a parameter has no gradient, and the module in which that is so."""
        module = parameter.module
        chain = [*self._above(module)]
        ids = [above.module_id for above in chain]
        if any(one in self._compiled for one in ids):
            return "compiled", next(above for above in chain if above.module_id in self._compiled)
        if module.module_id not in self._called:
            # The outermost module that was never called, nor anything in it.
            return "not called", list(_while(chain, self._with_called))[-1]
        measured = [above for above in chain if above.module_id in self._measured]
        blocked = next(
            (at for at, above in enumerate(measured) if above.module_id in self._not_requiring), None
        )
        if blocked == 0:
            without = list(_while(measured, self._requiring))
            return "no grad mode", without[-1]
        if blocked is not None:
            return "detaching", measured[blocked]
        if module.module_id in self._reached:
            return "not used", module
        unreached = list(_while(measured, self._reached))
        return "not reached", (unreached or [module])[-1]


def _while(chain: Sequence[Module], ended_by: Container[int]) -> Iterator[Module]:
    """Yields modules from the innermost on, up to the first that is one of `ended_by`."""
    for module in chain:
        if module.module_id in ended_by:
            return
        yield module


def _merge(reasons: dict[tuple[_Kind, int], list[Parameter]], flow: _Flow) -> Iterator[tuple[_Kind, _Group]]:
    """Yields the groups of parameters that one reason explains.

    Modules of one type that have one reason are one group, if they are in the same module, or in such as repeat. Of
    modules to which no gradient comes that of the last call is named, as it is the next to where the gradients end. If
    a later call in the same module runs without gradients, that explains it.
    """
    unreached: dict[int | None, list[Module]] = defaultdict(list)  # by the module that calls them
    alike: dict[tuple[_Kind, str, str], list[Module]] = defaultdict(list)
    for kind, module_id in reasons:
        module = flow.modules[module_id]
        if kind == "not reached":
            unreached[flow.find_caller(module)].append(module)
        else:
            alike[kind, flow.holder_of(module), module.type].append(module)
    for (kind, _, _), modules in alike.items():
        before: list[Module] = []
        if kind in ("no grad mode", "detaching"):
            for caller in dict.fromkeys(map(flow.find_caller, modules)):
                first = min(flow.order(module) for module in modules if flow.find_caller(module) == caller)
                before += [module for module in unreached[caller] if flow.order(module) < first]
            for caller in unreached:
                unreached[caller] = [module for module in unreached[caller] if module not in before]
        group = _group(reasons, kind, modules, before)
        has_siblings = kind == "not called" and flow.has_called_siblings(modules[0])
        yield kind, replace(group, has_called_siblings=has_siblings)
    ends: dict[tuple[str, str], list[list[Module]]] = defaultdict(list)
    for modules in filter(None, unreached.values()):
        in_order = sorted(modules, key=flow.order)
        ends[number_free(in_order[-1].path), in_order[-1].type].append(in_order)
    for repeated in ends.values():
        last = [modules[-1] for modules in repeated]
        yield (
            "not reached",
            _group(reasons, "not reached", last, [one for modules in repeated for one in modules[:-1]]),
        )


def _group(
    reasons: dict[tuple[_Kind, int], list[Parameter]],
    kind: _Kind,
    modules: Sequence[Module],
    before: Sequence[Module],
) -> _Group:
    keys = [(kind, module.module_id) for module in modules]
    keys += [("not reached", module.module_id) for module in before]
    return _Group(modules, [parameter for key in keys for parameter in reasons[key]], before)


class _Text(NamedTuple):
    """What is said of a reason; `{name}` stands for the modules, `{verb}` for one of `verbs`, `{get}` for how many."""

    severity: Severity
    verbs: tuple[str, str]  # for one module, and for several
    text: str
    remedy: str


_TEXTS: Mapping[_Kind, _Text] = {
    "no grad mode": _Text(
        "error",
        ("runs", "run"),
        "{name} {verb} without gradients: {get}",
        "call it outside of torch.no_grad(); if a checkpoint calls it, use_reentrant=False, or "
        "x.requires_grad_() on its input (transformers: model.enable_input_require_grads())",
    ),
    "detaching": _Text(
        "error",
        ("returns", "return"),
        "{name} {verb} what requires no gradient, though what is in it does: {get}",
        "look in its forward for detach(), .data, .item(), numpy, argmax, or torch.no_grad()",
    ),
    "not reached": _Text(
        "warning",
        ("returns", "return"),
        "no gradient comes back to what {name} {verb}: {get}",
        "use what it returns, and do not detach it (detach(), .data, no_grad()): record --ops (ops=True) names who "
        "reads it",
    ),
    "compiled": _Text(
        "warning",
        ("runs", "run"),
        "{get} inside of {name}, which {verb} compiled",
        "record without torch.compile, so that the modules inside are seen",
    ),
    "not called": _Text(
        "note",
        ("is", "are"),
        "{name} {verb} never called: {get}",
        "call it in the forward, or leave it out of the model and the optimizer",
    ),
    "not used": _Text(
        "note",
        ("does", "do"),
        "{name} {verb} not use all parameters: {get}",
        "use them, or leave them out",
    ),
}
