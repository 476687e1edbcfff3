"""Which ops use of an argument its shape alone, overwrite, choose, multiply ... by their names without overload."""

# fmt: off

#: Arguments of which an op uses the shape, the dtype or the presence. Asked of tensors that have changed nothing.
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
    "mkldnn_rnn_layer_backward": ("hx_", "cx_tmp", "output", "hy_", "cy_", "weight3", "weight4"),
}

#: These return `self` with something written into a part of it, which may be all of it.
SCATTERING = frozenset({
    "scatter", "index_put", "slice_scatter", "select_scatter", "index_copy", "masked_scatter", "index_fill",
    "diagonal_scatter", "as_strided_scatter", "copy", "fill", "index_reduce", "scatter_reduce",
})

#: These take some elements of their first tensor by their places.
SELECTING = frozenset({
    "index", "gather", "index_select", "embedding", "take", "take_along_dim", "masked_select", "roll", "flip",
})

#: Of these, and of all backwards, a factor that is zero hides the others.
MULTIPLYING = frozenset({
    "mul", "mul_", "mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear", "dot", "mv", "addmv", "addcmul",
    "addcmul_", "convolution", "_grouped_mm", "grouped_mm", "cumprod", "prod",
})

#: These give the place of an element, or the element at a place.
CHOOSING = frozenset({
    "argmax", "argmin", "max", "min", "topk", "sort", "argsort", "kthvalue", "median", "mode", "cummax", "cummin",
    "multinomial", "multi_margin_loss", "multilabel_margin_loss_forward",
    "multi_margin_loss_backward", "multilabel_margin_loss_backward",
})

#: Of these integers are plain numbers: any will do. Elsewhere they may be indices, and stay in the range they have.
ANY_INTEGER = frozenset({
    "add", "sub", "rsub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "where", "copy_", "_to_copy", "clone", "neg",
    "abs", "sum", "cumsum", "cat", "stack", "remainder", "maximum", "minimum", "max", "min", "amax", "amin", "any",
    "all", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "logical_and", "logical_or", "logical_not",
    "clamp", "clamp_min", "clamp_max", "floor_divide", "fmod", "equal", "isin", "view", "_unsafe_view", "alias",
    "detach", "expand", "permute", "transpose", "t", "slice", "select", "unsqueeze", "squeeze", "reshape",
    "lift_fresh", "unbind", "split", "_local_scalar_dense", "tril", "triu", "masked_fill", "div", "pow", "sign",
    "repeat", "flip", "roll", "constant_pad_nd", "add_", "sub_", "mul_", "masked_fill_", "eq_", "ne_",
})
