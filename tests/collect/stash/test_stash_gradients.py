"""Gradients in stashes: of any structure, once for each call and backward, without a bit changed."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modtrace
from helpers.architectures import ARCHITECTURES
from helpers.twins import outcome, state
from helpers.views import ShowsBase
from modtrace.tensor_tracker import Tracker, rmap_tensor, track
from zoo import TiedGPT

Point = namedtuple("Point", ["a", "b"])


@dataclass
class Pair:
    a: Tensor
    b: Any
    name: str = "pair"


@dataclass(frozen=True, slots=True)
class Sealed:
    a: Tensor
    b: Tensor


@dataclass
class Strict:
    """Wants tensors, and has more than it is given."""

    a: Tensor
    b: Tensor
    scale: InitVar[float]
    total: Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        assert isinstance(self.a, Tensor)
        self.total = self.a * scale


class Gives(nn.Module):
    """Returns two products of its input in some structure."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x * 2, x * 3)


def gradients(tracker: Tracker, name: str = "") -> list[Any]:
    """What came as gradients under a name, tensors as lists."""
    found = [each.value for each in tracker if each.grad and each.name == name]
    return [rmap_tensor(each, Tensor.tolist) for each in found]


def of_both(make: Callable[[Tensor, Tensor], Any], first: Any, second: Any) -> list[Any]:
    """The gradients of an output of which both products are used."""
    model = Gives(make)
    with track(model, strict=True) as tracker:
        out = model(torch.ones(2, requires_grad=True))
        (first(out) * 5 + second(out) * 7).sum().backward()
    return gradients(tracker)


@pytest.mark.parametrize(
    ("make", "first", "second", "expected"),
    [
        (lambda a, b: (a, b), lambda o: o[0], lambda o: o[1], ([5, 5], [7, 7])),
        (lambda a, b: [a, b], lambda o: o[0], lambda o: o[1], ([5, 5], [7, 7])),
        (lambda a, b: (a, "x", b), lambda o: o[0], lambda o: o[2], ([5, 5], None, [7, 7])),
        (lambda a, b: (a, a, b), lambda o: o[1], lambda o: o[2], ([5, 5], [5, 5], [7, 7])),
        (lambda a, b: (a, (b, 1)), lambda o: o[0], lambda o: o[1][0], ([5, 5], ([7, 7], 1))),
        (
            lambda a, b: {"a": a, "n": 1, "b": [b]},
            lambda o: o["a"],
            lambda o: o["b"][0],
            ({"a": [5, 5], "n": 1, "b": [[7, 7]]},),
        ),
        (
            lambda a, b: OrderedDict(a=a, b=b),
            lambda o: o["a"],
            lambda o: o["b"],
            ({"a": [5, 5], "b": [7, 7]},),
        ),
        (Point, lambda o: o.a, lambda o: o.b, (Point([5, 5], [7, 7]),)),
        (Pair, lambda o: o.a, lambda o: o.b, (Pair([5, 5], [7, 7]),)),
        (Sealed, lambda o: o.a, lambda o: o.b, (Sealed([5, 5], [7, 7]),)),
    ],
    ids=[
        "tuple", "list", "not only tensors", "twice the same", "nested", "dict", "ordered dict", "named tuple",
        "dataclass", "frozen with slots",
    ],
)  # fmt: skip
def test_gradients_have_the_structure_of_the_output(
    make: Any, first: Any, second: Any, expected: tuple[Any, ...]
) -> None:
    [value] = of_both(make, first, second)
    assert value == expected
    assert type(value) is tuple
    assert type(value[0]) is type(expected[0])


def test_structure_is_made_again_without_running_code_of_its_class() -> None:
    model = Gives(lambda a, b: Strict(a, b, 2.0))
    with track(model, strict=True) as tracker:
        out = model(torch.ones(2, requires_grad=True))
        (out.b * 7 + out.total).sum().backward()
    assert tracker[0].value.total.tolist() == [4, 4]
    [(value,)] = gradients(tracker)
    assert (value.a, value.b, value.total) == ([2, 2], [7, 7], [1, 1])


def test_what_torch_returns_by_name_is_stashed_with_gradients() -> None:
    model = Gives(lambda a, b: torch.stack([a, b]).max(dim=0))
    with track(model, strict=True) as tracker:
        model(torch.ones(2, requires_grad=True)).values.sum().backward()
    assert type(tracker[0].value) is torch.return_types.max
    [(value,)] = [each.value for each in tracker if each.grad]
    assert type(value) is torch.return_types.max
    assert (value.values.tolist(), value.indices) == ([1, 1], None)


def test_packed_sequence_is_stashed_with_gradients() -> None:
    torch.manual_seed(0)
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 2, requires_grad=True), torch.randn(1, 2)])
    model = nn.GRU(2, 2)
    with track(model, strict=True) as tracker:
        out, _ = model(packed)
        out.data.sum().backward()
    assert type(tracker[0].value[0]) is nn.utils.rnn.PackedSequence
    [value] = gradients(tracker)
    assert value[0].data == [[1, 1]] * 4
    assert value[1] is None or isinstance(value[1], list)


def test_output_whose_gradient_never_comes_is_none_and_does_not_delay_the_others() -> None:
    model = nn.Sequential(Gives(lambda a, b: (a, b)), Gives(lambda a, b: a))
    model[1].forward = lambda pair: pair[0] * 4
    x = torch.ones(2, requires_grad=True)
    order: list[str] = []
    with track(model, strict=True) as tracker:
        x.register_hook(lambda gradient: order.append(f"{len(tracker)} stashes"))
        model(x).sum().backward()
    assert [(each.name, each.grad) for each in tracker] == [
        ("0", False), ("1", False), ("", False), ("", True), ("1", True), ("0", True),
    ]  # fmt: skip
    assert gradients(tracker, "0") == [([4, 4], None)]
    assert order == ["6 stashes"]  # told before the end of the backward


def test_single_output_that_nothing_is_used_of_has_no_event() -> None:
    class Second(nn.Module):
        def forward(self, pair: Any) -> Tensor:
            return pair[1]

    split = Gives(lambda a, b: torch.stack([a, b]).unbind())
    first, second = Second(), Second()
    with Tracker(strict=True) as tracker:
        tracker.register(first, "first")
        tracker.register(second, "second")
        a, b = split(torch.ones(2, requires_grad=True))
        first((b, a))
        second((a, b)).sum().backward()
    assert gradients(tracker, "first") == []
    assert gradients(tracker, "second") == [([1, 1],)]


def test_second_backward_gives_events_again() -> None:
    model = Gives(lambda a, b: (a, b))
    with track(model, strict=True) as tracker:
        a, b = model(torch.ones(2, requires_grad=True))
        (a * 5).sum().backward(retain_graph=True)
        (a + b).sum().backward(retain_graph=True)
        (a + b * 2).sum().backward()
    assert gradients(tracker) == [([5, 5], None), ([1, 1], [1, 1]), ([1, 1], [2, 2])]


@pytest.mark.parametrize("asked", ["input", "first", "both"])
def test_autograd_grad_brings_what_it_computes(asked: str) -> None:
    model, x = Gives(lambda a, b: (a * 1, b * 1)), torch.ones(2, requires_grad=True)
    with track(model, strict=True) as tracker:
        a, b = model(x)
        loss = (a * 5 + b * 7).sum()
        torch.autograd.grad(loss, {"input": [x], "first": [a], "both": [a, b]}[asked])
    assert (
        gradients(tracker)
        == {
            "input": [([5, 5], [7, 7])],
            "first": [([5, 5], None)],
            "both": [([5, 5], [7, 7])],
        }[asked]
    )


def test_double_backward_gives_events_in_each() -> None:
    model, x = nn.Tanh(), torch.tensor([0.5], requires_grad=True)
    with track(model, strict=True) as tracker:
        [first] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        first.sum().backward()
    y = torch.tanh(torch.tensor([0.5]))
    assert [each.value[0] for each in tracker if each.grad] == [1, pytest.approx((-2 * y).item())]
    assert x.grad is not None
    assert not tracker[1].value[0].requires_grad


def test_root_stands_before_its_parts_though_one_of_its_gradients_comes_last() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Tanh(), nn.Tanh()

        def forward(self, x: Tensor) -> Any:
            hidden = self.first(x)
            return self.second(hidden), hidden

    model = nn.Sequential(Root())
    with track(model, strict=True) as tracker:
        out, hidden = model(torch.ones(2, requires_grad=True))
        (out + hidden).sum().backward()
    assert [each.name for each in tracker if each.grad] == ["", "0", "0.second", "0.first"]
    assert len(gradients(tracker)[0]) == 2


def test_two_that_wait_keep_their_order_whichever_is_done_first() -> None:
    """The outer one waits for `late`, the inner one is done before it."""

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Any:
            middle = x * 2
            return middle * 3, middle

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.inner = nn.Tanh(), Inner()

        def forward(self, x: Tensor) -> Any:
            late = self.early(x)
            a, b = self.inner(late)
            return a, b, late

    model = Outer()
    with track(model, strict=True) as tracker:
        a, b, late = model(torch.ones(2, requires_grad=True))
        (a + b + late).sum().backward()
    assert [each.name for each in tracker if each.grad] == ["", "inner", "early"]


def test_module_that_works_in_place_has_its_own_gradient_and_its_input_another() -> None:
    layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(inplace=True), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        layers[0].weight.fill_(-3)
        layers[2].weight.fill_(5)
    with track(layers, strict=True) as tracker:
        layers(torch.ones(1, 1, requires_grad=True)).sum().backward()
    values = [each.first_value.tolist() for each in tracker]
    assert values == [[[-3]], [[0]], [[0]], [[0]], [[1]], [[1]], [[5]], [[0]]]
    assert [each.name for each in tracker][4:] == ["", "2", "1", "0"]


@pytest.mark.parametrize("several", [False, True])
def test_view_that_a_module_in_place_writes_to_has_the_gradient_it_had(several: bool) -> None:
    """What Linear returns of three dimensions is a view: afterwards its own node is in no graph."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return (self.linear(x), x * 2) if several else self.linear(x)

    torch.manual_seed(0)
    model, relu, x = Layer(), nn.ReLU(inplace=True), torch.randn(2, 3, 2, requires_grad=True)
    with track(model, strict=True) as tracker:
        for _ in range(2):
            out = model(x)
            relu(out[0] if several else out).square().sum().backward()
    linear = model.linear(x).detach()
    expected = torch.relu(linear) * 2
    found = [each for each in tracker if each.grad]
    assert [each.name for each in found] == ["", "linear"] * 2
    assert all(torch.equal(each.first_value, expected) for each in found)


def test_view_that_is_not_used_has_no_gradient_though_its_base_has() -> None:
    model = ShowsBase()
    with track(model, strict=True) as tracker:
        model(torch.ones(2, requires_grad=True))
        model.base.sum().backward()
    assert gradients(tracker) == []


class Passes(nn.Module):
    """Returns its input, or its parameter."""

    def __init__(self, parameter: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2)) if parameter else None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.weight is None else self.weight


def test_leaf_that_is_returned_without_a_backward_keeps_no_endless_list() -> None:
    model, x = Passes(), torch.ones(2, requires_grad=True)
    with track(model, strict=True) as tracker:
        for _ in range(200):
            model(x)
        [watch] = x._backward_hooks.values()
        assert len(watch.entries) <= 65
    assert len(tracker) == 200


def test_leaf_beside_another_output_comes_in_one_event() -> None:
    model, x = Gives(lambda a, b: (a, b)), torch.ones(2, requires_grad=True)
    model.forward = lambda x: (x, x * 2)
    with track(model, strict=True) as tracker:
        same, double = model(x)
        double.sum().backward(retain_graph=True)
        torch.autograd.grad((same + double).sum(), x)
    assert gradients(tracker) == [([2, 2], [1, 1]), ([3, 3], [1, 1])]


def test_none_and_integers_have_no_gradient_event() -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            self.kept = x * 2
            return None

    class Index(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(0, keepdim=True)

    model = nn.ModuleList([Nothing(), Index()])
    with track(model, strict=True) as tracker:
        x = torch.ones(2, requires_grad=True)
        model[0](x)
        model[1](x)
        model[0].kept.sum().backward()
    assert [(each.name, each.grad) for each in tracker] == [("0", False), ("1", False)]


class TwoInputs(nn.Module):
    """Returns a product of each input."""

    def forward(self, x, y):
        return x * 2, y * 3


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
    with track(model, strict=True) as tracker:
        output = model(x)
        (output[0].sum() + 2 * output[1][0].sum() + 5 * output[2].sum()).backward()
    assert [(each.name, each.grad) for each in tracker] == [
        ("linear", False),
        ("", False),
        ("", True),
        ("linear", True),
    ]
    first, (second, inner), of_x, none, text = tracker[2].value
    assert first.tolist() == second.tolist() == inner["a"][0].tolist() == [[3.0, 3.0, 3.0]]
    assert of_x.tolist() == inner["a"][1].tolist() == x.grad.tolist()
    assert none is text is None


def test_leaf_that_is_returned_twice_after_a_backward_has_its_gradient_for_both_calls() -> None:
    model, x = Passes(), torch.ones(2, requires_grad=True)
    with track(model, strict=True) as tracker:
        (model(x) * 2).sum().backward()
        first, second = model(x), model(x)
        (first * 3 + second * 5).sum().backward()
    found = [(stash.call, stash.value[0].tolist()) for stash in tracker if stash.grad]
    assert [value for _, value in found] == [[2.0, 2.0], [8.0, 8.0], [8.0, 8.0]]


def test_view_that_is_used_and_then_written_to_has_one_stash_of_gradients() -> None:
    """The gradient comes to the view itself, by the first use, and by the second to what it is a view of."""
    model, relu = nn.Sequential(nn.Linear(2, 2)), nn.ReLU(inplace=True)
    x = torch.randn(2, 3, 2, requires_grad=True)
    with track(model, strict=True) as tracker:
        output = model(x)
        (output * 2).sum().add(relu(output).sum()).backward()
    assert [(each.name, each.grad) for each in tracker] == [
        ("0", False),
        ("", False),
        ("", True),
        ("0", True),
    ]
    assert [stash.first_value.tolist() for stash in tracker if stash.grad] == [[[[2.0, 2.0]] * 3] * 2] * 2


def test_backward_that_begins_with_an_edge_of_the_graph_brings_both_gradients_together() -> None:
    model, x = TwoInputs(), torch.ones(1, requires_grad=True)
    with track(model, strict=True) as tracker:
        a, b = model(x, x)
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(a * 5 + b * 7))
    assert [stash.value for stash in tracker if stash.grad] == [(torch.tensor([5.0]), torch.tensor([7.0]))]


def test_gradient_that_a_backward_with_inputs_does_not_bring_is_not_waited_for() -> None:
    model, x, y = TwoInputs(), torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    known: list[int] = []
    with track(model, strict=True) as tracker:
        a, b = model(x, y)
        x.register_hook(lambda gradient: known.append(len(tracker)))
        (a + b).sum().backward(inputs=[x])
    assert [stash.value for stash in tracker if stash.grad] == [(torch.tensor([1.0]), None)]
    assert known == [2]  # before the backward has ended


def test_two_trackers_at_one_leaf_hear_its_gradient_each() -> None:
    model, x = Passes(), torch.ones(1, requires_grad=True)
    with track(model, strict=True) as one, track(model, strict=True) as other:
        (model(x) * 3).sum().backward()
    assert [stash.value for stash in one] == [torch.tensor([1.0]), (torch.tensor([3.0]),)]
    assert list(other) == list(one)
    assert not x._backward_hooks


# Nothing is changed.


def train(make: Callable[[], nn.Module], inputs: Callable[[], Any]) -> Any:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(inputs()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, state(model), [each.grad for each in model.parameters()]


class SharedOutput(nn.Module):
    """Its part's output is used several times, where a hook of torch's changes the order of the additions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y.sin() * 1e-3 + y.exp() + y * 1e3 + y


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (TiedGPT, lambda: torch.randint(0, 17, (2, 8))),
        (SharedOutput, lambda: torch.randn(4, 8)),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), lambda: torch.randn(4, 8)),
    ],
    ids=["gpt", "output used repeatedly", "in place"],
)
def test_training_is_the_same_to_the_bit(make: Any, inputs: Any) -> None:
    class Tracked:
        """Tracks every model that is made in a block."""

        def __enter__(self) -> None:
            self.trackers: list[Tracker] = []

        def __exit__(self, *error: Any) -> None:
            for tracker in self.trackers:
                tracker.unregister()

    tracked = Tracked()

    def make_tracked() -> nn.Module:
        model = make()
        tracked.trackers.append(track(model, strict=True))
        return model

    plain = outcome(lambda: train(make, inputs))
    assert outcome(lambda: train(make_tracked, inputs), tracked) == plain
    assert all(any(each.grad for each in tracker) for tracker in tracked.trackers)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_of_every_output_of_an_architecture_are_those_that_autograd_keeps(name: str) -> None:
    """`retain_grad` on every output tells, independently, what the gradients are."""
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name]()
    model.eval()
    truth: list[tuple[str, type, Any]] = []

    def retain(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            rmap_tensor(output, lambda each: each.retain_grad() if _has_gradient(each) else None)
            # As it is now: CLIP puts other tensors into it afterwards.
            truth.append((name, type(output), rmap_tensor(output, lambda each: each)))

        return hook

    handles = [each.register_forward_hook(retain(path)) for path, each in model.named_modules()]
    with track(model, strict=True) as tracker:
        model(**inputs).loss.backward()
    for handle in handles:
        handle.remove()
    expected = [(path, _flat(output, _retained)) for path, _, output in truth]
    found = [(each.name, _flat(each.value, lambda each: each)) for each in tracker if each.grad]
    assert len(found) > 15
    assert found[0][0] == ""
    assert sorted(found) == sorted(each for each in expected if each[1])
    assert {type(each.value) for each in tracker if each.name == "" and not each.grad} == {truth[-1][1]}


def _retained(tensor: Tensor) -> Tensor | None:
    return tensor.grad if _has_gradient(tensor) else None


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and not value.is_leaf


def _flat(value: Any, read: Callable[[Tensor], Tensor | None]) -> list[bytes]:
    """The bytes of all gradients in a structure."""
    found: list[bytes] = []

    def note(tensor: Tensor) -> None:
        gradient = read(tensor)
        if gradient is not None:
            found.append(gradient.detach().numpy().tobytes())

    rmap_tensor(value, note)
    return found


def test_two_trackers_and_a_recording_hear_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Passes()), nn.Linear(4, 4))
    with (
        track(model, strict=True, stash_value=lambda t: t.shape) as outer,
        modtrace.record(model, strict=True) as rec,
        modtrace.ModuleTracker(strict=True),
        track(model, strict=True, stash_value=lambda t: t.shape) as inner,
    ):
        model(torch.randn(2, 4)).sum().backward()
    assert list(outer) == list(inner)
    frame = rec.frame("values")
    recorded = frame[frame["role"] == "grad_output"]["path"]
    assert sorted(recorded) == sorted(each.name for each in outer if each.grad)
