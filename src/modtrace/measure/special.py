"""Finds the plain tensor that holds the numbers of an unusual one, or the reason why there is none."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..torch_internals.graph_captures import BEING_CAPTURED
from ..torch_internals.subclasses import (
    MKLDNN_LAYOUT,
    DTensorShard,
    has_no_memory,
    is_awaited_collective,
    is_fake,
    is_instance_of,
    jagged_parts,
    local_part,
    masked_parts,
    shard_of,
    stored_values,
)
from ..torch_internals.tensors import has_own_dispatch
from ..torch_internals.transforms import (
    batched_below,
    functional_below,
    is_functorch_tensor,
    wrapped_by_functorch,
)
from .memory import why_unread

_SPARSE_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}

_DTENSOR = ("torch.distributed.tensor", "DTensor")
_MASKED = ("torch.masked.maskedtensor.core", "MaskedTensor")

#: The note of a part of which torch does not say where it lies.
_UNPLACED = "DTensor: the part on this rank, at an unknown place"

#: At most this many nested subclasses are unwrapped, in case they never end.
_MOST_LAYERS = 8


class Plain(NamedTuple):
    """The part of a tensor that can be measured."""

    tensor: torch.Tensor | None  # strided, of torch's own kind; None: nothing
    shape: Sequence[int]  # of the tensor as its user sees it
    note: str | None  # which part of it is measured, or why nothing is
    shard: DTensorShard | None = None  # where the part is that was measured of a DTensor


def find_plain(tensor: torch.Tensor) -> Plain:
    """Unwraps wrappers, layouts and subclasses. It runs ops, so call it where no mode sees them (`unseen`).

    Raises:
        Exception: what a subclass of the user's raises.
    """
    shape: Sequence[int] | None = None
    notes: list[str] = []
    shard: DTensorShard | None = None
    for _ in range(_MOST_LAYERS):
        reason = _nothing_to_measure(tensor)
        if reason is not None:
            return Plain(None, shape_of(tensor) if shape is None else shape, reason, shard)
        if shape is None:
            shape = shape_of(tensor)
        inner = _unwrap(tensor)
        if inner is None:
            reason = why_unread(tensor) if tensor.is_conj() or tensor.is_neg() else None
            if reason is not None:
                return Plain(None, shape, f"not measured: {reason}", shard)
            return Plain(_resolved(tensor), shape, "; ".join(notes) or None, shard)
        tensor, note, shape = inner.tensor, inner.note, inner.shape if inner.shape is not None else shape
        shard = inner.shard or shard
        if note is not None:
            notes.append(note)
    return Plain(None, shape or (), f"not measured: {type(tensor).__name__} wraps too much")


def find_shard(tensor: torch.Tensor) -> tuple[torch.Tensor, DTensorShard | None]:
    """Returns the part of a DTensor that is on this rank, and where it lies; the tensor itself if it is none."""
    return (local_part(tensor), shard_of(tensor)) if is_instance_of(tensor, *_DTENSOR) else (tensor, None)


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is an uninitialized parameter or buffer, as in `LazyLinear`, without a shape."""
    # `isinstance` asks a metaclass of torch's, in 1 us.
    if type(tensor) in (
        torch.Tensor,
        torch.nn.Parameter,
    ):
        return False
    return isinstance(tensor, (UninitializedParameter, UninitializedBuffer))


class _Inner(NamedTuple):
    tensor: torch.Tensor
    note: str | None
    shape: Sequence[int] | None = None  # where the outer one has another, or none
    shard: DTensorShard | None = None


def _nothing_to_measure(tensor: torch.Tensor) -> str | None:
    if is_uninitialized(tensor):
        return "not measured: not initialized yet"
    if is_fake(tensor):
        return "not measured: a fake tensor holds no numbers"
    if is_awaited_collective(tensor):
        return "not measured: a collective that has not been waited for"
    if functional_below(tensor) is not None:
        return "not measured: functionalize may have writes to it still to do"
    if is_functorch_tensor(tensor):
        return None
    if tensor.device.type == "meta":
        return "not measured: a meta tensor holds no numbers"
    if tensor.layout is MKLDNN_LAYOUT:
        return "not measured: mkldnn layout"
    if tensor.is_quantized:
        return f"not measured: quantized ({str(tensor.dtype).removeprefix('torch.')})"
    if has_own_dispatch(type(tensor)) and not _is_understood(tensor):
        return f"not measured: {type(tensor).__name__} does not say where its numbers are"
    return None


def _is_understood(tensor: torch.Tensor) -> bool:
    """Returns whether the numbers of a class that runs its ops itself can be read."""
    known = is_instance_of(tensor, *_DTENSOR) or is_instance_of(tensor, *_MASKED) or tensor.is_nested
    return known or _parts_of_subclass(tensor) is not None or _has_memory(tensor)


def _unwrap(tensor: torch.Tensor) -> _Inner | None:
    """Returns the next tensor inside; None if this tensor holds the numbers itself."""
    return (
        _unwrap_transform(tensor)
        or _unwrap_known_subclass(tensor)
        or _unwrap_layout(tensor)
        or _unwrap_subclass(tensor)
    )


def _unwrap_transform(tensor: torch.Tensor) -> _Inner | None:
    if not is_functorch_tensor(tensor):
        return None
    below = batched_below(tensor)
    if below is not None:
        return _Inner(below, "vmap: all examples together", tuple(below.shape))
    return _Inner(wrapped_by_functorch(tensor), None)


def _unwrap_known_subclass(tensor: Any) -> _Inner | None:
    if is_instance_of(tensor, *_DTENSOR):
        try:
            local, shard = find_shard(tensor)
        except Exception:  # of a placement of the user's, or in other versions of torch
            return _Inner(local_part(tensor), _UNPLACED, shape_of(local_part(tensor)))
        return _Inner(local, None, shape_of(local), shard)
    if is_instance_of(tensor, *_MASKED):
        data, mask = masked_parts(tensor)
        reason = why_unread(data) or why_unread(mask)
        if reason is not None:
            raise ValueError(reason)
        return _Inner(data[mask], "MaskedTensor: the elements not masked")
    return None


def _unwrap_layout(tensor: Any) -> _Inner | None:
    if tensor.is_nested:
        if tensor.layout is torch.jagged:
            values, holes = jagged_parts(tensor)
        else:
            values = tensor.values()
            holes = values.numel() != tensor.numel()  # a slice of a nested tensor still has all of its values
        note = "nested: its values()" + (", holes included" if holes else "")
        return _Inner(values, note, tuple(values.shape))
    if tensor.layout is torch.sparse_coo:
        together = "" if tensor.is_coalesced() else ", those of one place apart (not coalesced)"
        return _Inner(stored_values(tensor), f"sparse: the stored values{together}")
    if tensor.layout in _SPARSE_COMPRESSED:
        return _Inner(tensor.values(), "sparse: the stored values")
    return None


def _unwrap_subclass(tensor: torch.Tensor) -> _Inner | None:
    part = _parts_of_subclass(tensor) if has_own_dispatch(type(tensor)) else None
    return None if part is None else _Inner(part[1], f"{type(tensor).__name__}: its {part[0]}")


def _parts_of_subclass(tensor: Any) -> tuple[str, torch.Tensor] | None:
    """Returns the only tensor that a wrapper subclass holds, by the protocol that torch.compile uses for it."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return None
    names, _ = flatten()
    inner = [(name, getattr(tensor, name)) for name in names]
    same = [(name, part) for name, part in inner if tuple(part.shape) == tuple(tensor.shape)]
    return same[0] if len(inner) == 1 and same else None


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with pending conjugation and negation applied; zeros without memory get memory."""
    if has_no_memory(tensor):
        return tensor.detach().clone()
    if tensor.is_conj() or tensor.is_neg():
        return tensor.detach().resolve_conj().resolve_neg()
    return tensor


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of a tensor; () if it is not known."""
    try:
        return tuple(int(size) for size in tensor.shape)
    except Exception:  # not initialized, nested, or sizes that are symbols
        return ()


_MOST_OF_A_NOTE = 120

#: The note if work on the tensor would end the capture of a CUDA graph, or become part of it.
NOT_MEASURED_IN_GRAPH = f"not measured: {BEING_CAPTURED}"


def shortened(note: str | None) -> str | None:
    """Returns the first line. Notes are dictionary-encoded, so there must not be many different ones."""
    return None if note is None else " ".join(note.split("\n", 1)[0].split())[:_MOST_OF_A_NOTE]
