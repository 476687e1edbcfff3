"""What PyTorch's own tests ask of its two module trackers, asked of ours too.

Each behaviour runs on torch's classes as far as they have the feature, so that the expectation is torch's own.
"""

import warnings
from collections.abc import Callable, Iterator
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
def test_parents_in_forward_are_the_modules_on_the_way(kind: type) -> None:
    answers = Answers()
    with kind() as answers.tracker:
        Mod(answers)(make_input())
    assert answers.seen == FORWARD


@EVERY_TRACKER
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in-place relu"])
@pytest.mark.parametrize("of_dicts", [False, True], ids=["tensors", "dicts"])
def test_parents_in_backward_are_the_same_in_reverse(kind: type, of_dicts: bool, in_place: bool) -> None:
    answers = Answers()
    with kind() as answers.tracker:
        value_in(Mod(answers, of_dicts, in_place)(make_input(of_dicts))).sum().backward()
    assert answers.seen == FORWARD + BACKWARD


@EVERY_TRACKER
def test_second_iteration_in_one_context_gives_the_same_again(kind: type) -> None:
    answers = Answers()
    model = Mod(answers)
    with kind() as answers.tracker:
        for _ in range(2):
            model(make_input()).sum().backward()
    assert answers.seen == 2 * (FORWARD + BACKWARD)


@EVERY_TRACKER
def test_nothing_runs_after_a_backward(kind: type) -> None:
    answers = Answers()
    with kind() as tracker:
        answers.tracker = tracker
        y = Mod(answers)(make_input())
        assert (tracker.parents, tracker.is_bw) == ({"Global"}, False)
        y.sum().backward()
        assert (tracker.parents, tracker.is_bw) == ({"Global"}, False)
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


@EVERY_TRACKER
@pytest.mark.filterwarnings("ignore:The module hierarchy tracking maybe be messed up")
def test_module_that_calls_itself_raises_nothing(kind: type) -> None:
    answers = Answers()
    with kind() as tracker:
        answers.tracker = tracker
        Recursive(answers)(torch.ones(2, 3)).sum().backward()
        assert tracker.parents == {"Global"}
    assert len(answers.seen) == 6


def test_module_that_calls_itself_is_in_its_parents_until_the_outermost_call_ends() -> None:
    answers = Answers()
    with modtrace.ModuleTracker() as answers.tracker:
        Recursive(answers)(torch.ones(2, 3)).sum().backward()
    assert answers.seen == 3 * [({"Recursive"}, False)] + 3 * [({"Recursive", "Recursive.layer"}, True)]


@EVERY_TRACKER
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["default", "reentrant", "non-reentrant"])
@pytest.mark.filterwarnings("ignore:(?!.*modtrace)")  # the default warns, and so does ModTracker
def test_module_that_calls_itself_raises_nothing_under_checkpoint(kind: type, reentrant: bool | None) -> None:
    answers = Answers()
    model = Recursive(answers)
    with kind() as tracker:
        answers.tracker = tracker
        x = torch.ones(2, 3, requires_grad=True).clone()
        checkpoint(lambda x: model(x), x, use_reentrant=reentrant).sum().backward()
        assert tracker.parents == {"Global"}
    assert all(each.grad is not None for each in model.parameters())


@EVERY_TRACKER
def test_there_is_one_global_hook_before_and_one_after_a_forward(kind: type) -> None:
    from torch.nn.modules import module

    def installed() -> tuple[int, int]:
        return len(module._global_forward_pre_hooks), len(module._global_forward_hooks)

    assert installed() == (0, 0)
    with kind():
        assert installed() == (1, 1)
    assert installed() == (0, 0)


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


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILING = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings(
        "ignore:(?!.*modtrace)"
    ),  # Dynamo, of global hooks and of what it cannot trace
]


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


def under(*marks: Any) -> Callable[[Any], Any]:
    def apply(test: Any) -> Any:
        for mark in marks:
            test = mark(test)
        return test

    return apply


@under(*COMPILING)
@EVERY_TRACKER
@pytest.mark.parametrize("of_dicts", [False, True], ids=["tensors", "dicts"])
def test_answers_are_right_where_the_context_itself_is_compiled(kind: type, of_dicts: bool) -> None:
    answers = Answers()
    model = Mod(answers, of_dicts, in_place=True)

    def whole_test() -> None:
        with kind() as tracker:
            answers.tracker = tracker
            value_in(model(make_input(of_dicts))).sum().backward()
            assert tracker.parents == {"Global"}
            assert not tracker.is_bw

    compiled(whole_test)()
    assert answers.seen == FORWARD + BACKWARD


@under(*COMPILING)
@EVERY_TRACKER
def test_answers_are_right_where_the_step_is_compiled(kind: type) -> None:
    answers = Answers()
    model = Mod(answers)

    def step() -> None:
        model(make_input()).sum().backward()

    with kind() as tracker:
        answers.tracker = tracker
        run = compiled(step)
        run()
        run()
        assert (tracker.parents, tracker.is_bw) == ({"Global"}, False)
    assert answers.seen == 2 * (FORWARD + BACKWARD)


@under(*COMPILING)
def test_answers_are_right_where_the_model_is_compiled() -> None:
    """Torch's ModuleTracker fails here inside Dynamo, and its ModTracker sees nothing."""
    answers = Answers()
    with modtrace.ModuleTracker(strict=True) as tracker:
        answers.tracker = tracker
        model = compiled(Mod(answers))
        for _ in range(2):
            model(make_input()).sum().backward()
        assert (tracker.parents, tracker.is_bw) == ({"Global"}, False)
    assert answers.seen == 2 * (FORWARD + BACKWARD)


class Quiet(nn.Module):
    """Nothing in it asks, so nothing breaks its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


@under(*COMPILING)
def test_model_compiled_in_one_graph_under_the_tracker_stays_one_graph() -> None:
    """Torch's ModuleTracker raises: Dynamo finds the module twice."""
    model = Quiet()
    x = torch.ones(2, 3)
    expected = model(x)
    with modtrace.ModuleTracker(strict=True) as tracker:
        whole = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(2):
            y = whole(x)
            y.sum().backward()
        assert tracker.parents == {"Global"}
        model(x).sum().backward()
        assert tracker.get_known_fqn(model.b) == "Quiet.b"
    assert torch.equal(y, expected)


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
def test_user_hooks_run_in_this_order(kind: type) -> None:
    """The two that share an input end together, the outer first."""
    model = Bar()
    with kind() as tracker:
        events = Events(tracker)
        model(torch.ones(3, requires_grad=True)).sum().backward()
    assert events.seen == BAR_EVENTS


@TRACKERS_WITH_HOOKS
def test_name_is_in_parents_and_is_bw_is_right_in_every_user_hook(kind: type) -> None:
    model = Bar()
    with kind() as tracker:
        events = Events(tracker)  # it checks the name
        model(torch.ones(3, requires_grad=True)).sum().backward()
        assert (tracker.parents, tracker.is_bw) == ({"Global"}, False)
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
def test_hooks_may_be_registered_again_after_they_are_cleared(kind: type) -> None:
    model = Bar()
    with kind() as tracker:
        Events(tracker)
        tracker.clear_user_hooks()
        events = Events(tracker)
        model(torch.ones(3, requires_grad=True)).sum().backward()
        tracker.clear_user_hooks()
        model(torch.ones(3, requires_grad=True)).sum().backward()
    assert events.seen == BAR_EVENTS


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


class Checkpointed(nn.Module):
    """Checkpoints its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.linears[0](x).relu()
        return checkpoint(self.linears[1], x, use_reentrant=False).relu()


@TRACKERS_WITH_HOOKS
def test_forward_hooks_run_again_in_the_recompute_of_a_checkpoint(kind: type) -> None:
    model = Checkpointed()
    with kind() as tracker:
        events = Events(tracker)
        model(torch.ones(2, 3)).sum().backward()
    assert list(zip(events.seen, events.in_backward, strict=True)) == [
        (("pre_fw", "Checkpointed"), False),
        (("pre_fw", "Checkpointed.linears.0"), False),
        (("post_fw", "Checkpointed.linears.0"), False),
        (("pre_fw", "Checkpointed.linears.1"), False),
        (("post_fw", "Checkpointed.linears.1"), False),
        (("post_fw", "Checkpointed"), False),
        (("pre_bw", "Checkpointed"), True),
        (("pre_bw", "Checkpointed.linears.1"), True),
        (("pre_fw", "Checkpointed.linears.1"), True),
        (("post_fw", "Checkpointed.linears.1"), True),
        (("post_bw", "Checkpointed.linears.1"), True),
        (("pre_bw", "Checkpointed.linears.0"), True),
        (("post_bw", "Checkpointed.linears.0"), True),
        (("post_bw", "Checkpointed"), True),
    ]


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
