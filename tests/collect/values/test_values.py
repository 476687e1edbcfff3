"""What is measured of outputs and their gradients: which rows there are, in which step, with which numbers."""

import re
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
import zoo
from helpers.stat_rows import holds, names, one, rows


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


def record(*arguments: Any, **options: Any) -> modtrace.LiveRecording:
    return modtrace.record(*arguments, strict=True, **options)


class Keeps:
    """Copies of what modules return and of its gradients, kept by hooks of the test's own."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: dict[str, list[torch.Tensor]] = {}
        self.gradients: dict[str, list[torch.Tensor]] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.outputs.setdefault(name, []).append(output.detach().clone())
            if output.requires_grad:
                self._keep_gradient(output, self.gradients.setdefault(name, []))

        return hook

    @staticmethod
    def _keep_gradient(output: torch.Tensor, gradients: list[torch.Tensor]) -> None:
        shape, came = output.shape, []

        def keep(gradient: torch.Tensor) -> None:
            came.append(True)
            gradients.append(gradient.detach().clone())

        output.register_hook(keep)
        if output._base is not None:  # if somebody writes to a view, its gradient comes here alone
            output._base.register_hook(lambda gradient: None if came else keep(gradient.reshape(shape)))


# The numbers.


def test_outputs_gradients_and_parameters_of_a_step_written_out():
    """y = w x + b with w = 2, b = -1, x = 1, 2, 3; the loss is the sum of squares."""
    model = nn.Linear(1, 1)
    model.weight.data.fill_(2.0)
    model.bias.data.fill_(-1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model) as rec:
        model(torch.tensor([[1.0], [2.0], [3.0]])).square().sum().backward()  # y = 1, 3, 5; dy = 2, 6, 10
        optimizer.step()
    fields = ("phase", "role", "slot", "nth", "order", "count", "min", "max", "sum", "sumsq")
    assert names(rows(rec), *fields) == [
        ("forward", "output", "", 0, 0, 3, 1, 5, 9, 35),
        ("forward", "loss", "", None, 1, 1, 35, 35, 35, 1225),
        ("backward", "grad_output", "", 0, 2, 3, 2, 10, 18, 140),
        ("optimizer", "parameter", "weight", None, 3, 1, 2, 2, 2, 4),
        ("optimizer", "parameter_grad", "weight", None, 4, 1, 44, 44, 44, 1936),
        ("optimizer", "parameter", "bias", None, 5, 1, -1, -1, -1, 1),
        ("optimizer", "parameter_grad", "bias", None, 6, 1, 18, 18, 18, 324),
    ]
    of_model = rows(rec, slot="", path="")
    assert {(row.shape, row.dtype, row.note) for row in of_model} == {((3, 1), "float32", None)}
    assert (one(rec, role="loss").shape, one(rec, role="loss").dtype) == ((), "float32")


def test_numbers_are_those_of_torch_in_every_module_of_a_gpt():
    model = zoo.TiedGPT(layers=2)
    kept = Keeps(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model) as rec:
        for _ in range(2):
            tokens = torch.randint(0, 17, (2, 8))
            optimizer.zero_grad()
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
    for role, wanted in (("output", kept.outputs), ("grad_output", kept.gradients)):
        for path, tensors in wanted.items():
            found = rows(rec, path="blocks.0.shared" if path.endswith("shared") else path, role=role)
            if (
                role == "grad_output" and len(tensors) == 4
            ):  # a module called twice: its last call comes first
                tensors = [tensors[1], tensors[0], tensors[3], tensors[2]]
                found = sorted(found, key=lambda row: (row.step, row.nth))
            assert len(found) == len(tensors)
            assert all(holds(row, tensor) for row, tensor in zip(found, tensors, strict=True))
    assert {row.note for row in rows(rec)} == {None}


def test_output_of_no_elements_has_a_row_without_minimum():
    with record() as rec:
        nn.Identity()(torch.ones(0, 3))
    [row] = rows(rec)
    assert (row.shape, row.count, row.min, row.max, row.sum, row.sumsq) == ((0, 3), 0, None, None, 0, 0)


def test_output_of_a_meta_model_has_a_row_that_says_why_it_was_not_measured():
    model = nn.Linear(4, 4, device="meta")
    with record(model) as rec:
        model(torch.ones(2, 4, device="meta")).sum().backward()
    assert names(rows(rec), "role", "shape", "count", "note") == [
        ("output", (2, 4), None, "not measured: a meta tensor holds no numbers"),
        ("loss", (), None, "not measured: a meta tensor holds no numbers"),
        ("grad_output", (2, 4), None, "not measured: a meta tensor holds no numbers"),
    ]


def test_output_in_inference_mode_is_measured():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with record(model) as rec, torch.inference_mode():
        y = model(torch.ones(2, 4))
    found = rows(rec)
    assert names(found, "path", "role") == [("0", "output"), ("1", "output"), ("", "output")]
    assert holds(found[2], y)
    assert found[0].min < 0 <= found[1].min  # what the ReLU found, and what it made of it


# Which measurement a row belongs to.


def test_child_and_parent_differ_where_the_parent_works_in_place():
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x).mul_(2)

    model = Doubles()
    x = torch.ones(2, 4)
    expected = model.layer(x)
    with record(model) as rec:
        model(x).sum().backward()
    assert names(rows(rec), "path", "role", "order") == [
        ("layer", "output", 0),
        ("", "output", 1),
        (None, "loss", 2),
        ("", "grad_output", 3),
        ("layer", "grad_output", 4),
    ]
    assert holds(one(rec, path="layer", role="output"), expected)
    assert holds(one(rec, path="", role="output"), expected * 2)
    assert holds(one(rec, path="", role="grad_output"), torch.ones(2, 4))
    assert holds(one(rec, path="layer", role="grad_output"), torch.full((2, 4), 2.0))


def test_identity_returns_a_leaf_and_a_parameter():
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
            self.same = nn.Identity()

        def forward(self, x):
            return self.same(self.weight), self.same(x)

    model = Gives()
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    with record(model) as rec:
        weight, same = model(x)
        (weight * same).sum().backward()
    of_modules = [row for row in rows(rec) if row.role != "loss"]
    assert sorted(names(of_modules, "path", "nth", "role", "slot", "sum")) == [
        ("", 0, "grad_output", "[0]", 7),
        ("", 0, "grad_output", "[1]", 3),
        ("", 0, "output", "[0]", 3),
        ("", 0, "output", "[1]", 7),
        ("same", 0, "grad_output", "", 7),
        ("same", 0, "output", "", 3),
        ("same", 1, "grad_output", "", 3),
        ("same", 1, "output", "", 7),
    ]
    assert names(rows(rec, role="loss"), "path", "nth", "slot", "sum") == [(None, None, "", 11)]
    assert not weight._backward_hooks
    assert not x._backward_hooks


# Loops.


def test_graph_that_runs_backward_twice_gives_two_rows_of_each_gradient():
    model = nn.Linear(4, 1)
    with record(model) as rec:
        y = model(torch.ones(2, 4))
        y.sum().backward(retain_graph=True)
        (3 * y.sum()).backward()
    found = rows(rec, role="grad_output")
    assert names(found, "order", "sum", "nth", "call_id") == [(2, 2.0, 0, 0), (4, 6.0, 0, 0)]


def test_gradient_of_a_gan_comes_in_the_step_of_its_backward_to_the_call_of_an_earlier_one():
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    kept = Keeps(generator)
    with record({"generator": generator, "discriminator": discriminator}) as rec:
        for _ in range(2):
            fake = generator(torch.randn(2, 4))
            of_discriminator.zero_grad()
            real = discriminator(torch.randn(2, 4))
            (discriminator(fake.detach()).mean() - real.mean()).backward()
            of_discriminator.step()
            of_generator.zero_grad()
            discriminator(fake).mean().backward()
            of_generator.step()
    forwards = rows(rec, root="generator", role="output")
    assert names(forwards, "step") == [0, 2]
    found = rows(rec, root="generator", role="grad_output")
    assert names(found, "step", "phase", "nth") == [(1, "backward", 0), (3, "backward", 0)]
    assert names(found, "call_id") == names(forwards, "call_id")
    assert [holds(row, tensor) for row, tensor in zip(found, kept.gradients[""], strict=True)]
    assert len(fake._backward_hooks) == 1  # that of Keeps


def test_tensor_that_gets_its_graph_after_its_module_returned_it_is_watched_where_it_is_returned_again():
    """So it is with a reentrant checkpoint at the end of a model: the tensor of the block becomes its own."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                y = self.inner(x)
            return y.requires_grad_()

    with record() as rec:
        Outer()(torch.ones(2, 4)).sum().backward()
    assert names(rows(rec), "path", "role", "order") == [
        ("inner", "output", 0),
        ("", "output", 0),
        (None, "loss", 1),
        ("", "grad_output", 2),
    ]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_recompute_has_rows_of_its_own_that_equal_the_forwards(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = Checkpointed()
    with torch.no_grad():
        first = model.blocks[0][0](torch.ones(2, 4))
    with record(model) as rec:
        model(torch.ones(2, 4, requires_grad=True)).square().sum().backward()
    numbers = ("path", "nth", "count", "min", "max", "sum", "sumsq")
    forward = names(rows(rec, phase="forward", role="output"), *numbers)
    recomputed = names(rows(rec, phase="recompute", role="output"), *numbers)
    assert set(recomputed) <= set(forward)
    assert holds(one(rec, phase="recompute", role="output", path="blocks.0.0"), first)
    again = ["blocks.1.0", "blocks.1.1", "blocks.1", "blocks.0.0", "blocks.0.1", "blocks.0"]
    if not reentrant:
        again = ["blocks.1.0", "blocks.0.0"]  # the dropout saves the last tensor: there it stops
    assert [path for path, *_ in recomputed] == again
    gradients = names(rows(rec, role="grad_output"), "path")
    assert sorted(gradients) == ["", *sorted(path for path, *_ in forward if path)]  # each once
    assert {row.phase for row in rows(rec, role="grad_output")} == {"backward"}


def test_gradient_of_an_output_that_a_hook_of_the_users_changes_is_the_one_that_came_in():
    model = nn.Linear(4, 4)
    with record(model) as rec:
        y = model(torch.ones(2, 4))
        y.register_hook(lambda gradient: gradient * 100)
        y.sum().backward()
    assert holds(one(rec, role="grad_output"), torch.ones(2, 4))


def test_tensors_that_die_within_a_call_are_not_taken_for_each_other():
    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x):
            for number in range(50):
                self.same(torch.full((2,), float(number)))  # at the address of the one before, very likely
            return x

    with record() as rec, torch.no_grad():
        Loops()(torch.ones(1))
    found = rows(rec, path="same")
    assert names(found, "nth", "sum") == [(number, 2.0 * number) for number in range(50)]
    assert len({row.order for row in found}) == 50


def test_module_that_a_backward_runs_has_rows_of_its_phase():
    outer, inner = nn.Linear(4, 4), nn.Linear(4, 4)

    class Runs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                inner(torch.ones(1, 4)).sum().backward()
            return gradient

    with record({"outer": outer, "inner": inner}) as rec:
        Runs.apply(outer(torch.ones(2, 4))).sum().backward()
    assert names(rows(rec), "root", "role", "phase", "order") == [
        ("outer", "output", "forward", 0),
        (None, "loss", "forward", 1),
        ("inner", "output", "backward", 2),
        ("inner", "grad_output", "backward", 3),
        ("outer", "grad_output", "backward", 4),
    ]


# Recorders and threads.


def test_recording_that_ends_first_leaves_the_other_its_gradients():
    model = nn.Linear(4, 1)
    with record(model) as outer:
        with record(model) as inner:
            y = model(torch.ones(2, 4))
        y.sum().backward()
        assert len(y._backward_hooks) == 1
    assert names(rows(inner), "role") == ["output"]
    assert names(rows(outer), "role") == ["output", "loss", "grad_output"]
    assert not y._backward_hooks


def test_backward_on_another_thread_than_the_forward_has_its_rows():
    model = nn.Linear(4, 1)
    with record(model) as rec:
        loss = model(torch.ones(2, 4)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    expected = [("loss", pytest.approx(loss.item()), None), ("grad_output", 2.0, 0)]
    assert names(rows(rec), "role", "sum", "nth")[1:] == expected


def test_what_forward_returned_is_measured_though_a_hook_of_the_module_replaces_it():
    """Hooks of torch's own run ours first, so a row is of what `forward` itself returned."""
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda module, args, output: output * 0)
    expected = model.forward(torch.ones(2, 4))
    with record(model) as rec:
        model(torch.ones(2, 4))
    assert holds(one(rec), expected)


# What `values` may be.


def test_no_values_means_no_rows_and_no_hook():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, values=None) as rec:
        y = model(torch.ones(2, 4))
        assert y._backward_hooks is None
        y.sum().backward()
        optimizer.step()
    assert rec.table("values").num_rows == 0
    assert (
        rec.table("sites")["role"].to_pylist() == ["parameter"] * 2
    )  # to which the rows of `parameters` refer
    assert rec.table("calls").num_rows > 0
    assert rec.table("steps").column("overhead_ns").to_pylist() == [None]


@pytest.mark.parametrize("values", ["bogus", "", 3, True])
def test_values_that_are_something_else_are_refused(values):
    with pytest.raises(ValueError, match=re.escape(f"values={values!r}")):
        modtrace.record(values=values)
