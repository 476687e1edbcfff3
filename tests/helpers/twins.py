"""Runs the same code with and without a recording, and tells what of its outcome differs."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import modtrace

#: What a run gives: tensors and plain values, however nested.
Run = Callable[[], Any]


def assert_untouched(run: Run, **options: Any) -> modtrace.Recording:
    """The run gives the same bits, and leaves the same generator states, when it is recorded.

    Returns:
        the recording, which is whole and has calls in it.
    """
    plain = outcome(run)
    recording = modtrace.record(strict=True, **options)
    recorded = outcome(run, recording)
    assert recorded == plain
    assert recording.meta.marks == ()
    assert recording.table("calls").num_rows > 0
    return recording


def outcome(run: Run, recording: Any = None) -> list[Any]:
    """What the run gives and where it leaves the generators, from fixed seeds; tensors as their bytes."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with nullcontext() if recording is None else recording:
        given = run()
    generators = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    return [bits(each) for each in tree_leaves((given, generators))]


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().flatten()
        return (
            value.dtype,
            tuple(value.shape),
            value.requires_grad,
            flat.view(torch.uint8).cpu().numpy().tobytes(),
        )
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return value


def grads(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients of a model by parameter."""
    return {name: each.grad for name, each in model.named_parameters()}


def state(model: torch.nn.Module) -> list[Any]:
    """Its parameters and buffers, and their gradients."""
    return [dict(model.state_dict()), grads(model)]
