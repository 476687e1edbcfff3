"""The user's own dispatch and function modes see the same ops with and without a recording, in the same order."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import resolve_name

import modtrace
import zoo
from helpers.user_modes import SeesFunctions, SeesOps
from zoo import TiedGPT


def seen(run: Callable[[Any], object], place: str, **options: Any) -> list[list[str]]:
    """What a function mode and a dispatch mode see of a run, which gets the recording, or None.

    Args:
        place: "none" without a recording; "around" it or "inside" it.
    """
    torch.manual_seed(0)
    functions, ops = SeesFunctions(), SeesOps()
    recording: Any = nullcontext() if place == "none" else modtrace.record(strict=True, **options)
    order = (functions, ops, recording) if place == "around" else (recording, functions, ops)
    with ExitStack() as stack:
        for each in order:
            stack.enter_context(each)
        run(recording if place != "none" else None)
    if place != "none":
        assert recording.meta.marks == ()
    return [functions.seen, ops.seen]


def train(reentrant: bool | None = None, set_to_none: bool = True) -> Callable[[Any], None]:
    def run(rec: Any) -> None:
        model = TiedGPT(layers=1)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            tokens = torch.randint(0, 17, (2, 8))
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = F.cross_entropy(model(tokens, reentrant).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            if rec is not None:
                rec.log(loss=loss, twice=loss.detach())
            else:
                loss.detach()  # the user's own

    return run


def without_optimizer(set_to_none: bool) -> Callable[[Any], None]:
    """The steps are found by looking whether the gradients were cleared."""

    def run(rec: Any) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad(set_to_none=set_to_none)

    return run


def penalty(rec: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.ones(2, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.norm().backward()


def evaluate(rec: Any) -> None:
    model = TiedGPT(layers=1).eval()
    with torch.no_grad():
        model(torch.zeros(2, 8, dtype=torch.long))
    with torch.inference_mode():
        model(torch.zeros(2, 8, dtype=torch.long))


def structured(rec: Any) -> None:
    for kind in ("dataclass", "dict", "none"):
        zoo.Structured(kind)(x=torch.ones(3, 4))
    zoo.Hidden()(torch.ones(3, 4))
    model = zoo.Late()
    model(torch.ones(3, 4))
    model.late = nn.Linear(4, 4)
    model(torch.ones(3, 4)).sum().backward()


def vmap(rec: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    torch.vmap(model)(torch.ones(3, 4)).sum().backward()
    torch.func.grad(lambda x: model(x).sum())(torch.ones(4))


def failing(rec: Any) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        zoo.Failing(ValueError("on purpose"))(torch.ones(3, 4))


RUNS = {
    "training": train(),
    "reentrant checkpoints": train(True),
    "non-reentrant checkpoints": train(False),
    "zeroed gradients": train(set_to_none=False),
    "no optimizer": without_optimizer(True),
    "no optimizer, zeroed gradients": without_optimizer(False),
    "a gradient penalty": penalty,
    "evaluation": evaluate,
    "outputs of all kinds": structured,
    "transforms": vmap,
    "an exception": failing,
}


ALL_RUNS = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


@pytest.mark.parametrize("place", ["around", "inside"])
@ALL_RUNS
def test_mode_sees_nothing_of_ours_in(run, place):
    plain = seen(run, "none")
    assert seen(run, place, backward_times=True) == plain
    assert all(plain)


@pytest.mark.parametrize(("place", "values"), [("around", "stats"), ("inside", None)])
@ALL_RUNS
def test_mode_sees_nothing_of_recorded_ops_in(run, place, values):
    assert seen(run, place, ops=True, values=values) == seen(run, "none")


def test_mode_sees_nothing_of_a_model_that_is_given():
    model = TiedGPT(layers=1)

    def run(rec: Any) -> None:
        model(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
        model.zero_grad()

    plain = seen(run, "none")
    assert seen(run, "around", model=model) == plain


class Tagged(torch.Tensor):
    """A tensor subclass that keeps what it is asked."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(resolve_name(function) or repr(function).partition(" at 0x")[0])
        return super().__torch_function__(function, types, args, kwargs)


@pytest.mark.parametrize("options", [{"backward_times": True}, {"ops": True}], ids=["", "ops"])
def test_tensor_subclass_is_asked_nothing_by_us(options):
    asked = []
    for recording in (nullcontext(), modtrace.record(strict=True, **options)):
        Tagged.seen = []
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        with recording:
            x = torch.ones(3, 4).as_subclass(Tagged)
            model(x).sum().backward()
        asked.append(Tagged.seen)
    assert asked[0] == asked[1]
    assert len(asked[0]) > 3
