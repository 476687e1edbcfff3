"""Formulas are found for every operator that has one; where nothing can be known, nothing is said."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Size, nn
from torch.ops import aten
from torch.utils import flop_counter

from helpers.flop_mode import flops_of, total_flops
from modtrace.collect.flops.lookup import FORMULAS, count_flops, is_counted

QUERY, KEY = Size([2, 4, 3, 8]), Size([2, 4, 5, 8])
FORWARD = 2 * 2 * (2 * 4 * 3 * 5 * 8)


@pytest.fixture
def own_op() -> Iterator[Any]:
    """An operator of a user's, and the registry as it was afterwards."""
    before = dict(flop_counter.flop_registry)
    with torch.library._scoped_library("modtrace_flops", "FRAGMENT") as library:
        library.define("twice(Tensor x, Tensor[] more) -> Tensor")
        library.impl("twice", lambda x, more: x * 2, "CompositeExplicitAutograd")
        yield torch.ops.modtrace_flops.twice
    flop_counter.flop_registry.clear()
    flop_counter.flop_registry.update(before)


def test_operator_of_a_users_is_unknown_until_its_formula_is_registered(own_op: Any) -> None:
    def run() -> None:
        own_op(torch.ones(3, 4), [torch.ones(5)])

    assert flops_of(run) == [("modtrace_flops::twice", None)]

    @flop_counter.register_flop_formula(own_op)
    def flops(x: Size, more: list[Size], out_shape: Size | None = None, **kwargs: Any) -> int:
        assert (x, more, out_shape) == ((3, 4), [(5,)], (3, 4))
        return 7

    assert flops_of(run) == [("modtrace_flops::twice", 7)]


def test_raw_formula_is_given_what_has_a_shape(own_op: Any) -> None:
    @flop_counter.register_flop_formula(own_op, get_raw=True)
    def flops(x: Any, more: Any, out_val: Any = None, **kwargs: Any) -> int:
        return x.numel() * x.size(0) * x.dim() * len(more[0].shape) * out_val.ndim * out_val.size()[1]

    assert flops_of(lambda: own_op(torch.ones(3, 4), [torch.ones(5)])) == [
        ("modtrace_flops::twice", 12 * 3 * 2 * 1 * 2 * 4)
    ]


def test_formula_that_raises_leaves_the_flops_unknown(own_op: Any) -> None:
    @flop_counter.register_flop_formula(own_op, get_raw=True)
    def flops(x: Any, more: Any, out_val: Any = None, **kwargs: Any) -> int:
        return 8 if x.dtype == torch.float32 else 4  # the tensor is gone

    assert flops_of(lambda: own_op(torch.ones(3, 4), [])) == [("modtrace_flops::twice", None)]


def test_users_formula_wins_over_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    op = aten._scaled_dot_product_flash_attention_for_cpu
    monkeypatch.setitem(flop_counter.flop_registry, op, lambda *args, **kwargs: 1.0)
    assert count_flops(op.default, [QUERY, KEY, KEY], {}, [QUERY, Size([2, 4, 3])]) == 1


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.fft.fft(torch.ones(8)),
        lambda: torch.linalg.solve(torch.eye(3), torch.ones(3, 1)),
        lambda: torch.linalg.svdvals(torch.ones(3, 3)),
        lambda: torch.linalg.norm(torch.ones(3, 3), "nuc"),
        lambda: torch.matrix_exp(torch.eye(3)),
        lambda: torch.sparse.mm(torch.eye(4).to_sparse(), torch.ones(4, 5)),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_what_no_shape_tells_is_unknown(run: Any, mode: Any) -> None:
    with mode():
        assert None in [flops for _, flops in flops_of(run)]


@pytest.mark.parametrize(
    "op",
    [
        aten.add.Tensor,
        aten.upsample_bilinear2d.default,
        aten.relu_.default,
        aten.cumsum.default,
        aten.fft_fftshift.default,
        aten.embedding_bag.default,
        aten._cudnn_rnn_flatten_weight.default,
        aten._linalg_check_errors.default,
        torch.ops.mkl._mkl_reorder_linear_weight.default,
        torch.ops.profiler._record_function_enter_new.default,
    ],
    ids=str,
)
def test_element_wise_operators_and_reductions_count_as_nothing(op: Any) -> None:
    assert count_flops(op, [Size([3, 4])], {}, Size([3, 4])) == 0
    assert not is_counted(op)


def test_shapes_that_do_not_fit_are_unknown() -> None:
    assert count_flops(aten.mm.default, [Size([]), Size([])], {}, Size([])) is None
    assert count_flops(aten.einsum.default, ["ij,jk", [Size([2, 3]), Size([4, 5])]], {}, Size([2, 5])) is None


def test_higher_order_operator_is_unknown_unless_registered() -> None:
    flex = torch.ops.higher_order.flex_attention
    expected = (
        FORWARD if flex in flop_counter.flop_registry else None
    )  # torch before 2.13 has no formula of it
    assert count_flops(flex, [QUERY, KEY, KEY], {}, [QUERY, Size([2, 4, 3])]) == expected
    assert count_flops(torch.ops.higher_order.cond, [Size([])], {}, Size([3])) is None


def test_composite_is_taken_apart_unseen_and_draws_no_number() -> None:
    state = torch.get_rng_state()
    args = ["ab,bc,cd->ad", [Size([2, 3]), Size([3, 4]), Size([4, 5])]]
    with torch.inference_mode():
        found = flops_of(lambda: count_flops(aten.einsum.default, args, {}, Size([2, 5])))
    assert found == []
    assert count_flops(aten.einsum.default, args, {"path": [1, 2, 0, 1]}, Size([2, 5])) == (
        2 * 3 * 4 * 5 + 2 * 2 * 3 * 5
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_bilinear_layer_counts_the_products_that_are_made_of_it() -> None:
    layer = nn.Bilinear(3, 4, 5)
    x, y = torch.ones(6, 3, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    rows = 6 * 5 * 3 * 4
    with torch.no_grad():
        assert total_flops(lambda: layer(x, y)) == 2 * (rows + 6 * 5 * 4)
    names = [name for name, _ in flops_of(lambda: layer(x, y).sum().backward())]
    assert names == ["aten::_trilinear"] * 4


#: Where torch's formula is passed over, and what is wrong with it.
WRONG_IN_TORCH = {
    "aten::convolution_backward": "counts the gradient of a grouped weight once a group",
    "aten::cudnn_convolution": "takes `benchmark` for `transposed`",
    "aten::_slow_conv2d_forward": "asks for more arguments than the operator has",
    "aten::bmm.dtype": "takes `out_dtype` for the shape of the output",
    "aten::addmm.dtype": "the same",
    "aten::baddbmm.dtype": "the same",
    "aten::_flash_attention_forward": "takes heads for positions",
    "aten::_flash_attention_backward": "the same",
    "aten::_efficient_attention_forward": "the same",
    "aten::_efficient_attention_backward": "the same",
}


def test_our_formulas_are_of_what_torch_lacks_or_gets_wrong() -> None:
    in_torch = {str(packet).replace(".", "::", 1) for packet in flop_counter.flop_registry}
    assert {name for name in FORMULAS if name.partition(".")[0] in in_torch} == WRONG_IN_TORCH.keys()


def test_torchs_formula_counts_the_in_place_variant() -> None:
    args = [Size([3, 5]), Size([3, 4]), Size([4, 5])]
    assert count_flops(aten.addmm_.default, args, {}, Size([3, 5])) == 2 * 3 * 4 * 5
    assert "aten::addmm" not in FORMULAS
    assert is_counted(aten.addmm_.default)
