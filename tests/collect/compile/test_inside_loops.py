"""Whatever loop runs a compiled model: calls inside have the numbers that they have in an eager run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import modtrace
from helpers.compiled_runs import rows_of
from modtrace import Capture

WIDTH = 8

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU()

    def forward(self, x):
        return x + self.act(self.up(x))


class Net(nn.Module):
    """Runs its blocks several times, each call in a checkpoint if options of that are given."""

    def __init__(self, rounds=1, **options):
        super().__init__()
        self.rounds, self.options = rounds, options
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in [*self.blocks] * self.rounds:
            x = checkpoint(block, x, **self.options) if self.options else block(x)
        return x


Rows = dict[tuple[Any, ...], tuple[Any, ...]]
Call = Any  # the model, compiled or not
Update = Callable[[], None]


def rows_in(net: nn.Module, loop: Callable[[Call, Update], None], how: str | None, **options: Any) -> Rows:
    """Returns the rows of a loop that is given the model and what updates its parameters.

    Args:
        net: the model.
        loop: the loop.
        how: what is compiled, `whole` or `blocks`; None runs eagerly.
        options: of the recording.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    for name, parameter in net.named_parameters():
        nn.init.normal_(parameter, std=0.5 if name.endswith("weight") else 0.1)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    if how is not None:
        options["compiled"] = "inside"
        for module in net.blocks if how == "blocks" else [net]:
            module.compile(backend="aot_eager", fullgraph=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    with modtrace.record(net, strict=True, **options) as rec:
        loop(net, update)
    return rows_of(rec, "output", "grad_output")


def batch() -> Tensor:
    return torch.randn(4, WIDTH, requires_grad=True)


def evaluate(call: Call) -> None:
    with torch.no_grad():
        call(batch())
        call(batch())


def evaluation_before_backward(call: Call, update: Update) -> None:
    for _ in range(2):
        loss = call(batch()).sum()
        evaluate(call)
        loss.backward()
        update()


def evaluation_between_micro_batches(call: Call, update: Update) -> None:
    for _ in range(2):
        call(batch()).sum().backward()
        evaluate(call)
        call(batch()).sum().backward()
        update()


def steps_without_optimizer(call: Call, update: Update) -> None:
    for _ in range(3):
        x = batch()
        torch.autograd.grad(call(x).sum(), x)


def forwards_alone(call: Call, update: Update) -> None:
    for _ in range(3):
        call(batch())


def backward_of_the_batch_before(call: Call, update: Update) -> None:
    waiting = None
    for _ in range(3):
        loss = call(batch()).sum()
        if waiting is not None:
            waiting.backward()
        waiting = loss


def part_called_by_itself(call: Call, update: Update) -> None:
    part = call.blocks[0].up
    for _ in range(2):
        (call(part(batch())).sum() + part(batch()).sum() + call(batch()).sum()).backward()
        update()


def micro_batches(call: Call, update: Update) -> None:
    for _ in range(2):
        for _ in range(3):
            call(batch()).sum().backward()
        update()


LOOPS = (
    evaluation_before_backward,
    evaluation_between_micro_batches,
    steps_without_optimizer,
    forwards_alone,
    backward_of_the_batch_before,
    part_called_by_itself,
)


#: The others run with the tests that compile for long.
QUICK = (evaluation_between_micro_batches, backward_of_the_batch_before, part_called_by_itself)


@pytest.mark.parametrize("how", ["whole", pytest.param("blocks", marks=pytest.mark.compile)])
@pytest.mark.parametrize(
    "loop",
    [loop if loop in QUICK else pytest.param(loop, marks=pytest.mark.compile) for loop in LOOPS],
    ids=lambda loop: loop.__name__,
)
def test_rows_have_the_numbers_of_an_eager_run(loop, how):
    eager = rows_in(Net(), loop, None)
    assert rows_in(Net(), loop, how) == eager
    assert eager


def keep_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": keep_products},
}


@pytest.mark.parametrize("options", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize(
    ("rounds", "loop"),
    [
        (2, micro_batches),
        pytest.param(1, micro_batches, marks=pytest.mark.compile),
        pytest.param(3, evaluation_before_backward, marks=pytest.mark.compile),
    ],
)
def test_what_a_checkpoint_computes_again_has_the_numbers_of_its_forwards(rounds, loop, options):
    eager = rows_in(Net(rounds, **options), loop, None)
    found = rows_in(Net(rounds, **options), loop, "blocks")
    assert {site: row for site, row in found.items() if site in eager} == eager
    assert {site[2] for site in found} == {site[2] for site in eager}


def test_gradients_are_those_that_the_step_of_their_forward_wants():
    """A step that other captures want has run between forward and backward."""
    values = [Capture(steps="::2"), Capture(include="blocks.*.act", roles="output", steps="1::2")]
    eager, found = (rows_in(Net(), evaluation_before_backward, how, values=values) for how in (None, "whole"))
    assert found == eager
    assert any(site[3] == "grad_output" for site in eager)


@pytest.mark.parametrize(
    ("compiled", "is_compiled_before"),
    [
        ("boundary", True),
        pytest.param("boundary", False, marks=pytest.mark.compile),
        ("inside", False),
        pytest.param("inside", True, marks=pytest.mark.compile),
    ],
)
def test_many_recordings_of_a_model_compile_it_once_with_and_once_without_them(compiled, is_compiled_before):
    net, counter = Net(), CompileCounterWithBackend("aot_eager")
    called = torch.compile(net, backend=counter, fullgraph=True)
    if is_compiled_before:
        called(batch()).sum().backward()
    for _ in range(10):  # Dynamo gives up a function that it has compiled eight times
        with modtrace.record(net, compiled=compiled, strict=True) as rec:
            called(batch()).sum().backward()
        called(batch()).sum().backward()
        assert rec.table("values").num_rows
    assert counter.frame_count == (1 if is_compiled_before and compiled == "boundary" else 2)


def test_calls_that_return_no_tensor_are_counted():
    class AtTimes(Block):
        def forward(self, x, is_wanted):
            return super().forward(x) if is_wanted else None

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = AtTimes()

        def forward(self, x):
            self.part(x, False)
            return self.part(x, True)

    eager = rows_in(Twice(), forwards_alone, None)
    assert rows_in(Twice(), forwards_alone, "whole") == eager
    assert {site[2] for site in eager if site[1] == "part"} == {1}


def test_modules_that_are_mapped_over_examples_are_said_not_to_be_measured():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.head = Block(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.head(torch.vmap(self.part)(x))

    net = Mapped()
    net.compile(backend="aot_eager", fullgraph=True)
    with (
        pytest.warns(modtrace.ModtraceWarning, match=r"given to torch.cond, torch.vmap and so on"),
        modtrace.record(net, compiled="inside", strict=True) as rec,
    ):
        net(batch()).sum().backward()
    assert {site[1] for site in rows_of(rec, "output", "grad_output")} == {"", "head"}
