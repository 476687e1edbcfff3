"""Rules by which a tensor that an op reads need not change what the op gives; docs/verify.md lists them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..collect.op_plans import base_name
from ..torch_internals import schema_arguments
from .kept_ops import KeptOp
from .op_families import ANY_INTEGER, CHOOSING, MULTIPLYING, SCATTERING, SELECTING, SHAPE_ONLY


class Case(NamedTuple):
    """A tensor in whose place everything that was tried changed nothing."""

    op: str  # without namespace and overload: `addmm`
    argument: str  # its name in the schema
    at: int  # which of the tensors
    tensors: Sequence[torch.Tensor]  # all that the op reads
    arguments: Sequence[str]  # the argument of each of them
    values: dict[str, Any]  # the arguments that are no tensors
    outputs: Sequence[torch.Tensor]
    is_written: bool  # the op writes to it

    @property
    def tensor(self) -> torch.Tensor:
        return self.tensors[self.at]

    def other(self, argument: str) -> torch.Tensor | None:
        """The tensor given as another argument; None: none is."""
        return next(
            (each for each, name in zip(self.tensors, self.arguments, strict=True) if name == argument), None
        )


def make_case(
    kept: KeptOp, at: int, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> Case:
    """The case of one tensor of an op."""
    schema = schema_arguments(kept.plan.func) or []
    names = [name for name, _, _ in schema]
    arguments = [names[each] if isinstance(each, int) else each for each in kept.template.arguments]
    values = {
        name: kept.template.value(place, name) for place, name in enumerate(names) if name not in arguments
    }
    op = base_name(kept.name).split(".", 1)[-1]
    return Case(op, arguments[at], at, tensors, arguments, values, outputs, at in kept.written)


def exemption(case: Case) -> str | None:
    """The name of the first rule that the case falls under; None: it should have changed something."""
    return next((name for name, holds in RULES.items() if holds(case)), None)


def _is_empty(case: Case) -> bool:
    return case.tensor.numel() == 0 or (
        all(each.numel() == 0 for each in case.outputs) and bool(case.outputs)
    )


def _is_uninitialised(case: Case) -> bool:
    return case.op.removeprefix("new_").startswith("empty")


def _has_shape_only(case: Case) -> bool:
    return case.argument in SHAPE_ONLY.get(case.op, ())


def _is_overwritten(case: Case) -> bool:
    """The op writes to it, or to a copy of it, and has left nothing of what was there."""
    return case.is_written or (case.op in SCATTERING and case.argument == "self")


def _is_not_wanted(case: Case) -> bool:
    """Of several gradients some were not asked for, and this tensor serves those alone."""
    mask = case.values.get("output_mask")
    return isinstance(mask, list) and not all(mask) and not case.argument.startswith("grad")


def _is_masked(case: Case) -> bool:
    """None of its elements is let through, or let through to another."""
    if case.op == "where":
        return _hides(case.other("condition"), case.argument, shown_where_false="other")
    if case.op.startswith("masked_fill"):
        return _hides(case.other("mask"), case.argument, shown_where_false="self")
    if case.op == "heaviside":
        return case.argument == "values" and bool(case.tensors[0].all())
    if case.op.rstrip("_") in ("bitwise_and", "logical_and"):
        return any(not bool(each.any()) for at, each in enumerate(case.tensors) if at != case.at)
    if case.op.rstrip("_") in ("bitwise_or", "logical_or"):
        return any(bool(each.all()) for at, each in enumerate(case.tensors) if at != case.at)
    return case.op.startswith(("tril", "triu")) and not any(bool(each.any()) for each in case.outputs)


def _hides(mask: torch.Tensor | None, argument: str, *, shown_where_false: str) -> bool:
    """Whether a mask lets nothing of an argument through."""
    if mask is None or argument in ("condition", "mask"):
        return False
    return bool(mask.all()) if argument == shown_where_false else not bool(mask.any())


def _is_choice_of_equals(case: Case) -> bool:
    """What is chosen from is the same everywhere."""
    if case.op == "where" and case.argument == "condition":
        return _are_equal(case.other("self"), case.other("other"))
    if case.op.startswith("masked_fill") and case.argument == "mask":
        filled = case.other("self")
        return filled is not None and _is_constant(filled)
    if _writes_at_places(case) and case.argument in ("index", "indices", "mask"):
        written = ("self", "src", "values", "source", "value")
        return all(
            _is_constant(each)
            for each, name in zip(case.tensors, case.arguments, strict=True)
            if name in written
        )
    source = next(iter(case.tensors), None)
    return (
        case.op in SELECTING and source is not None and source is not case.tensor and _has_equal_rows(source)
    )


def _writes_at_places(case: Case) -> bool:
    op = case.op.rstrip("_")
    return op in SCATTERING or op in ("scatter_add", "index_add")


def _is_only_index(case: Case) -> bool:
    """An index into one place: there is no other that would be sure to exist."""
    is_integer = not case.tensor.dtype.is_floating_point and case.tensor.dtype is not torch.bool
    if not is_integer or case.tensor.dtype.is_complex or case.op in ANY_INTEGER:
        return False
    return int(case.tensor.min()) == int(case.tensor.max()) == 0


def _is_single_choice(case: Case) -> bool:
    dim = case.values.get("dim")
    chosen = case.tensor.shape[dim] if isinstance(dim, int) and case.tensor.dim() else case.tensor.numel()
    return case.op in CHOOSING and chosen == 1


def _is_times_zero(case: Case) -> bool:
    """A factor beside it is zero, or the gradient that is handed on."""
    others = [each for at, each in enumerate(case.tensors) if at != case.at and each.dtype.is_floating_point]
    if case.op not in MULTIPLYING and not case.op.endswith("_backward"):
        return False
    zeros = any(case.values.get(name) == 0 for name in ("scale", "alpha", "p"))
    return zeros or any(each.numel() and not bool(each.any()) for each in others)


def _is_constant(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or bool((tensor == tensor.reshape(-1)[0]).all())


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and bool((one == other).all())


def _has_equal_rows(tensor: torch.Tensor) -> bool:
    return (
        tensor.dim() == 0
        or tensor.shape[0] == 0
        or bool((tensor == tensor[:1]).all())
        or _is_constant(tensor)
    )


#: By name, in the order in which they are asked.
RULES: dict[str, Callable[[Case], bool]] = {
    "no elements": _is_empty,
    "memory left as it was": _is_uninitialised,
    "only its shape is used": _has_shape_only,
    "overwritten": _is_overwritten,
    "its gradient is not wanted": _is_not_wanted,
    "masked": _is_masked,
    "a choice among equals": _is_choice_of_equals,
    "an index with one place to go": _is_only_index,
    "a single choice": _is_single_choice,
    "times zero": _is_times_zero,
}

#: Not decided by a rule: an op with the same arguments and shapes has been checked often enough.
SAME_AS_CHECKED = "same as checked"
