"""Counts the floating-point operations of one operator call, from shapes alone.

The conventions are those of `torch.utils.flop_counter`: a multiply-add is 2; element-wise operators, reductions and
copies are 0; the dtype does not matter. Formulas come from three sources. Those that the user has registered with
`register_flop_formula` come first. Then come our own, for what torch does not count (attention on the CPU, recurrent
layers, quantised and fused products, composite operators, which a mode sees whole in inference mode) or counts wrongly
(see convolution_formulas.py and formulas.py). Then come torch's, which also count the in-place variants.
docs/limits.md lists where the numbers differ.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils import flop_counter

from .convolution_formulas import CONVOLUTIONS
from .formulas import PRODUCTS, Formula
from .layer_formulas import LAYERS
from .replay import REPLAYED, in_each, replay

#: Our formulas by the name of an operator or of one of its overloads.
FORMULAS: Mapping[str, Formula] = {**PRODUCTS, **LAYERS, **CONVOLUTIONS}


def count_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int | None:
    """Returns the floating-point operations of an operator's call; 0 if it only does work that is not counted.

    Padding, masked scores, and zeros of a sparse operand of a dense product (`aten.mm`) count as data.

    Args:
        func: the operator as a dispatch mode sees it: an `OpOverload` or a `HigherOrderOperator`.
        args: its positional arguments, with a `torch.Size` for each tensor, also inside lists.
        kwargs: its keyword arguments, likewise.
        outputs: what it returned, likewise.

    Returns:
        the count, or None if it is not known: a formula raised, or there is none for a product, a factorisation, an
        FFT, a sparse product, an operator that is not PyTorch's, or a higher-order operator.
    """
    try:
        flops = _count(func, args, kwargs, outputs)
        return None if flops is None else int(flops)
    except Exception:  # a user's formula failed, or ours did not expect the shapes
        return None


def is_counted(func: Any) -> bool:
    """Returns whether `count_flops` may return anything but 0 for an operator, whatever the shapes.

    A formula that the user registers later may change the answer.
    """
    name = func.name()
    is_registered = _find_registered(func) is not None
    return is_registered or _find_formula(name) is not None or _is_replayed(name) or is_unknown(name)


def _count(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> Any:
    registered = _find_registered(func)
    if registered is not None and not _is_torchs(registered):
        return _call_registered(registered, args, kwargs, outputs)
    formula = _find_formula(func.name())
    if formula is not None:
        is_several = isinstance(outputs, list | tuple) and not isinstance(outputs, torch.Size)
        return formula(args, outputs if is_several else [outputs])
    if registered is not None:
        return _call_registered(registered, args, kwargs, outputs)
    if _is_replayed(func.name()):
        return replay(count_flops, func, args, kwargs)
    return None if is_unknown(func.name()) else 0


def _find_registered(func: Any) -> Callable[..., Any] | None:
    """Returns the formula in torch's registry for the operator, or for the one of which it is the in-place variant."""
    packet = getattr(func, "overloadpacket", func)
    found = flop_counter.flop_registry.get(packet)
    name = func.name().removeprefix("aten::").partition(".")[0]
    if found is None and name.endswith("_") and name != func.name():
        found = flop_counter.flop_registry.get(getattr(torch.ops.aten, name[:-1], None))
    return found


def _find_formula(name: str) -> Formula | None:
    """Returns our formula for the overload, the operator, or the one of which it is the in-place variant."""
    plain = name.partition(".")[0]
    return FORMULAS.get(name) or FORMULAS.get(plain) or FORMULAS.get(plain.removesuffix("_"))


def _is_replayed(name: str) -> bool:
    return name.partition(".")[0] in REPLAYED


def _is_torchs(formula: Callable[..., Any]) -> bool:
    return getattr(formula, "__module__", None) == flop_counter.__name__


def _call_registered(
    formula: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any
) -> Any:
    """Calls a formula of torch's registry, which takes shapes or, with `get_raw=True`, tensors."""
    if getattr(formula, "__code__", None) is not _WRAPPER_CODE:  # the formula takes tensors
        args, kwargs, outputs = _as_shaped(args), _as_shaped(kwargs), _as_shaped(outputs)
    return formula(*args, **kwargs, out_val=outputs)


#: torch wraps all formulas that take shapes by one function, so all have its code.
_WRAPPER_CODE = getattr(flop_counter, "shape_wrapper")(_is_torchs).__code__  # noqa: B009 (untyped)


class _Shaped:
    """Stands in for a tensor that no longer exists. A formula that reads more than its shape raises an error."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.ndim = len(shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return prod(self.shape)


def _as_shaped(value: Any) -> Any:
    if isinstance(value, torch.Size):
        return _Shaped(value)
    return in_each(_as_shaped, value)


#: PyTorch's own namespaces; operators of other libraries have unknown costs.
_NAMESPACES = frozenset(
    {
        *("aten", "prim", "prims", "inductor", "inductor_prims", "static_runtime", "export", "sparse"),
        *("quantized", "_quantized", "quantization", "quantized_decomposed"),
        *("onednn", "mkldnn", "mkldnn_prepacked", "mkl"),
        *("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "fsdp", "_dtensor"),
        *("profiler", "rngprims", "debugprims", "debug_mode_ops"),
    }
)

#: Words in a name, between underscores, that mean a product, a factorisation or an FFT.
_WORD = re.compile(
    r"""(?:^|_)(?:
    mm|bmm|addmm|baddbmm|addbmm|smm|hspmm|sspaddmm|spmm|mv|addmv|gemm|matmul|dot|vdot|einsum|q?linear|bilinear
    |q?conv(?:olution)?(?:[123]d)?|attention|rnn|lstm|gru|transformer
    |svd|svdvals|eig|eigh|eigvals|eigvalsh|cholesky|qr|geqrf|orgqr|ormqr|householder|lu|ldl|lstsq|solve|tensorsolve
    |triangular|inv|inverse|tensorinv|pinv|pinverse|det|slogdet|logdet|cond|rank|matrix_exp|nuclear
    |i?[rh]?fft[2n]?|stft|istft
    )(?=_|$)""",
    re.VERBOSE,
)

#: Words in the names of operators that only prepare or query data of a product, or are named similarly.
_HARMLESS = re.compile(
    r"(?:^|_)(?:reorder|prepack|unpack|pack|convert|flatten|quantize|check|use|erf|slice|i?fftshift|r?fftfreq)(?=_|$)"
)


def is_unknown(name: str) -> bool:
    """Returns whether the FLOPs of an operator without formula are unknown, rather than 0.

    They are unknown for operators of other libraries, and for those of torch whose name has a word that stands for a
    product or for linear algebra (`aten::linalg_svd.U`).
    """
    namespace, _, rest = name.partition("::")
    base = rest.partition(".")[0]
    if namespace not in _NAMESPACES:
        return True
    return _WORD.search(base) is not None and _HARMLESS.search(base) is None
