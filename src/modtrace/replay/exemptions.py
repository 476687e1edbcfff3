"""Rules by which a tensor that an op reads need not affect the op's results; docs/verify.md lists them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..collect.ops.schemas import base_name
from .kept_ops import KeptOp
from .op_families import ASKING_OF_REALS, CHOOSING, SCATTERING, SHAPE_ONLY, may_be_index


class Case(NamedTuple):
    """A tensor that an op reads, for which none of the contents that were tried changed the op's results."""

    op: str  # without overload: `addmm`, and with its namespace if it is not torch's
    argument: str  # its name in the schema
    at: int  # which of the tensors
    tensors: Sequence[torch.Tensor]  # all that the op reads
    values: dict[str, Any]  # the arguments that are no tensors
    outputs: Sequence[torch.Tensor]
    is_written: bool  # the op writes to it
    may_be_index: bool  # it holds integers, and the op may use them as indices

    @property
    def tensor(self) -> torch.Tensor:
        return self.tensors[self.at]


def make_case(
    kept: KeptOp, at: int, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> Case:
    """Returns the `Case` of one tensor of an op."""
    arguments = kept.argument_names
    values = {
        name: kept.template.value(place, name)
        for place, name in enumerate(kept.schema.argument_names)
        if name not in arguments
    }
    op = base_name(kept.name).removeprefix("aten.")
    return Case(
        op=op,
        argument=arguments[at],
        at=at,
        tensors=tensors,
        values=values,
        outputs=outputs,
        is_written=at in kept.written,
        may_be_index=may_be_index(tensors[at], kept.schema.func, arguments[at]),
    )


def exemption(case: Case) -> str | None:
    """Returns the name of the first rule that applies to a case. None means that the results should have changed."""
    return next((name for name, holds in RULES.items() if holds(case)), None)


def _is_empty(case: Case) -> bool:
    return case.tensor.numel() == 0 or (
        all(output.numel() == 0 for output in case.outputs) and bool(case.outputs)
    )


def _is_uninitialised(case: Case) -> bool:
    return case.op.removeprefix("new_").startswith("empty")


def _has_shape_only(case: Case) -> bool:
    if case.op in ASKING_OF_REALS:
        return not (case.tensor.dtype.is_floating_point or case.tensor.dtype.is_complex)
    return case.argument in SHAPE_ONLY.get(case.op, ())


def _is_overwritten(case: Case) -> bool:
    """Returns whether the op overwrites the tensor, or a copy of it, and keeps nothing of its former content."""
    return case.is_written or (case.op in SCATTERING and case.argument == "self")


def _is_not_wanted(case: Case) -> bool:
    """Returns whether only gradients that were not asked for need the tensor."""
    mask = case.values.get("output_mask")
    return isinstance(mask, list) and not all(mask) and not case.argument.startswith("grad")


def _is_only_index(case: Case) -> bool:
    """Returns whether all elements are the index 0. No other index is sure to exist."""
    return case.may_be_index and not bool(case.tensor.any())


def _is_single_choice(case: Case) -> bool:
    dim = case.values.get("dim")
    chosen = case.tensor.shape[dim] if isinstance(dim, int) and case.tensor.dim() else case.tensor.numel()
    return case.op in CHOOSING and chosen == 1


#: The rules by name, in the order in which they are tried.
RULES: dict[str, Callable[[Case], bool]] = {
    "no elements": _is_empty,
    "memory left as it was": _is_uninitialised,
    "only its shape is used": _has_shape_only,
    "overwritten": _is_overwritten,
    "its gradient is not wanted": _is_not_wanted,
    "an index with one place to go": _is_only_index,
    "a single choice": _is_single_choice,
}

#: Found by trying, not by a rule: the op reads the tensor, but other arguments hide its effect (`Perturber`).
HIDDEN = "hidden by other arguments"

#: Found by counting, not by a rule: ops with the same arguments and shapes have been checked often enough.
SAME_AS_CHECKED = "same as checked"
