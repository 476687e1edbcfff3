"""Rules by which a tensor that an op reads need not affect the op's results; docs/verify.md lists them."""

from collections.abc import Sequence

import torch

from ..collect.ops.schemas import base_name
from .kept_ops import KeptOp
from .op_families import ASKING_OF_REALS, CHOOSING, SCATTERING, SHAPE_ONLY, may_be_index

#: The rules, in the order in which they are applied.
RULES = (
    "no elements",
    "memory left as it was",
    "only its shape is used",
    "overwritten",
    "its gradient is not wanted",
    "an index with one place to go",
    "a single choice",
)

#: An exemption by trial, not by a rule: the op reads the tensor, but other arguments hide its effect (`Perturber`).
HIDDEN = "hidden by other arguments"

#: An exemption by count, not by a rule: ops with the same arguments and shapes were checked often enough.
SAME_AS_CHECKED = "same as checked"


def find_exemption(
    kept: KeptOp, at: int, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> str | None:
    """Returns the first rule by which a tensor need not affect an op; None means that the results should have changed.

    Args:
        kept: the op.
        at: the number of the tensor in `tensors`.
        tensors: all tensors that the op reads.
        outputs: the tensors that it returns.
    """
    tensor, argument = tensors[at], kept.argument_names[at]
    op = base_name(kept.name).removeprefix("aten.")  # includes the namespace unless it is torch's
    positions = {name: position for position, name in enumerate(kept.schema.argument_names)}
    mask, dim = (
        kept.template.value(positions[name], name) if name in positions else None
        for name in ("output_mask", "dim")
    )
    is_real = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    is_index = may_be_index(tensor, kept.schema.func, argument)
    choices = (
        tensor.shape[dim] if op in CHOOSING and isinstance(dim, int) and tensor.dim() else tensor.numel()
    )
    holds = (
        not tensor.numel() or (bool(outputs) and not any(output.numel() for output in outputs)),
        op.removeprefix("new_").startswith("empty"),
        not is_real if op in ASKING_OF_REALS else argument in SHAPE_ONLY.get(op, ()),
        # The op overwrites the tensor, or a copy of it, and keeps nothing of its contents.
        at in kept.written or (op in SCATTERING and argument == "self"),
        isinstance(mask, list) and not all(mask) and not argument.startswith("grad"),
        # All elements are the index 0, and no other index is certain to exist.
        is_index and not bool(tensor.any()),
        op in CHOOSING and choices == 1,
    )
    return next((rule for rule, is_true in zip(RULES, holds, strict=True) if is_true), None)
