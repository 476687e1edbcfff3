"""Parameters without a gradient are found with the module that is the reason, and healthy models are left alone."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import modtrace
from helpers.findings import assert_readable, show_heads
from helpers.health_models import (
    FAMILIES,
    CallBlock,
    Stack,
    behind_detach,
    beside,
    in_reentrant_checkpoint,
    skipped,
    train,
    without_grad,
)
from modtrace.analysis.findings.finding import Finding

CHECKS = ["no-gradient", "not-in-optimizer"]


class _Detaching(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.inner = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.inner(x).detach().numpy())


def _find(model: nn.Module, **options: object) -> tuple[Finding, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a checkpoint over inputs without gradients
        rec = train(model, **options)
    answer = rec.findings(only=CHECKS)
    assert_readable(answer, rec.data)
    found = answer.findings
    assert not found or found[0].text[:40] in show_heads(rec)
    return found


def _call_otherwise(number: int, how: CallBlock) -> Callable[[Stack], None]:
    return lambda model: model.call_block.update({number: how})


def _checkpoint_all(model: Stack) -> None:
    model.embed.requires_grad_(False)
    model.call_block.update(dict.fromkeys(range(3), in_reentrant_checkpoint))


def _wrap(model: Stack) -> None:
    model.blocks[1] = _Detaching(model.blocks[1])


PLANTED = {
    "no_grad around a block": (
        _call_otherwise(1, without_grad),
        "error",
        "blocks.1",
        "runs without gradients",
    ),
    "reentrant checkpoints over a frozen embedding": (
        _checkpoint_all,
        "error",
        "blocks.0",
        "blocks.0..2 run with",
    ),
    "numpy in a forward": (_wrap, "error", "blocks.1", "returns what requires no gradient"),
    "detach before a block": (
        _call_otherwise(2, behind_detach),
        "warning",
        "blocks.1",
        "comes back to what blocks.1",
    ),
    "unused output": (
        _call_otherwise(1, beside),
        "warning",
        "blocks.1",
        "comes back to what blocks.1 returns",
    ),
    "block that is not called": (
        _call_otherwise(1, skipped),
        "warning",
        "blocks.1",
        "blocks.1 is never called",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("planted", PLANTED)
def test_reason_is_named(family: str, planted: str) -> None:
    plant, severity, path, text = PLANTED[planted]
    model = Stack(FAMILIES[family])
    plant(model)
    first, *others = _find(model, parameters=[one for one in model.parameters() if one.requires_grad])
    assert (first.severity, first.path) == (severity, path)
    assert text in first.text
    assert first.root == "Stack"
    assert not others  # what comes from the same fault is not told again


def _choose(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x).argmax(-1, keepdim=True).float().expand_as(x)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("how", "text"),
    [
        (behind_detach, "what blocks.1 returns is detached: aten.detach.default in Stack at "),
        (_choose, "what blocks.2 returns is read by aten.argmax.default in Stack at "),
    ],
)
def test_op_that_passes_no_gradient_on_is_named(family: str, how: CallBlock, text: str) -> None:
    model = Stack(FAMILIES[family])
    model.call_block[2] = how
    [found] = [one for one in _find(model, ops=modtrace.Ops(source=True)) if "comes back" in one.text]
    assert found.evidence[0].startswith(text)
    assert ".py:" in found.evidence[0]
    assert "record --" not in found.remedy


def test_output_that_no_op_reads_is_named() -> None:
    model = Stack(FAMILIES["attention"])
    model.call_block[1] = beside
    [found] = [one for one in _find(model, ops=True) if "comes back" in one.text]
    assert found.evidence[0] == "no op reads what blocks.1 returns"
    [without] = [one for one in _find(model) if "comes back" in one.text]
    assert "record --ops (ops=True) names who reads it" in without.remedy


class _Aside(nn.Module):
    """Throws away what its member returns."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.inner = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner(x)
        return x


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda block: block.add_module("spare", nn.Linear(2, 2)), "blocks.0..2.spare are never called: 6 "),
        (
            lambda block: block.register_parameter("scale", nn.Parameter(torch.ones(1))),
            "blocks.0..2 do not use ",
        ),
        (lambda block: _Aside(block), "comes back to what blocks.0..2.inner return"),
        (lambda block: _Detaching(block), "blocks.0..2 return what requires no gradient"),
    ],
)
def test_blocks_that_repeat_are_named_once(
    change: Callable[[nn.Module], nn.Module | None], text: str
) -> None:
    model = Stack(FAMILIES["attention"])
    for number, block in enumerate(model.blocks):
        model.blocks[number] = change(block) or block
    first, *others = _find(model)
    assert text in first.text
    assert not [other for other in others if other.path.startswith("blocks")]


@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_models_are_left_alone(family: str) -> None:
    model = Stack(FAMILIES[family])
    assert not _find(model)
    model.call_block.update(dict.fromkeys(range(3), in_reentrant_checkpoint))
    assert not _find(model)
    model.embed.requires_grad_(False)
    model.call_block.clear()
    assert not _find(model, parameters=[one for one in model.parameters() if one.requires_grad])


def test_parameter_that_the_forward_does_not_use_is_a_note() -> None:
    model = Stack(FAMILIES["attention"])
    model.blocks[0].scale = nn.Parameter(torch.ones(1))
    [found] = _find(model)
    assert (found.severity, found.path, found.parameter) == ("note", "blocks.0", "scale")


def test_parameters_in_no_optimizer_are_found_if_they_get_gradients() -> None:
    model = Stack(FAMILIES["recurrent"])
    model.blocks[0].scale = nn.Parameter(torch.ones(1))  # gets no gradient either
    of_head = set(model.head.parameters())
    [found] = _find(model, parameters=[one for one in model.parameters() if one not in of_head])[:1]
    assert (found.check, found.severity, found.path) == ("not-in-optimizer", "warning", "head")
    assert "2 parameters get gradients" in found.text


@pytest.mark.parametrize("is_held", [False, True])
def test_frozen_parameters_are_a_note_and_a_warning_where_only_norms_train(is_held: bool) -> None:
    model = Stack(FAMILIES["attention"])
    model.blocks[1].requires_grad_(False)
    held = [one for one in model.parameters() if is_held or one.requires_grad]
    found = _find(model, parameters=held)
    assert len(found) == is_held
    for note in found:
        assert (note.severity, note.path) == ("note", "blocks.1.qkv")
        assert "4 parameters are frozen, 25.6% of all elements: blocks.1.qkv.weight" in note.text
    model.requires_grad_(False)
    model.blocks.insert(0, nn.LayerNorm(16))
    [warning] = _find(model, parameters=[one for one in model.parameters() if is_held or one.requires_grad])
    assert warning.severity == "warning"
    assert "only LayerNorm trains" in warning.text


def test_what_was_not_recorded_is_not_checked() -> None:
    rec = train(Stack(FAMILIES["attention"]), values=None)
    found = rec.findings(only=["no-gradient"])
    assert not found.checked and not found.ok
    [unchecked] = found.unchecked
    assert "--values stats" in unchecked.remedy and "values='stats'" in unchecked.remedy


def test_generator_whose_fakes_are_always_detached_is_found_though_only_the_critic_steps_beside_it() -> None:
    generator, critic = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (critic, generator)]
    with modtrace.record() as rec:
        for _ in range(5):
            fake = generator(torch.randn(8, 4))
            for optimizer in optimizers:
                optimizer.zero_grad()
                critic(fake.detach()).square().mean().backward()
                optimizer.step()
    [found] = rec.findings(only=["no-gradient"]).findings
    assert "no gradient comes back to what Sequential returns: 2 parameters get no gradient" in found.text


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_in_a_plain_list_are_found_to_be_in_no_optimizer(family: str) -> None:
    model = Stack(FAMILIES[family])
    blocks = [*model.blocks]
    del model.blocks
    object.__setattr__(model, "blocks", blocks)
    [found] = _find(model)
    assert found.text == (
        f"in Stack 3 modules get gradients and are not registered, and in no optimizer: "
        f"({type(blocks[0]).__name__}#0), ({type(blocks[0]).__name__}#1), ({type(blocks[0]).__name__}#2)"
    )
    assert (found.check, found.severity) == ("not-in-optimizer", "warning")


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_model_that_an_earlier_optimizer_has_trained_is_accused_only_while_gradients_reach_it(
    family: str, is_frozen: bool
) -> None:
    model, probe = Stack(FAMILIES[family]), nn.Linear(30, 2)
    tokens = torch.randint(0, 30, (2, 6))
    with modtrace.record(strict=True) as rec:
        for trained in (model, probe):
            optimizer = torch.optim.AdamW(trained.parameters())  # takes the place of the one before
            for _ in range(5):
                optimizer.zero_grad()
                with torch.set_grad_enabled(trained is model or not is_frozen):
                    features = model(tokens)
                probe(features).square().mean().backward()
                optimizer.step()
    found = rec.findings(only=["not-in-optimizer"]).findings
    assert bool([one for one in found if "get gradients" in one.text]) is not is_frozen
