"""Tells, by their names, operators that multiply matrices (or do as much) from those that count as nothing."""

import re

#: PyTorch's own namespaces. What an operator of anyone else's does cannot be known.
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

#: One of these says that it does not: it arranges what a product will read, asks about it, or is called alike.
_HARMLESS = re.compile(
    r"(?:^|_)(?:reorder|prepack|unpack|pack|convert|flatten|quantize|check|use|erf|slice|i?fftshift|r?fftfreq)(?=_|$)"
)


def is_unknown(name: str) -> bool:
    """Tells whether an operator for which there is no formula (`aten::linalg_svd.U`) does more than nothing."""
    namespace, _, rest = name.partition("::")
    base = rest.partition(".")[0]
    if namespace not in _NAMESPACES:
        return True
    return _WORD.search(base) is not None and _HARMLESS.search(base) is None
