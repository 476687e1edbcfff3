"""What a graph keeps for backward agrees with what `saved_tensors_hooks` counts, and reading it changes nothing."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zoo
from modtrace.collect.ops.saved_tensors import (
    SavedByNode,
    SavedTensor,
    _Described,
    _read,
    charge,
    saved_in_graph,
    storages_of,
)
from modtrace.torch_internals.modes import unseen

ROW = 16  # bytes of a tensor of four float32
COPY_SLICES = "torch::autograd::CopySlices"  # an in-place op on a view

pytestmark = pytest.mark.usefixtures("seeded")


def saved_by(node: Any) -> tuple[list[SavedTensor], bool]:
    """What one node keeps, and whether it keeps, or may keep, more than that."""
    with unseen():
        found = _read(node._sequence_nr(), node, frozenset(), _Described())
    return found.saved, found.is_unknown


def _leaf() -> Tensor:
    return torch.randn(4, requires_grad=True)


def _charged(output: Tensor, *alive_anyway: Tensor) -> dict[int, int | None]:
    return charge(saved_in_graph([output.grad_fn]), storages_of(alive_anyway))


def _total(charged: dict[int, int | None]) -> int:
    """Of a graph in which everything is known."""
    assert None not in charged.values()
    return sum(charged.values())


def _by_name(output: Tensor, *alive_anyway: Tensor) -> list[tuple[str, int | None]]:
    saved_by_nodes = saved_in_graph([output.grad_fn])
    charged = charge(saved_by_nodes, storages_of(alive_anyway))
    return [(each.name, charged[each.sequence_nr]) for each in saved_by_nodes]


def _counted_by_hooks(run: Callable[[], Tensor], *alive_anyway: Tensor) -> int:
    """The bytes of all storages that a run saves, except for those of some tensors."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())  # an address is used again as soon as its tensor is gone
        return kept[-1]

    with saved_tensors_hooks(pack, lambda packed: packed):
        output = run()
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    for each in alive_anyway:
        sizes.pop(each.untyped_storage().data_ptr(), None)
    del output
    return sum(sizes.values())


# Agreement with an independent count.


@pytest.mark.parametrize("reentrant, unknown", [(None, {COPY_SLICES}), (True, set()), (False, {COPY_SLICES})])
def test_tied_weights_dropout_and_in_place_work_are_counted_as_hooks_do(reentrant, unknown):
    model = zoo.TiedGPT()
    tokens = torch.randint(17, (2, 8))

    def run() -> Tensor:
        return model(tokens, reentrant).sum()

    expected = _counted_by_hooks(run, tokens, *model.parameters())
    saved_by_nodes = saved_in_graph([run().grad_fn])
    charged = charge(saved_by_nodes, storages_of([tokens]))
    assert expected > 0
    assert sum(size or 0 for size in charged.values()) == expected  # in-place ops keep what others keep too
    assert {each.name for each in saved_by_nodes if each.is_unknown} == unknown


def test_buffers_and_indices_are_counted_as_hooks_do():
    """Batch norm keeps buffers; pooling keeps indices."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(2))
    x = torch.randn(2, 3, 6, 6)
    alive = [x, *model.parameters(), *model.buffers()]

    expected = _counted_by_hooks(lambda: model(x), *alive)
    assert expected > 0
    assert _total(_charged(model(x), *alive)) == expected


# Who is charged.


def test_a_tensor_saved_twice_is_charged_to_the_first_node_that_keeps_it():
    result = _leaf().exp().sin()
    assert _by_name(result) == [("ExpBackward0", ROW), ("SinBackward0", 0)]
    assert [len(each.saved) for each in saved_in_graph([result.grad_fn])] == [1, 1]


def test_a_slice_is_charged_with_the_whole_storage_that_it_keeps():
    small = torch.randn(1000)[:4]
    (saved,), is_unknown = saved_by((_leaf() * small).grad_fn)

    assert (saved.size_bytes, saved.is_leaf, is_unknown) == (4000, False, False)


def test_parameters_and_their_views_are_not_charged():
    weight = torch.randn(4, 4, requires_grad=True)
    product = weight.exp() @ weight.t()

    assert _by_name(product) == [("ExpBackward0", 64), ("TBackward0", 0), ("MmBackward0", 0)]
    assert sorted(each.is_leaf for each in saved_by(product.grad_fn)[0]) == [False, True]


def test_frozen_weights_are_charged_unless_they_are_named():
    frozen = torch.randn(4)
    result = _leaf() * frozen

    assert _by_name(result) == [("MulBackward0", ROW)]
    assert _by_name(result, frozen) == [("MulBackward0", 0)]


def test_nodes_are_charged_by_number_whatever_their_order():
    small, large, leaf = (
        SavedTensor(1, 10, False),
        SavedTensor(2, 30, False),
        SavedTensor(3, 7, True),
    )
    saved_by_nodes = [
        SavedByNode(9, "late", [small, large], False),
        SavedByNode(4, "early", [small, leaf], False),
        SavedByNode(4, "of another thread", [SavedTensor(4, 100, False)], False),
        SavedByNode(5, "hidden", [SavedTensor(5, 1, False)], True),
        SavedByNode(5, "of another thread", [SavedTensor(6, 1, False)], False),
    ]

    assert charge(saved_by_nodes) == {4: 110, 5: None, 9: 30}
    assert charge(saved_by_nodes, {2, 4}) == {4: 10, 5: None, 9: 0}
    assert charge([]) == {}


def test_roots_may_be_none_repeated_or_leaves():
    leaf = _leaf()
    node = leaf.exp().grad_fn
    accumulate = node.next_functions[0][0]

    assert [each.name for each in saved_in_graph([None, node, node, accumulate])] == ["ExpBackward0"]


def test_a_detached_alias_of_a_parameter_in_the_same_graph_is_not_charged():
    weight = _leaf()
    assert _by_name(weight.add(1) * weight.detach()) == [("AddBackward0", 0), ("MulBackward0", 0)]


def test_a_long_chain_is_walked():
    x = _leaf()
    for _ in range(2000):
        x = x + 1
    assert len(saved_in_graph([x.grad_fn])) == 2000


# What nodes hold in other ways.


class _Keeper(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, None, x * 2)
        ctx.one = torch.zeros(10)
        ctx.more = {"a": [torch.zeros(20), None], "b": 3}
        ctx.more["itself"] = ctx.more
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_custom_function_keeps_what_it_saves_and_what_lies_on_its_ctx():
    assert _by_name(_Keeper.apply(_leaf())) == [("_KeeperBackward", ROW + 40 + 80)]


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda tensor: SimpleNamespace(inside=[tensor]), None),
        (lambda tensor: lambda: tensor, None),
        (lambda tensor: functools.partial(torch.add, tensor), None),
        (lambda tensor: SimpleNamespace(size=3, name="no tensor", more={"a": (1, 2.0)}), 0),
        (lambda tensor: nn.BatchNorm1d(4), 0),
        (lambda tensor: torch.float32, 0),
    ],
    ids=["object", "closure", "partial", "numbers", "module", "dtype"],
)
def test_it_is_unknown_what_a_function_keeps_in_objects_that_hold_tensors(make, expected):
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = make(x.exp())
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    assert _by_name(Keeps.apply(_leaf())) == [("KeepsBackward", expected)]


def test_a_list_of_tensors_is_read():
    index = torch.tensor([0, 1])
    assert _by_name(_leaf()[index]) == [("IndexBackward0", 16)]


def test_a_number_that_an_op_is_given_counts_although_hooks_are_not_shown_it():
    assert _by_name(_leaf() * 0.5) == [("MulBackward0", 8)]


def test_a_wrapper_subclass_keeps_the_tensors_that_it_wraps():
    wrapped = TwoTensor(torch.randn(4), torch.randn(4))
    assert _by_name(_leaf() * wrapped) == [("MulBackward0", 2 * ROW)]


def test_what_cannot_be_seen_is_unknown():
    x = _leaf()
    through_view = x.exp()
    through_view[:2].mul_(x[:2])
    (hidden,) = torch._foreach_exp([x])
    sparse = torch.sparse.mm(torch.eye(4).to_sparse(), torch.randn(4, 4, requires_grad=True))

    assert saved_by(through_view.grad_fn) == ([], True)
    assert saved_by(hidden.grad_fn) == ([], True)
    assert _by_name(sparse)[-1] == ("SparseAddmmBackward0", None)
    assert _charged(through_view)[through_view.grad_fn._sequence_nr()] is None


@pytest.mark.parametrize("hooks", [lambda: saved_tensors_hooks(lambda x: x, lambda x: x), save_on_cpu])
def test_what_hooks_of_the_users_have_packed_is_unknown(hooks):
    with hooks():
        result = _leaf().exp()
    assert saved_by(result.grad_fn) == ([], True)


def test_tensors_inside_a_transform_are_unknown():
    seen = []

    def function(x: Tensor) -> Tensor:
        y = x.exp()
        seen.append(saved_by(y.grad_fn))
        return y.sum()

    torch.func.vmap(torch.func.grad(function))(torch.randn(2, 3))
    assert seen == [([], True)]


# Checkpoints.


def _twice(x: Tensor, scale: Tensor | None = None) -> Tensor:
    y = x.exp().exp()
    return y if scale is None else y * scale


def test_a_checkpointed_region_is_charged_with_what_its_recompute_needs():
    result = checkpoint(_twice, _leaf() + 1, use_reentrant=False)
    assert _by_name(result) == [("AddBackward0", 0), ("ExpBackward0", ROW), ("ExpBackward0", 0)]


@pytest.mark.parametrize(
    "run",
    [
        lambda x, scale: checkpoint(_twice, x, use_reentrant=False, scale=scale),
        lambda x, scale: checkpoint(functools.partial(_twice, scale=scale), x, use_reentrant=False),
        lambda x, scale: checkpoint(lambda both: _twice(*both), (x, scale), use_reentrant=False),
        lambda x, scale: checkpoint(functools.partial(_twice, scale=scale), x, use_reentrant=True),
        lambda x, scale: checkpoint(lambda x, more: _twice(x, more[0]), x, [scale], use_reentrant=True),
    ],
    ids=["keyword", "partial", "tuple", "reentrant, partial", "reentrant, list"],
)
def test_arguments_of_a_region_count_however_they_are_given(run):
    result = run(_leaf() + 1, torch.randn(100)[:4])
    assert _total(_charged(result)) == ROW + 400


def test_nested_regions_keep_only_what_the_outer_one_needs():
    def inner(x: Tensor) -> Tensor:
        return checkpoint(_twice, x.sin(), use_reentrant=False).sin()

    result = checkpoint(inner, _leaf() + 1, use_reentrant=False)
    assert _total(_charged(result)) == ROW


def test_a_selective_checkpoint_keeps_the_outputs_that_its_policy_saves():
    def policy(ctx, op, *args, **kwargs):
        keep = op is torch.ops.aten.sin.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    result = checkpoint(lambda x: x.exp().sin().exp(), _leaf() + 1, use_reentrant=False, context_fn=contexts)
    assert _total(_charged(result)) == 2 * ROW


def test_a_region_with_a_context_of_the_users_is_unknown():
    class Context:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    result = checkpoint(_twice, _leaf(), use_reentrant=False, context_fn=lambda: (Context(), Context()))
    assert set(_charged(result).values()) == {None}


def test_a_recompute_that_was_used_in_part_is_counted_while_it_is_kept():
    x, y = _leaf(), _leaf()
    first, second = checkpoint(lambda x, y: (x.exp(), y.exp()), x, y, use_reentrant=False)
    roots = [first.grad_fn, second.grad_fn]
    before = charge(saved_in_graph(roots))
    torch.autograd.grad(second.sum(), y, retain_graph=True)
    between = charge(saved_in_graph(roots))

    assert _total(before) == 0
    assert _total(between) == ROW


# Reading changes nothing.


def test_reading_runs_no_unpack_hook_and_no_recompute():
    runs = []

    def region(x: Tensor) -> Tensor:
        runs.append("forward")
        return x.exp().sin()

    def unpack(x: Tensor) -> Tensor:
        runs.append("unpack")
        return x

    with saved_tensors_hooks(lambda x: x, unpack):
        hooked = _leaf().exp()
    saved_in_graph([checkpoint(region, _leaf(), use_reentrant=False).grad_fn, hooked.grad_fn])
    assert runs == ["forward"]


def _graph() -> tuple[Tensor, list[StorageWeakRef]]:
    """A sum, and the storages of what its graph has saved: an input and an output of an op."""
    x = _leaf()
    saved_input, saved_output = x + 1, x.exp()
    result = (saved_input.sin() * _Keeper.apply(saved_output)[torch.tensor([0, 1, 2, 3])]).sum()
    return result, [StorageWeakRef(each.untyped_storage()) for each in (saved_input, saved_output)]


def test_backward_frees_what_was_read():
    result, storages = _graph()
    saved_by_nodes = saved_in_graph([result.grad_fn])
    assert [each.expired() for each in storages] == [False, False]

    result.backward()
    assert [each.expired() for each in storages] == [True, True]
    assert len(saved_by_nodes) == 7


def test_after_backward_only_what_lies_on_a_ctx_is_left():
    result, _ = _graph()
    result.backward()

    left = [(each.name, each.saved, each.is_unknown) for each in saved_in_graph([result.grad_fn])]
    kept = [name for name, saved, _ in left if saved]
    assert kept == ["_KeeperBackward"]
    assert not any(is_unknown for _, _, is_unknown in left)


def test_a_tensor_modified_since_is_read_and_backward_still_says_so():
    x = _leaf().exp()
    result = x.sin()
    x.add_(1)

    assert _by_name(result) == [("ExpBackward0", ROW), ("SinBackward0", 0)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
