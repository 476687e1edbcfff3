"""Operators that a CPU, a GPU or inductor has in place of another count what that one does."""

from typing import Any

import pytest
import torch
from torch import Size
from torch.ops import aten

from helpers.flop_mode import flops_of
from modtrace.collect.flops.lookup import count_flops, is_counted

foreach_mm = aten._foreach_mm.default if hasattr(aten, "_foreach_mm") else None

QUERY, KEY = Size([2, 4, 3, 8]), Size([2, 4, 5, 8])
FORWARD = 2 * 2 * (2 * 4 * 3 * 5 * 8)


@pytest.mark.parametrize(
    "op",
    [
        aten.scaled_dot_product_attention,
        aten._scaled_dot_product_attention_math,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_fused_attention_overrideable,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
    ],
    ids=str,
)
def test_every_kernel_of_attention_counts_the_same(op: Any) -> None:
    outputs = QUERY if op is aten.scaled_dot_product_attention else [QUERY, Size([2, 4, 3])]
    assert count_flops(op.default, [QUERY, KEY, KEY], {}, outputs) == FORWARD


@pytest.mark.parametrize(
    "op",
    [
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._scaled_dot_product_fused_attention_overrideable_backward,
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_efficient_attention_backward,
        aten._scaled_dot_product_cudnn_attention_backward,
    ],
    ids=str,
)
def test_every_backward_of_attention_takes_five_products_to_two(op: Any) -> None:
    outputs = [QUERY, KEY, KEY]
    assert count_flops(op.default, [QUERY, QUERY, KEY, KEY, QUERY], {}, outputs) == FORWARD * 5 // 2


def test_attention_counts_values_that_are_wider_than_keys() -> None:
    value, out = Size([2, 4, 5, 16]), Size([2, 4, 3, 16])
    op, back = (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    assert count_flops(op.default, [QUERY, KEY, value], {}, [out, None]) == 2 * 2 * 4 * 3 * 5 * (8 + 16)
    assert count_flops(back.default, [out, QUERY, KEY, value], {}, [QUERY, KEY, value]) == (
        2 * 2 * 4 * 3 * 5 * (3 * 8 + 2 * 16)
    )


#: The forward of each kernel of attention, what it takes between the values and the lengths of packed sequences, and
#: its backward.
KERNELS = {
    "flash": (aten._flash_attention_forward, (), aten._flash_attention_backward),
    "efficient": (aten._efficient_attention_forward, (None,), aten._efficient_attention_backward),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_of_attention_counts_heads_behind_positions(kernel: str) -> None:
    forward, bias, backward = KERNELS[kernel]
    query, key, value = Size([2, 3, 4, 8]), Size([2, 5, 4, 8]), Size([2, 5, 4, 16])
    rest = [None, None, 3, 5, 0.0, False]
    assert count_flops(forward.default, [query, key, value, *bias, *rest], {}, [query]) == (
        2 * 2 * 4 * 3 * 5 * (8 + 16)
    )
    out = Size([2, 3, 4, 16])
    given = [out, query, key, value, out, Size([2, 4, 3])]
    assert count_flops(backward.default, [*given, *rest], {}, [query, key, value]) == (
        2 * 2 * 4 * 3 * 5 * (3 * 8 + 2 * 16)
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_over_packed_sequences_is_unknown_as_their_lengths_are_gone(kernel: str) -> None:
    forward, bias, backward = KERNELS[kernel]
    packed, offsets = Size([1, 6, 4, 8]), Size([3])
    rest = [offsets, offsets, 3, 3, 0.0, False]
    assert count_flops(forward.default, [packed, packed, packed, *bias, *rest], {}, [packed]) is None
    assert count_flops(backward.default, [*[packed] * 5, Size([4, 6]), *rest], {}, [packed] * 3) is None


@pytest.mark.parametrize("op", [aten._cudnn_rnn, aten.miopen_rnn], ids=str)
def test_recurrent_layers_on_a_gpu_count_all_their_weights(op: Any) -> None:
    source, weights = Size([3, 2, 4]), [Size([20, 4]), Size([20, 5]), Size([20]), Size([20])]
    forward = 2 * 3 * 2 * 20 * 9
    assert count_flops(op.default, [source, weights, 4], {}, [source, None]) == forward
    backward = getattr(aten, f"{op.__name__}_backward").default
    no_weights = [source, weights, 4, [True, True, True, False]]
    assert count_flops(backward, no_weights, {}, [source, None, None, []]) == forward
    assert count_flops(backward, [*no_weights[:-1], [True] * 4], {}, [source]) == 2 * forward


@pytest.mark.parametrize(
    "op",
    [aten._thnn_fused_lstm_cell, aten._thnn_fused_gru_cell, aten._thnn_fused_lstm_cell_backward],
    ids=str,
)
def test_gates_of_a_cell_count_as_nothing(op: Any) -> None:
    assert count_flops(op.default, [Size([2, 20])] * 3, {}, [Size([2, 5])] * 3) == 0


@pytest.mark.parametrize(
    ("op", "args", "outputs", "flops"),
    [
        (aten.mm.dtype, [Size([3, 4]), Size([4, 5]), torch.float32], Size([3, 5]), 120),
        (aten.bmm.dtype, [Size([2, 3, 4]), Size([2, 4, 5]), torch.float32], Size([2, 3, 5]), 240),
        (aten.addmm.dtype, [Size([5]), Size([3, 4]), Size([4, 5]), torch.float32], Size([3, 5]), 120),
        (aten._scaled_mm.default, [Size([3, 4]), Size([4, 5]), Size([]), Size([])], Size([3, 5]), 120),
        (aten._addmm_activation.default, [Size([5]), Size([3, 4]), Size([4, 5])], Size([3, 5]), 120),
        pytest.param(
            *(foreach_mm, [[Size([3, 4])] * 2, [Size([4, 5])] * 2], [Size([3, 5])] * 2, 240),
            marks=pytest.mark.skipif(foreach_mm is None, reason="torch before 2.13 has no _foreach_mm"),
        ),
        (aten.mkldnn_linear.default, [Size([2, 3, 4]), Size([5, 4]), None], Size([2, 3, 5]), 240),
        (
            aten.mkldnn_linear_backward.default,
            [Size([2, 3, 4]), Size([2, 3, 5]), Size([5, 4]), [True, True, True]],
            [Size([2, 3, 4]), Size([5, 4]), Size([5])],
            480,
        ),
        (
            torch.ops.inductor._mm_plus_mm.default,
            [Size([3, 4]), Size([4, 5]), Size([3, 6]), Size([6, 5]), Size([3, 5])],
            Size([3, 5]),
            120 + 180,
        ),
        (
            torch.ops.mkl._mkl_linear.default,
            [Size([3, 4]), Size([1, 99]), Size([5, 4]), None, 3],
            Size([3, 5]),
            120,
        ),
        (
            aten.cudnn_convolution.default,  # `benchmark` stands where others say `transposed`
            [Size([2, 4, 8, 8]), Size([6, 4, 3, 3]), [0, 0], [1, 1], [1, 1], 1, True, False, False],
            Size([2, 6, 6, 6]),
            2 * (2 * 6 * 36) * 36,
        ),
        (aten.conv_tbc.default, [Size([8, 2, 4]), Size([3, 4, 6]), Size([6])], Size([6, 2, 6]), 2 * 72 * 12),
    ],
    ids=str,
)
def test_variant_of_a_product_counts_as_the_product(op: Any, args: Any, outputs: Any, flops: int) -> None:
    assert count_flops(op, args, {}, outputs) == flops
    assert is_counted(op)


def test_operators_that_inductor_fuses_count_their_product() -> None:
    x, weight, bias = torch.ones(2, 4, 8, 8), torch.ones(6, 2, 3, 3), torch.ones(6)
    conv = torch.ops.mkldnn._convolution_pointwise
    shape = [[1, 1], [1, 1], [1, 1], 2]
    flops = 2 * (2 * 6 * 64) * (2 * 9)
    found = flops_of(lambda: conv(x, weight, bias, *shape, "relu", [], ""))
    assert found == [("mkldnn::_convolution_pointwise", flops)]
    other = torch.ones(2, 6, 8, 8)
    found = flops_of(lambda: conv.binary(x, other, weight, bias, *shape, "add", 1.0, None, [], None))
    assert found == [("mkldnn::_convolution_pointwise.binary", flops)]
    linear = torch.ops.mkldnn._linear_pointwise
    found = flops_of(lambda: linear(torch.ones(3, 4), torch.ones(5, 4), None, "none", [], ""))
    assert found == [("mkldnn::_linear_pointwise", 120)]
