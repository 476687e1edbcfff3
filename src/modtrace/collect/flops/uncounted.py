"""Decides by its name whether an operator without a formula multiplies matrices, or does as much work."""

import re

#: PyTorch's own namespaces. What operators of other namespaces do is not known.
_NAMESPACES = frozenset(
    {
        *("aten", "prim", "prims", "inductor", "inductor_prims", "static_runtime", "export", "sparse"),
        *("quantized", "_quantized", "quantization", "quantized_decomposed"),
        *("onednn", "mkldnn", "mkldnn_prepacked", "mkl"),
        *("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "fsdp", "_dtensor"),
        *("profiler", "rngprims", "debugprims", "debug_mode_ops"),
    }
)

#: One of these between underscores names a product, a factorisation or an FFT.
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

#: One of these names an operator that only prepares or queries the data of a product, or has a similar name.
_HARMLESS = re.compile(
    r"(?:^|_)(?:reorder|prepack|unpack|pack|convert|flatten|quantize|check|use|erf|slice|i?fftshift|r?fftfreq)(?=_|$)"
)


def is_unknown(name: str) -> bool:
    """Returns whether an operator without a formula (`aten::linalg_svd.U`) does work that should be counted."""
    namespace, _, rest = name.partition("::")
    base = rest.partition(".")[0]
    if namespace not in _NAMESPACES:
        return True
    return _WORD.search(base) is not None and _HARMLESS.search(base) is None
