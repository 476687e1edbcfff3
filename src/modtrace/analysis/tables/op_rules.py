"""Rules for single operators: which pass on intended infinities, and which remove them."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: They put a constant of the caller's into a tensor: an infinity in it is intended.
FILLS = _names(
    "full full_like new_full fill masked_fill where scatter index_fill constant_pad_nd scalar_tensor clamp clamp_min "
    "clamp_max index_put select_scatter slice_scatter masked_scatter nan_to_num fill_diagonal"
)

#: They write what they are given as it is.
WRITES = FILLS | _names("copy lift_fresh clone to_copy cat stack")

#: They return what they are given, in another place or shape, and write no numbers of their own.
MOVES = WRITES | _names(
    "contiguous expand repeat index index_select gather take embedding tril triu flip roll view unsafe_view reshape "
    "index_copy select narrow split chunk unbind detach alias squeeze unsqueeze permute t transpose set pin_memory"
)

#: They add numbers up.
ADDITIVE = _names("add sub rsub sum lerp addcmul addcdiv")

#: They add a product to what they read as `self`.
ADDS_PRODUCT = _names("addmm addbmm baddbmm addmv addr")

#: They return an axis more than they read, and count it with the others.
ADDS_AXIS = _names("unsqueeze stack")

#: They compute nothing, as views.
PLAIN = _names("to_copy detach alias clone copy contiguous unsafe_view lift_fresh")

#: They return elements of what they read, sums of two of them, or their extremes: a mask that they read is still one.
CARRIERS = WRITES | _names(
    "add sub rsub mul div neg abs minimum maximum max min amax amin cummax cummin logsumexp logcumsumexp log_softmax "
    "logaddexp logaddexp2 cumsum tril triu expand repeat index index_select gather take embedding sort topk flip roll "
    "view unsafe_view index_copy index_add scatter_add baddbmm"
)

#: They read a value in order to replace it: `where(x > 0, log(x), 0)`.
GUARDS = _names(
    "where masked_fill nan_to_num clamp clamp_min clamp_max masked_scatter masked_select index_put index index_select "
    "minimum maximum"
)

#: They make no NaN of finite numbers: one that they return was in what they read.
NEVER_NAN = _names(
    "clone copy to_copy cat stack contiguous repeat index index_select gather embedding flip roll tril triu "
    "add sub rsub mul neg abs relu threshold where masked_fill maximum minimum clamp clamp_min clamp_max"
)

#: They make NaN of nothing, and of numbers so large that sums of both signs overflow; else of none that are finite.
AVERAGES = _names("sum mean")

#: They return memory that nobody has written to.
UNINITIALIZED = _names(
    "empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize empty_affine_quantized"
)

#: They read the shape of a tensor, and not its values.
SHAPES_ONLY = UNINITIALIZED | _names(
    "ones_like zeros_like full_like rand_like randn_like randint_like new_ones new_zeros new_full zero"
)

#: They do not read what `self` holds, in place or not.
OVERWRITES = SHAPES_ONLY | _names("copy fill normal uniform random exponential geometric log_normal cauchy")

#: A softmax over scores that are all masked divides 0 by 0.
SOFTMAX = _names("softmax log_softmax safe_softmax masked_softmax")
CASTS = _names("to_copy")
LOGARITHMS = _names("log log2 log10 log1p logit xlogy")
DIVISIONS = _names("div reciprocal rsqrt fmod remainder")
EXPONENTIALS = _names("exp exp2 expm1 cosh sinh")
ROOTS = _names("sqrt rsqrt linalg_vector_norm norm pow hypot cdist_forward euclidean_dist")
VARIANCES = _names("var std var_mean std_mean")
MEANS = _names("mean nll_loss_forward nll_loss2d_forward")

#: They draw random numbers.
RANDOM = _names(
    "native_dropout dropout alpha_dropout feature_dropout fused_dropout bernoulli rand rand_like randn randn_like "
    "randint randint_like randperm normal uniform exponential geometric log_normal cauchy random multinomial poisson "
    "binomial rrelu_with_noise"
)

#: The op by which torch begins a backward: it reads the loss.
SEED = "aten.ones_like.default"

#: GradScaler's look at the gradients: an overflow before it is expected.
UNSCALES = "amp_foreach_non_finite_check_and_unscale"


def is_attention(name: str) -> bool:
    """Returns whether it is one of the fused kernels of attention, by its `bare_name`."""
    return "scaled_dot_product" in name or "efficient_attention" in name or "flash_attention" in name


def holds_nan(args: str) -> bool:
    """Returns whether a template of arguments has a NaN in it."""
    return '"nan"' in args


def holds_infinity(args: str) -> bool:
    """Returns whether a template of arguments has an infinite number in it."""
    return '"inf"' in args or '"-inf"' in args
