"""What PyTorch's own tests ask of its two module trackers, asked of ours too.

Each behaviour runs on torch's classes as far as they have the feature, so that the expectation is torch's own.
"""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.mod_tracker import ModTracker
from torch.utils.checkpoint import checkpoint
from torch.utils.module_tracker import ModuleTracker

import modtrace

OURS = pytest.param(modtrace.ModuleTracker, id="ours")
TORCHS = pytest.param(ModuleTracker, id="torch ModuleTracker")
TORCHS_WITH_HOOKS = pytest.param(ModTracker, id="torch ModTracker")

EVERY_TRACKER = pytest.mark.parametrize("kind", [TORCHS, TORCHS_WITH_HOOKS, OURS])
TRACKERS_WITH_HOOKS = pytest.mark.parametrize("kind", [TORCHS_WITH_HOOKS, OURS])

#: Parents without "Global", and whether it was in backward.
Seen = tuple[set[str], bool]


@pytest.fixture(autouse=True)
def what_torchs_leave_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """ModTracker replaces `warnings.formatwarning` for good when it warns."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)


class Answers:
    """Asks a tracker from inside of a model, and from a hook on a tensor in its backward."""

    def __init__(self) -> None:
        self.tracker: Any = None
        self.seen: list[Seen] = []

    def ask(self) -> None:
        parents = self.tracker.parents
        assert "Global" in parents
        self.seen.append((parents - {"Global"}, self.tracker.is_bw))

    def ask_in_backward_of(self, tensor: Tensor) -> None:
        if tensor.requires_grad:  # not in the first forward of a reentrant checkpoint
            tensor.register_hook(lambda gradient: self.ask())


class Asking(nn.Module):
    """Has the tracker asked in the middle of its work."""

    def __init__(self, answers: Answers, of_dicts: bool, in_place: bool) -> None:
        super().__init__()
        self.__dict__["answers"] = answers
        self.of_dicts = of_dicts
        self.in_place = in_place

    def forward(self, x: Any) -> Any:
        value = x["value"] if self.of_dicts else x
        if self.in_place:
            value = value.relu_()
        self.answers.ask()
        value = value * 2
        self.answers.ask_in_backward_of(value)
        value = value + 1
        return {"value": value, "unused": None} if self.of_dicts else value


class Mod(nn.Module):
    """Reaches the same kind of module through a ModuleList, an attribute and a ModuleDict, in this order."""

    def __init__(self, answers: Answers, of_dicts: bool = False, in_place: bool = False) -> None:
        super().__init__()
        self.a = Asking(answers, of_dicts, in_place)
        self.b = nn.ModuleDict({"nest": Asking(answers, of_dicts, in_place)})
        self.c = nn.ModuleList([Asking(answers, of_dicts, in_place)])

    def forward(self, x: Any) -> Any:
        return self.b["nest"](self.a(self.c[0](x)))


FORWARD: list[Seen] = [
    ({"Mod", "Mod.c.0"}, False),
    ({"Mod", "Mod.a"}, False),
    ({"Mod", "Mod.b.nest"}, False),
]
BACKWARD: list[Seen] = [
    ({"Mod", "Mod.b.nest"}, True),
    ({"Mod", "Mod.a"}, True),
    ({"Mod", "Mod.c.0"}, True),
]


def value_in(x: Any) -> Tensor:
    return x["value"] if isinstance(x, dict) else x


def make_input(of_dicts: bool = False) -> Any:
    value = torch.ones(3, requires_grad=True).clone()  # no leaf: it is written to
    return {"value": value} if of_dicts else value


# Of both.


@EVERY_TRACKER
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in-place relu"])
@pytest.mark.parametrize("of_dicts", [False, True], ids=["tensors", "dicts"])
def test_parents_are_the_modules_on_the_way_in_each_iteration(
    kind: type, of_dicts: bool, in_place: bool
) -> None:
    answers = Answers()
    model = Mod(answers, of_dicts, in_place)
    with kind() as tracker:
        answers.tracker = tracker
        for _ in range(2):
            output = value_in(model(make_input(of_dicts)))
            assert (tracker.parents, tracker.is_bw) == ({"Global"}, False)
            output.sum().backward()
            assert (tracker.parents, tracker.is_bw) == ({"Global"}, False)
    assert answers.seen == 2 * (FORWARD + BACKWARD)
    assert (tracker.parents, tracker.is_bw) == ({"Global"}, False)


class Recursive(nn.Module):
    """Calls itself, so its own hooks run again inside it."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.__dict__["answers"] = answers

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.layer(x)
        self.answers.ask_in_backward_of(x)
        if depth:
            x = self(x, depth - 1)
        self.answers.ask()
        return x


def test_module_that_calls_itself_is_in_its_parents_until_the_outermost_call_ends() -> None:
    answers = Answers()
    with modtrace.ModuleTracker() as answers.tracker:
        Recursive(answers)(torch.ones(2, 3)).sum().backward()
    assert answers.seen == 3 * [({"Recursive"}, False)] + 3 * [({"Recursive", "Recursive.layer"}, True)]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_module_that_calls_itself_raises_nothing_under_checkpoint(reentrant: bool) -> None:
    answers = Answers()
    model = Recursive(answers)
    with modtrace.ModuleTracker(strict=True) as tracker:
        answers.tracker = tracker
        x = torch.ones(2, 3, requires_grad=True).clone()
        checkpoint(lambda x: model(x), x, use_reentrant=reentrant).sum().backward()
        assert tracker.parents == {"Global"}
    assert all(each.grad is not None for each in model.parameters())


@EVERY_TRACKER
def test_example_of_the_docstring_prints_the_modules(
    kind: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    x = torch.ones(2, 2)
    expected = F.linear(x, model.weight, model.bias)
    with kind() as tracker:

        def my_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            print("running:", *sorted(tracker.parents))
            return torch.mm(x, weight.t()) + bias

        monkeypatch.setattr(torch.nn.functional, "linear", my_linear)
        y = model(x)
    assert capsys.readouterr().out == "running: Global Linear\n"
    torch.testing.assert_close(y, expected)


# Under Dynamo, where PyTorch expects its own tests to fail.


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore:(?!.*modtrace)")  # Dynamo, of global hooks and of what it cannot trace
@pytest.mark.parametrize("compiled", ["context", "step", "model"])
def test_answers_are_right_where_what_asks_is_compiled(compiled: str) -> None:
    """Torch's ModuleTracker fails where the model is compiled, and its ModTracker sees nothing there."""
    answers = Answers()
    mod = Mod(answers, of_dicts=True, in_place=True)
    model = torch.compile(mod, backend="eager") if compiled == "model" else mod

    def step() -> None:
        value_in(model(make_input(of_dicts=True))).sum().backward()

    run = torch.compile(step, backend="eager") if compiled == "step" else step

    def context() -> None:
        with modtrace.ModuleTracker(strict=True) as tracker:
            answers.tracker = tracker
            run()
            run()
            assert tracker.parents == {"Global"}
            assert not tracker.is_bw

    (torch.compile(context, backend="eager") if compiled == "context" else context)()
    assert answers.seen == 2 * (FORWARD + BACKWARD)


# Of ModTracker: user hooks.


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Bar(nn.Module):
    """Gives its own input to its child: both get the same gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.foo = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.foo(x).cos()


class Events:
    """Four user hooks, which note what they are called for and check what holds in each of them."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.seen: list[tuple[str, str | None]] = []
        self.in_backward: list[bool] = []
        tracker.register_user_hooks(
            lambda module, args: self._note("pre_fw", module),
            lambda module, args, output: self._note("post_fw", module),
            lambda module, grads: self._note("pre_bw", module),
            lambda module, grads: self._note("post_bw", module),
        )

    def _note(self, kind: str, module: nn.Module | None) -> None:
        name = None if module is None else self.tracker.get_known_fqn(module)
        if module is not None:
            assert name in self.tracker.parents
        self.seen.append((kind, name))
        self.in_backward.append(self.tracker.is_bw)


BAR_EVENTS = [
    ("pre_fw", "Bar"),
    ("pre_fw", "Bar.foo"),
    ("post_fw", "Bar.foo"),
    ("post_fw", "Bar"),
    ("pre_bw", "Bar"),
    ("pre_bw", "Bar.foo"),
    ("post_bw", "Bar"),
    ("post_bw", "Bar.foo"),
]


@TRACKERS_WITH_HOOKS
def test_user_hooks_run_in_this_order_until_they_are_cleared(kind: type) -> None:
    """The two that share an input end together, the outer first. In each the name is in `parents`."""
    model = Bar()
    with kind() as tracker:
        Events(tracker)
        tracker.clear_user_hooks()
        events = Events(tracker)
        model(torch.ones(3, requires_grad=True)).sum().backward()
        assert (tracker.parents, tracker.is_bw) == ({"Global"}, False)
        tracker.clear_user_hooks()
        model(torch.ones(3, requires_grad=True)).sum().backward()
    assert events.seen == BAR_EVENTS
    assert events.in_backward == 4 * [False] + 4 * [True]


@TRACKERS_WITH_HOOKS
@pytest.mark.parametrize("hook", ["pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook"])
def test_second_hook_of_a_kind_is_refused(kind: type, hook: str) -> None:
    seen: list[str] = []
    tracker = kind()
    tracker.register_user_hooks(**{hook: lambda *args: seen.append("first")})
    with pytest.raises(AssertionError, match=hook):
        tracker.register_user_hooks(**{hook: lambda *args: seen.append("second")})
    with tracker:
        Inner()(torch.ones(3, requires_grad=True)).sum().backward()
    assert seen == ["first"]


@TRACKERS_WITH_HOOKS
def test_backward_hooks_get_none_for_a_module_that_is_dead(kind: type) -> None:
    with kind() as tracker:
        events = Events(tracker)
        model = Bar()
        y = model(torch.ones(3, requires_grad=True))
        del model
        y.sum().backward()
    assert events.seen == BAR_EVENTS[:4] + [("pre_bw", None)] * 2 + [("post_bw", None)] * 2


@TRACKERS_WITH_HOOKS
def test_hooks_stay_from_one_context_of_a_tracker_to_the_next(kind: type) -> None:
    tracker = kind()
    events = Events(tracker)
    model = Bar()
    for _ in range(2):
        with tracker:
            model(torch.ones(3, requires_grad=True)).sum().backward()
    assert events.seen == 2 * BAR_EVENTS


@TRACKERS_WITH_HOOKS
def test_known_name_is_that_of_a_module_that_ran_or_whose_parent_did(kind: type) -> None:
    model, other = Bar(), Bar()
    with kind() as tracker:
        assert tracker.get_known_fqn(model) is None
        model(torch.ones(3))
        assert tracker.get_known_fqn(model) == "Bar"
        assert tracker.get_known_fqn(model.foo) == "Bar.foo"
        assert tracker.get_known_fqn(other.foo) is None


def test_ours_stands_for_both_names() -> None:
    assert modtrace.ModTracker is modtrace.ModuleTracker
