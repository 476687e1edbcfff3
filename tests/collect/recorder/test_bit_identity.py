"""A recorded run computes the same bits as a plain one: losses, gradients, parameters, generators."""

import asyncio
import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
import zoo
from helpers.ranks import group_of_one
from helpers.twins import assert_untouched, grads, state
from zoo import TiedGPT

CHECKPOINTS = pytest.mark.parametrize(
    "reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"]
)


def loss_of(model: nn.Module, tokens: torch.Tensor, *args: Any) -> torch.Tensor:
    logits = model(tokens, *args)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def train_gpt(dtype: torch.dtype = torch.float32, reentrant: bool | None = None, steps: int = 3) -> list[Any]:
    """Some AdamW steps, whose data come from all three generators."""
    model = TiedGPT().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 17, (2, 8))
        tokens[0, 0] = random.randrange(17)
        tokens[1, 0] = int(np.random.randint(17))
        optimizer.zero_grad()
        loss = loss_of(model, tokens, reentrant)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [losses, state(model), optimizer.state_dict()["state"]]


@CHECKPOINTS
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"backward_times": True}),
        (torch.bfloat16, {"backward_times": True}),
        (torch.float32, {"ops": True, "values": None}),
        (torch.bfloat16, {"ops": True}),
    ],
    ids=["float32", "bfloat16", "ops", "bfloat16, ops and values"],
)
def test_training_a_gpt_with_dropout_gives_the_same_bits(tmp_path, dtype, reentrant, options):
    recording = assert_untouched(lambda: train_gpt(dtype, reentrant), to=tmp_path / "run", **options)
    kinds = recording.table("steps").column("kind").to_pylist()
    assert kinds == ["train", "train", "train"]
    assert (len(recording.table("ops")) > 1000) == ("ops" in options)


# Single difficulties beside those of tests/collect/values/test_values_bit_identity.py. Each run gives all that it
# computes.


def retained_graph():
    model = zoo.Twice()
    loss = model(torch.randn(3, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return state(model)


class InnerGradient(nn.Module):
    """Takes a gradient inside its forward: forces from an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.training)[0]


def gradient_inside_forward():
    model = InnerGradient()
    model(torch.randn(3, 4)).square().sum().backward()
    return [state(model), model.eval()(torch.randn(3, 4))]


def gradient_of_a_leaf_input():
    model = TiedGPT()
    image = torch.randn(2, 8, 16, requires_grad=True)
    hidden = model.blocks[0](image)
    only_part = torch.autograd.grad(model.head(hidden).sum(), [image, model.head.weight], retain_graph=True)
    unused = torch.autograd.grad(hidden.sum(), [image, model.position], allow_unused=True)
    return [only_part, unused, [each is None for each in grads(model).values()]]


def backward_to_chosen_inputs():
    model = zoo.Twice()
    x = torch.randn(3, 4, requires_grad=True)
    model(x).sum().backward(inputs=[x])
    return [x.grad, grads(model)]


class RunsModuleInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        with torch.no_grad():
            return ctx.module(grad), None


def module_inside_a_custom_backward():
    module = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    RunsModuleInBackward.apply(x, module).sum().backward()
    return [x.grad, state(module)]


def users_own_hooks():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())
    seen: list[Any] = []
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    model[1].register_forward_hook(
        lambda module, args, kwargs, output: output * 0.5, with_kwargs=True, always_call=True
    )
    model[1].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
    model[2].register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] - 1,))
    model[3].register_full_backward_hook(lambda module, grad_in, grad_out: seen.append((grad_in, grad_out)))
    y = model(torch.randn(3, 4))
    y.register_hook(lambda grad: grad * 0.25)
    y.grad_fn.register_prehook(lambda grads: (grads[0] + 2,))
    y.grad_fn.register_hook(lambda grads, outputs: seen.append((grads, outputs)))
    y.sum().backward()
    return [y, seen, state(model)]


def users_global_hooks():
    from torch.nn.modules import module as hooks

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    handles = [
        hooks.register_module_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        hooks.register_module_forward_hook(lambda module, args, output: output * 2),
        hooks.register_module_full_backward_hook(lambda module, grad_in, grad_out: None),
    ]
    try:
        model(torch.randn(3, 4)).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return state(model)


def optimizer_in_backward():
    """Each parameter's optimizer steps as soon as its gradient is there."""
    model = TiedGPT(layers=2)
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        loss_of(model, torch.randint(0, 17, (2, 8))).backward()
    return state(model)


def saved_tensor_hooks():
    model = TiedGPT()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each.clone(), lambda each: each):
        loss = loss_of(model, torch.randint(0, 17, (2, 8)))
    loss.backward()
    return state(model)


def data_parallel_without_devices():
    model = nn.DataParallel(TiedGPT())
    loss_of(model, torch.randint(0, 17, (2, 8))).backward()
    return state(model)


def lbfgs():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    x, y = torch.randn(8, 4), torch.randn(8, 1)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure), optimizer.step(closure), state(model)]


def batch_norm_and_rnn():
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "rnn": nn.LSTM(4, 4, num_layers=2, dropout=0.5)})
    y, hidden = model["rnn"](model["norm"](torch.randn(8, 4)).view(4, 2, 4))
    (y.sum() + hidden[0].sum()).backward()
    return [y, hidden, state(model)]


def complex_float64():
    model = nn.Linear(4, 4).to(torch.complex128)
    y = model(torch.randn(3, 4, dtype=torch.complex128))
    y.abs().sum().backward()
    return [torch.view_as_real(y), [torch.view_as_real(each.grad) for each in model.parameters()]]


def anomaly_mode():
    with warnings.catch_warnings(), torch.autograd.detect_anomaly(check_nan=True):
        warnings.simplefilter("ignore")
        return train_gpt(reentrant=False, steps=1)


def swallowed_exception():
    model = zoo.Failing(ValueError("on purpose"))
    with pytest.raises(ValueError, match="on purpose") as caught:
        model(torch.randn(3, 4))
    model.error = None
    model(torch.randn(3, 4)).sum().backward()
    error = caught.value
    return [state(model), str(error), error.__context__ is None, error.__cause__ is None]


def multithreading_disabled():
    model = TiedGPT()
    with torch.autograd.set_multithreading_enabled(False):
        loss_of(model, torch.randint(0, 17, (2, 8)), True).backward()
    return state(model)


def scripted_module():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    model(torch.randn(3, 4)).sum().backward()
    return state(model)


class LazyMapping(Mapping[str, torch.Tensor]):
    """Cannot be read here."""

    def __getitem__(self, key):
        raise RuntimeError("not loaded")

    def __iter__(self):
        return iter(["y"])

    def __len__(self):
        return 1


class GivesMapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.stashed = self.layer(x)
        return [LazyMapping(), self.stashed]


def output_that_cannot_be_read():
    model = GivesMapping()
    model(torch.randn(3, 4))
    model.stashed.sum().backward()
    return state(model)


class GivesStaleView(nn.Module):
    """Its output has no gradient any more: torch says so to whoever asks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.base = self.layer(x) * 1
        first = self.base.unbind(0)[0]
        self.base.mul_(2)
        return first


def output_whose_gradient_cannot_be_asked_for():
    model = GivesStaleView()
    value = model(torch.randn(2, 4)).data + 1
    model.base.sum().backward()
    return [value, state(model)]


class GivesView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.base = self.layer(x) * 1
        return self.base[0]


def output_whose_base_is_written_to():
    model = GivesView()
    view = model(torch.randn(2, 4))
    model.base.mul_(3)
    view.mul_(2)
    model.base.sin().sum().backward()
    return [view, state(model)]


def lazy_layers():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    model(torch.randn(3, 4)).sum().backward()
    return state(model)


def sparse_gradients():
    model = nn.Embedding(5, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model.weight


def nested_tensors():
    model = nn.Linear(4, 4)
    y = model(torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged))
    y.values().sum().backward()
    return [y.values(), state(model)]


def forwards_that_wait():
    """A generator and a coroutine."""

    class Generates(nn.Linear):
        def forward(self, x):
            for _ in range(3):
                x = super().forward(x)
                yield x

    class Waits(nn.Linear):
        async def forward(self, x):
            await asyncio.sleep(0)
            return super().forward(x)

    async def both():
        return await asyncio.gather(waits(torch.randn(3, 4)), waits(torch.randn(3, 4)))

    generates, waits = Generates(4, 4), Waits(4, 4)
    sum(each.sum() for each in generates(torch.randn(3, 4))).backward()
    sum(each.sum() for each in asyncio.run(both())).backward()
    return [state(generates), state(waits)]


def distributed_data_parallel():
    with group_of_one():
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
        result = state(model.module)
        del (
            model
        )  # before the group: a reducer that is the last to hold it waits for ever, now and then (torch 2.13)
        return result


def fully_sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with group_of_one():
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        for each in (model[0], model[2], model):
            fully_shard(each, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return [each.full_tensor() for each in model.parameters()]


RUNS = [
    retained_graph, gradient_inside_forward,
    gradient_of_a_leaf_input, backward_to_chosen_inputs, module_inside_a_custom_backward, users_own_hooks,
    users_global_hooks, optimizer_in_backward, saved_tensor_hooks, data_parallel_without_devices, lbfgs,
    batch_norm_and_rnn, complex_float64, anomaly_mode, swallowed_exception, multithreading_disabled, scripted_module,
    output_that_cannot_be_read, output_whose_gradient_cannot_be_asked_for, output_whose_base_is_written_to,
    lazy_layers, sparse_gradients, nested_tensors, forwards_that_wait, distributed_data_parallel, fully_sharded,
]  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:(?!.*modtrace)")  # of torch's own features


@pytest.mark.parametrize("run", RUNS, ids=[run.__name__.replace("_", " ") for run in RUNS])
def test_recording_ops_and_backward_times_changes_no_bit_of(run):
    """Without ops, these and others run in tests/collect/values/test_captures_bit_identity.py."""
    recording = assert_untouched(run, ops=True, backward_times=True)
    assert len(recording.table("ops")) > 0


def test_two_recordings_at_once_change_no_bit(tmp_path):
    def run():
        with modtrace.record(to=tmp_path / "inner", overwrite=True, strict=True, backward_times=True):
            return train_gpt(reentrant=False)

    assert_untouched(run)
