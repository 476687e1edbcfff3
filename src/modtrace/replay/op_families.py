"""Lists families of ops with a common rule, such as ops that use only an argument's shape, by base name."""

from functools import cache
from typing import Any

import torch

from ..collect.ops.schemas import base_name, name_of

# fmt: off

#: Arguments of which an op uses only the shape, dtype or presence; they are tested all the same.
SHAPE_ONLY: dict[str, tuple[str, ...]] = {
    "zeros_like": ("self",), "ones_like": ("self",), "full_like": ("self",), "rand_like": ("self",),
    "randn_like": ("self",), "randint_like": ("self",), "new_zeros": ("self",), "new_ones": ("self",),
    "new_full": ("self",), "uniform": ("self",), "normal_functional": ("self",), "bernoulli": ("self",),
    "exponential": ("self",), "expand_as": ("other",), "view_as": ("other",), "reshape_as": ("other",),
    "type_as": ("other",), "resize_as_": ("the_template",),
    "native_layer_norm_backward": ("bias",),
    "native_batch_norm_backward": ("running_mean", "running_var", "save_mean", "save_invstd"),
    "batch_norm_backward": ("running_mean", "running_var", "save_mean", "save_var"),
    "lu_unpack": ("LU_pivots", "LU_data"), "adaptive_max_pool3d_backward": ("self",),
    "rrelu_with_noise_backward": ("self",), "fractional_max_pool2d_backward": ("self",),
    "fractional_max_pool3d_backward": ("self",),
    "max_pool2d_with_indices_backward": ("self",), "max_pool3d_with_indices_backward": ("self",),
    "avg_pool2d_backward": ("self",), "avg_pool3d_backward": ("self",), "adaptive_max_pool2d_backward": ("self",),
    "_adaptive_avg_pool2d_backward": ("self",), "_adaptive_avg_pool3d_backward": ("self",),
    "reflection_pad1d_backward": ("self",), "reflection_pad2d_backward": ("self",),
    "replication_pad1d_backward": ("self",), "replication_pad2d_backward": ("self",),
    "nll_loss_backward": ("self", "total_weight"), "nll_loss2d_backward": ("self", "total_weight"),
    "_segment_reduce_backward": ("output", "data"),
    "_embedding_bag_backward": ("indices", "offsets", "offset2bag", "bag_size", "maximum_indices"),
    "mkldnn_rnn_layer_backward": ("input", "hx_", "cx_tmp", "output", "hy_", "cy_", "weight3", "weight4"),
}

#: Ops whose result is the same for all integers, or for all unsigned ones.
ASKING_OF_REALS = frozenset({"isnan", "isinf", "isposinf", "isneginf", "signbit"})

#: Ops that return a copy of `self` with a part overwritten, which may be the whole.
SCATTERING = frozenset({
    "scatter", "index_put", "slice_scatter", "select_scatter", "index_copy", "masked_scatter", "index_fill",
    "diagonal_scatter", "as_strided_scatter", "copy", "fill", "index_reduce", "scatter_reduce",
})

#: Ops that return the index of an element, or the element at an index.
CHOOSING = frozenset({
    "argmax", "argmin", "max", "min", "topk", "sort", "argsort", "kthvalue", "median", "mode", "cummax", "cummin",
    "multinomial", "multi_margin_loss", "multilabel_margin_loss_forward",
    "multi_margin_loss_backward", "multilabel_margin_loss_backward",
})

#: Arguments with an index to ignore. If it is 0, an index that always exists, -1 is tried; 255 may be a mark.
PASSED_OVER = frozenset({"ignore_index", "padding_idx"})

#: Arguments that cut off a part of the tensor; 0 is tried for them.
CUTTING = frozenset({"diagonal", "pad"})

#: Ops that use integers as numbers, although torch tags none of their overloads (`may_be_index`).
_ANY_INTEGER = frozenset({
    "copy", "_to_copy", "clone", "cumsum", "cumprod", "cummax", "cummin", "cat", "stack", "equal", "isin", "view",
    "_unsafe_view", "_reshape_alias", "as_strided", "alias", "detach", "expand", "permute", "transpose", "t", "slice",
    "select", "unsqueeze", "squeeze", "reshape", "diagonal", "unfold", "lift_fresh", "unbind", "split",
    "split_with_sizes", "_local_scalar_dense", "tril", "triu", "repeat", "flip", "roll", "constant_pad_nd", "fill",
    "floor_divide", "bucketize", "searchsorted", "sort", "topk", "kthvalue", "median", "mode", "nonzero", "histc",
    "_unique2", "unique_dim", "unique_consecutive", "mm", "_int_mm", "bmm", "addmm", "baddbmm", "mv", "dot",
})

#: Ops that use integers as indices only in the given arguments. `_ctc_loss` checks the lengths it is given.
_INDEXING = frozenset({
    "gather", "index", "_unsafe_index", "index_select", "take", "masked_select", "index_put", "_unsafe_index_put",
    "_index_put_impl", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill",
    "index_reduce", "masked_scatter", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter",
    "_ctc_loss",
})

_INDICES = frozenset({"index", "indices", "targets"})
# fmt: on

#: Names of the tags of ops that use integers as numbers; torch 2.11 lacks some of them.
_NUMBER_TAGS = frozenset({"pointwise", "reduction"})


def may_be_index(tensor: torch.Tensor, func: Any, argument: str) -> bool:
    """Returns whether an op may use a tensor's integers as indices, which not every kernel checks."""
    is_real = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    if is_real or tensor.dtype is torch.bool or _takes_any_integer(func):
        return False
    return _functional_name(func) not in _INDEXING or argument in _INDICES


@cache
def _takes_any_integer(func: Any) -> bool:
    """Returns whether an op uses integers as numbers, not as indices.

    Some overloads lack the tag of the others (torch 2.13: `le_.Scalar`, `masked_fill.Tensor`, all of `_foreach_add`).
    """
    functional = _functional_name(func)
    packet = getattr(torch.ops.aten, functional or "", None)
    overloads = [] if packet is None else packet.overloads()
    return (
        functional in _ANY_INTEGER
        or _counts(func)
        or any(_counts(getattr(packet, overload)) for overload in overloads)
    )


def _functional_name(func: Any) -> str | None:
    """Returns "add" for `aten.add_.Tensor` and `aten._foreach_add.List`; None if the op is not one of torch's."""
    base = base_name(name_of(func))
    if not base.startswith("aten."):
        return None
    return base.removeprefix("aten.").removeprefix("_foreach_").rstrip("_")


def _counts(func: Any) -> bool:
    return any(tag.name in _NUMBER_TAGS for tag in func.tags)
