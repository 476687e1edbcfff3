"""Under a graft, modules return what they returned in a recorded run."""

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.architectures import ARCHITECTURES
from modtrace.collect.structures.find import find_slots
from modtrace.errors import MisuseError, RecordingNotFoundError

WHOLE = modtrace.Capture(roles="output", tensors=True)

pytestmark = pytest.mark.usefixtures("seeded")


def outputs_of(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return [slot.tensor.clone() for slot in find_slots(model(*args, **kwargs)) if slot.tensor is not None]


def are_equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_one_module_has_done_is_undone(name: str) -> None:
    """Whichever weight is another one: with that module grafted, the model returns the same bits."""
    model, kwargs = ARCHITECTURES[name]()
    model.eval()
    with torch.no_grad():
        with modtrace.record(model, values=WHOLE, strict=True) as rec:
            expected = outputs_of(model, **kwargs)
        called = {path for path in rec.frame("values")["path"] if path}
        paths = [
            path for path, module in model.named_modules() if path in called and hasattr(module, "weight")
        ]
        for path in random.Random(name).sample(sorted(paths), 3):
            other = copy.deepcopy(model)
            module = other.get_submodule(path)
            module.weight = nn.Parameter(1.25 * module.weight + 0.1)  # not that of a module which shares it
            before = outputs_of(other, **kwargs)
            assert not are_equal(before, expected), path
            with modtrace.graft(other, rec, path):
                assert are_equal(outputs_of(other, **kwargs), expected), path
            assert are_equal(outputs_of(other, **kwargs), before), path


class Answer(NamedTuple):
    hidden: Tensor
    more: dict[str, list[Tensor]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Answer:
        hidden = self.linear(x)
        return Answer(hidden, {"scaled": [2 * hidden, hidden]})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4), Block(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        answer = self.block(self.first(x))
        again = self.block(answer.more["scaled"][0])
        return self.last(answer.hidden + again.more["scaled"][1])


@pytest.fixture
def recorded(seeded: None) -> "tuple[Model, Tensor, modtrace.LiveRecording, Tensor]":
    model, x = Model(), torch.randn(3, 4)
    with modtrace.record(model, values=WHOLE) as rec:
        expected = model(x)
    return model, x, rec, expected


def test_structures_and_calls_are_told_apart(recorded: Any) -> None:
    model, x, rec, expected = recorded
    with torch.no_grad():
        model.block.linear.weight.mul_(2)
    with modtrace.graft(model, rec, {"block": "block"}):
        found = model(x)
    assert torch.equal(found, expected)


def test_gradients_pass_to_what_the_module_has_computed(recorded: Any) -> None:
    model, x, rec, expected = recorded
    expected.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with modtrace.graft(model, rec, ["block", "first"]):
        model(x).sum().backward()
    assert all(map(torch.equal, gradients, [parameter.grad for parameter in model.parameters()]))


def test_dtype_and_the_names_of_another_model_are_its_own(recorded: Any, tmp_path: Path) -> None:
    model, x, rec, expected = recorded
    rec.write(tmp_path / "run.modtrace")
    port = nn.Sequential(copy.deepcopy(model)).to(torch.bfloat16)
    with modtrace.graft(port, modtrace.open_recording(tmp_path / "run.modtrace"), {"0.last": "last"}):
        found = port(x.to(torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.to(torch.bfloat16))


def test_a_recording_in_the_block_shows_the_grafted_tensors(recorded: Any) -> None:
    model, x, rec, _ = recorded
    with torch.no_grad():
        model.first.weight.mul_(2)
    with modtrace.record(model, values=WHOLE, ops=True) as with_graft, modtrace.graft(model, rec, "first"):
        model(x)
    assert torch.equal(with_graft.tensor("first"), rec.tensor("first"))
    assert modtrace.compare(rec, with_graft)
    assert {"prim.device", "aten._to_copy"}.isdisjoint(with_graft.frame("ops")["name"])


def test_modules_are_as_before_after_an_exception(recorded: Any) -> None:
    model, _, rec, _ = recorded
    with pytest.raises(RuntimeError), modtrace.graft(model, rec, ["first", "block"]):
        model(torch.zeros(3, 5))
    assert not any("forward" in vars(module) for module in model.modules())


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return _Holder(self.linear(x))


class _Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _twice(model: Model, x: Tensor) -> None:
    model(x)
    model(x)


def _under_checkpoint(model: Model, x: Tensor) -> None:
    checkpoint(
        lambda x: model.block(model.block(x).hidden).hidden, x.requires_grad_(), use_reentrant=False
    ).sum().backward()


MISUSES: dict[str, tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = {
    "no such module": (
        lambda *_: None,
        {"paths": "blok"},
        ValueError,
        "paths='blok' matches no module of Model; the nearest are: block",
    ),
    "no such module in a dict": (
        lambda *_: None,
        {"paths": {"blok": "block"}},
        ValueError,
        "Model has no such module; the nearest are: block",
    ),
    "no paths": (lambda *_: None, {"paths": []}, ValueError, "holds no pattern"),
    "an empty dict": (lambda *_: None, {"paths": {}}, TypeError, "give a dict of paths"),
    "a number": (lambda *_: None, {"paths": 3}, TypeError, "paths=3: give a glob"),
    "none": (lambda *_: None, {"paths": None}, TypeError, "paths=None: give a glob"),
    "no recording": (lambda *_: None, {"recording": 3}, TypeError, "give a recording or the path of one"),
    "nothing at a path": (
        lambda *_: None,
        {"recording": "nothing.modtrace"},
        RecordingNotFoundError,
        "nothing.modtrace",
    ),
    "no model": (lambda *_: None, {"model": len}, TypeError, "give a torch.nn.Module"),
    "not recorded": (
        lambda *_: None,
        {"paths": {"first": "frist"}},
        ValueError,
        "path='frist' matches no module",
    ),
    "no such step": (lambda *_: None, {"step": 7}, ValueError, "7"),
    "another step": (_twice, {}, MisuseError, "whole outputs of 2 calls. Leave the block"),
    "other inputs": (
        lambda model, x: model(x[:2]),
        {},
        ValueError,
        r"block.* has the shape \(2, 4\) in call 0, and 'block' \(3, 4\)",
    ),
    "not called": (lambda *_: None, {}, MisuseError, "block was called 0 of 2 times"),
    "called once": (lambda model, x: model.block(x), {}, MisuseError, "block was called 1 of 2 times"),
    "other tensors": (
        lambda model, x: model(x),
        {"paths": {"first": "block"}},
        MisuseError,
        "first returns tensors at",
    ),
    "checkpoint": (_under_checkpoint, {}, MisuseError, "which call this repeats is not known"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_told_with_the_module(recorded: Any, name: str) -> None:
    model, x, rec, _ = recorded
    misuse, given, error, text = MISUSES[name]
    given = {"model": model, "recording": rec, "paths": "block", **given}
    with pytest.raises(error, match=text), modtrace.graft(**given):
        misuse(model, x)
    assert not any("forward" in vars(module) for module in model.modules())


def test_globs_choose_modules_and_a_path_names_the_recording(tmp_path: Path) -> None:
    """A module that has two paths is grafted once."""
    model, other = (
        nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))) for _ in "ab"
    )
    model[2], other[2] = model[1], other[1]
    x = torch.randn(3, 4)
    with modtrace.record(model, values=WHOLE, to=tmp_path / "run.modtrace"):
        expected = outputs_of(model, x)
    assert not are_equal(outputs_of(other, x), expected)
    for paths in ("*.0", "**.0", ["0.0", re.compile(r"^1\.")], {"0.0", re.compile(r"^1\.")}):
        with modtrace.graft(other, tmp_path / "run.modtrace", paths):
            assert are_equal(outputs_of(other, x), expected)


def test_steps_and_what_was_not_kept_are_asked_for() -> None:
    model, x = Model(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with modtrace.record(model, values=WHOLE) as rec:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
    with pytest.raises(ValueError, match=r"whole outputs of 2 steps were kept: 0, 1\. Give step="):
        modtrace.graft(model, rec, "first").__enter__()
    with modtrace.graft(model, rec, "first", step=1):
        model(x)
    with modtrace.record(model) as without:
        model(x)
    with pytest.raises(ValueError, match="tensors=True"):
        modtrace.graft(model, without, "first").__enter__()


def test_tensors_inside_of_objects_are_not_lost_silently() -> None:
    model, x = nn.ModuleDict({"hides": Hides()}), torch.randn(3, 4)
    model.forward = lambda x: model["hides"](x).tensor
    with modtrace.record(model, values=WHOLE) as rec:
        model(x)
    with pytest.raises(MisuseError, match="inside of an object"), modtrace.graft(model, rec, "hides"):
        model(x)
