"""Finds parameters that get gradients and that no optimizer updates."""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from ...recording.role import GRAD_OUTPUT
from ...recording.suggestions import count_of, first_few
from ..tables.parameter_facts import Parameter
from ..tables.placement import read_modules
from ..tables.sampled_steps import SampledSteps
from .check import check
from .finding import CannotCheck, Finding
from .names import list_others, name_steps_of
from .places import place_of_module

#: The path of a module that is registered nowhere, at the beginning of that of a parameter's module.
_UNREGISTERED = re.compile(r".*?\([^()]*#\d+\)")


@check("not-in-optimizer", about="parameters that get gradients, and no optimizer updates", needs="values")
def NOT_IN_OPTIMIZER(run: SampledSteps) -> Iterator[Finding]:
    """Finds parameters that are left out, and frozen ones that are in."""
    known = run.parameters
    if not any(parameter.optimizer for parameter in known):
        raise CannotCheck("no optimizer was seen to step")
    left_out = [parameter for parameter in known if parameter.requires_grad and parameter.has_gradient]
    if any(parameter.was_updated for parameter in left_out):
        # What an earlier phase of the training has left: its optimizer is gone, and its gradients are still there.
        modules, seen = read_modules(run.data), np.unique(run.values(GRAD_OUTPUT).module).tolist()
        reached = {modules[one].module_id for one in seen if one in modules}
        left_out = [one for one in left_out if not one.was_updated or one.module.module_id in reached]
    unregistered = {
        parameter.site_id: found[0]
        for parameter in left_out
        if (found := _UNREGISTERED.match(parameter.module.path)) is not None
    }
    if unregistered:
        first = next(parameter for parameter in left_out if parameter.site_id in unregistered)
        names = [*dict.fromkeys(unregistered.values())]
        what = (
            "a module gets gradients and is"
            if len(names) == 1
            else f"{len(names)} modules get gradients and are"
        )
        place = place_of_module(run, first.module.root_id)
        yield Finding(
            severity="warning",
            text=f"in {place.name} {what} not registered, and in no optimizer: {first_few(names, 3)}",
            remedy="keep modules in nn.ModuleList or nn.ModuleDict, or as attributes, not in a plain list or dict; "
            "parameters(), state_dict() and to() leave out what is not registered",
            rests_on=name_steps_of(run),
            root=place.root,
            path=first.module.path,
            parameter=first.slot,
        )
    left_out = [parameter for parameter in left_out if parameter.site_id not in unregistered]
    if left_out:
        shown = first_few([parameter.name for parameter in left_out], 1)
        them = "it" if len(left_out) == 1 else "them"
        verb = "gets gradients and is" if len(left_out) == 1 else "get gradients and are"
        yield Finding(
            severity="warning",
            text=f"{count_of(len(left_out), 'parameter')} {verb} in no optimizer that steps: {shown}",
            remedy=f"give {them} to the optimizer, or freeze {them} (requires_grad_(False)), which saves the gradients",
            evidence=list_others([parameter.name for parameter in left_out]),
            rests_on=name_steps_of(run),
            **place_of_module(run, left_out[0].module.module_id, left_out[0].slot).fields(),
        )
    yield from _find_frozen(run, known)


def _find_frozen(run: SampledSteps, known: Sequence[Parameter]) -> Iterator[Finding]:
    """Yields a finding on frozen parameters that an optimizer holds, or beside which only norms train."""
    trained = [one for one in known if one.optimizer and one.requires_grad]
    roots = {one.module.root_id for one in trained}
    frozen = [one for one in known if not one.requires_grad and one.module.root_id in roots]
    if not frozen or not trained:
        return
    share = sum(one.numel for one in frozen) / max(sum(one.numel for one in frozen + trained), 1)
    of_types = sorted({one.module.type for one in trained})
    is_norms = all("Norm" in one for one in of_types)
    if not is_norms and not any(one.optimizer for one in frozen):
        return  # as meant: the optimizer was not given them
    are = "is" if len(frozen) == 1 else "are"
    yield Finding(
        severity="warning" if is_norms else "note",
        text=f"{count_of(len(frozen), 'parameter')} {are} frozen, {share:.1%} of all elements"
        + (
            f"; only {' and '.join(of_types)} trains"
            if is_norms
            else f": {first_few([one.name for one in frozen], 2)}"
        ),
        remedy="requires_grad_(True) before the optimizer is made, if they were to train",
        evidence=(f"those that train: {first_few([one.name for one in trained], 4)}",),
        rests_on=name_steps_of(run),
        **place_of_module(run, frozen[0].module.module_id, frozen[0].slot).fields(),
    )
