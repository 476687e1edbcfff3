"""Finds parameters that get gradients and that no optimizer updates."""

from collections.abc import Iterator

from ...recording.suggestions import count_of, first_few
from ..tables.parameter_facts import read_parameters
from ..tables.sampled_steps import SampledSteps
from .check import check
from .finding import CannotCheck, Finding
from .names import name_steps_of


@check("not-in-optimizer", about="parameters that get gradients, and no optimizer updates", needs="values")
def NOT_IN_OPTIMIZER(run: SampledSteps) -> Iterator[Finding]:
    """Finds parameters that are left out, and frozen ones that are in."""
    known = read_parameters(run.data)
    if not any(parameter.optimizer for parameter in known):
        raise CannotCheck("no row says which optimizer updates parameters")
    left_out = [parameter for parameter in known if parameter.requires_grad and parameter.has_gradient]
    if left_out:
        names = first_few([parameter.name for parameter in left_out], 3)
        verb = "gets gradients and is" if len(left_out) == 1 else "get gradients and are"
        yield Finding(
            severity="warning",
            text=f"{count_of(len(left_out), 'parameter')} {verb} in no optimizer that steps: {names}",
            remedy="give it to the optimizer, or freeze it (requires_grad_(False)), which saves its gradient",
            rests_on=name_steps_of(run),
            path=left_out[0].module.path,
            parameter=left_out[0].slot,
        )
    frozen = [parameter for parameter in known if parameter.optimizer and not parameter.requires_grad]
    held = [parameter for parameter in known if parameter.optimizer]
    if frozen:
        names = first_few([parameter.name for parameter in frozen], 3)
        yield Finding(
            severity="note",
            text=f"{frozen[0].optimizer} holds {len(frozen)} frozen of {len(held)} parameters: {names}",
            remedy="requires_grad_(True) before training, if they were to train; else leave them out",
            rests_on=name_steps_of(run),
            path=frozen[0].module.path,
            parameter=frozen[0].slot,
        )
