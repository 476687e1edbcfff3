"""Groups of operators, by their names, for which analyses have rules of their own."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Ops that put a constant of the caller into a tensor, so an infinity in it is intended.
FILLS = _names(
    "full full_like new_full fill masked_fill where scatter index_fill constant_pad_nd scalar_tensor clamp clamp_min "
    "clamp_max index_put select_scatter slice_scatter masked_scatter nan_to_num fill_diagonal"
)

#: Ops that write their inputs unchanged.
WRITES = FILLS | _names("copy lift_fresh clone to_copy cat stack")

#: Ops that return their inputs at another position or in another shape, without computing new numbers.
MOVES = WRITES | _names(
    "contiguous expand repeat index index_select gather take embedding tril triu flip roll view unsafe_view reshape "
    "index_copy select narrow split chunk unbind detach alias squeeze unsqueeze permute t transpose set pin_memory"
)

#: Ops that add numbers up.
ADDITIVE = _names("add sub rsub sum lerp addcmul addcdiv")

#: Ops that add a product to their argument `self`.
ADDS_PRODUCT = _names("addmm addbmm baddbmm addmv addr")

#: Ops that return one axis more than they read, so their `dim` counts that axis, too.
ADDS_AXIS = _names("unsqueeze stack")

#: Ops that compute nothing, and are treated as views are.
PLAIN = _names("to_copy detach alias clone copy contiguous unsafe_view lift_fresh")

#: Ops that bring tensors from rank to rank, and compute nothing: what FSDP does around a module's parameters, say.
GATHERS = _names(
    "all_gather_into_tensor all_gather_into_tensor_coalesced allgather allgather_base all_gather_copy_in "
    "split_with_sizes_copy wait_tensor wrap_tensor_autograd broadcast record_function_enter_new record_function_exit "
    "all_gather_into_tensor_out broadcast_coalesced chunk_cat"
)

#: Ops that return elements of their inputs, sums of two of them or extremes, so a mask of infinities stays a mask.
CARRIERS = WRITES | _names(
    "add sub rsub mul div neg abs minimum maximum max min amax amin cummax cummin logsumexp logcumsumexp log_softmax "
    "logaddexp logaddexp2 cumsum tril triu expand repeat index index_select gather take embedding sort topk flip roll "
    "view unsafe_view index_copy index_add scatter_add baddbmm"
)

#: Ops that can absorb an unwanted value on purpose, by replacing it: `where(x > 0, log(x), 0)`.
GUARDS = _names(
    "where masked_fill nan_to_num clamp clamp_min clamp_max masked_scatter masked_select index_put index index_select "
    "minimum maximum"
)

#: Ops that make no NaN from finite numbers, so a NaN in an output was in an input.
NEVER_NAN = _names(
    "clone copy to_copy cat stack contiguous repeat index index_select gather embedding flip roll tril triu "
    "add sub rsub mul neg abs relu threshold where masked_fill maximum minimum clamp clamp_min clamp_max"
)

#: Ops that make NaN only of an empty tensor, or where sums of both signs overflow.
AVERAGES = _names("sum mean")

#: Ops that return memory to which nothing has been written.
UNINITIALIZED = _names(
    "empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize empty_affine_quantized"
)

#: Ops that read the shape of a tensor, not its values.
SHAPES_ONLY = UNINITIALIZED | _names(
    "ones_like zeros_like full_like rand_like randn_like randint_like new_ones new_zeros new_full zero"
)

#: Ops that ignore what `self` holds, whether they work in place or not.
OVERWRITES = SHAPES_ONLY | _names("copy fill normal uniform random exponential geometric log_normal cauchy")

#: Softmaxes, which divide 0 by 0 where all scores are masked.
SOFTMAX = _names("softmax log_softmax safe_softmax masked_softmax")
CASTS = _names("to_copy")
LOGARITHMS = _names("log log2 log10 log1p logit xlogy")
DIVISIONS = _names("div reciprocal rsqrt fmod remainder")
EXPONENTIALS = _names("exp exp2 expm1 cosh sinh")
ROOTS = _names("sqrt rsqrt linalg_vector_norm norm pow hypot cdist_forward euclidean_dist")
VARIANCES = _names("var std var_mean std_mean")
MEANS = _names("mean nll_loss_forward nll_loss2d_forward")

#: Functions whose slope is about as far apart between two runs as their values are: it has no jumps, and no poles as
#: that of powers has, nor a threshold as that of softplus.
SMOOTH = _names(
    "gelu silu mish sigmoid log_sigmoid_forward tanh native_layer_norm native_group_norm native_batch_norm "
    "fused_rms_norm"
)

#: Ops that draw random numbers.
RANDOM = _names(
    "native_dropout dropout alpha_dropout feature_dropout fused_dropout bernoulli rand rand_like randn randn_like "
    "randint randint_like randperm normal uniform exponential geometric log_normal cauchy random multinomial poisson "
    "binomial rrelu_with_noise"
)

#: The op that makes the first gradient of a backward, for which it reads the loss.
SEED = "aten.ones_like.default"

#: The op by which GradScaler looks for overflows in gradients, which are expected there.
UNSCALES = "amp_foreach_non_finite_check_and_unscale"


def is_attention(name: str) -> bool:
    """Returns whether a `bare_name` is that of a fused attention kernel."""
    return "scaled_dot_product" in name or "efficient_attention" in name or "flash_attention" in name


def holds_nan(args: str) -> bool:
    """Returns whether a template of arguments has a NaN in it."""
    return '"nan"' in args


def holds_infinity(args: str) -> bool:
    """Returns whether a template of arguments has an infinite number in it."""
    return '"inf"' in args or '"-inf"' in args
