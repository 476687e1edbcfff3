"""Reads the settings of torch that change numbers: the seed, precision, determinism, autocast, kernels."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

#: What each setting is called, as a program would set it, and how it is read.
_READERS: Mapping[str, Callable[[], Any]] = {
    "seed": torch.initial_seed,  # of the last torch.manual_seed()
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
    "deterministic_debug_mode": lambda: ("default", "warn", "error")[torch.get_deterministic_debug_mode()],
    "cudnn.enabled": lambda: torch.backends.cudnn.enabled,
    "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "cuda.matmul.fp32_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
    "cuda.matmul.allow_fp16_reduced_precision_reduction": (
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "cuda.matmul.allow_bf16_reduced_precision_reduction": (
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "flash_sdp": torch.backends.cuda.flash_sdp_enabled,
    "mem_efficient_sdp": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math_sdp": torch.backends.cuda.math_sdp_enabled,
    "mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
    "autocast cpu": lambda: _read_autocast("cpu"),
    "autocast cuda": lambda: _read_autocast("cuda"),
    "CUBLAS_WORKSPACE_CONFIG": lambda: os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
}


def read_flags() -> dict[str, Any]:
    """Returns each setting as a JSON value; None where this torch does not tell it. No device is initialized."""
    return {name: _read(reader) for name, reader in _READERS.items()}


def _read(reader: Callable[[], Any]) -> Any:
    with suppress(AttributeError, RuntimeError):  # an older torch; or tf32 was set in another way
        return reader()
    return None


def _read_autocast(device: str) -> str:
    """Returns the dtype that autocast gives ops on a device, or "off"."""
    if not torch.is_autocast_enabled(device):
        return "off"
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
