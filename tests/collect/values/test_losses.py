"""The losses of each backward: its roots of one element."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.simulated_captures import simulated_captures
from helpers.stat_rows import names, rows
from modtrace import Capture
from modtrace.measure.measurers.measurer import Measurer

STEPS = 3

#: Receives the step, and the roots of one of its backwards with one element, as the backward begins.
Tell = Callable[..., None]


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


class Largest(nn.Module):
    """Returns one element that is no scalar."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.amax(0)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def record(model: object = None, **options: Any) -> modtrace.LiveRecording:
    return modtrace.record(model, strict=True, **options)


# Programs: each trains for `STEPS` steps.


def train(tell: Tell, parameters: Iterable[torch.Tensor], compute: Callable[[], torch.Tensor]) -> None:
    """Trains by one loss a step."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = compute()
        tell(step, loss)
        loss.backward()
        optimizer.step()


def plain(tell: Tell) -> None:
    model = two_layers()
    train(tell, model.parameters(), lambda: model(torch.randn(5, 4)).square().mean())


def returned_by_the_model(tell: Tell) -> None:
    model = nn.Sequential(two_layers(), Largest())
    train(tell, model.parameters(), lambda: model(torch.randn(5, 4)))


def micro_batches(tell: Tell) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(4):
            loss = model(torch.randn(5, 4)).square().mean() / 4
            tell(step, loss)
            loss.backward()
        optimizer.step()


def two_losses_in_one_backward(tell: Tell) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        y = model(torch.randn(5, 4))
        losses = y.square().mean(), y.abs().mean()
        tell(step, *losses)
        torch.autograd.backward(losses)
        optimizer.step()


def gradient_penalty(tell: Tell) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(5, 4, requires_grad=True)
        score = model(x).sum()
        tell(step, score)
        (gradient,) = torch.autograd.grad(score, x, create_graph=True)
        loss = score + (gradient.norm(dim=1) - 1).square().mean()
        tell(step, loss)
        loss.backward()
        optimizer.step()


def with_gradient() -> torch.Tensor:
    return torch.randn(5, 4, requires_grad=True)


def checkpointed(tell: Tell, *, reentrant: bool) -> None:
    model = two_layers()
    train(
        tell,
        model.parameters(),
        lambda: checkpoint(model, with_gradient(), use_reentrant=reentrant).square().mean(),
    )


def reentrant_checkpoint_of_the_loss(tell: Tell) -> None:
    """The backward inside begins at a tensor of one element, too."""
    model = two_layers()
    train(
        tell,
        model.parameters(),
        lambda: checkpoint(lambda x: model(x).square().mean(), with_gradient(), use_reentrant=True) * 2,
    )


def compiled(tell: Tell) -> None:
    model = torch.compile(two_layers(), backend="aot_eager")
    train(tell, model.parameters(), lambda: model(torch.randn(5, 4)).square().mean())


def scaled(tell: Tell) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(5, 4)).float().square().mean()
        root = scaler.scale(loss)
        tell(step, root)
        root.backward()
        scaler.step(optimizer)
        scaler.update()


def closure(tell: Tell) -> None:
    model = two_layers()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for step in range(STEPS):
        x = torch.randn(5, 4)

        def compute(x: torch.Tensor = x, step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            tell(step, loss)
            loss.backward()
            return loss

        optimizer.step(compute)


def without_modules(tell: Tell) -> None:
    weight = torch.randn(3, requires_grad=True)
    train(tell, [weight], lambda: (weight * torch.randn(3)).square().sum())


def functional(tell: Tell) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(5, 4)

        def compute(
            parameters: dict[str, torch.Tensor], x: torch.Tensor = x
        ) -> tuple[torch.Tensor, torch.Tensor]:
            loss = torch.func.functional_call(model, parameters, (x,)).square().mean()
            return loss, loss

        gradients, loss = torch.func.grad(compute, has_aux=True)(dict(model.named_parameters()))
        tell(step, loss)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()


PROGRAMS: dict[str, Callable[[Tell], None]] = {
    "plain": plain,
    "returned by the model": returned_by_the_model,
    "micro-batches": micro_batches,
    "two losses in one backward": two_losses_in_one_backward,
    "gradient penalty": gradient_penalty,
    "checkpoint": lambda tell: checkpointed(tell, reentrant=False),
    "reentrant checkpoint": lambda tell: checkpointed(tell, reentrant=True),
    "reentrant checkpoint of the loss": reentrant_checkpoint_of_the_loss,
    "GradScaler": scaled,
    "LBFGS": closure,
    "no modules": without_modules,
    "torch.func.grad": functional,
}


def assert_losses_recorded(program: Callable[[Tell], None], **options: Any) -> None:
    told: dict[int, list[tuple[str, float]]] = defaultdict(list)

    def tell(step: int, *losses: torch.Tensor) -> None:
        slots = [f"[{at}]" for at in range(len(losses))] if len(losses) > 1 else [""]
        told[step] += zip(slots, [each.item() for each in losses], strict=True)

    with record(**options) as rec:
        program(tell)
    recorded: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for row in rows(rec, role="loss"):
        assert (row.phase, row.path, row.nth, row.call_id, row.count) == ("forward", None, None, None, 1)
        assert row.min == row.max == row.sum
        recorded[row.step].append((row.slot, row.sum))
    assert recorded == told
    assert rec.meta.marks == ()


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_recorded_losses_are_those_of_the_program(program: Callable[[Tell], None]) -> None:
    assert_losses_recorded(program)


@pytest.mark.parametrize(
    "program",
    [gradient_penalty, reentrant_checkpoint_of_the_loss, functional],
    ids=lambda program: program.__name__,
)
def test_recorded_losses_are_those_of_the_program_with_ops(program: Callable[[Tell], None]) -> None:
    assert_losses_recorded(program, ops=True)


@pytest.mark.parametrize("options", [{}, {"compiled": "inside"}])
def test_recorded_losses_of_a_compiled_model_are_those_of_the_program(
    fresh_dynamo: None, options: dict[str, Any]
) -> None:
    assert_losses_recorded(compiled, **options)


def test_nan_that_nothing_else_holds_is_in_the_row_of_the_loss() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model) as rec:
        for step in range(2):
            optimizer.zero_grad()
            (model(torch.randn(5, 4)).square().mean() + (math.nan if step else 0.0)).backward()
            optimizer.step()
    assert names([row for row in rows(rec) if row.nan_count or row.inf_count], "step", "role") == [
        (1, "loss")
    ]
    found = rec.first_nonfinite()
    assert found is not None
    assert (found.step, found.role, found.root, found.path, found.count) == (1, "loss", None, None, 1)
    assert "given" not in (found.remedy or "")


def test_root_of_more_elements_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[torch.Size] = []
    measure = Measurer.measure

    def count(self: Measurer, tensor: torch.Tensor) -> Any:
        measured.append(tensor.shape)
        return measure(self, tensor)

    monkeypatch.setattr(Measurer, "measure", count)
    model = nn.Linear(4, 3)
    with record(model, values=Capture(roles="loss")) as rec:
        y = model(torch.randn(5, 4))
        y.backward(torch.ones(5, 3), retain_graph=True)
        torch.autograd.backward([y.sum(), y], [None, torch.ones(5, 3)])
    assert names(rows(rec), "role", "slot") == [("loss", "[0]")]
    assert measured == [()]


def test_edge_of_the_graph_is_no_loss() -> None:
    model = nn.Linear(4, 1)
    with record(model, values=Capture(roles="loss")) as rec:
        loss, other = model(torch.randn(5, 4)).sum(), model(torch.randn(5, 4)).sum()
        torch.autograd.backward([get_gradient_edge(loss), other], [torch.ones(()), torch.ones(())])
    assert names(rows(rec), "slot", "sum") == [("[1]", other.item())]


def test_examples_of_vmap_are_no_loss() -> None:
    model = nn.Linear(4, 1)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    with record(model, values=Capture(roles="loss")) as rec:
        torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.randn(5, 4))
    assert rows(rec) == []


def test_row_of_a_fake_loss_says_that_it_holds_no_numbers() -> None:
    with record(values=Capture(roles="loss")) as rec, FakeTensorMode():
        nn.Linear(4, 1)(torch.randn(5, 4)).sum().backward()
    assert names(rows(rec), "count", "note") == [(None, "not measured: a fake tensor holds no numbers")]
    assert rec.meta.marks == ()


def test_row_of_a_loss_in_a_graph_that_is_captured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 1)
    with simulated_captures(monkeypatch) as captures, record(values=Capture(roles="loss")) as rec:
        model(torch.ones(5, 4)).sum().backward()
        with captures.capture():
            model(torch.ones(5, 4)).sum().backward()
    assert names(rows(rec), "note") == [None, "not measured: a CUDA graph was being captured"]
    assert rec.meta.marks == ()


def test_backward_that_raises_has_its_loss() -> None:
    with record() as rec:
        loss = torch.ones(2).sum()
        with pytest.raises(RuntimeError, match="does not require grad"):
            loss.backward()
    assert names(rows(rec), "role", "sum") == [("loss", 2.0)]


# What captures choose.


def losses_measured(values: Any, **options: Any) -> list[int]:
    """The steps of the losses that are measured of a run of four steps."""
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, values=values, **options) as rec:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
    return names(rows(rec, role="loss"), "step")


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ("stats", [0, 1, 2, 3]),
        (None, []),
        (Capture(), [0, 1, 2, 3]),
        (Capture(roles="all"), [0, 1, 2, 3]),
        (Capture(roles="output"), []),
        (Capture(steps="1::2"), [1, 3]),
        (Capture(roles="loss", steps=[2]), [2]),
        (Capture(include="0"), []),
        (Capture(exclude="0"), []),
        (Capture(types=nn.Linear), []),
        (Capture(where=lambda path, module: True), []),
        (Capture(roles=("output", "loss"), include="0"), [0, 1, 2, 3]),
        ([Capture(include="0"), Capture(roles="loss", steps="3:")], [3]),
    ],
)
def test_capture_measures_losses_by_its_roles_and_steps(values: Any, steps: list[int]) -> None:
    assert losses_measured(values) == steps


def test_loss_may_be_kept_whole_and_given_to_a_function() -> None:
    given: list[float] = []
    capture = Capture(
        roles="loss", tensors=True, hash=True, function=lambda x: given.append(x.item()) or x.item()
    )
    model = nn.Linear(4, 1)
    with record(model, values=capture) as rec:
        losses = [model(torch.randn(5, 4)).sum() for _ in range(2)]
        torch.autograd.backward(losses)
    expected = [each.item() for each in losses]
    assert given == expected
    assert rec.frame("values")["user"].tolist() == [str(each) for each in expected]
    assert [rec.tensor("", role="loss", slot=f"[{at}]").item() for at in range(2)] == expected


def test_trigger_names_the_loss() -> None:
    model = two_layers()
    with record(model, keep_last=2, triggers=modtrace.NonFinite()) as rec:
        (model(torch.randn(5, 4)).square().mean() + math.inf).backward()
    assert [note.reason for note in rec.meta.notes] == ["loss holds 1 inf"]
