"""FLOPs that a recording says of forward and backward are those that one counts by hand: a multiply-add is 2."""

from collections import Counter

import pytest
import torch
from torch import nn

import modtrace

pytestmark = pytest.mark.usefixtures("seeded")


def flops_by_phase(model, *args):
    """Of one call and its backward; None in it where they are not known."""
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        output = model(*args)
        (output[0] if isinstance(output, tuple) else output).sum().backward()
    counted = Counter()
    for row in rec.table("ops").to_pylist():
        assert row["flops"] is not None, row["name"]
        counted[row["phase"]] += row["flops"]
    roots = [row["flops"] for row in rec.table("calls").to_pylist() if row["parent_call_id"] is None]
    assert roots == [counted["forward"], counted["backward"]]  # all of it is in calls
    return counted["forward"], counted["backward"]


def test_linear_layers():
    """6 rows, 4 -> 8 -> 2; the input of the first needs no gradient."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    first, second = 2 * 6 * 4 * 8, 2 * 6 * 8 * 2
    assert flops_by_phase(model, torch.randn(6, 4)) == (first + second, first + 2 * second)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_attention():
    """Batch 3, 5 tokens, 2 heads of 8: a product for scores, one for values; in backward five, as torch counts."""
    projection = 2 * (3 * 5) * 16 * 48
    product = 2 * (3 * 2) * 5 * 5 * 8
    x = torch.randn(3, 5, 16, requires_grad=True)
    assert flops_by_phase(Attention(), x) == (projection + 2 * product, 2 * projection + 5 * product)


def test_lstm():
    """7 steps of batch 3, 4 -> 5, two layers in both directions: four gates see input and hidden state."""
    model = nn.LSTM(4, 5, num_layers=2, bidirectional=True)
    first, second = 2 * 7 * 3 * 4 * 5 * (4 + 5), 2 * 7 * 3 * 4 * 5 * (10 + 5)
    forward = 2 * first + 2 * second
    x = torch.randn(7, 3, 4, requires_grad=True)
    assert flops_by_phase(model, x) == (forward, 2 * forward)
