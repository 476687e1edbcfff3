"""What recorded ops and calls are charged with for backward adds up to what `saved_tensors_hooks` counts."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import modtrace

GPT = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "train_gpt.py"))["GPT"]

pytestmark = pytest.mark.usefixtures("seeded")


def counted_by_hooks(run, alive_anyway):
    """The bytes of the storages that a run of its own saves for backward, each once."""
    kept = []

    def pack(tensor):
        kept.append(tensor.detach())
        return kept[-1]

    with saved_tensors_hooks(pack, lambda packed: packed):
        output = run()
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    for each in alive_anyway:
        sizes.pop(each.untyped_storage().data_ptr(), None)
    assert output.requires_grad
    return sum(sizes.values())


def recorded(model, run):
    """The tables of one forward and backward."""
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        run().backward()
    return rec


def saved_by_ops(rec):
    return sum(row["saved_bytes"] or 0 for row in rec.table("ops").to_pylist())


def saved_by_calls(rec):
    """By module path; of all calls inside of each too."""
    paths = {row["module_id"]: row["path"] for row in rec.table("modules").to_pylist()}
    calls = rec.table("calls").to_pylist()
    return {paths[row["module_id"]]: row["saved_bytes"] for row in calls if row["phase"] == "forward"}


@pytest.mark.parametrize("approximate", ["none", "by hand"])
def test_numbers_that_ops_are_given_are_all_that_hooks_do_not_count(approximate):
    class Scaled(nn.Module):
        def forward(self, x):
            y = F.gelu(x) if approximate == "none" else 0.5 * x * (1 + (0.8 * (x + 0.04 * x * x)).tanh())
            return y.sum()

    model, x = nn.Sequential(nn.Linear(4, 8), Scaled()), torch.randn(3, 4)
    expected = counted_by_hooks(lambda: model(x), [x, *model.parameters()])
    numbers = 0 if approximate == "none" else 3  # 0.5, 0.8 and 0.04, but not 1, which the sum does not need
    assert saved_by_ops(recorded(model, lambda: model(x))) == expected + 8 * numbers


def test_mlp_keeps_what_hooks_count():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(3, 4)
    expected = counted_by_hooks(lambda: model(x).sum(), [x, *model.parameters()])
    rec = recorded(model, lambda: model(x).sum())
    assert saved_by_ops(rec) == expected == 192
    assert saved_by_calls(rec) == {"": 192, "0": 0, "1": 96, "2": 96}


@pytest.mark.parametrize(
    ("checkpointing", "expected", "inside"),
    [(None, 36484, 16768), ("non-reentrant", 4996, 1024), ("reentrant", 4996, 1024)],
)
def test_gpt_keeps_what_hooks_count_and_less_with_checkpoints(checkpointing, expected, inside):
    """Parameters and tokens, which the user keeps, left out."""
    model = GPT(11, layers=2, width=16, heads=2, context=8, checkpointing=checkpointing)
    tokens = torch.randint(11, (2, 8))

    def run():
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    assert counted_by_hooks(run, [tokens, *model.parameters()]) == expected
    rec = recorded(model, run)
    calls = saved_by_calls(rec)
    outside = sum(
        row["saved_bytes"] or 0
        for row in rec.table("ops").to_pylist()
        if row["call_id"] is None and row["saved_bytes"]
    )
    assert calls[""] + outside == expected
    assert calls["blocks.0"] == inside


class Doubled(torch.autograd.Function):
    """Keeps what `exp` returns."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * 2


class OnContext(torch.autograd.Function):
    """Keeps a tensor as an attribute of `ctx`."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.exp()
        return ctx.kept * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.kept * 2


class Outer(torch.autograd.Function):
    """Runs another Function in its forward, without a graph; keeps what that returns."""

    @staticmethod
    def forward(ctx, x):
        y = Doubled.apply(x.sin())
        ctx.save_for_backward(y)
        return y + 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class Custom(nn.Module):
    """A custom Function between two ops, the first of which keeps nothing that is charged."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function.apply(self.linear(x)).sin()


def saved_by_forward_ops(rec):
    return [
        (row["name"], row["saved_bytes"]) for row in rec.table("ops").to_pylist() if row["phase"] == "forward"
    ]


@pytest.mark.parametrize("function", [Doubled, OnContext])
def test_what_a_custom_function_keeps_is_charged_to_the_first_op_in_its_forward(function):
    model, x = Custom(function), torch.randn(3, 4)
    rec = recorded(model, lambda: model(x).sum())
    assert [each for each in saved_by_forward_ops(rec) if each[1] != 0] == [
        ("aten.exp.default", 48),
        ("aten.sin.default", 48),
    ]
    assert saved_by_calls(rec) == {"": 96, "linear": 0}
    assert [(row.name, row.saved.saved_bytes, row.saved.unknown) for row in rec.memory_table().rows[:1]] == [
        ("Custom", 96, 0)
    ]


def test_a_custom_function_inside_another_keeps_nothing():
    model, x = Custom(Outer), torch.randn(3, 4)
    rec = recorded(model, lambda: model(x).sum())
    known = [each for each in saved_by_forward_ops(rec) if each[1] != 0]
    assert known[0] == ("aten.sin.default", 48)  # what Outer keeps
    assert ("aten.exp.default", None) in known  # nothing tells that the node of Doubled is in no graph


def test_what_a_custom_loss_outside_of_modules_keeps_is_charged():
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    rec = recorded(model, lambda: Doubled.apply(model(x)).sum())
    outside = [row for row in rec.table("ops").to_pylist() if row["call_id"] is None]
    assert [(row["name"], row["saved_bytes"]) for row in outside if row["saved_bytes"]] == [
        ("aten.exp.default", 48)
    ]
    assert rec.memory_table().saved.saved_bytes == 48


def run_twice(model, output):
    loss = output.sum()
    loss.backward(retain_graph=True)
    loss.backward()


def raise_and_run_again(model, output):
    handle = output.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    handle.remove()
    output.sum().backward()


def ask_for_some_gradients(model, output):
    loss = output.sum()
    torch.autograd.grad(loss, model[2].weight, retain_graph=True)
    loss.backward(inputs=[model[0].weight])


@pytest.mark.parametrize("backwards", [run_twice, raise_and_run_again, ask_for_some_gradients])
def test_a_graph_that_is_run_several_times_is_counted_once(backwards):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(3, 4)
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        backwards(model, model(x))
    assert saved_by_ops(rec) == 192
    assert saved_by_calls(rec) == {"": 192, "0": 0, "1": 96, "2": 96}


def test_a_tensor_that_two_graphs_keep_is_counted_in_the_first():
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        shared = model(x)
        first, second = (shared.sin() * 1.0).sum(), shared.cos().sum()
        first.backward(retain_graph=True)
        second.backward()
    saved = {row["name"]: row["saved_bytes"] for row in rec.table("ops").to_pylist() if row["phase"] is None}
    assert (saved["aten.sin.default"], saved["aten.cos.default"]) == (48, 0)


def test_it_is_unknown_what_a_forward_keeps_that_never_gets_a_backward():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.function, self.flat = nn.Linear(4, 4), Function(), nn.Flatten()

        def forward(self, x):
            return self.function(self.linear(x)), self.flat(x)

    class Function(nn.Module):
        def forward(self, x):
            return Doubled.apply(x)

    model, x = Mixed(), torch.randn(3, 4)
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        model(x)
    assert saved_by_calls(rec) == {"": None, "linear": None, "function": None, "flat": 0}
    assert rec.memory_table().saved.unknown == 3


def test_a_forward_without_grad_mode_keeps_nothing():
    model, x = Custom(Doubled), torch.randn(3, 4)
    with modtrace.record(model, ops=True, values=None, strict=True) as rec, torch.no_grad():
        model(x)
    assert saved_by_calls(rec) == {"": 0, "linear": 0}


def test_a_part_that_no_backward_has_reached_is_unknown():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU())

        def forward(self, x):
            return self.used(x), self.unused(x)

    model, x = Heads(), torch.randn(3, 4)
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        outputs = model(x)
        outputs[0].sum().backward()
    assert saved_by_calls(rec) == {"": None, "used": 0, "unused": None, "unused.0": None, "unused.1": None}


def test_micro_batches_are_each_charged_with_their_own():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        for size in (3, 5):
            model(torch.randn(size, 4)).sum().backward()
    roots = [row for row in rec.table("calls").to_pylist() if row["parent_call_id"] is None]
    assert [row["saved_bytes"] for row in roots if row["phase"] == "forward"] == [192, 320]


def test_what_the_nodes_of_a_backward_keep_is_charged_to_it():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    rows = rec.table("ops").to_pylist()
    phases = {row["name"]: row["phase"] for row in rows if row["saved_bytes"]}
    assert phases["aten.tanh.default"] == "forward"
    assert phases["aten.tanh_backward.default"] == "backward"
    forward = [row for row in rows if row["phase"] == "forward"]
    assert sum(row["saved_bytes"] or 0 for row in forward) == saved_by_calls(rec)[""]


def test_what_compiled_code_keeps_is_charged_in_a_call_and_unknown_outside():
    compiled = torch.compile(lambda x: x.exp().sin(), backend="aot_eager")

    class Compiled(nn.Module):
        def forward(self, x):
            return compiled(x)

    model, x = nn.Sequential(nn.Linear(4, 4), Compiled()), torch.randn(3, 4)
    compiled(model(x)).sum().backward()  # compiles it
    rec = recorded(model, lambda: compiled(model(x) * 2).sum())
    saved = [
        (row["call_id"] is None, row["saved_bytes"])
        for row in rec.table("ops").to_pylist()
        if row["name"] == "aten.exp.default"
    ]
    assert saved == [(False, 48), (True, None)]
    assert saved_by_calls(rec) == {"": 48, "0": 0, "1": 48}


def test_a_tensor_that_the_user_keeps_counts_in_every_step_alike():
    model, mask = nn.Linear(4, 4), torch.ones(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        for _ in range(3):
            (model(torch.randn(3, 4)) * mask).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = rec.table("ops").to_pylist()
    products = [row for row in rows if row["name"] == "aten.mul.Tensor" and row["phase"] is None]
    assert [row["saved_bytes"] for row in products] == [48, 48, 48]
