"""Every recorded op has the call, the phase and the forward op that an independent account of another run gives it."""

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
import zoo
from collect.ops.test_ops_truth import Program, TrueOp, said_ops, true_ops
from helpers.architectures import ARCHITECTURES
from zoo import TiedGPT

CHECKPOINTS = pytest.mark.parametrize(
    "reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"]
)
EXAMPLES = Path(__file__).parents[3] / "examples"


def example(name: str) -> ModuleType:
    """A script of the examples, as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_all_as_true(make: Any, program: Program, *, told: float = 0.9) -> tuple[list[TrueOp], Any]:
    """Runs a program on a fresh model twice, once under the account and once recorded, and compares op by op.

    Args:
        told: at least this part of the backward ops of modules and losses has a forward op that the account can tell.

    Returns:
        the true ops, and the recording.
    """
    torch.manual_seed(0)
    account = true_ops(make(), program)
    torch.manual_seed(0)
    model = make()
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        program(model, lambda optimizer: None)
    said = said_ops(rec)
    assert rec.meta.marks == ()
    assert Counter(op.phase for op in said.ops) == Counter(op.phase for op in account.ops)
    assert said.ops == account.ops
    assert_forward_ops(account, said, told)
    return account.ops, rec


def assert_forward_ops(account: Any, said: Any, told: float) -> None:
    true = {number: account.forward_op(number) for number in account.node_of}
    known = {number: op for number, op in true.items() if op is not None}
    assert {number: said.forward_ops[number] for number in known} == known
    assert len(known) >= told * len(true)


def train_once(loss_of: Any) -> Program:
    def program(model: nn.Module, watch: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        watch(optimizer)
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    return program


@CHECKPOINTS
def test_ops_of_a_gpt_with_shared_modules_and_work_in_place(reentrant):
    def loss_of(model):
        tokens = torch.randint(0, 17, (2, 8))
        return F.cross_entropy(model(tokens, reentrant).flatten(0, 1), tokens.flatten())

    ops, _ = assert_all_as_true(lambda: TiedGPT(layers=2), train_once(loss_of))
    counts = Counter(op.phase for op in ops)
    assert counts["backward"] > 200
    assert counts["optimizer"] > 20
    assert (counts["recompute"] > 50) == (reentrant is not None)
    assert sum(op.accumulation for op in ops) > 5


@pytest.mark.parametrize("reentrant", [None, False], ids=["plain", "non-reentrant"])
def test_ops_of_a_transformer(reentrant):
    inputs: dict[str, Any] = {}

    def make():
        model, given = ARCHITECTURES["GPT-2"]()
        inputs.update(given)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model.train()

    ops, _ = assert_all_as_true(make, train_once(lambda model: model(**inputs).loss))
    assert (sum(op.phase == "recompute" for op in ops) > 50) == (reentrant is not None)


def test_ops_of_resnet18():
    resnet18 = example("resnet18_paths").ResNet18

    def loss_of(model):
        return F.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.tensor([1, 2]))

    assert_all_as_true(lambda: resnet18(5), train_once(loss_of))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5, bidirectional=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][-1])


def test_ops_of_an_lstm():
    def loss_of(model):
        return F.cross_entropy(model(torch.randn(5, 2, 4)), torch.tensor([1, 2]))

    assert_all_as_true(Recurrent, train_once(loss_of))


def mean_square(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(3, 4)).square().mean()


@pytest.mark.parametrize("make", [zoo.Recursive, zoo.TwoParents], ids=lambda make: make.__name__)
def test_ops_of_modules_that_are_called_several_times(make):
    assert_all_as_true(make, train_once(mean_square))


def test_ops_of_accumulated_batches_with_evaluation_between():
    def program(model, watch):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch(optimizer)
        for _ in range(2):
            for _ in range(2):
                (mean_square(model) / 2).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            with torch.no_grad():
                mean_square(model)

    assert_all_as_true(zoo.Twice, program)


def test_ops_of_optimizers_that_step_inside_of_the_backward():
    def program(model, watch):
        optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter, optimizer in optimizers.items():
            watch(optimizer)
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            mean_square(model).backward()

    ops, _ = assert_all_as_true(zoo.Twice, program)
    assert sum(op.phase == "optimizer" for op in ops) == 4


def test_ops_of_two_losses_that_share_a_graph():
    def program(model, watch):
        hidden = model(torch.randn(3, 4))
        hidden.sum().backward(retain_graph=True)
        hidden.square().sum().backward()

    assert_all_as_true(zoo.Twice, program)


def test_ops_of_a_backward_to_chosen_inputs():
    def program(model, watch):
        x = torch.randn(3, 4, requires_grad=True)
        model(x).sum().backward(inputs=[x, *model.parameters()][:2])

    assert_all_as_true(zoo.Twice, program)
