"""Measuring changes no bit of a run and is seen by no mode, and its rows are those of that run."""

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
import zoo
from helpers.stat_rows import names, one, rows
from helpers.twins import assert_untouched, state
from helpers.user_modes import SeesFunctions, SeesOps

#: All that can be measured and kept.
EVERYTHING = modtrace.Capture(
    roles="all",
    stats=2,
    hash=True,
    sketch=True,
    sample=8,
    tensors=True,
    micro_batches=True,
    function=lambda x: x.dim(),
)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def loss_of(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 17, (2, 8))
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


# Each run gives all that it computes.


def in_place_relu():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4), nn.ReLU(inplace=True))
    x = torch.randn(3, 4, requires_grad=True)
    model(x * 2).square().sum().backward()
    return [x.grad, state(model)]


def in_place_relu_through_a_view():
    model = nn.Sequential(nn.Linear(4, 8), nn.Flatten(0), nn.ReLU(inplace=True))
    model(torch.randn(3, 4)).square().sum().backward()
    return state(model)


def output_used_twice():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(3, 4, requires_grad=True)
    y = model(x)
    (y.sum() + (y * y.flip(0)).sum() + y.detach().sum()).backward()
    return [x.grad, y, state(model)]


def output_kept_and_its_gradient_retained():
    model = small()
    hidden = model[0](torch.randn(3, 4))
    hidden.retain_grad()
    y = model[2](model[1](hidden))
    y.retain_grad()
    y.square().sum().backward()
    return [hidden.grad, y.grad, state(model)]


def tied_weights():
    model = zoo.TiedGPT(layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model).backward()
        optimizer.step()
    return state(model)


def train_scaled(*, fused: bool, unscale: bool) -> list[Any]:
    """The second step's gradients overflow, so the scaler skips it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().mean() * (math.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    return state(model)


def grad_scaler():
    return train_scaled(fused=False, unscale=True)


def grad_scaler_that_unscales_by_itself():
    return train_scaled(fused=False, unscale=False)


def grad_scaler_and_fused_adamw():
    return train_scaled(fused=True, unscale=False)


def grad_scaler_unscaled_and_fused_adamw():
    return train_scaled(fused=True, unscale=True)


def fused_adamw_after_micro_batches():
    model = zoo.TiedGPT(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            (loss_of(model) / 2).backward()
        optimizer.step()
    return [state(model), optimizer.state_dict()["state"]]


def autocast():
    model = zoo.TiedGPT(layers=2)
    losses = []
    for _ in range(2):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            losses.append(loss_of(model))
        losses[-1].backward()
    return [losses, state(model)]


def func_grad():
    model = small()
    parameters = dict(model.named_parameters())
    x = torch.randn(3, 4)

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    def slope(x):
        return torch.func.grad(lambda x: model(x).sum())(x).square().sum()

    return [torch.func.grad(loss)(parameters, x), torch.func.grad(slope)(x)]


def vmap():
    model = small()
    x = torch.randn(5, 4)
    y = torch.vmap(model)(x)
    y.sum().backward()
    return [y, torch.vmap(torch.vmap(model))(x.view(5, 1, 4)), state(model)]


def per_sample_gradients():
    model = small()
    parameters = {name: each.detach() for name, each in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    x = torch.randn(5, 4)
    return [
        torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x),
        torch.func.jacrev(model)(x[0]),
        torch.func.jacfwd(model)(x[0]),
        torch.func.jvp(model, (x,), (x,)),
        torch.func.vjp(model, x)[1](x),
        torch.func.hessian(lambda x: model(x).sum())(x[0]),
        torch.func.linearize(model, x[0])[1](x[1]),
    ]


def vmap_with_dropout():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(5, 4)
    return [torch.vmap(model, randomness=kind)(x) for kind in ("different", "same")]


def forward_ad():
    import torch.autograd.forward_ad as forward

    model = small()
    with forward.dual_level():
        y = model(forward.make_dual(torch.randn(3, 4), torch.randn(3, 4)))
        value, tangent = forward.unpack_dual(y)
        return [value.detach().clone(), tangent.detach().clone()]


def inference_mode():
    model = zoo.TiedGPT(layers=2)
    with torch.inference_mode():
        logits = model(torch.randint(0, 17, (2, 8)))
        assert logits.is_inference()
    return logits.clone()


def parameters_made_in_inference_mode():
    with torch.inference_mode():
        model = small()
        y = model(torch.randn(3, 4))
    return y.clone()


def deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        model = zoo.TiedGPT(layers=2)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        return state(model)
    finally:
        torch.use_deterministic_algorithms(False)


def create_graph():
    model = small()
    x = torch.randn(3, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (slope.norm() - 1).square().backward()
    return [slope, x.grad, state(model)]


def views_of_chunks():
    """`chunk` and `unbind` give views that torch lets nobody write to, and whose hooks are a matter of their own."""

    class Splits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)

        def forward(self, x):
            return self.qkv(x).chunk(3, -1)

    class Unbinds(nn.Module):
        def forward(self, q, k, v):
            return torch.stack([q, k, v]).unbind(0)

    first, second = Splits(), Unbinds()
    q, k, v = second(*first(torch.randn(3, 4)))
    (q * k + v).sum().backward()
    return state(first)


def view_of_an_output_written_to_before_its_module_returned_it():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.same = nn.Identity()

        def forward(self, x):
            y = self.layer(x)
            row = self.same(y[0])
            y[1] = row * 2
            y.mul_(3)
            return row, y

    model = Writes()
    row, y = model(torch.randn(3, 4))
    (row.sum() + y.square().sum()).backward()
    return state(model)


def no_grad_view_of_a_leaf():
    model = nn.Identity()
    leaf = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        view = model(leaf[0])
        view.mul_(2)
    leaf.square().sum().backward()
    return [view, leaf.grad]


def leaf_written_to_after_its_module_returned_it():
    model = nn.Identity()
    leaf = torch.randn(3, 4, requires_grad=True)
    y = model(leaf)
    loss = (y * 2).sum()
    with torch.no_grad():
        leaf.mul_(0.5)
    loss.backward()
    return leaf.grad


def output_set_to_need_no_gradient():
    model = nn.Identity()
    leaf = torch.randn(3, 4, requires_grad=True)
    y = model(leaf)
    y.requires_grad_(False)
    y.requires_grad_(True)
    (y * 2).sum().backward()
    return [leaf.grad, leaf.requires_grad]


def output_whose_data_is_replaced():
    model = nn.Linear(4, 4)
    y = model(torch.randn(3, 4))
    y.data = torch.zeros(3, 4)
    (y * y).sum().backward()
    return [y, state(model)]


def output_detached_in_place():
    model = nn.Linear(4, 4)
    y = model(torch.randn(3, 4))
    y.detach_()
    return [y, y.requires_grad]


def weights_swapped():
    model = nn.Linear(4, 4)
    y = model(torch.randn(3, 4))
    y.sum().backward()
    model.load_state_dict({name: each * 2 for name, each in model.state_dict().items()}, assign=True)
    y = model(torch.randn(3, 4))
    return [y, state(model)]


def tensors_swapped():
    """`torch.utils.swap_tensors` refuses tensors that anybody holds a weak reference to."""
    model = nn.Linear(4, 4)
    model(torch.randn(3, 4)).sum().backward()
    a, b = model.weight, nn.Parameter(torch.ones(4, 4))
    torch.utils.swap_tensors(a, b)
    return [model.weight, b]


def output_swapped():
    model = nn.Linear(4, 4)
    with torch.no_grad():
        y = model(torch.randn(3, 4))
    other = torch.ones(3, 4)
    torch.utils.swap_tensors(y, other)
    return [y, other]


def deep_copies():
    model = nn.Identity()
    leaf = torch.randn(3, 4, requires_grad=True)
    y = copy.deepcopy(model(leaf))
    (y * 3).sum().backward()
    return [y.grad, leaf.grad]


def memory_formats():
    """Gradients lie in memory as they would: of leaves that modules return, of channels last, of views."""
    same, convolution = nn.Identity(), nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    weight = nn.Parameter(torch.randn(4, 6))
    first, second = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    (same(weight).t() @ same(weight)).sum().backward()
    convolution(same(image)).mean().backward()
    (same(first) + same(second)).sum().backward()
    leaves = [weight, image, first, second, *convolution.parameters()]
    shared = first.grad.data_ptr() == second.grad.data_ptr()
    return [[(each.grad, each.grad.stride()) for each in leaves], shared]


class Small(nn.Module):
    """Convolution in channels-last, batch normalization, an embedding with sparse gradients, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, sparse=True)
        self.convolve = nn.Conv2d(1, 2, 2).to(memory_format=torch.channels_last)
        self.normalize = nn.BatchNorm2d(2)
        self.frozen = nn.Linear(9, 3).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).unsqueeze(1)
        return self.frozen(F.dropout(self.normalize(self.convolve(x)).flatten(2), 0.2)).square().mean()


def optimizer_state(optimizer: Any) -> list[Any]:
    return [dict(each) for each in optimizer.state.values()]


def two_optimizers_and_a_sparse_one() -> list[Any]:
    model = Small()
    dense = [each for name, each in model.named_parameters() if not name.startswith("embed")]
    optimizers = [torch.optim.SparseAdam(model.embed.parameters()), torch.optim.AdamW(dense)]
    losses = []
    for _ in range(3):
        model.zero_grad()
        loss = model(torch.randint(0, 7, (2, 4)))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss)
    gradients = [each.grad.to_dense() for each in model.parameters() if each.grad is not None]
    return [losses, dict(model.state_dict()), gradients, *map(optimizer_state, optimizers)]


def checkpointed() -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters())
    for reentrant in (False, True):
        optimizer.zero_grad()
        x = torch.randn(3, 4, requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        optimizer.step()
    return [state(model), optimizer_state(optimizer)]


RUNS = [
    in_place_relu, in_place_relu_through_a_view, output_used_twice, output_kept_and_its_gradient_retained, tied_weights,
    grad_scaler, grad_scaler_that_unscales_by_itself, grad_scaler_and_fused_adamw,
    grad_scaler_unscaled_and_fused_adamw, fused_adamw_after_micro_batches,
    autocast, func_grad, vmap, per_sample_gradients, vmap_with_dropout, forward_ad, inference_mode,
    parameters_made_in_inference_mode, deterministic_algorithms, create_graph,
    views_of_chunks, view_of_an_output_written_to_before_its_module_returned_it, no_grad_view_of_a_leaf,
    leaf_written_to_after_its_module_returned_it, output_set_to_need_no_gradient, output_whose_data_is_replaced,
    output_detached_in_place, memory_formats, weights_swapped, tensors_swapped, output_swapped, deep_copies,
    two_optimizers_and_a_sparse_one, checkpointed,
]  # fmt: skip


OVER_RUNS = pytest.mark.parametrize("run", RUNS, ids=[run.__name__.replace("_", " ") for run in RUNS])
WARNINGS_OF_TORCH = pytest.mark.filterwarnings("ignore:(?!.*modtrace)")  # about its own features


@OVER_RUNS
@WARNINGS_OF_TORCH
def test_measuring_changes_no_bit_of(run, tmp_path):
    rec = assert_untouched(run, to=tmp_path / "run.modtrace", backward_times=True)
    assert rec.table("values").num_rows > 0


# The rows of those runs.


@pytest.mark.parametrize("run", [grad_scaler, grad_scaler_that_unscales_by_itself])
def test_rows_of_a_scaled_step_hold_unscaled_gradients_and_a_skipped_step_has_none(run):
    rec = assert_untouched(run)
    found = rows(rec, role="parameter_grad", path="1", slot="bias")
    assert names(found, "step", "note") == [(0, None), (2, None)]
    gradients = rows(rec, role="grad_output", path="1")
    assert names(gradients, "step") == [0, 1, 2]
    assert gradients[1].inf_count + gradients[1].nan_count == 12
    for row, gradient, scale in zip(found, (gradients[0], gradients[2]), (1024.0, 512.0), strict=True):
        if run is grad_scaler_that_unscales_by_itself:
            assert row.sum == pytest.approx(gradient.sum / scale, rel=1e-4)
        else:
            assert row.sumsq <= 1


def test_rows_of_gradients_that_a_fused_optimizer_unscales_itself_say_so():
    rec = assert_untouched(grad_scaler_and_fused_adamw)
    found = rows(rec, role="parameter_grad", path="1", slot="bias")
    assert names(found, "step", "note") == [(step, "still scaled by the GradScaler") for step in (0, 1, 2)]
    assert found[0].sum == pytest.approx(one(rec, role="grad_output", path="1", step=0).sum, rel=1e-4)
    assert names(rows(rec, role="parameter"), "note") == [None] * 12


def test_rows_of_gradients_unscaled_before_a_fused_optimizer_have_no_note():
    rec = assert_untouched(grad_scaler_unscaled_and_fused_adamw)
    found = rows(rec, role="parameter_grad")
    assert {row.note for row in found} == {None}
    assert sum(row.sumsq for row in found if row.step == 0) <= 1 + 1e-4


def test_rows_under_autocast_have_the_dtypes_of_the_outputs():
    rec = assert_untouched(autocast)
    assert one(rec, nth=0, role="output", path="blocks.0.fc").dtype == "bfloat16"
    assert one(rec, nth=0, role="output", path="blocks.0.ln1").dtype == "float32"
    assert one(rec, nth=0, role="grad_output", path="blocks.0.attn.qkv").dtype == "bfloat16"
    # What `fc` returns is a view there, and is written to in place: its gradient comes to what it is a view of.
    assert one(rec, nth=0, role="grad_output", path="blocks.0.fc").dtype == "bfloat16"


def test_rows_under_transforms_say_what_they_are_of():
    rec = assert_untouched(vmap)
    found = rows(rec, role="output", path="0", step=0)
    assert {(row.shape, row.note) for row in found[:1]} == {((5, 4), "vmap: all examples together")}
    assert all(row.count == 20 for row in rows(rec, role="output"))
    assert {row.note for row in rows(assert_untouched(func_grad), role="output")} == {None}


def test_rows_of_a_view_and_its_base_are_of_the_moment_they_were_returned():
    rec = assert_untouched(view_of_an_output_written_to_before_its_module_returned_it)
    [view, base] = rows(rec, role="output", path="")
    assert view.sum == pytest.approx(3 * one(rec, role="output", path="same").sum, rel=1e-5)
    assert base.shape == (3, 4)


# Modes of the user's.


def seen(recording: Any, run: Any, *, is_outside: bool = False) -> tuple[list[str], list[str]]:
    """The ops and the functions that modes of the user's see of a run, inside or outside of which it is recorded."""
    torch.manual_seed(0)
    ops, functions = SeesOps(), SeesFunctions()
    outside, inside = (recording, nullcontext()) if is_outside else (nullcontext(), recording)
    with outside, ops, functions, inside:
        run()
    return ops.seen, functions.seen


@OVER_RUNS
@WARNINGS_OF_TORCH
def test_modes_of_the_users_see_nothing_of_ours_in(run):
    plain_ops, plain_functions = seen(nullcontext(), run)
    assert plain_ops
    assert plain_functions
    everything = modtrace.record(strict=True, values=EVERYTHING)
    assert seen(everything, run) == (plain_ops, plain_functions)
    usual = modtrace.record(strict=True, backward_times=True)
    assert seen(usual, run, is_outside=True) == (plain_ops, plain_functions)
    for recording in (everything, usual):
        assert recording.meta.marks == ()
        assert recording.table("values").num_rows > 0


OF_PARAMETERS = modtrace.Capture(
    roles=("parameter", "parameter_grad", "update", "optimizer_state", "buffer"), micro_batches=True
)


@pytest.mark.parametrize("values", ["stats", OF_PARAMETERS], ids=["stats", "parameters"])
def test_profiler_sees_nothing_of_ours(values):
    def events(recording: Any) -> list[str]:
        torch.manual_seed(0)
        with recording, torch.profiler.profile() as profile:
            in_place_relu()
            grad_scaler()
        return [event.name for event in profile.events()]

    assert events(modtrace.record(strict=True, values=values)) == events(nullcontext())
