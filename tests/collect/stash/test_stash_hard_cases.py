"""`track()` where it is saved and copied, given what is no module, entered late, or made to keep odd structures."""

import copy
import pickle

import pytest
import torch
from torch import nn

import modtrace
from modtrace.tensor_tracker import Tracker


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


def names(tracker: Tracker) -> list[tuple[str, bool]]:
    return [(stash.name, stash.grad) for stash in tracker]


@pytest.mark.parametrize("again", [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy])
@pytest.mark.parametrize("is_running", [True, False])
def test_saved_tracker_has_the_stashes_and_tracks_nothing(again, is_running: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with modtrace.track(model, stash_value=lambda tensor: tensor.detach().clone()) as tracker:
        model(torch.randn(1, 2)).sum().backward()
        copied = again(tracker) if is_running else None
    copied = copied or again(tracker)
    assert str(copied) == "Tracker(stashes=6, tracking=0)"
    assert names(copied) == names(tracker)
    assert torch.equal(copied[0].value, tracker[0].value)
    assert copied[0].value is not tracker[0].value
    assert [(each.step, each.phase, each.call) for each in copied][3:] == [(0, "backward", 0)] * 3
    with copied:  # it may be used on
        copied.register(model[0], "first")
        model(torch.randn(1, 2))
    assert names(copied)[6:] == [("first", False)]


@pytest.mark.parametrize("given", ["model", None, 3])
def test_what_is_no_module_is_refused_at_once(given) -> None:
    with pytest.raises(TypeError, match=r"register_all\(module=.*\): give a torch.nn.Module"):
        modtrace.track(given)


class Nested(nn.Module):
    """Returns a tensor three times, its input, and things that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        return y, (y, {"a": [y, x]}), x, None, "text"


def test_tensor_that_stands_in_an_output_many_times_has_its_gradient_in_each_place() -> None:
    model, x = Nested(), torch.ones(1, 3, requires_grad=True)
    with modtrace.track(model, strict=True) as tracker:
        output = model(x)
        (output[0].sum() + 2 * output[1][0].sum() + 5 * output[2].sum()).backward()
    assert names(tracker) == [("linear", False), ("", False), ("", True), ("linear", True)]
    first, (second, inner), of_x, none, text = tracker[2].value
    assert first.tolist() == second.tolist() == inner["a"][0].tolist() == [[3.0, 3.0, 3.0]]
    assert of_x.tolist() == inner["a"][1].tolist() == x.grad.tolist()
    assert none is text is None


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, depth: int):
        return self.linear(x) if depth == 0 else self(self.linear(x), depth - 1)


def test_module_that_calls_itself_has_a_stash_for_each_call() -> None:
    model = Recursive()
    with modtrace.track(model, stash_value=lambda tensor: None, strict=True) as tracker:
        model(torch.randn(1, 2), 20).sum().backward()
    calls = {(stash.name, stash.grad, stash.call) for stash in tracker}
    assert calls == {
        (name, grad, nth) for name in ("", "linear") for grad in (False, True) for nth in range(21)
    }
    assert len(tracker) == 84


class Generating(nn.Module):
    """Its forward is a generator: what it runs, it runs when the call is over."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        for _ in range(3):
            x = self.linear(x)
            yield x


def test_modules_that_a_generator_runs_are_stashed() -> None:
    model = Generating()
    with modtrace.track(model, strict=True) as tracker:
        outputs = list(model(torch.randn(1, 2)))
        outputs[-1].sum().backward()
    assert names(tracker) == [("", False), *[("linear", False)] * 3, *[("linear", True)] * 3]
    assert [torch.equal(stash.value, each) for stash, each in zip(tracker[1:4], outputs, strict=True)] == [
        True
    ] * 3


class Same(nn.Module):
    """Returns its input."""

    def forward(self, x):
        return x


def test_leaf_that_is_returned_twice_after_a_backward_has_its_gradient_for_both_calls() -> None:
    model, x = Same(), torch.ones(2, requires_grad=True)
    with modtrace.track(model, strict=True) as tracker:
        (model(x) * 2).sum().backward()
        first, second = model(x), model(x)
        (first * 3 + second * 5).sum().backward()
    found = [(stash.call, stash.value[0].tolist()) for stash in tracker if stash.grad]
    assert [value for _, value in found] == [[2.0, 2.0], [8.0, 8.0], [8.0, 8.0]]


def test_view_that_is_used_and_then_written_to_has_one_stash_of_gradients() -> None:
    """The gradient comes to the view itself, by the first use, and by the second to what it is a view of."""
    model, relu = nn.Sequential(nn.Linear(2, 2)), nn.ReLU(inplace=True)
    x = torch.randn(2, 3, 2, requires_grad=True)
    with modtrace.track(model, strict=True) as tracker:
        output = model(x)
        (output * 2).sum().add(relu(output).sum()).backward()
    assert names(tracker) == [("0", False), ("", False), ("", True), ("0", True)]
    assert [stash.first_value.tolist() for stash in tracker if stash.grad] == [[[[2.0, 2.0]] * 3] * 2] * 2


class Two(nn.Module):
    """Returns a product of each input."""

    def forward(self, x, y):
        return x * 2, y * 3


def test_backward_that_begins_with_an_edge_of_the_graph_brings_both_gradients_together() -> None:
    model, x = Two(), torch.ones(1, requires_grad=True)
    with modtrace.track(model, strict=True) as tracker:
        a, b = model(x, x)
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(a * 5 + b * 7))
    assert [stash.value for stash in tracker if stash.grad] == [(torch.tensor([5.0]), torch.tensor([7.0]))]


def test_gradient_that_a_backward_with_inputs_does_not_bring_is_not_waited_for() -> None:
    model, x, y = Two(), torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    known: list[int] = []
    with modtrace.track(model, strict=True) as tracker:
        a, b = model(x, y)
        x.register_hook(lambda gradient: known.append(len(tracker)))
        (a + b).sum().backward(inputs=[x])
    assert [stash.value for stash in tracker if stash.grad] == [(torch.tensor([1.0]), None)]
    assert known == [2]  # before the backward has ended


def test_two_trackers_at_one_leaf_hear_its_gradient_each() -> None:
    model, x = Same(), torch.ones(1, requires_grad=True)
    with modtrace.track(model, strict=True) as one, modtrace.track(model, strict=True) as other:
        (model(x) * 3).sum().backward()
    assert [stash.value for stash in one] == [torch.tensor([1.0]), (torch.tensor([3.0]),)]
    assert list(other) == list(one)
    assert not x._backward_hooks
