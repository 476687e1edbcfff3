"""Looking at parameters and all that belongs to them changes no bit of a run, and its rows are those of that run."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
import zoo
from helpers.stat_rows import holds, names, one, rows
from helpers.twins import assert_untouched, state
from helpers.user_modes import SeesFunctions, SeesOps

ROLES = ("parameter", "parameter_grad", "update", "optimizer_state", "buffer")
ALL = modtrace.Capture(roles=ROLES, micro_batches=True)


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


def accumulated(make: Any, *, steps: int = 2, batches: int = 2) -> list[Any]:
    model = zoo.TiedGPT(layers=1)
    optimizer = make(model.parameters())
    losses = []
    for _ in range(steps):
        for _ in range(batches):
            tokens = torch.randint(0, 17, (2, 8))
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            (loss / batches).backward()
            losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [losses, state(model), optimizer_state(optimizer)]


def adamw() -> list[Any]:
    return accumulated(torch.optim.AdamW)


def adamw_fused() -> list[Any]:
    return accumulated(lambda parameters: torch.optim.AdamW(parameters, fused=True))


def sgd_with_momentum() -> list[Any]:
    return accumulated(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True))


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


def lbfgs() -> list[Any]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x, y = torch.randn(8, 3), torch.randn(8, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(2)]
    return [losses, state(model), optimizer_state(optimizer)]


def halves_with_a_gradient_scaler() -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4).bfloat16()).square().mean() * (math.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [state(model), optimizer_state(optimizer), scaler.get_scale()]


def grad_of_grad() -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(each.square().sum() for each in gradients)).backward()
        optimizer.step()
    return [state(model), optimizer_state(optimizer)]


def checkpointed() -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters())
    for reentrant in (False, True):
        optimizer.zero_grad()
        x = torch.randn(3, 4, requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        optimizer.step()
    return [state(model), optimizer_state(optimizer)]


def optimizers_in_backward() -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for each in model.parameters():
        optimizer = torch.optim.Adam([each], lr=0.1)

        def step(parameter: Any, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        each.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
    return state(model)


RUNS = (
    adamw,
    adamw_fused,
    sgd_with_momentum,
    two_optimizers_and_a_sparse_one,
    lbfgs,
    halves_with_a_gradient_scaler,
    grad_of_grad,
    checkpointed,
    optimizers_in_backward,
)

KEPT: dict[str, dict[str, Any]] = {
    "statistics": {},
    "all of it": {
        "stats": 2,
        "hash": True,
        "sketch": True,
        "sample": 3,
        "function": lambda each: each.numel(),
    },
    "whole": {"tensors": True, "stats": 0},
    "whole, later": {"tensors": "lazy", "stats": 0},
}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("kept", KEPT)
def test_run_is_the_same_to_the_bit(run: Any, kept: str):
    capture = modtrace.Capture(roles=ROLES, micro_batches=True, **KEPT[kept])
    rec = assert_untouched(run, values=capture)
    assert rows(rec, role="update")
    assert rows(rec, role="parameter_grad", phase="backward")


def test_modes_of_the_users_see_nothing_of_it():
    def train() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            model(torch.ones(2, 4).bfloat16()).sum().backward()
            optimizer.step()

    def seen(recorded: bool) -> tuple[list[str], list[str]]:
        with SeesOps() as ops, SeesFunctions() as functions:
            if recorded:
                with modtrace.record(values=ALL, strict=True):
                    train()
            else:
                train()
        return ops.seen, functions.seen

    assert seen(True) == seen(False)


def test_profiler_sees_nothing_of_it():
    def events(recorded: bool) -> list[str]:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def train(steps: int) -> None:
            for _ in range(steps):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()

        def profiled() -> list[str]:
            train(1)
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities) as profile:
                train(2)
            return [event.name for event in profile.events() or []]

        if not recorded:
            return profiled()
        with modtrace.record(values=ALL, strict=True):
            return profiled()

    assert events(True) == events(False)


def test_rows_stand_in_the_step_and_the_phase_that_they_are_of():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with modtrace.record(model, values=ALL, strict=True) as rec:
        for _ in range(2):
            for _ in range(2):
                model(torch.randn(3, 2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    buffers = [(step, "forward", "1", "buffer", "running_var") for step in (0, 0, 1, 1)]
    assert names(rows(rec, slot="running_var"), "step", "phase", "path", "role", "slot") == buffers
    of_layer = names(rows(rec, path="0"), "step", "phase", "role", "slot")
    assert of_layer == [
        (step, *each)
        for step in (0, 1)
        for each in (
            ("backward", "parameter_grad", "weight"),
            ("backward", "parameter_grad", "weight"),
            ("optimizer", "parameter", "weight"),
            ("optimizer", "parameter_grad", "weight"),
            ("optimizer", "update", "weight"),
            ("optimizer", "optimizer_state", "weight.momentum_buffer"),
        )
    ]


def test_statistics_are_those_of_the_tensors():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with modtrace.record(model, values=ALL, strict=True) as rec:
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    assert holds(one(rec, role="update", slot="weight"), model.weight.detach() - before)
    assert holds(one(rec, role="parameter_grad", slot="weight", phase="backward"), model.weight.grad)
    assert holds(one(rec, slot="weight.exp_avg"), optimizer.state[model.weight]["exp_avg"])
    assert one(rec, slot="weight.step").sum == 1


def test_only_the_steps_that_are_asked_for_have_rows():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    capture = modtrace.Capture(roles=ROLES, micro_batches=True, steps="1:4:2")
    with modtrace.record(model, values=capture, strict=True) as rec:
        for _ in range(5):
            model(torch.randn(3, 2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for role in ROLES:
        assert {row.step for row in rows(rec, role=role)} == {1, 3}
    assert all(each._backward_hooks is None for each in model.parameters())


def test_exception_leaves_no_hook_on_a_parameter():
    model = nn.Linear(2, 1)
    with pytest.raises(KeyboardInterrupt), modtrace.record(model, values=ALL, strict=True):
        model(torch.ones(1, 2)).sum().backward()
        raise KeyboardInterrupt
    assert all(each._backward_hooks is None for each in model.parameters())


def test_running_average_that_is_copied_later_is_that_of_its_call():
    """Batch normalization does not count its writes to it."""
    model = nn.BatchNorm1d(2, affine=False)
    capture = modtrace.Capture(roles="buffer", tensors="lazy")
    kept = []
    with modtrace.record(model, values=capture, strict=True) as rec:
        for _ in range(2):
            model(torch.randn(3, 2))
            kept.append(model.running_mean.tolist())
            rec.step()
    assert [rec.tensor("running_mean", step, role="buffer").tolist() for step in (0, 1)] == kept
