"""Floating-point operations of linear layers, attention and products equal what one counts by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.flop_mode import flops_of, forward_and_backward, total_flops

#: What count_flops gives must not depend on how a model is run.
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_take_a_product_forward_and_two_backward(bias: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=bias), nn.ReLU(), nn.Linear(8, 3, bias=bias))
    # 2 * rows * in * out, with 2 * 5 rows; the input of the first layer needs no gradient.
    first, second = 2 * 10 * 4 * 8, 2 * 10 * 8 * 3
    assert (first, second) == (640, 480)
    assert forward_and_backward(model, torch.ones(2, 5, 4)) == (640 + 480, 640 + 2 * 480)


class Attention(nn.Module):
    """Projects 6 features to 2 heads of 4, attends, and projects back."""

    def __init__(self, kv_heads: int = 2) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.query = nn.Linear(6, 8)
        self.key = nn.Linear(6, kv_heads * 4)
        self.value = nn.Linear(6, kv_heads * 4)
        self.out = nn.Linear(8, 6)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (2, 4)).transpose(1, 2)
        key = self.key(context).unflatten(-1, (self.kv_heads, 4)).transpose(1, 2)
        value = self.value(context).unflatten(-1, (self.kv_heads, 4)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=self.kv_heads == 1)
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("kv_heads", "kv_projection"), [(2, 2 * 15 * 6 * 8), (1, 2 * 15 * 6 * 4)])
def test_attention_recomputes_its_scores_in_backward(kv_heads: int, kv_projection: int) -> None:
    # A batch of 3, 2 queries and 5 keys each. Scores and mixing: 2 * 3 * 2 heads * 2 * 5 * 4 each.
    query = out = 2 * 6 * 6 * 8
    scores = mixing = 2 * 3 * 2 * 2 * 5 * 4
    assert (query, scores) == (576, 480)
    forward, backward = forward_and_backward(Attention(kv_heads), torch.ones(3, 2, 6), torch.ones(3, 5, 6))
    assert forward == query + 2 * kv_projection + scores + mixing + out
    assert backward == query + 2 * kv_projection + scores + 2 * (scores + mixing) + 2 * out


def test_attention_with_dropout_keeps_its_scores() -> None:
    query = torch.ones(3, 2, 2, 4, requires_grad=True)
    key = torch.ones(3, 2, 5, 4, requires_grad=True)

    def run() -> None:
        F.scaled_dot_product_attention(query, key, key, dropout_p=0.5).sum().backward()

    assert flops_of(run) == [("aten::bmm", 480)] * 6


@pytest.mark.parametrize("mode", MODES)
def test_attention_counts_the_same_in_every_mode(mode: Callable[[], Any]) -> None:
    with mode():
        model, x, context = Attention(), torch.ones(3, 2, 6), torch.ones(3, 5, 6)
        assert total_flops(lambda: model(x, context)) == 576 + 2 * 1440 + 2 * 480 + 576


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("run", "flops"),
    [
        (lambda: ones(2, 3, 4) @ ones(4, 5), 2 * 2 * 3 * 4 * 5),
        (lambda: ones(2, 1, 3, 4) @ ones(6, 4, 5), 2 * 12 * 3 * 4 * 5),
        (lambda: ones(3, 4) @ ones(4), 2 * 3 * 4),
        (lambda: ones(3) @ ones(3, 4), 2 * 3 * 4),
        (lambda: ones(4) @ ones(4), 2 * 4),
        (lambda: torch.vdot(ones(4), ones(4)), 2 * 4),
        (lambda: torch.inner(ones(2, 4), ones(3, 4)), 2 * 2 * 3 * 4),
        (lambda: torch.mm(ones(3, 4), ones(4, 5), out=ones(3, 5)), 2 * 3 * 4 * 5),
        (lambda: torch.addmm(ones(5), ones(3, 4), ones(4, 5), out=ones(3, 5)), 2 * 3 * 4 * 5),
        (lambda: torch.bmm(ones(2, 3, 4), ones(2, 4, 5), out=ones(2, 3, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.baddbmm(ones(5), ones(2, 3, 4), ones(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.addbmm(ones(5), ones(2, 3, 4), ones(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.addmv(ones(3), ones(3, 4), ones(4)), 2 * 3 * 4),
        (lambda: torch.addr(ones(3, 4), ones(3), ones(4)), 2 * 3 * 4),
        (lambda: ones(3, 5).addmm_(ones(3, 4), ones(4, 5)), 2 * 3 * 4 * 5),
        (lambda: ones(2, 3, 5).baddbmm_(ones(2, 3, 4), ones(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.outer(ones(3), ones(4)), 0),
        (lambda: torch.kron(ones(3, 3), ones(4, 4)), 0),
        (lambda: F.bilinear(ones(6, 3), ones(6, 4), ones(5, 3, 4)), 2 * 6 * 5 * 3 * 4 + 2 * 6 * 5 * 4),
        (lambda: torch.einsum("bij,bjk->bik", ones(2, 3, 4), ones(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.einsum("i,j->ij", ones(3), ones(4)), 0),
        (lambda: torch.tensordot(ones(2, 3, 4), ones(3, 4, 5), 2), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.linalg.multi_dot([ones(2, 9), ones(9, 3), ones(3, 4)]), 2 * (2 * 9 * 3 + 2 * 3 * 4)),
        (lambda: torch.matrix_power(ones(3, 3), 4), 2 * 2 * 27),
        (lambda: torch.cdist(ones(2, 30, 3), ones(2, 40, 3)), 2 * 2 * 30 * 40 * 5),
        (lambda: torch.cdist(ones(3, 3), ones(4, 3)), 0),
        (lambda: ones(3, 3).int() @ ones(3, 3).int(), 54),
        (lambda: ones(3, 3).cfloat() @ ones(3, 3).cfloat(), 54),
        (
            lambda: torch._int_mm(torch.ones(32, 32, dtype=torch.int8), torch.ones(32, 32, dtype=torch.int8)),
            65_536,
        ),
        (lambda: F.embedding(torch.tensor([1, 2]), ones(4, 6)), 0),
        (lambda: F.layer_norm(ones(3, 4), (4,)).softmax(-1).sum(), 0),
        (lambda: torch.ones(0, 4) @ ones(4, 5), 0),
    ],
)
def test_product_counts_two_for_each_multiply_add(
    run: Callable[[], Tensor], flops: int, mode: Callable[[], Any]
) -> None:
    with mode():
        assert total_flops(run) == flops


@pytest.mark.parametrize(
    ("first", "second", "offsets", "flops"),
    [
        ((8, 16), (2, 16, 32), [3, 8], 2 * 8 * 16 * 32),
        ((2, 8, 16), (16, 32), [16, 32], 2 * 8 * 16 * 32),
        ((8, 32), (32, 16), [16, 32], 2 * 8 * 32 * 16),  # the groups divide what is summed over
        ((2, 8, 16), (2, 16, 32), None, 2 * 2 * 8 * 16 * 32),
    ],
)
def test_grouped_product_counts_its_groups_once(
    first: tuple[int, ...], second: tuple[int, ...], offsets: list[int] | None, flops: int
) -> None:
    where = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    operands = [torch.ones(first, dtype=torch.bfloat16), torch.ones(second, dtype=torch.bfloat16)]
    assert flops_of(lambda: F.grouped_mm(*operands, offs=where)) == [("aten::_grouped_mm", flops)]


def test_fast_paths_of_transformers_count_projections_attention_and_feed_forward() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    attention = layer.self_attn
    x = torch.ones(2, 3, 8)
    projections, products = 4 * 2 * 6 * 8 * 8, 2 * 2 * 2 * 3 * 3 * 8
    with torch.no_grad():
        found = flops_of(lambda: attention(x, x, x, need_weights=False))
        assert found == [("aten::_native_multi_head_attention", projections + products)]
        found = flops_of(lambda: layer(x))
        feed_forward = 2 * 2 * 6 * 8 * 16
        assert found == [("aten::_transformer_encoder_layer_fwd", projections + products + feed_forward)]
    assert total_flops(lambda: layer(x)) == projections + products + feed_forward
